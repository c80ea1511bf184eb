"""The planner: its arithmetic, its memory against measurement, what fits, and what it prints."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headgate import cli
from headgate.compare.variants import Variant
from headgate.config import Config, override
from headgate.data.loader import document_lengths
from headgate.data.shards import open_split
from headgate.errors import HeadgateError
from headgate.grammar import MechanismSpec
from headgate.measure import costs
from headgate.mechanisms import MECHANISMS
from headgate.model.decoder import Decoder
from headgate.plan import cpu_timing
from headgate.plan.devices import DEVICES, Device, Seconds, find_device
from headgate.plan.memory_trace import DIRECT_TOKENS, Ledger, Passes, Sizes, blank_decoder, walk
from headgate.plan.planner import USABLE, Planner, make_plan, make_plans, with_batch
from headgate.recipes import RECIPES, get_recipe
from headgate.train.summary import flops_per_token, pairs_per_token

A100 = DEVICES["A100"]
LIKE_HERE = replace(A100, kind="cpu")
"""Its tiles and paths are those of this machine."""


def planner(config: Config, mechanism: str = "full", count: int = 1, device: Device = A100) -> Planner:
    variant = Variant.parse(mechanism)
    return Planner(replace(config, model=replace(config.model, mechanism=variant.mechanism)), device, count)


def total(
    config: Config, mechanism: str = "full", *, recompute: bool = False, device: Device = A100
) -> float:
    found = planner(config, mechanism, device=device)
    return found.memory(config.train.batch_size, recompute=recompute, shard=False).total


@pytest.mark.parametrize("name", RECIPES.names())
def test_parameters_are_the_recipes(name: str) -> None:
    assert Sizes.of(blank_decoder(get_recipe(name).model)).total == RECIPES.get(name).parameters


def test_flops_are_three_times_those_of_a_runs_summary() -> None:
    tiny = get_recipe("tiny")
    plan = make_plan(tiny, A100)
    tokens = tiny.train.tokens / tiny.train.steps
    assert plan.flops["total"] == pytest.approx(
        3 * tokens * flops_per_token(Decoder(tiny.model), 256)["forward"]
    )
    assert plan.flops["total"] == plan.flops["linear"] + plan.flops["attention"]


@pytest.mark.parametrize("name", MECHANISMS.names())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_mechanism_runs_dry_and_leaves_its_gradients(name: str, precision: str, micro: Config) -> None:
    """What a pass holds at its end are the gradients of all weights, in fp32, whatever the precision."""
    model = replace(micro.model, mechanism=(MechanismSpec(name),), n_layers=1)
    run = Passes(model, precision, 24, recompute=False).of(2)
    segments = [run.embedding, *run.layers, run.loss, run.loss_back, *run.layers_back, run.embedding_back]
    kept = sum(segment.kept for segment in segments)
    gradients = 4 * Sizes.of(blank_decoder(model)).total
    assert gradients <= kept <= gradients + 2000  # a few small tensors live as long as the step
    assert all(segment.peak >= max(0, segment.kept) for segment in segments)


@pytest.mark.parametrize("name", ["full", "head-gated", "context-adaptive", "sparse-geometric", "combiner"])
def test_the_dry_run_peaks_where_the_real_one_does(name: str, micro: Config) -> None:
    """The same ledger over real tensors, of the whole depth at once."""
    model = replace(micro.model, mechanism=(MechanismSpec(name),), n_layers=3)
    memory = walk(
        Passes(model, "fp32", 24, recompute=False).of(4), Sizes.of(blank_decoder(model)), accumulated=False
    )
    decoder, tokens = Decoder(model), torch.randint(256, (4, 24))
    with Ledger() as real:
        for tensor in (tokens, *decoder.parameters()):
            real.follow(tensor, counted=False)
        decoder(tokens, tokens).backward()
    assert memory.total - memory.weights - memory.optimiser == pytest.approx(real.peak, rel=0.02)


def test_predicted_memory_is_within_a_tenth_of_measured(micro: Config) -> None:
    """One is measured in a process of its own, the other in a fork beside another."""
    wide = override(get_recipe("tiny"), ["train.batch_size=16"])
    deep = override(get_recipe("tiny"), ["model.n_layers=3", "model.vocab_size=16384"])
    alone = costs.peak_memory(Variant.parse("head-gated").config(wide), 512)
    forked, _ = costs.peak_memories([(Variant.parse("context-adaptive").config(deep), 1024), (micro, 24)])
    for base, mechanism, length, peak in (
        (wide, "head-gated", 512, alone),
        (deep, "context-adaptive", 1024, forked),
    ):
        sequences = costs.sequences_at(length, base.train)
        asked = replace(base, train=replace(base.train, context=length, batch_size=sequences))
        assert total(asked, mechanism, device=LIKE_HERE) == pytest.approx(peak, rel=0.1)


def test_memory_that_cannot_be_measured_is_one_sentence(micro: Config) -> None:
    broken = replace(micro, train=replace(micro.train, precision="fp8"))
    sentence = "measuring the memory of dynamic-sparse at a context of 24 failed: .*fp8"
    with pytest.raises(HeadgateError, match=sentence):
        costs.peak_memories([(micro, 24), (broken, 24)])


def test_parts_add_up_and_have_their_known_sizes() -> None:
    small = get_recipe("small")
    memory = planner(small).memory(4, recompute=False, shard=False)
    assert memory.weights == 4 * RECIPES.get("small").parameters
    assert memory.optimiser == 2 * memory.weights
    parts = (memory.weights, memory.gradients, memory.optimiser, memory.activations, memory.loss)
    assert memory.total == sum(parts)
    assert min(parts) >= 0


def test_memory_grows_with_batch_context_and_depth_and_recomputation_saves() -> None:
    tiny = get_recipe("tiny")
    totals = [total(override(tiny, [f"train.batch_size={n}"])) for n in (8, 16, 64, 256)]
    assert totals == sorted(totals)
    assert totals[3] - totals[2] > 2.9 * (totals[2] - totals[1])
    longer = [total(override(tiny, [f"train.context={n}"])) for n in (256, 1024, 8192)]
    assert longer == sorted(longer)
    assert total(override(tiny, ["model.n_layers=8"])) > 1.5 * total(tiny)
    assert total(tiny, recompute=True) < 0.6 * total(tiny)


def test_many_tokens_lie_on_the_line_of_few() -> None:
    """Where a pass is no longer run as it is, nothing jumps."""
    model = get_recipe("tiny").model
    passes, sizes = Passes(model, "fp32", 256, recompute=False), Sizes.of(blank_decoder(model))
    at = DIRECT_TOKENS // 256
    last, beyond, far = (walk(passes.of(n), sizes, accumulated=False).total for n in (at, at + 1, 2 * at))
    assert far - last == pytest.approx(at * (beyond - last), rel=0.01)


def test_a_pattern_is_walked_layer_by_layer() -> None:
    """Five layers of a pattern of two: three of the first, two of the second."""
    tiny = override(get_recipe("tiny"), ["model.n_layers=5"])
    plan = planner(tiny, "full+sparse-geometric")
    assert plan.sizes.total == plan.decoder.parameter_count()
    plain, gated = total(tiny), total(tiny, "sparse-geometric")
    assert plain < total(tiny, "full+sparse-geometric") < plain + 0.5 * (gated - plain)


def test_sharding_divides_what_is_shared() -> None:
    config = override(get_recipe("small"), ["train.batch_size=8"])
    whole = planner(config, count=8).memory(1, recompute=False, shard=False)
    shared = planner(config, count=8).memory(1, recompute=False, shard=True)
    assert shared.optimiser == whole.optimiser / 8
    assert whole.weights / 8 < shared.weights < whole.weights
    assert shared.gradients < whole.gradients
    assert shared.activations == pytest.approx(whole.activations, rel=0.05)


def test_what_fits_is_the_most_that_fits() -> None:
    config = override(get_recipe("small"), ["train.batch_size=32"])
    need = planner(config).memory(8, recompute=False, shard=False).total
    device = replace(A100, memory=1.01 * need / USABLE)
    plan = make_plan(config, device)
    assert not plan.asked.fits
    plain, recomputed = plan.ways
    assert (plain.sequences, plain.accumulation, plain.fits) == (8, 4, True)
    assert recomputed.sequences > 8
    assert recomputed.fits
    assert recomputed.seconds.expected > plain.seconds.expected
    assert plan.best == plain
    assert make_plan(config, replace(A100, memory=1e6)).best is None


def test_cache_is_what_decoding_keeps() -> None:
    tiny = get_recipe("tiny")
    for name in ("full", "dynamic-sparse", "sparse-geometric", "full+local"):
        asked = override(tiny, ["train.context=300", "train.batch_size=2"])
        model = replace(asked.model, mechanism=Variant.parse(name).mechanism)
        _, held = costs.decoding_step(Decoder(model), 300)
        assert planner(asked, name).cache() == held


def test_time_is_a_range_and_follows_work_and_devices() -> None:
    config = get_recipe("paper-134m")
    plans = {
        name: make_plan(config, find_device(name), count=8) for name in ("A100", "h100", "rtx4090", "L4")
    }
    seconds = {name: plan.asked.seconds for name, plan in plans.items()}
    for span in seconds.values():
        assert 0 < span.low < span.expected < span.high
    assert seconds["h100"].expected < seconds["A100"].expected < seconds["L4"].expected
    work = plans["A100"].flops["total"] / 8 / A100.bf16
    assert work < seconds["A100"].low  # nothing beats the peak


def test_pair_gates_are_dearer_and_windows_cheaper_on_long_contexts() -> None:
    config = with_batch(get_recipe("paper-134m"), context=16_384, batch=8)
    assert config.train.tokens == pytest.approx(get_recipe("paper-134m").train.tokens, rel=0.01)
    names = ["full", "dynamic-sparse", "sparse-geometric"]
    plans = make_plans(config, [Variant.parse(name).mechanism for name in names], [16_384], A100, price=2.0)
    full, windowed, gated = (plan.asked.seconds.expected for plan in plans)
    assert windowed < full < gated
    hours, cost = plans[0].hours(plans[0].asked), plans[0].cost(plans[0].asked)
    assert cost is not None
    assert cost.high == pytest.approx(2 * hours.high)


def test_pieces_scale_with_sequences_and_extrapolate_by_pairs(micro: Config) -> None:
    found = cpu_timing.time_model(micro, blank_decoder(micro.model))
    one, ten = (found.seconds(n, recompute=False) for n in (1, 10))
    assert 0 < one.low <= one.expected <= one.high
    assert ten.low - found.step.low == pytest.approx(10 * (one.low - found.step.low))
    assert found.seconds(1, recompute=True).low > one.low
    points = [
        (512, 512 * 256, 512 * 3.0 + 512 * 256 * 2.0),
        (1024, 1024 * 512, 1024 * 3.0 + 1024 * 512 * 2.0),
    ]
    assert cpu_timing.extrapolated(points, 4096, 4096 * 2048) == pytest.approx(4096 * 3.0 + 4096 * 2048 * 2.0)
    assert cpu_timing.extrapolated([(512, 5120, 1.0), (1024, 10240, 2.0)], 4096, 40960) == pytest.approx(8.0)


def test_no_compiler_is_imported() -> None:
    """It would take as long as all else; and the answer is to come in two seconds."""
    script = (
        "import sys; from headgate.cli import run;"
        "run(['plan', 'tiny', '--mechanism', 'context-adaptive', '--threads', '1', '--json']);"
        "print(sorted({'sympy', 'torch._dynamo', 'torch._inductor', 'scipy', 'altair'} & set(sys.modules)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    plan, modules = printed.splitlines()
    assert json.loads(plan)["device"]["name"] == "cpu"
    assert modules == "[]"


def test_words_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["plan", "paper-134m", "--device", "A100", "--count", "8", "--price", "2", "train.steps=10"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    told = " ".join(told.split())
    assert "134,234,368 parameters" in told
    assert "8 x A100" in told
    assert "--recompute" in told
    assert "at 2 per device and hour" in told
    cli.run(["plan", "tiny", "--device", "L4", "--table", "--mechanisms", "local", "--contexts", "256,512"])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert told.count("local") == 2
    assert told.count("full") == 2
    cli.run(["plan", "tiny", "--device", "L4", "--json", "--context", "128"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["context"] == 128
    assert plan["asked"]["memory"]["total"] == pytest.approx(
        sum(
            plan["asked"]["memory"][part]
            for part in ("weights", "gradients", "optimiser", "activations", "loss")
        )
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "A10"], "unknown device 'A10'; did you mean 'a100'?"),
        (["--count", "0"], "count=0 is too small"),
        (["--count", "2"], "count=2 of this machine cannot be measured"),
        (["--device", "L4", "--count", "3"], "8 sequences cannot be shared evenly among 3 devices"),
        (["--batch", "0"], "batch=0 is too small"),
        (["--price", "-1"], "price=-1.0 is not a price; give that of one device per hour"),
        (["--table", "--contexts", "5,x"], "contexts='5,x' must be whole numbers above 0"),
        (["--contexts", "5"], "--contexts needs --table"),
        (["--mechanism", "fulll"], "did you mean 'full'?"),
    ],
)
def test_errors_are_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(HeadgateError) as caught:
        cli.run(["plan", "tiny", *words])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def config_of(config: Config, mechanism: str) -> Config:
    return replace(config, model=replace(config.model, mechanism=Variant.parse(mechanism).mechanism))


def seconds(config: Config, device: str, mechanism: str = "full") -> Seconds:
    return make_plan(config_of(config, mechanism), find_device(device), all_ways=False).asked.seconds


def test_a_small_step_takes_as_long_as_its_kernels_take_to_start() -> None:
    """A device ten times as fast is no faster where the host is too slow for it."""
    tiny, a100 = get_recipe("tiny"), find_device("A100")
    plan = Planner(tiny, a100, 1)
    started = plan.over_layers(plan.run(8, recompute=False).kernels)
    assert 100 < started < 2000
    faster = replace(a100, bf16=10 * a100.bf16, fp32=10 * a100.fp32, bandwidth=10 * a100.bandwidth)
    slow, fast = (make_plan(tiny, device).asked.seconds for device in (a100, faster))
    assert slow.low == fast.low > 3e-6 * started
    assert slow.high == fast.high > 12e-6 * started


def test_attention_is_costed_by_its_path() -> None:
    """What goes over all pairs in plain PyTorch multiplies in fp32 and writes its scores out; a pair gate's
    backward pass is four times its forward, by what its kernels were measured to execute."""
    config = override(get_recipe("paper-134m"), ["train.context=8192", "train.batch_size=8"])
    fused, plain = seconds(config, "A100"), seconds(config, "A100", "positional")
    assert plain.low > 4 * fused.low
    planned = planner(config, "sparse-geometric")
    assert planned.run(1, recompute=False).paths == (frozenset({"triton"}),)
    forward, both = (planned.attention(0, ["triton"], 0, again) for again in (0, 1))
    assert both / forward == pytest.approx(6 / 5)
    assert make_plan(config_of(config, "local"), find_device("MI300X"), all_ways=False).paths == ("flex",)
    assert planner(config, "near-far").run(1, recompute=False).paths == (frozenset({"varlen"}),)


def test_the_output_head_is_not_recomputed_and_takes_large_chunks_on_a_gpu() -> None:
    config = override(get_recipe("paper-134m"), ["model.n_layers=1", "train.batch_size=4"])
    plan = planner(config)
    plain, again = (plan.bound(0, 4, recompute=recompute, shard=False) for recompute in (False, True))
    assert plan.head > 0.9 * plan.forward["linear"]
    assert again < 1.1 * plain  # a third more, if the head were
    rows = 2048
    held = plan.memory(4, recompute=False, shard=False).loss
    logits = rows * config.model.vocab_size
    assert 6 * logits < held < 12 * logits  # in half and single precision, and never two chunks


def test_links_reach_no_more_than_four_fifths_and_shards_go_in_bf16() -> None:
    config = override(
        get_recipe("paper-1.5b"), ["train.context=128", "train.batch_size=8", "train.accumulation=1"]
    )
    plan = planner(config, count=8)
    weights = plan.sizes.total * 7 / 8
    slow = replace(A100, link=1e9)
    exchanged = Planner(config, slow, 8).bound(0, 1, recompute=False, shard=False)
    assert exchanged == pytest.approx(8 * weights / 0.8e9)
    sharded = Planner(config, slow, 8).bound(0, 1, recompute=False, shard=True)
    assert sharded == pytest.approx((2 * 2 + 4) * weights / 0.8e9)


@pytest.mark.parametrize("name", ["H200", "B200", "MI300X", "L40S", "A100-40GB", "RTX 5090", "Apple M4 Max"])
def test_devices_are_known_by_name_and_have_a_source(name: str) -> None:
    device = find_device(name)
    assert device.source
    assert device.fp32 <= device.bf16
    assert seconds(get_recipe("tiny"), name).low > 0


def test_masked_documents_make_less_work(data: Path) -> None:
    """FLOPs and a GPU's seconds follow the documents of the data; masks of one document change nothing."""
    config = override(get_recipe("tiny"), ["train.context=1024", "train.batch_size=512"])
    device, split = find_device("A100"), open_split(data, "train")
    whole, documents = (make_plan(config, device, all_ways=False, split=s) for s in (None, split))
    lengths = document_lengths(split, config.train)
    assert lengths is not None
    full = blank_decoder(config.model).layers[0].attention.mechanism
    share = pairs_per_token(full, 1024, lengths) / pairs_per_token(full, 1024)
    assert 0.1 < share < 0.6
    assert documents.flops["attention"] == pytest.approx(share * whole.flops["attention"])
    assert documents.flops["linear"] == whole.flops["linear"]
    assert documents.asked.seconds.high < whole.asked.seconds.high
    stream = override(config, ["train.documents=stream"])
    assert make_plan(stream, device, all_ways=False, split=split).flops == whole.flops
