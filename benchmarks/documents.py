"""What documents save and cost: attention over packed documents, whole steps, the loader.

python benchmarks/documents.py attention     forward and backward, without documents and with those of LENGTH
python benchmarks/documents.py step          a training step of recipe small, one document against none
python benchmarks/documents.py loader DATA   million tokens a second, with documents and packed; the padding

Timings are interleaved, so that other work on the machine meets all alike; medians of --rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import headgate
from headgate import ops
from headgate.data.loader import Loader, PackedDocuments
from headgate.data.shards import open_split
from headgate.recipes import get_recipe


def interleaved(cases: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each case, in turns after a first one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


def attention(context: int, length: int, rounds: int) -> None:
    q = torch.randn(1, 4, context, 64, requires_grad=True)
    k, v = (torch.randn(1, 2, context, 64, requires_grad=True) for _ in range(2))
    starts = ops.document_starts((torch.arange(context) // length)[None])
    d_out = torch.randn_like(q)

    def case(window: int | None, first_keys: torch.Tensor | None) -> Callable[[], None]:
        def run() -> None:
            ops.attention(q, k, v, ops.Span(window, first_keys=first_keys)).backward(d_out)

        return run

    cases = {}
    for name, window in (("full", None), ("window 256", 256)):
        cases[name] = case(window, None)
        cases[f"{name}, documents of {length}"] = case(window, starts)
    found = interleaved(cases, rounds)
    for name, seconds in found.items():
        print(f"{name}: {seconds * 1e3:.1f} ms")
    names = list(found)
    for plain, documents in zip(names[::2], names[1::2], strict=True):
        print(f"{plain}: {found[plain] / found[documents]:.2f}x faster with documents")


def step(mechanism: str, rounds: int) -> None:
    config = get_recipe("small")
    decoder = headgate.build_model(config, mechanism)
    shape = (config.train.batch_size, config.train.context + 1)
    stream = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    tokens, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    ids = torch.arange(len(tokens))[:, None].expand_as(tokens).contiguous()

    def case(documents: torch.Tensor | None) -> Callable[[], None]:
        def run() -> None:
            decoder.zero_grad()
            decoder(tokens, targets, documents=documents).backward()

        return run

    found = interleaved({"off": case(None), "one document": case(ids)}, rounds)
    print(f"{mechanism}: {found['one document'] / found['off'] - 1:+.1%} with one document a row")


def loader(data: str, rounds: int) -> None:
    split = open_split(data, "train")
    for length, batch_size in ((256, 16), (1024, 8), (2048, 8)):
        loaders = {
            "stream": Loader(split, length=length, batch_size=batch_size),
            "documents": Loader(split, length=length, batch_size=batch_size, document_ids=True),
            "packed": Loader(split, length=length, batch_size=batch_size, document_ids=True, packing="whole"),
        }

        def case(batches: Loader, steps: int) -> Callable[[], None]:
            def run() -> None:
                for _ in range(steps):
                    next(batches)

            return run

        steps = 500_000 // (length * batch_size)
        found = interleaved({name: case(batches, steps) for name, batches in loaders.items()}, rounds)
        speeds = ", ".join(
            f"{name} {steps * length * batch_size / seconds / 1e6:.0f}" for name, seconds in found.items()
        )
        windows = loaders["packed"].windows
        assert isinstance(windows, PackedDocuments)
        print(
            f"batches of {batch_size} x {length}, million tokens/s: {speeds}; padding {windows.padding:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What documents save and cost.")
    parser.add_argument("what", choices=["attention", "step", "loader"])
    parser.add_argument("data", nargs="?", help="for the loader, a folder that headgate prepare wrote")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--mechanism", default="full")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.what == "attention":
        attention(given.context, given.length, given.rounds)
    elif given.what == "step":
        step(given.mechanism, given.rounds)
    elif given.data is None:
        parser.error("the loader needs DATA")
    else:
        loader(given.data, given.rounds)


if __name__ == "__main__":
    main()
