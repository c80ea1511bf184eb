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
    kind: str = "cpu"
    """What runs there: cuda, hip (AMD's), mps or cpu."""


def _device(
    name: str,
    memory: float,
    bf16: float,
    fp32: float,
    bandwidth: float,
    link: float,
    source: str,
    kind: str = "cuda",
) -> Device:
    """In GB, TFLOP/s and GB/s."""
    return Device(name, memory * GB, bf16 * TERA, fp32 * TERA, bandwidth * GB, link * GB, source, kind)


_APPLE = (
    "Apple's specifications of memory; Apple gives no speed of its GPU: 256 operations a clock of each of its"
)
_KNOWN = (
    _device("A100", 80, 312, 19.5, 2039, 300, "NVIDIA A100 datasheet, 80 GB SXM"),
    _device("A100 40GB", 40, 312, 19.5, 1555, 300, "NVIDIA A100 datasheet, 40 GB SXM"),
    _device("H100", 80, 989, 67, 3350, 450, "NVIDIA H100 datasheet, SXM"),
    _device("H200", 141, 989, 67, 4800, 450, "NVIDIA H200 datasheet, SXM"),
    _device("B200", 180, 2250, 75, 7700, 900, "NVIDIA Blackwell datasheet, HGX B200"),
    _device("L4", 24, 121, 30.3, 300, 32, "NVIDIA L4 datasheet; PCIe 4.0"),
    _device("L40S", 48, 362, 91.6, 864, 32, "NVIDIA L40S datasheet; PCIe 4.0"),
    _device("RTX 4090", 24, 165, 82.6, 1008, 32, "NVIDIA Ada whitepaper; PCIe 4.0"),
    _device("RTX 5090", 32, 209.5, 104.8, 1792, 64, "NVIDIA RTX Blackwell whitepaper; PCIe 5.0"),
    _device("MI300X", 192, 1307, 163.4, 5300, 448, "AMD Instinct MI300X datasheet", "hip"),
    _device("M4", 32, 3.8, 3.8, 120, 120, f"{_APPLE} 10 cores at 1.47 GHz", "mps"),
    _device("M4 Max", 128, 17.2, 17.2, 546, 546, f"{_APPLE} 40 cores at 1.68 GHz", "mps"),
    _device("M3 Ultra", 512, 28.6, 28.6, 819, 819, f"{_APPLE} 80 cores at 1.40 GHz", "mps"),
)
DEVICES = {device.name: device for device in _KNOWN}
CPU = "cpu"


def find_device(name: str) -> Device:
    """A device by name, however spelt: RTX 4090, rtx-4090, rtx4090; cpu is this machine, measured now."""
    plain = _plain(name).removeprefix("apple")
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
