"""What this machine is and has: cores, processor, memory, and how a process keeps its memory.

Light to import: PyTorch is used only inside functions, where it is loaded anyway.
"""

import ctypes
import functools
import os
import platform
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LINUX = sys.platform.startswith("linux")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """Bytes of main memory."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import psutil  # Windows

    return int(psutil.virtual_memory().total)


def processor() -> str:
    """The processor's name, its cores, and the instruction set that PyTorch uses on it."""
    import torch

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores ({torch.backends.cpu.get_cpu_capability()})"


def describe(device: "torch.device") -> dict[str, str | None]:
    """What a run or a measurement on this device says about where it took place."""
    import torch

    return {
        "system": platform.platform(),
        "processor": processor(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def memory_peak(device: "torch.device | None" = None) -> int:
    """The most bytes used so far: on a GPU by tensors, otherwise by the process."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Peak:
    """The most memory that this process holds from now on, above what it holds now.

    Without /proc it is measured above the most that it has ever held, which is too little if loading took
    more.
    """

    def __init__(self) -> None:
        if _LINUX:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
                refs.write("5")  # the peak starts again from what is held now
        self._before = self._held("VmRSS")

    def bytes(self) -> int:
        return max(0, self._held("VmHWM") - self._before)

    def _held(self, key: str) -> int:
        if not _LINUX:
            return memory_peak()
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


@functools.cache
def avoid_broken_tiles() -> bool:
    """Make oneDNN do without matrix tiles (AMX) where they are announced but cannot run; True if so.

    Some virtual machines are like that, and PyTorch crashes on its first bf16 product. A separate process
    tries one, only if there are tiles; oneDNN reads the variable when it is first used.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_bf16" not in _cpu_flags():
        return False
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", product], capture_output=True).returncode != -signal.SIGILL:
        return False
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    print(
        "headgate: this processor announces matrix tiles (AMX) that it cannot run; bf16 does without them",
        file=sys.stderr,
    )
    return True


def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return ""


def keep_memory() -> bool:
    """Let glibc keep freed memory instead of returning it; False where that cannot be set.

    Otherwise a large tensor means fresh pages from the kernel at every step, each a page fault. Call it once,
    when a process starts to train or measure.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if _LINUX else None
    if mallopt is None:
        return False
    # -1 means "never": the largest number that fits would still return anything above 2 GB.
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def give_memory_back() -> None:
    """Return freed memory to the system; glibc would keep what a long document or a tokenizer.json used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _LINUX else None
    if trim is not None:
        trim(0)
