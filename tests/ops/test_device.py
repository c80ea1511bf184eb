"""The contract on a device: `make test-gpu` runs this with HEADGATE_DEVICE=cuda. Truths come from the CPU."""

import os

import pytest
import test_mechanisms
import test_pair_gate
import test_span
import torch

import headgate
from headgate import ops
from headgate.ops import pair_gated_attention, span_attention
from headgate.ops.triton import pair_gate

DEVICE = os.environ.get("HEADGATE_DEVICE", "")
if not DEVICE:
    pytest.skip("no device was asked for; make test-gpu does", allow_module_level=True)
GPU = DEVICE.startswith("cuda")
CASES = int(os.environ.get("HEADGATE_DEVICE_CASES", "60"))
"""Of random shapes. Each may be a kernel to compile, so `make test-gpu` asks for fewer."""
WIDTHS = pair_gate.WIDTHS if CASES >= 60 else (64,)


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("backend", ["flex" if GPU else "native", "torch"])
def test_span_attention(backend: str, seed: int) -> None:
    test_span.random_case(seed).check(backend, device=DEVICE)


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 200, "ring": 600}], ids=str)
@pytest.mark.parametrize("length", [1024, 1025, 1151])
def test_long_spans_in_bf16(length: int, options: dict[str, int]) -> None:
    chosen = test_span.case(1, 4, 2, length, length, 64, **options)
    expected = chosen.truth()
    result = chosen.run(span_attention, dtype=torch.bfloat16, device=DEVICE)
    for name, truth in expected.items():
        assert (result[name].double() - truth).abs().max() <= 0.06 * max(1, truth.abs().max()), name


def pair_gate_case(seed: int, **options: object) -> test_pair_gate.Case:
    widths, hidden = pair_gate.WIDTHS, pair_gate.HIDDEN
    keys = (1, 17, 63, 111, 130, 257, 500)[seed % 7]
    return test_pair_gate.case(
        1 + seed % 2,
        4,
        2,
        keys if seed % 3 else max(1, keys - 40),
        keys,
        widths[seed % 3],
        hidden[seed % 4],
        form=("multiply", "log")[seed // 2 % 2],
        window=(None, None, 20, 90)[seed // 3 % 4],
        order=("bhtd", "bthd", "sliced")[seed % 3],
        seed=seed,
        **options,
    )


@pytest.mark.parametrize("seed", range(min(48, CASES)))
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_pair_gated_attention(backend: str, seed: int) -> None:
    pair_gate_case(seed).check(backend, device=DEVICE)


@pytest.mark.skipif(not GPU, reason="the configurations are those of a GPU")
@pytest.mark.parametrize("dtype", pair_gate.DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_configuration(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "hip" if torch.version.hip else "cuda"
    choices = {name: pair_gate.configs(name, width, dtype, backend) for name in pair_gate.KERNELS}
    for number in range(max(map(len, choices.values()))):
        one = {name: (c[min(number, len(c) - 1)],) for name, c in choices.items()}
        monkeypatch.setattr(pair_gate, "configs", lambda kernel, *rest, one=one: one[kernel])
        for form in ("multiply", "log"):
            chosen = test_pair_gate.case(1, 2, 1, 300, width=width, hidden=16, form=form)
            chosen.inputs = [t.to(dtype).float() for t in chosen.inputs]
            expected = chosen.truth()
            result = chosen.run(pair_gated_attention, dtype=dtype, device=DEVICE)
            for name, truth in expected.items():
                size = max(truth.abs().max(), expected["d_w2"].abs().max() if name == "d_b2" else 0)
                worst = (result[name].double() - truth).abs().max() / size
                assert worst < (1e-4 if dtype == torch.float32 else 0.02), (name, form, one)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_results_repeat_bit_for_bit(backend: str) -> None:
    pairs = test_pair_gate.case(2, 4, 2, 300, width=64, hidden=16)
    spans = test_span.case(2, 4, 2, 300, 300, 64, window=100, ring=200)
    for chosen, op in ((pairs, pair_gated_attention), (spans, span_attention)):
        first = chosen.run(op, backend=backend, device=DEVICE)
        again = chosen.run(op, backend=backend, device=DEVICE)
        for name in first:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("variant", test_mechanisms.VARIANTS, ids=str)
def test_every_mechanism(variant: test_mechanisms.Variant) -> None:
    """Output and the gradients of all inputs and parameters, against the formula in double precision."""
    mechanism = test_mechanisms.shaken(variant.build(2, head_dim=32))
    inputs = test_mechanisms.tensors(variant, length=300, kv_heads=2, head_dim=32)
    expected = test_mechanisms.results(mechanism.double(), mechanism.reference, inputs, torch.float64)
    mechanism = mechanism.float().to(DEVICE)
    moved = {name: t.to(DEVICE) for name, t in inputs.items()}
    found = test_mechanisms.results(mechanism, mechanism, moved, torch.float32)
    for name, truth in expected.items():
        test_mechanisms.assert_close(found[name].cpu(), truth, 1e-4, name)


@pytest.mark.parametrize("variant", test_mechanisms.VARIANTS, ids=str)
def test_decoding_token_by_token(variant: test_mechanisms.Variant) -> None:
    mechanism = variant.build(2, head_dim=32).to(DEVICE)
    inputs = test_mechanisms.tensors(variant, length=70, kv_heads=2, head_dim=32)
    inputs = {name: t.float().to(DEVICE) for name, t in inputs.items()}
    with torch.no_grad():
        whole = mechanism(*inputs.values())
    parts = test_mechanisms.through_cache(mechanism, inputs, [40, *[1] * 30])
    test_mechanisms.assert_close(parts.cpu(), whole.cpu(), 1e-4)


@pytest.mark.parametrize("mechanism", ["full", "dynamic-sparse", "head-gated", "sparse-geometric"])
def test_a_decoder_learns_in_bf16_compiled(mechanism: str) -> None:
    decoder = headgate.build_model("tiny", mechanism=mechanism, seed=1).to(DEVICE)
    tokens = torch.randint(4096, (2, 257), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
    step = torch.compile(decoder, fullgraph=True) if GPU else decoder
    losses = []
    for _ in range(8):
        with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
            loss = step(tokens[:, :-1], tokens[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    if GPU:
        taken = {path.split(":")[1] for path in ops.paths_taken()}
        assert taken & {"flex", "triton"}
