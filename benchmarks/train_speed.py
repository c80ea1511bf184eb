"""Training speed beside transformers' Qwen3ForCausalLM with SDPA: same sizes, same tokens, same optimiser.

    python benchmarks/train_speed.py                 # both sizes, all cores
    python benchmarks/train_speed.py --threads 1 --compile

A round takes one step of each, in alternating order, so that whatever else the machine does meets both. Shown
are the medians of the rounds' ratios with their quartiles, from the clock and from the processor's own time,
which a busy machine disturbs less. Ours is a whole step of the training loop: loader, loss, clipping, AdamW
and metrics; the other's is the same written out, with its AdamW plain and fused. With --overhead, instead:
what evaluation, logging, progress and checkpoints take of a whole run with default settings.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headgate import config, ops
from headgate.config import Config
from headgate.data.loader import Loader
from headgate.data.prepare import Request, prepare
from headgate.data.shards import open_split
from headgate.machine import keep_memory
from headgate.model.decoder import Decoder
from headgate.model.families import write_settings
from headgate.options import RunOptions
from headgate.progress import Progress
from headgate.recipes import get_recipe
from headgate.train.checkpoint import State
from headgate.train.distributed import World
from headgate.train.folder import RunFolder, read_metrics
from headgate.train.loop import Stop, Trainer, train

SIZES = {
    "d 128, 4 layers, T 512, batch 8": ("tiny", ["train.context=512", "train.batch_size=8"]),
    "d 256, 6 layers, T 1024, batch 4": ("small", ["train.context=1024", "train.batch_size=4"]),
}


@dataclass
class Timed:
    step: Callable[[], object]
    wall: list[float]
    processor: list[float]

    def run(self) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        self.step()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)


def ours(asked: Config, data: Path, home: Path, *, compiled: bool) -> Callable[[], object]:
    split = open_split(data, "train")
    loader = Loader(split, length=asked.train.context, batch_size=asked.train.batch_size, seed=asked.seed)
    world = World(0, 1, torch.device("cpu"))
    options = RunOptions(compile=compiled)
    val = open_split(data, "val")
    trainer = Trainer(asked, options, world, RunFolder(home), Decoder(asked.model), loader, val, State())
    stop = Stop()
    return lambda: trainer.step(stop)


def theirs(asked: Config, data: Path, *, fused: bool, compiled: bool) -> Callable[[], object]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    m, t = asked.model, asked.train
    settings = write_settings(m, "qwen") | {"max_position_embeddings": t.context, "use_cache": False}
    model = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="sdpa")).train()
    count = sum(p.numel() for p in model.parameters())
    assert count == Decoder(m).parameter_count(), "the models differ in size"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=t.learning_rate,
        betas=t.betas,
        weight_decay=t.weight_decay,
        fused=fused or None,
    )
    loader = Loader(open_split(data, "train"), length=t.context, batch_size=t.batch_size, seed=asked.seed)
    called = torch.compile(model) if compiled else model

    def step() -> float:
        tokens, targets = next(loader)
        loss = called(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def compare(name: str, data: Path, home: Path, given: argparse.Namespace) -> None:
    recipe, words = SIZES[name]
    asked = config.override(get_recipe(recipe), [*words, "model.mechanism=full", "train.steps=100000"])
    before = ops.paths_taken()
    contestants = {
        "headgate": Timed(ours(asked, data, home, compiled=given.compile), [], []),
        "transformers": Timed(theirs(asked, data, fused=False, compiled=given.compile), [], []),
        "transformers, fused AdamW": Timed(theirs(asked, data, fused=True, compiled=given.compile), [], []),
    }
    for round_ in range(given.rounds + given.warmup):
        order = list(contestants.values())
        for timed in order if round_ % 2 else reversed(order):
            timed.run()
    paths = sorted(path for path, n in ops.paths_taken().items() if n > before.get(path, 0))
    tokens = asked.train.batch_size * asked.train.context
    mine = contestants.pop("headgate")
    print(
        f"\n{name}: headgate {tokens / statistics.median(mine.wall[given.warmup :]):,.0f} tokens/s by {paths}"
    )
    for peer, timed in contestants.items():
        speed = tokens / statistics.median(timed.wall[given.warmup :])
        clock = ratios(timed.wall, mine.wall, given.warmup)
        print(f"  against {peer}, {speed:,.0f} tokens/s: {clock} by the clock, "
              f"{ratios(timed.processor, mine.processor, given.warmup)} by processor time")  # fmt: skip


def ratios(others: list[float], mine: list[float], skipped: int) -> str:
    found = [a / b for a, b in zip(others[skipped:], mine[skipped:], strict=True)]
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def overhead(data: Path, home: Path) -> None:
    """The cost of one evaluation, one checkpoint and one line, times how often a default run has them."""
    for recipe in ("tiny", "small"):
        asked = config.override(get_recipe(recipe), ["model.mechanism=full"])
        whole, stretch = asked.train, 12
        short = replace(whole, steps=stretch, evaluate_every=stretch)
        train(replace(asked, train=short), data, home / recipe)
        spent = json.loads((home / recipe / "summary.json").read_text())["seconds"]
        tokens = whole.batch_size * whole.accumulation * whole.context
        step = statistics.median(tokens / line["tokens_per_second"] for line in read_metrics(home / recipe))
        times = -(-whole.steps // whole.evaluate_every)  # each evaluation may be the best, and be saved
        evaluating, saving = (times * spent[name] / (whole.steps * step) for name in ("evaluating", "saving"))
        telling = time_of_telling(home / recipe) / step
        print(
            f"{recipe}, {whole.steps} steps of {step:.2f} s: evaluating takes {evaluating:.2%} of the step "
            f"time, saving {saving:.2%}, logging and progress {telling:.2%}, together "
            f"{evaluating + saving + telling:.2%}"
        )


def time_of_telling(run: Path, times: int = 2000) -> float:
    """Seconds to write one line of metrics and show one step."""
    folder, line = RunFolder(run), read_metrics(run)[0]
    folder.open_metrics(0)
    with closing(folder), Progress(times) as progress:
        begun = time.perf_counter()
        for step in range(times):
            folder.log(line)
            progress.update(step, f"step {step:,} of {times:,}, loss 1.000", tokens=step)
        return (time.perf_counter() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--size", choices=["tiny", "small", "both"], default="both")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_memory()
    print(f"torch {torch.__version__}, {given.threads} threads, {given.rounds} rounds")
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "data"
        prepare(Request("stdlib", tokenizer="bpe:4096", max_tokens=600_000), data)
        if given.overhead:
            overhead(data, Path(home))
            return
        for name, (recipe, _) in SIZES.items():
            if given.size in ("both", recipe):
                compare(name, data, Path(home), given)


if __name__ == "__main__":
    main()
