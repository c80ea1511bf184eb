"""What a new token costs: beside transformers' Qwen3 generate, and at a long context beside a short one.

    python benchmarks/generation.py --threads 1

Four tables. The times are each from one run whose cases take turns, so that whatever else the machine does
meets all of them. Shown are the medians of the rounds' ratios with their quartiles, by the clock and by the
processor's own time, which a busy machine disturbs less.

1. `full` against Qwen3ForCausalLM.generate with the same weights, which gives the same tokens: whole calls,
   prompt and all.
2. Mechanisms with a window: time per decoded token and bytes of the cache at a context of 65,536 tokens
   against 2,048. `full` is beside them to show what the window saves.
3. Skipping closed gates: time per decoded token when a share of dynamic-sparse's heads is closed.
4. Peak memory of a prompt, above that of the model, run in chunks and at once, each in a fresh process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import headgate
from headgate.config import ModelConfig
from headgate.machine import Peak
from headgate.model.cache import Cache
from headgate.model.decoder import Decoder
from headgate.model.families import tensor_names, write_settings
from headgate.recipes import get_recipe


@dataclass
class Timed:
    run: Callable[[], object]
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        self.run()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)


def in_turns(cases: dict[str, Timed], rounds: int) -> None:
    for case in cases.values():
        case.run()
    for number in range(rounds):
        for case in list(cases.values())[:: -1 if number % 2 else 1]:
            case()


def ratio(case: Timed, to: Timed) -> str:
    shown = []
    for mine, its in ((case.wall, to.wall), (case.processor, to.processor)):
        each = sorted(a / b for a, b in zip(mine, its, strict=True))
        shown.append(
            f"{statistics.median(each):.2f} ({each[len(each) // 4]:.2f}-{each[-1 - len(each) // 4]:.2f})"
        )
    return f"{shown[0]:>20}{shown[1]:>20}"


def qwen3(decoder: Decoder, longest: int) -> Any:
    """The same model as transformers has it."""
    import transformers

    transformers.logging.set_verbosity_error()
    settings = write_settings(decoder.config, "qwen") | {"max_position_embeddings": longest}
    config = transformers.Qwen3Config(**settings, attn_implementation="sdpa")
    model = transformers.Qwen3ForCausalLM(config).eval()
    ours = decoder.state_dict()
    weights = {theirs: ours[name] for name, theirs in tensor_names(decoder.config).items()}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing.missing_keys
    return model


def beside_transformers(recipes: list[str], prompts: list[int], new: int, rounds: int) -> None:
    print(f"\nfull, {new} new tokens greedily, time relative to transformers' generate (below 1 is faster)")
    print(f"{'':44}{'by the clock':>20}{'by processor':>20}{'ms a token':>12}")
    for recipe in recipes:
        decoder = louder(headgate.build_model(get_recipe(recipe).model, "full"))
        theirs = qwen3(decoder, max(prompts) + new)
        for length in prompts:
            tokens = torch.randint(
                decoder.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
            )
            options: dict[str, Any] = {
                "max_new_tokens": new,
                "min_new_tokens": new,
                "do_sample": False,
                "pad_token_id": 0,
            }
            options["attention_mask"] = torch.ones_like(tokens)  # or a token that is the padding's is hidden
            cases = {
                "ours": Timed(lambda d=decoder, t=tokens: d.generate(t, new, temperature=0)[0].tokens),  # type: ignore[misc]
                "theirs": Timed(lambda t=tokens, m=theirs, o=options: m.generate(t, **o)[0, -new:].tolist()),  # type: ignore[misc]
            }
            same = sum(a == b for a, b in zip(cases["ours"].run(), cases["theirs"].run(), strict=True))
            in_turns(cases, rounds)
            each = statistics.median(cases["ours"].wall) / new * 1e3
            name = f"{recipe}, prompt {length} ({same} of {new} tokens agree)"
            print(f"{name:44}{ratio(cases['ours'], cases['theirs'])}{each:12.2f}", flush=True)


def louder(decoder: Decoder) -> Decoder:
    """Weights so large that layers matter: at their initial size all models copy their input."""
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return decoder


@torch.inference_mode()
def filled(decoder: Decoder, length: int, chunk: int = 512) -> Cache:
    cache, generator = decoder.new_cache(), torch.Generator().manual_seed(length)
    for first in range(0, length, chunk):
        size = min(chunk, length - first)
        decoder.hidden(torch.randint(decoder.config.vocab_size, (1, size), generator=generator), cache=cache)
    return cache


def decoding(decoder: Decoder, cache: Cache, count: int) -> Callable[[], object]:
    """A function that decodes the next `count` tokens; all that generation does but for the choice."""
    token = torch.ones(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(count):
            decoder.logits(decoder.hidden(token, cache=cache))

    return run


def long_and_short(
    config: ModelConfig, mechanisms: list[str], contexts: tuple[int, int], count: int, rounds: int
) -> None:
    short, long = contexts
    print(f"\na decoded token at a context of {long:,} relative to {short:,}")
    print(f"{'':44}{'by the clock':>20}{'by processor':>20}{'cache':>12}{'MB':>12}")
    for mechanism in mechanisms:
        decoder = headgate.build_model(replace(config, shared_options={}), mechanism)
        caches = {length: filled(decoder, length) for length in contexts}
        cases = {str(length): Timed(decoding(decoder, cache, count)) for length, cache in caches.items()}
        in_turns(cases, rounds)
        share = caches[long].bytes / caches[short].bytes
        shown = f"{share:12.2f}{caches[long].bytes / 1e6:12.2f}"
        print(f"{mechanism:44}{ratio(cases[str(long)], cases[str(short)])}{shown}", flush=True)


def closed_gates(config: ModelConfig, mechanism: str, context: int, count: int, rounds: int) -> None:
    """The gates' biases close a share of the heads in every layer."""
    print(f"\n{mechanism} at a context of {context:,}: a decoded token relative to computing all heads")
    print(f"{'heads closed':44}{'by the clock':>20}{'by processor':>20}")
    cases = {}
    for closed in (0, config.n_heads // 2, config.n_heads):
        decoder = headgate.build_model(replace(config, shared_options={}), mechanism)
        with torch.no_grad():
            for layer in decoder.layers:
                layer.attention.mechanism.gate.weight.zero_()
                layer.attention.mechanism.gate.bias.fill_(5.0)[:closed] = -5.0
        run = decoding(decoder, filled(decoder, context), count)

        def skipped(run: Callable[[], object] = run, decoder: Decoder = decoder) -> None:
            with headgate.skipping(decoder, 0.05):
                run()

        if closed == 0:
            cases["all"] = Timed(run)
        cases[f"{closed} of {config.n_heads}, skipping"] = Timed(skipped)
    in_turns(cases, rounds)
    for name, case in cases.items():
        if name != "all":
            print(f"{name:44}{ratio(case, cases['all'])}", flush=True)


def memory_of_prompts(prompts: list[tuple[str, int]]) -> None:
    print("\npeak memory of a prompt above the model's, MB")
    print(f"{'':44}{'chunks of 512':>20}{'all at once':>20}{'its cache':>12}")
    for mechanism, length in prompts:
        shown = []
        for chunk in (512, length):
            question = [sys.executable, __file__, "--peak", mechanism, str(length), str(chunk)]
            done = subprocess.run(question, capture_output=True, text=True, check=True)
            shown.append(json.loads(done.stdout))
        name = f"{mechanism}, {length:,} tokens"
        print(
            f"{name:44}{shown[0][0] / 1e6:20.0f}{shown[1][0] / 1e6:20.0f}{shown[0][1] / 1e6:12.0f}",
            flush=True,
        )


def peak(mechanism: str, length: int, chunk: int) -> tuple[int, int]:
    """Bytes at the peak of a prompt and of its cache, in this process."""
    torch.set_num_threads(1)
    decoder = headgate.build_model(replace(get_recipe("small").model, shared_options={}), mechanism)
    filled(decoder, 3)
    above = Peak()
    cache = filled(decoder, length, chunk)
    return above.bytes(), cache.bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipes", nargs="+", default=["tiny", "small"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--new", type=int, default=64, help="tokens that a generate call makes")
    parser.add_argument("--contexts", type=int, nargs=2, default=[2048, 65_536])
    parser.add_argument("--mechanisms", nargs="+", default=["dynamic-sparse", "local"])
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(options.peak[0], int(options.peak[1]), int(options.peak[2]))))
        return
    torch.set_num_threads(options.threads)
    config = get_recipe("small").model
    print(f"{options.threads} threads, {options.rounds} rounds, torch {torch.__version__}")
    if 1 in options.tables:
        beside_transformers(options.recipes, options.prompts, options.new, options.rounds)
    if 2 in options.tables:
        contexts = (options.contexts[0], options.contexts[1])
        long_and_short(config, options.mechanisms, contexts, 16, options.rounds)
    if 3 in options.tables:
        closed_gates(config, "dynamic-sparse:window=null", 8192, 16, options.rounds)
    if 4 in options.tables:
        memory_of_prompts([("full", 8192), ("dynamic-sparse", 32_768)])


if __name__ == "__main__":
    main()
