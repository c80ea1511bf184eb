"""bf16 on a processor that announces matrix tiles it cannot run."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import headgate
from headgate import machine
from headgate.config import Config
from headgate.train.evaluate import autocast


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    machine.avoid_broken_tiles.cache_clear()
    yield
    machine.avoid_broken_tiles.cache_clear()


def compute(precision: str) -> None:
    with autocast(torch.device("cpu"), precision):
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: compute("bf16"),
        lambda folder: compute("bf16-products"),
        lambda folder: headgate.load(folder / "bf16.safetensors"),
    ],
    ids=["train", "products", "load"],
)
@pytest.mark.parametrize(
    ("flags", "code", "avoided"),
    [
        ("flags: amx_bf16", -signal.SIGILL, True),
        ("flags: amx_bf16", 0, False),
        ("flags: avx2", -signal.SIGILL, False),
    ],
)
def test_tiles_are_tried_before_they_are_used(
    flags: str,
    code: int,
    avoided: bool,
    use: Callable[[Path], object],
    micro: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tries = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        tries.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(machine, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(machine.subprocess, "run", run)
    decoder = headgate.build_model(micro)
    decoder.save(tmp_path / "fp32.safetensors")
    decoder.bfloat16().save(tmp_path / "bf16.safetensors")
    compute("fp32")
    headgate.load(tmp_path / "fp32.safetensors")
    assert not tries, "only bf16 uses them"
    for _ in range(2):
        use(tmp_path)
    assert len(tries) == ("amx" in flags), "once a process"
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) == avoided
    assert capsys.readouterr().err.count("AMX") == avoided
