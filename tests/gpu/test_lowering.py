"""What PyTorch's compiler makes of FlexAttention's calls on an A100 that is not there: see absent.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="FlexAttention was not compiled: pip install triton")
SCRIPT = Path(__file__).with_name("lowering.py")


@pytest.mark.compiles
def test_flex_attention_has_a_kernel_for_every_number_of_queries(
    absent_gpu: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(absent_gpu("cuda"))],
        capture_output=True,
        text=True,
        env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["training"] == found["a tail"] == found["grouped blocks"] == "attention", found
    assert found["a token"] == "decoding", found
    # If this fails, PyTorch has mended it, and flex._kernel_options with modes.has_kernel can go.
    assert "NoValidChoicesError" in found["a tail, as PyTorch has it"], found
