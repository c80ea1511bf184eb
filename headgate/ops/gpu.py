"""What GPU paths need to know about the device."""

from collections.abc import Iterator
from contextlib import contextmanager

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


def device_kind(device: torch.device) -> str:
    """A device's type; while a plan is made, that of the device it is made for."""
    planned = _planned["kind"]
    return planned if planned and device.type == "cpu" else device.type


def is_planned() -> bool:
    """Whether tensors on the CPU stand for those of another device."""
    return bool(_planned["kind"])


@contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Inside, paths are chosen and tiles sized as on such a device ("cuda", AMD's "hip", "mps"); nothing runs
    there."""
    before = dict(_planned)
    _planned.update(kind={"cpu": "", "hip": "cuda"}.get(device, device), hip="hip" * (device == "hip"))
    try:
        yield
    finally:
        _planned.update(before)


def is_hip() -> bool:
    """Whether GPUs are AMD's."""
    return bool(_planned["hip"] if is_planned() else torch.version.hip)


_planned = {"kind": "", "hip": ""}  # no ContextVar: torch.compile cannot trace one
