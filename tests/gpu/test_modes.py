"""Every mechanism through its modes on a GPU that is not there: see absent.py."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import headgate

NAMES = headgate.mechanisms()
SCRIPT = Path(__file__).with_name("modes.py")


@pytest.mark.long
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_every_mechanism_passes_its_modes(device: str, absent_gpu: Callable[[str], Path]) -> None:
    """No mode mixes dtypes under the device's autocast, waits for the device (generation once a token), asks
    FlexAttention for a kernel that it does not have, or is dense where a fused kernel exists; on Apple's GPU
    none computes in double precision."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(absent_gpu(device)), device, *NAMES], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert {outcome["mechanism"] for outcome in outcomes} == set(NAMES)
    for outcome in outcomes:
        where = f"{outcome['mechanism']}, {outcome['mode']}"
        assert outcome["error"] is None, f"{where}: {outcome['error'][-3000:]}"
        assert not any(path.endswith((":reference", ":math")) for path in outcome["paths"]), where
        if device == "mps":
            continue
        if outcome["mode"] == "skip_below":
            assert "active_attention:torch" not in outcome["paths"], (
                f"{where}: it asks which heads are active"
            )
        if outcome["mode"] in ("prefill", "decode") and outcome["mechanism"] in ("full", "local", "near-far"):
            assert not any("flex" in path for path in outcome["paths"]), f"{where}: it compiles"
