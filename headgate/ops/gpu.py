"""What GPU paths need to know about the device."""

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
NO_TRITON = "triton is not installed; PyTorch's GPU builds include it, its CPU build does not"


def before_ampere(t: Tensor) -> bool:
    """Whether t is on an NVIDIA device that is present and older than compute capability 8.0."""
    # torch.compile treats a device's properties as constants, but not its capability.
    here = t.is_cuda and torch.cuda.is_available() and not torch.version.hip
    return bool(here and torch.cuda.get_device_properties(t.device).major < 8)


def send(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A copy from pageable memory would wait until the device has finished everything
    it was given; one from pinned memory only joins the queue."""
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True)


def has_double(device: torch.device) -> bool:
    """Whether it computes in double precision, which Apple's GPUs do not."""
    return device.type != "mps"
