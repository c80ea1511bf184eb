"""Compiles the C++ kernels in headgate/ops/native when the package is installed; the rest: pyproject.toml.

One shared library per instruction set, chosen when it is loaded. Without a compiler the installation succeeds
all the same: the reason is written beside the sources, and the loader tells it.

    python setup.py build_ext --inplace                        build where the sources are
    HEADGATE_SANITIZE=1 python setup.py build_ext --inplace    only the library that `make sanitize` tests
    HEADGATE_PURE=1 pip wheel .                                a wheel without kernels, for any platform
    HEADGATE_MACHINE=aarch64 CXX=aarch64-linux-gnu-g++ pip wheel .      for another processor

The libraries are loaded by name and know nothing of Python, so that one wheel serves all its versions.
"""

import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("headgate/ops/native")
FLAGS = "-std=c++17 -O3 -fPIC -shared -pthread -fvisibility=hidden -fno-math-errno -fno-trapping-math -Wall"
PURE = bool(os.environ.get("HEADGATE_PURE"))
MACHINE = os.environ.get("HEADGATE_MACHINE", platform.machine()).lower()
LEVELS = {"plain": ""}
if os.environ.get("HEADGATE_SANITIZE"):
    LEVELS = {"sanitize": "-march=native -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"}
elif MACHINE in ("x86_64", "amd64"):
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
        strip = "" if level == "sanitize" else "-s"
        command = [
            *f"{compiler} {FLAGS} {strip} {LEVELS[level]}".split(),
            *sources,
            "-o",
            str(self.library(level)),
        ]
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


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        system = super().get_tag()[2]
        if not PURE and "HEADGATE_MACHINE" in os.environ:
            system = f"linux_{MACHINE}"
        return "py3", "none", "any" if PURE else system


def found(compiler: str) -> str | None:
    return shutil.which(compiler.split()[0])


setup(
    # Names the libraries for setuptools, which then knows that the package is made for one platform.
    ext_modules=[] if PURE else [Extension("headgate.ops.native.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
