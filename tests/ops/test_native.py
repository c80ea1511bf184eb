"""The kernels' library: what is built, what is loaded, and what is said where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.ops.native import library

ROOT = Path(__file__).parents[2]
EXPLAIN = """
import torch
from headgate import ops
from headgate.ops.native import library
q = k = v = torch.randn(1, 2, 300, 16)
print(library.instruction_set())
print(ops.explain("window_attention", q, k, v, 20))
out = ops.window_attention(q, k, v, 20)
torch.testing.assert_close(out, ops.window_attention(q, k, v, 20, backend="reference"))
print(ops.paths_taken())
"""

needs_library = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(into: Path, **environment: str) -> str:
    """What build.txt says after building without or with a bad compiler."""
    pytest.importorskip("setuptools")
    run(
        f"import os, sys\nos.chdir({str(ROOT)!r})\n"
        f"sys.argv = ['setup.py', '-q', 'build_ext', '--build-lib', {str(into)!r}]\n"
        "exec(open('setup.py').read())",
        **environment,
    )
    assert not list(into.glob("headgate/ops/native/*.so"))
    return (into / "headgate/ops/native/build.txt").read_text()


def test_switched_off_it_says_so_and_plain_pytorch_serves() -> None:
    text = run(EXPLAIN, HEADGATE_NATIVE="off")
    assert "takes the path 'torch'" in text
    assert "not 'native': switched off by HEADGATE_NATIVE=off" in text
    assert "'span_attention:torch': 1" in text


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AssertionError, match="HEADGATE_NATIVE='sse9' is unknown; known are plain, avx2"):
        run(EXPLAIN, HEADGATE_NATIVE="sse9")


@needs_library
@pytest.mark.parametrize("level", ["plain", "avx2", "avx512"])
def test_a_level_is_loaded_or_refused_but_never_crashes(level: str) -> None:
    text = run(EXPLAIN, HEADGATE_NATIVE=level)
    if text.startswith("None"):
        assert f"HEADGATE_NATIVE={level} asks for instructions that this CPU does not have" in text
        assert level != "plain"
    else:
        assert text.startswith(level)
        assert "'span_attention:native': 1" in text


@needs_library
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the mapped libraries cannot be listed here")
    names = {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line}
    runtimes = {n for n in names if Path(n).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) == 1, runtimes
    assert library._torch_team() is not None


@needs_library
def test_torchs_threads_are_used_and_no_others_started() -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("threads cannot be counted here")
    code = """
import os, torch
from headgate import ops
count = lambda: len(os.listdir("/proc/self/task"))
q = torch.randn(1, 4, 512, 32)
torch.randn(1 << 20).exp()
before = count()
for _ in range(3):
    ops.window_attention(q, q, q, 64)
print(count() - before)
"""
    assert run(code, OMP_NUM_THREADS="2").strip() == "0"


def test_building_without_a_compiler_succeeds_and_leaves_the_reason(tmp_path: Path) -> None:
    note = build(tmp_path, PATH=str(tmp_path), CXX="")
    assert note == "no C++ compiler was found when headgate was installed\n"


def test_a_failing_compiler_leaves_its_reason(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    assert "failed for plain: x.cpp:1: error: out of ideas" in build(tmp_path, CXX=str(compiler))


def test_kept_memory_is_reused() -> None:
    code = """
import resource, torch
from headgate.machine import keep_memory
if not keep_memory():
    raise SystemExit(print("0 no mallopt"))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(16)))  # glibc needs some rounds until a piece fits exactly
"""
    assert int(run(code).split()[0]) < 100  # of 16384 pages
