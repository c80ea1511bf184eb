"""A GPU that is not there: PyTorch's own autocast, autograd and compiler for CUDA on tensors without values.

`build` compiles absent_gpu.cpp; `load` must be called before torch is imported, so all that uses it runs in a
process of its own. What asks for a value, a synchronisation with the host, raises.
"""

import ctypes
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("absent_gpu.cpp")


def build(folder: Path, device: str) -> Path:
    """The library with a "cuda" or an "mps", compiled into this folder in two seconds."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch, library = Path(spec.origin).parent, folder / f"absent_{device}.so"
    options = ["-DAPPLE"] * (device == "mps") + [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{torch}/include",
        f"-L{torch}/lib",
    ]
    needs = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    subprocess.run(["c++", *options, str(SOURCE), *needs, "-o", str(library)], check=True)
    return library


def load(library: str) -> None:
    ctypes.CDLL(library)
    import torch
    import torch.cuda.amp.common

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **options: True
    torch.backends.mps.is_macos_or_newer = lambda *args: True


class Lowered(Exception):
    """The Triton source that PyTorch's compiler would run."""


def compile_for(capability: int, multiprocessors: int, shared: int) -> None:
    """From now on torch.compile generates code for such an NVIDIA device and then raises `Lowered`; what it
    cannot generate raises its own error."""
    import torch
    import torch._dynamo.device_interface as devices
    from torch._inductor import graph
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name="a GPU that is not there",
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        gcnArchName="",
    )

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **options: value

    torch.version.cuda = "12.8"
    torch.cuda.get_device_properties = answer(properties)
    torch.cuda.get_device_capability = answer((major, minor))
    torch.cuda.current_device, torch.cuda.device_count = answer(0), answer(1)
    interface = devices.CudaInterface
    for place, name, value in (
        (interface.Worker, "get_device_properties", properties),
        (interface.Worker, "current_device", 0),
        (interface, "get_device_properties", properties),
        (interface, "get_compute_capability", capability),
        (interface, "current_device", 0),
        (interface, "is_available", True),
        (interface, "is_triton_capable", True),
        (interface, "raise_if_triton_unavailable", None),
        (interface, "is_bf16_supported", True),
    ):
        setattr(place, name, staticmethod(answer(value)))
    driver.set_active(
        SimpleNamespace(
            get_current_target=answer(GPUTarget("cuda", capability, 32)),
            get_current_device=answer(0),
            get_active_torch_device=answer(torch.device("cuda", 0)),
            get_current_stream=answer(0),
            set_current_device=answer(None),
        )
    )

    def stop(lowering: Any) -> None:
        raise Lowered(lowering.codegen()[0].value)

    graph.GraphLowering.compile_to_module = stop


def lowered(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The source for this call, after `compile_for`; raises the compiler's error if it has none."""
    import torch

    torch.compiler.reset()
    try:
        torch.compile(partial(function, **options), fullgraph=True)(*args)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Lowered):
            cause = getattr(cause, "inner_exception", None) or cause.__cause__
        if cause is None:
            raise
        return str(cause)
    raise AssertionError("the compiler was not stopped")
