"""The Triton kernels of pair-gated attention: interpreted on the CPU against the dense truth, and compiled
for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pair_gate import Case, case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headgate import ops
from headgate.errors import HeadgateError
from headgate.ops import pair_gated_attention
from headgate.ops.triton import pair_gate

pytest.importorskip("triton", reason="the Triton kernels were not tested: pip install triton")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # rows behind the last
RESOURCES = Path(__file__).parents[2] / "benchmarks" / "triton_resources.py"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU: tests/conftest.py asks Triton for it."""
    monkeypatch.setattr(pair_gate, "DEVICES", ("cpu",))


# Interpreted, a tile has 64 rows and 32 columns: the shapes below have rows and columns of one tile and of
# several, whole and cut.
SHAPES = [
    case(1, 2, 1, 1, width=32, hidden=4),
    case(1, 1, 1, 17, width=64, hidden=8, form="log"),
    case(2, 2, 1, 63, width=32, hidden=4, order="sliced"),
    case(1, 1, 1, 111, width=128, hidden=4, form="log", window=40),
    case(1, 1, 1, 130, width=32, hidden=4, order="bthd"),
    case(1, 2, 1, 1, 90, width=32, hidden=8, form="log"),  # decoding
    case(1, 1, 1, 3, 520, width=32, hidden=4),  # decoding with the keys of a head in three parts
    case(1, 1, 1, 1, 520, width=32, hidden=4, form="log", window=100),  # and parts without keys
    case(1, 2, 1, 20, 70, width=64, hidden=8, window=9),  # a chunk over a cache
    case(1, 1, 1, 33, width=32, hidden=32, order="bhdt"),
    case(1, 1, 1, 34, width=32, hidden=16, form="log"),
]


def name(chosen: Case) -> str:
    q, k, *_ = chosen.inputs
    return f"{tuple(q.shape)}-{tuple(k.shape)}-{chosen.inputs[5].shape[1]}-{chosen.options}"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("chosen", SHAPES, ids=name)
def test_output_and_every_gradient_are_the_truth(chosen: Case) -> None:
    chosen.check("triton")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("chosen", [SHAPES[2], SHAPES[3], SHAPES[8]], ids=name)
def test_so_they_are_where_results_must_repeat(chosen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels that add nothing atomically, in place of the one that does."""
    launched = []
    launch = pair_gate.TritonCall.launch

    def noted(self: pair_gate.TritonCall, kernel: str, *given: Any) -> None:
        launched.append(kernel)
        launch(self, kernel, *given)

    monkeypatch.setattr(pair_gate.TritonCall, "launch", noted)
    torch.use_deterministic_algorithms(False)  # the tests of ops ask for them, to poison memory
    try:
        chosen.check("triton")
    finally:
        torch.use_deterministic_algorithms(True)
    assert set(launched) == {"forward", "backward"}
    launched.clear()
    chosen.check("triton")
    assert set(launched) == {"forward", "backward_queries", "backward_keys"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("width", "hidden", "form"),
    [(32, 16, "log"), (32, 32, "log"), (64, 4, "multiply"), (64, 16, "multiply"), (128, 8, "log")],
)
def test_other_sizes(width: int, hidden: int, form: str) -> None:
    case(1, 1, 1, 13, width=width, hidden=hidden, form=form).check("triton")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "chosen",
    [case(1, 2, 1, 66, width=32, hidden=4), case(1, 2, 1, 9, 40, width=64, hidden=4, form="log")],
    ids=name,
)
def test_bf16_is_summed_in_fp32(chosen: Case) -> None:
    chosen.inputs = [t.bfloat16().float() for t in chosen.inputs]
    chosen.d_out = chosen.d_out.bfloat16().float()
    expected = chosen.truth()
    result = chosen.run(pair_gated_attention, dtype=torch.bfloat16, backend="triton")
    for which, truth in expected.items():
        assert result[which].dtype == torch.bfloat16
        size = max(truth.abs().max(), expected["d_w2"].abs().max() if which == "d_b2" else 0)
        assert (result[which].double() - truth).abs().max() <= 0.01 * size, which


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("form", ["multiply", "log"])
def test_saturated_gates_and_extreme_inputs_stay_finite(form: str) -> None:
    for bias, scale in ((-1e4, 1.0), (1e4, 1.0), (0.0, 1e4)):
        chosen = case(1, 1, 1, 20, width=32, hidden=4, form=form, bias=bias, window=7)
        chosen.inputs[:5] = [t * scale for t in chosen.inputs[:5]]
        for which, tensor in chosen.run(pair_gated_attention, backend="triton").items():
            assert tensor.isfinite().all(), (which, bias, scale)


@pytest.mark.usefixtures("interpreted")
def test_nan_is_not_lost() -> None:
    chosen = case(1, 1, 1, 40, width=32, hidden=4, window=10)
    chosen.inputs[4][0, 0, 20, 3] = torch.nan
    out = pair_gated_attention(*chosen.inputs, **chosen.options, backend="triton")
    assert out[0, 0, 20:31].isnan().all()
    assert out[0, 0, :20].isfinite().all()
    assert out[0, 0, 31:].isfinite().all()


@pytest.mark.usefixtures("interpreted")
def test_mixed_dtypes_as_autocast_leaves_them() -> None:
    """Heads in bf16, the gate's own tensors in fp32."""
    chosen = case(1, 1, 1, 20, width=32, hidden=4)
    mixed = [t.bfloat16() if n < 3 else t for n, t in enumerate(chosen.inputs)]
    truth = pair_gated_attention(*(t.double() for t in mixed), form="log", backend="reference")
    out = pair_gated_attention(*mixed, form="log", backend="triton")
    assert out.dtype == torch.bfloat16
    assert (out - truth).abs().max() < 0.02


@pytest.mark.usefixtures("interpreted")
def test_what_is_kept_for_the_backward_is_linear_in_the_length() -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        inputs = [t.requires_grad_() for t in case(1, 1, 1, length, width=32, hidden=4).inputs]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            pair_gated_attention(*inputs, form="multiply", backend="triton")
        return sum(sizes)

    assert 0 < kept(64) < 2.1 * kept(32)


@pytest.mark.compiles
@pytest.mark.usefixtures("interpreted")
def test_pytorch_accepts_the_ops_and_compiles_them_to_one_graph() -> None:
    chosen = case(1, 2, 1, 9, 12, width=32, hidden=4)
    forward, backward = (
        getattr(torch.ops.headgate, n).default for n in ("pair_gate_triton", "pair_gate_triton_backward")
    )
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward, (*chosen.inputs, "log", 5), test_utils=checks)
    saved = forward(*chosen.inputs, "log", 5)
    torch.library.opcheck(backward, (chosen.d_out, *chosen.inputs, *saved, "log", 5), test_utils=checks)

    def loss(*inputs: Tensor) -> Tensor:
        return pair_gated_attention(*inputs, form="multiply", backend="triton").square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = [t.clone().requires_grad_() for t in chosen.inputs]
        results.append(torch.autograd.grad(function(*inputs), inputs))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def gpu_inputs(width: int = 64, hidden: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors without values on a device that need not be there."""
    shapes = [t.shape for t in case(1, 4, 2, 300, width=width, hidden=hidden).inputs]
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


def test_a_gpu_takes_the_kernels_and_each_refusal_has_its_reason() -> None:
    for dtype in pair_gate.DTYPES:
        chosen = ops.explain(pair_gated_attention, *gpu_inputs(dtype=dtype), form="log")
        assert chosen.path == "triton"
        assert [path for path, _ in chosen.refusals] == ["native"]
    inputs = gpu_inputs()
    with inputs[0].fake_mode:
        out = pair_gated_attention(*inputs, form="log")
    assert (out.device.type, out.shape, out.dtype) == ("cuda", (1, 4, 300, 64), torch.bfloat16)
    refusals = {
        "head width 96 is not one of 32, 64, 128": gpu_inputs(width=96),
        "hidden width 5 is not one of 4, 8, 16, 32": gpu_inputs(hidden=5),
        "it takes float32 and bfloat16, not float64": gpu_inputs(dtype=torch.float64),
    }
    for reason, inputs in refusals.items():
        explanation = ops.explain(pair_gated_attention, *inputs, form="log")
        assert explanation.path == "torch"
        assert explanation.refusals[1] == ("triton", reason)
    with pytest.raises(HeadgateError, match="it runs on a GPU, not on cpu"):
        pair_gated_attention(*case().inputs, form="log", backend="triton")


@pytest.mark.long
def test_every_configuration_fits_its_device(tmp_path: Path) -> None:
    """The first of each kernel's configurations at the largest sizes, which need the most registers. All of
    them: the command in docs/gpu.md."""
    found = tmp_path / "resources.json"
    command = [sys.executable, str(RESOURCES), "--width", "128", "--hidden", "32", "--first"]
    command += ["--jobs", "2", "--json", str(found)]
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=compiling)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(found.read_text())
    kernels = [(kernel, "bf16") for kernel in pair_gate.KERNELS] + [("backward_keys", "fp32")]
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    assert {(r["kernel"], r["dtype"], r["target"]) for r in rows} == {
        (*kernel, target) for kernel in kernels for target in targets
    }
    assert {(r["width"], r["hidden"]) for r in rows} == {(128, 32)}
    for row in rows:
        assert row["registers"] <= (512 if row["target"] == "gfx942" else 255), row
        assert row["spilled"] <= 16, row
        assert row["shared"] <= {"sm_80": 163, "gfx942": 64}.get(row["target"], 227) * 1024, row


def test_the_bound_counts_inner_loops_once_per_hidden_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        /*0000*/                   FADD R0, R1, R2 ;
.L_x_0:
        /*0010*/                   FMUL R0, R1, R2 ;
.L_x_1:
        /*0020*/              @!P0 FFMA R0, R1, R2, R3 ;
        /*0030*/                   MUFU.TANH R4, R5 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/                   BRA `(.L_x_0) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
"""
    monkeypatch.syspath_prepend(RESOURCES.parent)
    from triton_bound import tile_instructions

    expected = {"FMUL": 1, "FFMA": 16, "MUFU": 16, "BRA": 17, "HMMA": 1}
    assert tile_instructions(code, 16) == expected
    on_blackwell = code.replace("@P0 BRA `(.L_x_1)", "BRA.U UP0, `(.L_x_1)")
    assert tile_instructions(on_blackwell, 16) == expected


def test_the_bound_finds_the_loops_of_amds_code_by_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stand in any order; a loop without the activation, as of atomics, is not the hidden units'."""
    code = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	v_add_f32_e32 v0, v1, v2
.LBB0_1:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_2 Depth 2
	v_mul_f32_e32 v0, v1, v2
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	v_exp_f32_e32 v0, v1
	s_cbranch_scc1 .LBB0_2
; %bb.3:                                ;   in Loop: Header=BB0_1 Depth=1
	v_fma_f32 v0, v1, v2, v3
	s_branch .LBB0_1
.LBB0_4:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	global_atomic_add_f32 v0, v1, s[0:1]
	s_cbranch_execnz .LBB0_4
.LBB0_5:
	s_endpgm
"""
    monkeypatch.syspath_prepend(RESOURCES.parent)
    from triton_bound import tile_instructions

    assert tile_instructions(code, 16) == {
        "v_mul_f32_e32": 1,
        "v_exp_f32_e32": 16,
        "s_cbranch_scc1": 16,
        "v_fma_f32": 1,
        "s_branch": 1,
        "global_atomic_add_f32": 1,
        "s_cbranch_execnz": 1,
    }


def test_the_backward_pass_computes_the_hidden_layer_twice() -> None:
    """By the loops with an activation in the code for an A100: one for the gate, one for its slopes."""
    script = (
        "import re, sys, torch; sys.path.insert(0, sys.argv[1]);"
        "from triton_bound import _nvidia_loops, configs; from triton_resources import Case, machine_code;"
        "config = configs('backward', 64, torch.bfloat16, 'cuda')[0];"
        "code = machine_code(Case('backward', 'bf16', 64, 16, 'multiply', config, 'sm_80')).splitlines();"
        "print(sum(any('MUFU.TANH' in code[n] for n in loop) for loop in _nvidia_loops(code)[1]))"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, str(RESOURCES.parent)]
    assert subprocess.run(command, capture_output=True, text=True, env=compiling).stdout == "2\n"
