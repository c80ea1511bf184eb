"""What a variant costs: training steps, peak memory, decoding and its cache, at several context lengths.

Costs are measured apart from training, with the whole machine. Times are interleaved with the baseline's; a
speed is the median over rounds of the baseline's time divided by the variant's in the same round, so above 1
is faster. Peak memory is that of two training steps in a fresh process, above what it held before the model
was built.

To find where a mechanism starts to win, lengths between one where it does not and one where it does are
measured until the two are close.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headgate import config
from headgate.config import Config, TrainConfig
from headgate.errors import HeadgateError
from headgate.machine import Peak, describe, keep_memory
from headgate.measure.speed import interleaved, ratios
from headgate.mechanisms import Mechanism
from headgate.mechanisms.contract import Heads
from headgate.model.decoder import Decoder
from headgate.train.distributed import World
from headgate.train.evaluate import autocast, rounded_products
from headgate.train.loop import refuse_too_large
from headgate.train.optim import clip_gradients, gradient_norm, make_optimizer, output_rates

Kind = Literal["training", "decoding"]
KINDS: tuple[Kind, ...] = ("training", "decoding")
DECODED = 8
"""Tokens decoded in one round."""
PREFILL = 1024
CLOSE = 1.25
"""A crossover is narrowed down to two lengths, the larger at most this many times the smaller."""
LENGTH_STEP = 64


@dataclass(frozen=True)
class CostPlan:
    """What to measure."""

    lengths: tuple[int, ...] = ()
    """Context lengths; if empty, the training context and 4 and 16 times it."""
    seconds: float = 1.0
    """Roughly how long each variant is measured at each length, for training and decoding separately."""

    def lengths_for(self, train: TrainConfig) -> list[int]:
        """Always includes the training context, whose cost is shown beside the loss."""
        context = train.context
        return sorted({context, *(self.lengths or (4 * context, 16 * context))})


@dataclass(frozen=True)
class Speed:
    """The speed relative to the baseline, with quartiles, and the seconds per step: measured for the
    baseline, and for the others the baseline's divided by their relative speed, so that the two never
    disagree."""

    seconds: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """What a variant costs at one context length."""

    label: str
    length: int
    sequences: int
    """Sequences in a training step."""
    training: Speed
    """A step: forward, backward and optimiser."""
    decoding: Speed
    """One token after a context of this length, for one sequence."""
    peak_bytes: int
    peak_ratio: float
    cache_bytes: int
    """Keys and values that must be kept after a context of this length."""

    @property
    def tokens_per_second(self) -> float:
        return self.length * self.sequences / self.training.seconds


@dataclass(frozen=True)
class Crossover:
    """The length from which a variant is faster than the baseline."""

    label: str
    kind: Kind
    wins_at: int | None
    """The shortest measured length from which it was always faster; None if there is none."""
    not_at: int | None
    """The longest measured length below that at which it was not faster; None if there is none."""


@dataclass(frozen=True)
class Costs:
    threads: int
    device: str
    costs: tuple[Cost, ...]
    crossovers: tuple[Crossover, ...]
    machine: Mapping[str, str | None] = field(default_factory=dict)
    """Where all of it was measured; empty if an earlier version did."""

    def of(self, label: str) -> list[Cost]:
        return [cost for cost in self.costs if cost.label == label]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build(config: Config) -> Decoder:
    return Decoder(config.model, seed=config.seed).to(device())


def sequences_at(length: int, train: TrainConfig) -> int:
    """As many tokens per step as in training, and at least one sequence."""
    return max(1, train.batch_size * train.context // length)


def refuse_lengths(config: Config, lengths: Sequence[int]) -> None:
    """Raise if the longest of them cannot fit this machine's memory."""
    longest = max(lengths)
    train = replace(config.train, context=longest, batch_size=sequences_at(longest, config.train))
    refuse_too_large(replace(config, train=train), World(0, 1, device()))


def training_step(decoder: Decoder, train: TrainConfig, length: int) -> Callable[[], None]:
    """A function that does one optimiser step on random tokens."""
    optimizer = make_optimizer(decoder, train)
    parameters: list[Tensor] = list(decoder.parameters())
    rates = output_rates(decoder, train)
    where = parameters[0].device
    shape = (sequences_at(length, train), length + 1)
    tokens = torch.randint(decoder.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(
        where
    )

    def step() -> None:
        with rounded_products(train.precision):
            with autocast(where, train.precision):
                loss = decoder(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        clip_gradients(parameters, gradient_norm(parameters, rates), train.clip)
        optimizer.step()
        optimizer.zero_grad()
        _wait(where)

    return step


def decoding_step(decoder: Decoder, length: int) -> tuple[Callable[[], None], int]:
    """A function that decodes DECODED tokens after a context of `length`, and the bytes that context
    keeps."""
    where = next(decoder.parameters()).device
    tokens = random_tokens(decoder, (1, length))
    cache, token = decoder.new_cache(), tokens[:, -1:]
    with torch.inference_mode():
        with _without_attention(decoder):
            for part in tokens[:, :-1].split(PREFILL, dim=1):
                decoder.hidden(part, cache=cache)
        decoder.hidden(token, cache=cache)
    held = cache.held_bytes

    def step() -> None:
        with torch.inference_mode():
            for _ in range(DECODED):
                decoder(token, cache=cache)
        _wait(where)

    return step, held


def _nothing(heads: Heads, x: Tensor, q: Tensor, *others: Any) -> Tensor:
    return q.new_zeros(q.shape[0], heads.n_heads, q.shape[2], heads.head_dim)


@contextmanager
def _without_attention(decoder: Decoder) -> Iterator[None]:
    """Inside, keys are made and kept but nothing attends to them: the cost of a decoded token does not depend
    on their values, and attention over all tokens of a long context takes minutes."""
    mechanisms: list[Any] = [module for module in decoder.modules() if isinstance(module, Mechanism)]
    for mechanism in mechanisms:
        mechanism.attend = partial(_nothing, mechanism.heads)
    try:
        yield
    finally:
        for mechanism in mechanisms:
            del mechanism.attend


def random_tokens(decoder: Decoder, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(decoder.config.vocab_size, shape, generator=generator).to(device())


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def measure_costs(
    configs: Mapping[str, Config],
    plan: CostPlan,
    before: Costs | None,
    at_once: int,
    say: Callable[[str], None],
) -> Costs:
    """Measure every variant, by label, that is not in `before`; the first is the baseline of all. What was
    measured on another machine is measured again with what is new, so that one machine has measured all."""
    here = describe(device())
    if before is not None and before.machine != here and any(not before.of(label) for label in configs):
        before = None
    known = {cost.label for cost in before.costs} if before else set()
    baseline, *others = configs
    labels = [baseline, *(label for label in others if label not in known)]
    if before is not None and len(labels) == 1:
        return before
    keep_memory()
    train = configs[baseline].train
    bench = Bench(baseline, {label: build(configs[label]) for label in labels}, train)
    lengths = plan.lengths_for(train)
    speeds: dict[tuple[Kind, int], dict[str, Speed]] = {}
    for length in lengths:
        say(f"measuring speed at a context of {length:,}")
        for kind in KINDS:
            speeds[kind, length] = bench.speeds(kind, labels, length, plan.seconds)
    crossovers = []
    for label in labels[1:]:
        for kind in KINDS:

            def measure(length: int, kind: Kind = kind, label: str = label) -> float:
                say(f"measuring where {label} starts to win in {kind}: a context of {length:,}")
                found = bench.speeds(kind, [baseline, label], length, plan.seconds / 2)
                return found[label].low

            known_speeds = {length: speeds[kind, length][label].low for length in lengths}
            crossovers.append(Crossover(label, kind, *crossover(known_speeds, measure)))
    bench.decoders.clear()
    say(f"measuring peak memory, {len(labels) * len(lengths)} processes")
    peaks = _peaks({label: configs[label] for label in labels}, lengths, at_once)
    fresh = [
        Cost(
            label=label,
            length=length,
            sequences=sequences_at(length, train),
            training=speeds["training", length][label],
            decoding=speeds["decoding", length][label],
            peak_bytes=peaks[label, length],
            peak_ratio=peaks[label, length] / max(1, peaks[baseline, length]),
            cache_bytes=bench.held[label, length],
        )
        for label in labels
        for length in lengths
    ]
    if before is not None:
        known_costs = {cost.length: cost for cost in before.of(baseline)}
        fresh = [
            *before.costs,
            *(_on_the_basis_of(known_costs.get(c.length), c) for c in fresh if c.label != baseline),
        ]
        crossovers = [*before.crossovers, *crossovers]
    return Costs(torch.get_num_threads(), str(device()), tuple(fresh), tuple(crossovers), here)


def _on_the_basis_of(baseline: Cost | None, cost: Cost) -> Cost:
    """The cost, with its seconds derived from the baseline's as measured earlier."""
    if baseline is None:
        return cost
    training = replace(cost.training, seconds=baseline.training.seconds / cost.training.ratio)
    decoding = replace(cost.decoding, seconds=baseline.decoding.seconds / cost.decoding.ratio)
    return replace(cost, training=training, decoding=decoding)


def _speeds(times: Mapping[str, list[float]], baseline: str, each: int = 1) -> dict[str, Speed]:
    """Of interleaved times, in each of which a step was taken `each` times."""
    seconds, found = median(times[baseline]) / each, {}
    for label, own in times.items():
        ratio, low, high = ratios({"baseline": times[baseline], "own": own}, "baseline", "own")
        found[label] = Speed(seconds / ratio, ratio, low, high)
    return found


class Bench:
    """Decoders to be measured against one of them, the baseline."""

    def __init__(self, baseline: str, decoders: dict[str, Decoder], train: TrainConfig) -> None:
        self.baseline, self.decoders, self.train = baseline, decoders, train
        self.held: dict[tuple[str, int], int] = {}
        """Bytes that a context leaves in the cache, by label and length."""

    def speeds(self, kind: Kind, labels: Sequence[str], length: int, for_seconds: float) -> dict[str, Speed]:
        runs: dict[str, Callable[[], None]] = {}
        for label in labels:
            if kind == "training":
                runs[label] = training_step(self.decoders[label], self.train, length)
            else:
                runs[label], self.held[label, length] = decoding_step(self.decoders[label], length)
        times = interleaved(runs, seconds=for_seconds * len(runs), least_rounds=5, most_rounds=20)
        return _speeds(times, self.baseline, 1 if kind == "training" else DECODED)


def crossover(speed: Mapping[int, float], measure: Callable[[int], float]) -> tuple[int | None, int | None]:
    """(wins_at, not_at) from speeds by length, above 1 where it wins, measuring lengths in between."""
    wins_at = not_at = None
    for length in sorted(speed, reverse=True):
        if speed[length] <= 1:
            not_at = length
            break
        wins_at = length
    if wins_at is None or not_at is None:
        return wins_at, not_at
    while wins_at > CLOSE * not_at:
        between = round((wins_at * not_at) ** 0.5 / LENGTH_STEP) * LENGTH_STEP
        if not not_at < between < wins_at:
            break
        if measure(between) > 1:
            wins_at = between
        else:
            not_at = between
    return wins_at, not_at


def training_speeds(configs: Mapping[str, Config], threads: int) -> dict[str, Speed]:
    """How fast each config trains at its own context, as in a study's runs; the first is the baseline. If
    sequences grow, a step is the mean over their lengths."""
    keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = {label: _steps_as_they_grow(config) for label, config in configs.items()}
        times = interleaved(steps, seconds=3.0 * len(steps), least_rounds=5, most_rounds=20)
    finally:
        torch.set_num_threads(before)
    for label, asked in configs.items():
        times[label] = [seconds / len(asked.train.contexts) for seconds in times[label]]
    return _speeds(times, next(iter(configs)))


def _steps_as_they_grow(config: Config) -> Callable[[], None]:
    """A function that does a step at each of the lengths that sequences have."""
    decoder = build(config)
    steps = [training_step(decoder, config.train, length) for length in config.train.contexts]

    def step() -> None:
        for each in steps:
            each()

    return step


def step_seconds(configs: Mapping[str, Config], threads: int) -> dict[str, float]:
    """Seconds per training step. Through the ratio, which other load on the machine disturbs less."""
    return {label: speed.seconds for label, speed in training_speeds(configs, threads).items()}


def _peaks(configs: Mapping[str, Config], lengths: list[int], at_once: int) -> dict[tuple[str, int], int]:
    cases = [(label, length) for label in configs for length in lengths]
    peaks = peak_memories([(configs[label], length) for label, length in cases], at_once)
    return dict(zip(cases, peaks, strict=True))


def peak_memory(asked: Config, length: int) -> int:
    """Peak bytes of two training steps in a fresh process, above what it held before."""
    return peak_memories([(asked, length)])[0]


def peak_memories(cases: Sequence[tuple[Config, int]], at_once: int = 1) -> list[int]:
    """The peak memory of each config at a context, so many measured at once, each in a process of its own.

    Loading PyTorch takes longer than the steps of a small model, so on Linux one process loads it and forks
    the others, before it has computed anything. What a GPU holds is measured in new processes, one by one."""
    threads = torch.get_num_threads()
    questions = [{"config": config.to_dict(c), "length": length, "threads": threads} for c, length in cases]
    if device().type == "cpu" and sys.platform.startswith("linux"):
        answers = _ask(questions, at_once)
    else:
        with ThreadPoolExecutor(at_once if device().type == "cpu" else 1) as pool:
            answers = [answer for one in pool.map(lambda each: _ask([each], 1), questions) for answer in one]
    for (asked, length), answer in zip(cases, answers, strict=True):
        if isinstance(answer, str):
            names = "+".join(spec.name for spec in asked.model.mechanism)
            raise HeadgateError(f"measuring the memory of {names} at a context of {length} failed: {answer}")
    return [int(answer) for answer in answers]


def _ask(questions: Sequence[Mapping[str, Any]], at_once: int) -> list[int | str]:
    """Bytes, or why there are none, from a fresh process."""
    run = subprocess.run(
        [sys.executable, "-m", "headgate.measure.costs"],
        input=json.dumps({"questions": questions, "at_once": at_once}),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"},
    )
    if run.returncode:
        last_words = run.stderr.strip().splitlines() or ["it said nothing"]
        return [last_words[-1]] * len(questions)
    answers: list[int | str] = json.loads(run.stdout)
    return answers


def _answers(questions: Sequence[Mapping[str, Any]], at_once: int) -> list[int | str]:
    """In the fresh process, which answers a single question itself, and forks for each of several."""
    if len(questions) == 1:
        return [_answer(questions[0])]
    import torch._dynamo  # noqa: F401 - optimisers load it

    fork = multiprocessing.get_context("fork")
    waiting, answers = list(enumerate(questions)), dict[int, int | str]()
    running: dict[Any, tuple[int, BaseProcess]] = {}  # by the end of a pipe on which it answers
    while waiting or running:
        while waiting and len(running) < at_once:
            number, question = waiting.pop(0)
            answer, to = fork.Pipe(duplex=False)
            process = fork.Process(target=_send_answer, args=(question, to))
            process.start()
            to.close()
            running[answer] = number, process
        for ready in wait(list(running)):
            number, ended = running.pop(ready)
            with suppress(EOFError):  # it was killed
                answers[number] = cast(Connection, ready).recv()
            ended.join()
            answers.setdefault(number, f"its process ended with code {ended.exitcode}")
    return [answers[number] for number in range(len(questions))]


def _send_answer(question: Mapping[str, Any], to: Any) -> None:
    try:
        to.send(_answer(question))
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}")


def _answer(question: Mapping[str, Any]) -> int:
    """In the fresh process."""
    torch.set_num_threads(question["threads"])
    asked = config.from_dict(Config, question["config"])
    # What is loaded on first use should not count, so something small takes a first step.
    small = replace(asked.model, n_layers=1, vocab_size=64)
    training_step(Decoder(small).to(device()), replace(asked.train, batch_size=1), 16)()
    peak = Peak() if device().type == "cpu" else None
    step = training_step(Decoder(asked.model).to(device()), asked.train, question["length"])
    step()
    step()
    return torch.cuda.max_memory_allocated() if peak is None else peak.bytes()


if __name__ == "__main__":
    print(json.dumps(_answers(**json.load(sys.stdin))))
