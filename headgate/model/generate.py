"""Generation: prompts go through the cache in chunks, then one token after another is chosen for all rows.

Every row gets the tokens it would get alone. Rows of one length are run together through their prompts; after
that all rows run together, each at its own position (see `cache`), and a row that has ended leaves the
computation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from headgate.errors import HeadgateError
from headgate.mechanisms.contract import skipping
from headgate.model.cache import Cache
from headgate.model.graphs import GraphedStep
from headgate.ops.gpu import has_double, send

if TYPE_CHECKING:
    from headgate.model.decoder import Decoder

Prompts = Tensor | Sequence[Sequence[int] | Tensor]
Stop = int | Sequence[int | Sequence[int]]
Stream = Callable[[int, int], object]
LIKELIEST = 1024
"""How many tokens top_p looks at first: they nearly always suffice, and sorting a whole vocabulary is
slow."""
AHEAD = 64
"""How many tokens' random numbers are sent to the device at once."""


@dataclass
class Completion:
    """What was generated for one prompt."""

    tokens: list[int] = field(default_factory=list)
    """The new tokens, without the prompt; if a stop ended them, it is included at the end."""
    ended: Literal["stop", "length"] = "length"
    """Whether a stop ended it, or max_new_tokens."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits; the steps are applied in the order of the fields."""

    repetition_penalty: float = 1.0
    """Positive logits of tokens that occurred, in the prompt too, are divided by it, negative ones
    multiplied."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep only this many of the most likely tokens."""
    top_p: float | None = None
    """Of those, keep the fewest most likely ones that together have this probability."""
    min_p: float | None = None
    """Of those, keep the ones at least this times as likely as the most likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        def check(good: bool, name: str, expected: str) -> None:
            if not good:
                raise HeadgateError(f"{name}={getattr(self, name)} is out of range; expected {expected}")

        usable = self.temperature == 0 or 1e-6 <= self.temperature < float("inf")
        check(usable, "temperature", "0 for the most likely token, or 1e-6 and more")
        check(0 < self.repetition_penalty < float("inf"), "repetition_penalty", "more than 0; 1 for none")
        check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or none for all tokens")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "more than 0 and at most 1")
        check(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "0 to 1")
        check(0 <= self.seed < 1 << 63, "seed", "0 or more, below 2**63")


class Sampler:
    """Draws each row's tokens with the row's own random numbers, made from (seed, row), so that they do not
    depend on the rows beside it. Only the tokens are read back from the device."""

    def __init__(self, sampling: Sampling, prompts: Sequence[Tensor], vocab_size: int) -> None:
        self.sampling = sampling
        device = prompts[0].device
        self._device = device if has_double(device) else torch.device("cpu")
        self._generators = [
            torch.Generator().manual_seed(
                int.from_bytes(blake2b(f"{sampling.seed}/{row}".encode(), digest_size=7).digest(), "little")
            )
            for row in range(len(prompts))
        ]
        self._numbers: Tensor | None = None  # (n,AHEAD): random numbers for the next tokens
        self._used = 0
        self._occurred: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._occurred = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=self._device)
            for row, prompt in enumerate(prompts):
                self._occurred[row, prompt.to(self._device)] = True

    def select(self, places: Sequence[int]) -> None:
        """From now on the logits are those of these rows, in this order."""
        index = send(torch.tensor(places), self._device)
        self._generators = [self._generators[place] for place in places]
        self._numbers, self._occurred = (
            None if t is None else t.index_select(0, index) for t in (self._numbers, self._occurred)
        )

    def __call__(self, logits: Tensor) -> tuple[Tensor, list[int]]:
        """The next token of each row from its logits (n,V), on their device and as numbers."""
        given_on = logits.device
        logits = logits.to(self._device).float()
        if self._occurred is not None:
            penalty = self.sampling.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._occurred, penalised, logits)
        highest, likeliest = logits.max(-1, keepdim=True)
        chosen = likeliest if self.sampling.temperature == 0 else self._draw(logits - highest)
        if self._occurred is not None:
            self._occurred.scatter_(1, chosen, True)
        good = highest.isfinite().all()[None]
        *tokens, good_too = torch.cat([chosen.squeeze(-1), good]).tolist()  # the only wait for the device
        if not good_too:
            raise HeadgateError(
                "the model's logits are not finite, so no token can be chosen; check its weights"
            )
        return chosen.squeeze(-1).to(given_on), tokens

    def _draw(self, logits: Tensor) -> Tensor:
        s, tokens = self.sampling, None
        scores = logits / s.temperature
        if s.top_k is not None and s.top_k < scores.shape[-1]:
            scores, tokens = scores.topk(s.top_k)
        p = scores.softmax(-1)
        if s.top_p is not None and s.top_p < 1:
            if tokens is None:
                p, tokens = self._likeliest(p, s.top_p)
            likelier = p.cumsum(-1, dtype=torch.float64) - p  # the probability of all before, 0 for the first
            p = p.masked_fill(likelier >= s.top_p, 0.0)
        if s.min_p is not None:
            p = p.masked_fill(p < s.min_p * p.amax(-1, keepdim=True), 0.0)
        cumulative = p.cumsum(-1, dtype=torch.float64)
        reached = self._uniform() * cumulative[:, -1:]
        place = torch.searchsorted(cumulative, reached, right=True).clamp(max=p.shape[-1] - 1)
        return place if tokens is None else tokens.gather(-1, place)

    def _likeliest(self, p: Tensor, together: float) -> tuple[Tensor, Tensor]:
        """Enough of the likeliest tokens to have this probability together, and which they are. Sorting them
        all is slow on a CPU; checking whether some suffice is slow on a GPU."""
        if p.device.type == "cpu":
            some, tokens = p.topk(min(LIKELIEST, p.shape[-1]))
            if not (some.sum(-1) < together).any():
                return some, tokens
        every, tokens = p.sort(descending=True)
        return every, tokens

    def _uniform(self) -> Tensor:
        """(n,1): a random number from 0 to 1 for each row."""
        if self._numbers is None or self._used == AHEAD:
            drawn = [torch.rand(AHEAD, generator=own, dtype=torch.float64) for own in self._generators]
            self._numbers, self._used = send(torch.stack(drawn), self._device), 0
        self._used += 1
        return self._numbers[:, self._used - 1 : self._used]


@torch.inference_mode()
def generate(
    decoder: "Decoder",
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: Sampling,
    stop: Stop = (),
    stream: Stream | None = None,
    skip_below: float | None = None,
    prefill_chunk: int = 512,
    graphs: bool = False,
) -> list[Completion]:
    """Continue every prompt; `Decoder.generate` explains the arguments."""
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise HeadgateError(f"{name}={value} is too small; it must be at least 1")
    device = decoder.embedding.weight.device
    given = [prompt.to(device) for prompt in check_prompts(prompts, decoder.config.vocab_size)]
    stops = check_stops(stop)
    sampler = Sampler(sampling, given, decoder.config.vocab_size)
    completions = [Completion() for _ in given]
    step: Callable[[Tensor, Cache], Tensor] = GraphedStep(decoder) if graphs else decoder.next_logits
    was_training = decoder.training
    decoder.eval()
    try:
        with nullcontext() if skip_below is None else skipping(decoder, skip_below):
            rows, cache, states = prefill(decoder, given, max_new_tokens, prefill_chunk)
            sampler.select(rows)
            logits = decoder.logits(states)
            while True:
                chosen, tokens = sampler(logits)
                left = []
                for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                    completion = completions[row]
                    completion.tokens.append(token)
                    if stream is not None:
                        stream(row, token)
                    if any(completion.tokens[-len(s) :] == s for s in stops):
                        completion.ended = "stop"
                    elif len(completion.tokens) < max_new_tokens:
                        left.append(place)
                if not left:
                    return completions
                if len(left) < len(rows):
                    cache.select(left)
                    sampler.select(left)
                    rows, chosen = [rows[place] for place in left], chosen[left]
                logits = step(chosen[:, None], cache)
    finally:
        decoder.train(was_training)


def prefill(
    decoder: "Decoder", prompts: Sequence[Tensor], max_new_tokens: int, chunk: int
) -> tuple[list[int], Cache, Tensor]:
    """Run the prompts, those of equal length together; returns the rows in their new order, their cache, and
    the states (B,C) at their last tokens."""
    rows, caches, states = [], [], []
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # stable
    for length, group in groupby(by_length, key=lambda row: len(prompts[row])):
        members = list(group)
        tokens = torch.stack([prompts[row] for row in members])
        cache = decoder.new_cache(length + max_new_tokens)
        for part in tokens.split(max(1, chunk // len(members)), dim=1):
            hidden = decoder.hidden(part, cache=cache)
        rows += members
        caches.append(cache)
        states.append(hidden[:, -1])
    return rows, Cache.join(caches), torch.cat(states)


def check_prompts(prompts: Prompts, vocab_size: int) -> list[Tensor]:
    """Each prompt as a tensor of tokens; raises if one is invalid."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2:
            raise HeadgateError(
                f"the prompts have shape {tuple(prompts.shape)}; expected (B,T), or a list of token lists"
            )
        prompts = list(prompts)
    if len(prompts) == 0:
        raise HeadgateError("there is no prompt; give at least one list of tokens")
    checked = []
    for row, prompt in enumerate(prompts):
        try:
            tokens = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            tokens = torch.empty(0, 0)
        if tokens.ndim != 1 or (len(tokens) and (tokens.is_floating_point() or tokens.dtype == torch.bool)):
            raise HeadgateError(f"prompt {row} is not a list of tokens; expected a list of token lists")
        if len(tokens) == 0:
            raise HeadgateError(f"prompt {row} is empty; give it at least one token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise HeadgateError(
                f"prompt {row} has the token {low if low < 0 else high}; "
                f"expected tokens in the vocabulary, 0 to {vocab_size - 1}"
            )
        checked.append(tokens.long())
    return checked


def check_stops(stop: Stop) -> list[list[int]]:
    """Each stop as a sequence of tokens."""
    each = [stop] if isinstance(stop, int) else list(stop)
    stops = [[s] if isinstance(s, int) else [int(token) for token in s] for s in each]
    if [] in stops:
        raise HeadgateError("a stop without tokens would end everything at once; give it at least one token")
    return stops
