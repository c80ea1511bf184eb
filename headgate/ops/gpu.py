"""What the paths on a GPU ask of it."""

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def before_ampere(t: Tensor) -> bool:
    """Whether t lies on an NVIDIA device that is here and older than compute capability 8.0."""
    # torch.compile knows the properties of a device as constants, and its capability not.
    here = t.is_cuda and torch.cuda.is_available() and not torch.version.hip
    return bool(here and torch.cuda.get_device_properties(t.device).major < 8)
