"""What was tried beside near-far, one seed each: smeared keys, a gate for every channel, other starts, first
tokens kept beside a window, pair gates on a window.

    python studies/first/candidates.py --data runs/study/text-data --out runs/study/candidates [--only smear]

Trains recipe.json with each candidate, one after another on one thread, about a minute each; run
again, it goes on. `candidate` by itself is near-far; the others live here and not in the package: on this
one seed none is far ahead of it, and none was tried on more.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from headgate import ops
from headgate.config import Config, load, override
from headgate.machine import keep_memory
from headgate.mechanisms.contract import Heads, Past, register
from headgate.mechanisms.gates import head_weights, openness
from headgate.mechanisms.near_far import NearFar, NearFarOptions
from headgate.mechanisms.sparse_geometric import SparseGeometric, SparseGeometricOptions
from headgate.train.loop import train


@dataclass(frozen=True)
class CandidateOptions(NearFarOptions):
    smear: Literal["none", "split", "half"] = "none"
    """Keys mixed with the one before them, by a learned share of each key-value head (smeared keys, arXiv
    2209.11895): from 0 for near heads and 1 for far ones, or from one half for all."""
    channels: bool = False
    """A gate for every channel of a head instead of one."""


@register("candidate")
class Candidate(NearFar):
    Options = CandidateOptions
    options: CandidateOptions

    def __init__(self, heads: Heads, options: CandidateOptions) -> None:
        super().__init__(heads, options)
        if options.channels:
            self.gate = nn.Linear(heads.d_model, heads.n_heads * heads.head_dim)
        self.smear = None if options.smear == "none" else nn.Parameter(torch.empty(heads.n_kv_heads))

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "smear":
            split = (torch.arange(len(parameter)) >= self.heads.n_kv_heads // 2).float()
            parameter.copy_(split if self.options.smear == "split" else torch.full_like(split, 0.5))
        else:
            super().initialise(name, parameter, generator)

    def prepare(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, ...]:
        q, k, v = super().prepare(x, q, k, v, past)
        if self.smear is not None:
            before = past.with_previous("key", k)[:, :, :-1]
            k = torch.lerp(k, before, self.smear[:, None, None].to(k.dtype))
        return q, k, v

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        if not self.options.channels:
            return super().attend(x, q, k, v, past)
        gate, self.gate = self.gate, None
        attended = super().attend(x, q, k, v, past)
        self.gate = gate
        assert gate is not None
        return openness(gate(x)).unflatten(-1, q.shape[1::2]).transpose(1, 2) * attended


@dataclass(frozen=True)
class FirstTokensOptions(NearFarOptions):
    tokens: int = 4
    """First tokens of the sequence that every token sees beside its window."""


@register("first-tokens")
class FirstTokens(NearFar):
    """A head gate over a window and the first tokens."""

    Options = FirstTokensOptions
    options: FirstTokensOptions

    @property
    def pinned_keys(self) -> int:
        return self.options.tokens

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past) -> Tensor:
        attended = ops.attention(q, k, v, past.span(self.options.window, pinned=self.options.tokens))
        assert self.gate is not None
        return head_weights(self.gate(x)) * attended


@dataclass(frozen=True)
class PairWindowOptions(SparseGeometricOptions):
    start: float = 1.0
    """What the output is multiplied by, a learned number of each head that starts here."""


@register("pair-window")
class PairWindow(SparseGeometric):
    """Pair gates in log space on the keys of a window."""

    Options = PairWindowOptions
    options: PairWindowOptions

    def __init__(self, heads: Heads, options: PairWindowOptions) -> None:
        super().__init__(heads, options)
        self.size = nn.Parameter(torch.empty(heads.n_heads, 1, 1))

    def initialise(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "size":
            parameter.fill_(self.options.start)
        else:
            super().initialise(name, parameter, generator)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, past: Past, *states: Tensor) -> Tensor:
        (key_half,) = states
        return self.size * ops.pair_gated_attention(
            self._scaled(q), k, v, self._query_half(q), key_half, self.w2, self.b2,
            form="log", window=self.options.window,
        )  # fmt: skip


RECIPE = Path(__file__).with_name("recipe.json")
NAMES = [
    "candidate:smear=split",
    "candidate:channels=true",
    "local+full",
    "local:global_tokens=4",
    "near-far:opening=0.02",
    "near-far:opening=0.12",
    "candidate:smear=half",
    "candidate:smear=split,opening=0.5",
    "candidate:channels=true,opening=0.5",
    "first-tokens",
    "first-tokens:opening=0.5",
    "pair-window",
    "pair-window:start=0.05",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="candidates whose name has this in it")
    parser.add_argument("settings", nargs="*", help="settings of the recipe that differ")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    for name in NAMES:
        if options.only not in name:
            continue
        pattern = json.dumps(name.split("+"))
        config = override(load(Config, RECIPE), [f"model.mechanism={pattern}", *options.settings])
        folder = options.out / name.replace(":", "-")
        if train(config, options.data, folder).signal is not None:
            break
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        print(f"{name:40}{summary['final']['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
