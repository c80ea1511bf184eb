"""Compiles the C++ kernels in headgate/ops/native when the package is installed; the rest: pyproject.toml.

One shared library per instruction set, chosen when it is loaded. Without a compiler the installation succeeds
all the same: the reason is written beside the sources, and the loader tells it.

    python setup.py build_ext --inplace                        build where the sources are
    HEADGATE_SANITIZE=1 python setup.py build_ext --inplace    only the library that `make sanitize` tests
"""

import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("headgate/ops/native")
FLAGS = "-std=c++17 -O3 -fPIC -shared -pthread -fvisibility=hidden -fno-math-errno -fno-trapping-math -Wall"
LEVELS = {"plain": ""}
if os.environ.get("HEADGATE_SANITIZE"):
    LEVELS = {"sanitize": "-march=native -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"}
elif platform.machine().lower() in ("x86_64", "amd64"):
    # Exactly the features that headgate_instruction_set asks the CPU for.
    LEVELS |= {
        "avx2": "-mavx2 -mfma",
        "avx512": "-mavx2 -mfma -mavx512f -mavx512vl -mavx512bw -mavx512dq -mprefer-vector-width=512",
    }


class BuildKernels(build_ext):
    """Calls the C++ compiler itself: the libraries are no Python extension modules."""

    def run(self) -> None:
        self.folder = (Path() if self.inplace else Path(self.build_lib)) / NATIVE
        self.folder.mkdir(parents=True, exist_ok=True)
        for level in LEVELS:
            self.library(level).unlink(missing_ok=True)  # rather none than one of older sources
        compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and found(c)), None)
        began = time.perf_counter()
        reasons: list[str | None] = ["no C++ compiler was found when headgate was installed"]
        if compiler:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                reasons = list(pool.map(lambda level: self.compile_level(compiler, level), LEVELS))
        note = "; ".join(filter(None, reasons)) or f"built in {time.perf_counter() - began:.1f} s"
        (self.folder / "build.txt").write_text(note + "\n")
        print(f"headgate kernels: {note}", flush=True)

    def compile_level(self, compiler: str, level: str) -> str | None:
        """The reason why this library could not be built, if so."""
        sources = sorted(str(path) for path in NATIVE.glob("*.cpp"))
        command = [*f"{compiler} {FLAGS} {LEVELS[level]}".split(), *sources, "-o", str(self.library(level))]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stderr, end="")
        if done.returncode == 0:
            return None
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        return f"{compiler} failed for {level}: {errors[0].strip()}"

    def library(self, level: str) -> Path:
        return self.folder / f"kernels_{level}.so"

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (Path(self.build_lib) / NATIVE).glob("kernels_*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def found(compiler: str) -> str | None:
    return shutil.which(compiler.split()[0])


setup(
    # Names the libraries for setuptools, which then knows that the package is made for one platform.
    ext_modules=[Extension("headgate.ops.native.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
