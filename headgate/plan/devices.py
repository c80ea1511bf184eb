"""The devices that `headgate plan` knows, from the makers' datasheets, and this machine by measurement.

Tensor figures are for dense products in bf16 with fp32 accumulation; vector figures are for plain fp32.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from headgate import machine
from headgate.errors import HeadgateError, suggestion

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Seconds:
    """At best, as expected and at worst."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, run: Callable[[], object]) -> "Seconds":
        """Fastest, middle and slowest of several runs."""
        times = timed(run)
        return cls(min(times), median(times), max(times))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.low + other.low, self.expected + other.expected, self.high + other.high)

    def times(self, factor: float) -> "Seconds":
        return Seconds(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True)
class Device:
    name: str
    memory: float
    """Bytes."""
    bf16: float
    """FLOP/s of matrix products."""
    fp32: float
    """FLOP/s of matrix products in fp32 as PyTorch does them by default: without tensor cores."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    link: float
    """Bytes per second, in each direction, to the other devices of a machine."""
    source: str
    """Where the figures come from."""


DEVICES = {
    device.name: device
    for device in (
        Device(
            "A100", 80 * GB, 312 * TERA, 19.5 * TERA, 2039 * GB, 300 * GB, "NVIDIA A100 datasheet, 80 GB SXM"
        ),
        Device(
            "H100", 80 * GB, 989 * TERA, 67 * TERA, 3350 * GB, 450 * GB, "NVIDIA H100 datasheet, SXM, dense"
        ),
        Device(
            "RTX 4090",
            24 * GB,
            165 * TERA,
            82.6 * TERA,
            1008 * GB,
            32 * GB,
            "NVIDIA Ada GPU architecture whitepaper, dense bf16 with fp32 accumulation; PCIe 4.0",
        ),
        Device(
            "A100 40GB",
            40 * GB,
            312 * TERA,
            19.5 * TERA,
            1555 * GB,
            300 * GB,
            "NVIDIA A100 datasheet, 40 GB SXM",
        ),
        Device(
            "H200", 141 * GB, 989 * TERA, 67 * TERA, 4800 * GB, 450 * GB, "NVIDIA H200 datasheet, SXM, dense"
        ),
        Device(
            "B200", 180 * GB, 2250 * TERA, 80 * TERA, 8000 * GB, 900 * GB, "NVIDIA HGX B200 datasheet, dense"
        ),
        Device(
            "MI300X", 192 * GB, 1307 * TERA, 163.4 * TERA, 5300 * GB, 448 * GB, "AMD MI300X datasheet, dense"
        ),
        Device(
            "L40S",
            48 * GB,
            362 * TERA,
            91.6 * TERA,
            864 * GB,
            32 * GB,
            "NVIDIA L40S datasheet, dense; PCIe 4.0",
        ),
        Device(
            "RTX 5090",
            32 * GB,
            209.5 * TERA,
            104.8 * TERA,
            1792 * GB,
            64 * GB,
            "NVIDIA Blackwell GPU architecture whitepaper, dense bf16 with fp32 accumulation; PCIe 5.0",
        ),
        Device("L4", 24 * GB, 121 * TERA, 30.3 * TERA, 300 * GB, 32 * GB, "NVIDIA L4 datasheet, dense"),
    )
}
CPU = "cpu"


def find_device(name: str) -> Device:
    """A device by name, however spelt: RTX 4090, rtx-4090, rtx4090; cpu is this machine, measured now."""
    plain = _plain(name)
    if plain == CPU:
        return measured()
    for device in DEVICES.values():
        if plain == _plain(device.name):
            return device
    known = {_plain(known): known for known in (*DEVICES, CPU)}
    raise HeadgateError(f"unknown device {name!r}; {suggestion(plain, known)}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def measured() -> Device:
    """This machine: its memory, and the best of a few products and copies."""
    a, b = torch.randn(2, 512, 512)
    wide = torch.zeros(1 << 23)
    target = torch.empty_like(wide)
    flops = 2 * 512**3 / fastest(lambda: torch.mm(a, b))
    copied = 2 * wide.nbytes / fastest(lambda: target.copy_(wide))
    threads = torch.get_num_threads()
    return Device(
        CPU,
        machine.memory(),
        flops,
        flops,
        copied,
        copied,
        f"measured now, {threads} thread{'s' * (threads > 1)}",
    )


def fastest(run: Callable[[], object], *, seconds: float = 0.03) -> float:
    return min(timed(run, seconds=seconds))


def timed(run: Callable[[], object], *, seconds: float = 0.03, least: int = 3) -> list[float]:
    """Seconds of each of several runs, after one untimed run; together they take about `seconds`."""
    run()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return times
