"""What other systems lack: Windows its modules, ROCm a Triton of its own that an extra must not overwrite."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WINDOWS = """
import importlib, os, pkgutil, signal, sys, types
import altair, jinja2, psutil, pyarrow, rich.console, scipy.stats, torch, tokenizers, tyro
import vl_convert, xxhash, multiprocessing.connection, safetensors.torch
from transformers import PreTrainedModel, GenerationMixin, AutoModelForCausalLM
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sysconf", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "getuid", "fork", "killpg"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL"):
    delattr(signal, name)
psutil.Process = lambda: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(peak_wset=7))
import headgate
skipped = ("headgate.__main__", "headgate.ops.triton.pair_gate_kernels", "headgate.model.hf")
for module in pkgutil.walk_packages(headgate.__path__, "headgate."):
    if module.name not in skipped and ".native.kernels" not in module.name:
        importlib.import_module(module.name)
from headgate import machine
assert machine.memory_peak() == 7
assert machine.memory() == psutil.virtual_memory().total
assert machine.cores() >= 1
print("imported")
"""


def test_everything_imports_without_what_windows_lacks() -> None:
    run = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.endswith("imported\n"), run.stderr[-3000:]


def test_no_extra_overwrites_the_triton_of_a_pytorch_build() -> None:
    """ROCm's PyTorch brings a package of another name with the same module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "dev"}
    for name, needs in {"dependencies": project["dependencies"], **extras}.items():
        assert not any(re.match(r"triton\b", need) for need in needs), name
