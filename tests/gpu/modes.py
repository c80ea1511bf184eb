"""Every mechanism through its modes on a GPU that is not there (see absent.py); one line of JSON for each.

python modes.py LIBRARY cuda|mps [MECHANISM ...]
"""

import sys

if __name__ == "__main__":
    import absent

    absent.load(sys.argv[1])

import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves

import headgate
from headgate import ops
from headgate.config import ModelConfig
from headgate.mechanisms import MECHANISMS, contract
from headgate.mechanisms.contract import probe, skipping
from headgate.model import decoder as decoder_module
from headgate.model.cache import Cache
from headgate.model.decoder import Decoder
from headgate.ops import documents, flex, grouped
from headgate.ops.span import tiled
from headgate.train.evaluate import _moments, _uncompiled, autocast

LENGTH = 260
CONFIG = ModelConfig(
    vocab_size=97,
    d_model=64,
    n_layers=1,
    n_heads=4,
    n_kv_heads=1,
    head_dim=32,
    d_mlp=96,
    shared_options={"window": 40, "max_window": 60, "dense_prefix": 50, "block": 16, "stride": 8},
)
GPU = torch.device(sys.argv[2] if __name__ == "__main__" else "cuda")


def some(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.int64, device=GPU)


def train(decoder: Decoder, precision: str = "bf16") -> None:
    tokens = some(2, LENGTH)
    with autocast(GPU, precision):
        loss = decoder(tokens, tokens, reduction="sum")
    assert loss.dtype == torch.float32, f"the loss is {loss.dtype}"
    loss.backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
    torch.optim.AdamW(decoder.parameters(), lr=1e-3).step()


def packed(decoder: Decoder) -> None:
    """Several documents in a row. Where they begin is known on the CPU, where alone it has values."""
    tokens, starts = some(2, LENGTH), some(2, LENGTH)
    with unset_fake_temporarily():
        ids = torch.arange(LENGTH).div(70, rounding_mode="floor").expand(2, -1)
        documents._on_host[starts] = documents.document_starts(ids)

    def with_values(run: Callable[..., Any]) -> Callable[..., Any]:
        def on_host(*given: Any) -> list[Any]:
            with unset_fake_temporarily():
                return list(run(*given))

        return on_host

    with (
        patch.object(decoder_module, "document_starts", lambda ids, device: ids),
        patch.object(contract, "lengths", with_values(documents.lengths)),
        patch.object(tiled, "stretches", with_values(documents.stretches)),
        autocast(GPU, "bf16"),
    ):
        decoder(tokens, tokens, documents=starts, reduction="sum").backward()


def recompute(decoder: Decoder) -> None:
    decoder.recompute = True
    train(decoder)


def compiled(decoder: Decoder) -> None:
    torch.compiler.reset()
    for layer in decoder.layers:
        layer.compile(fullgraph=True, backend="aot_eager")


def train_compiled(decoder: Decoder) -> None:
    compiled(decoder)
    train(decoder)


def evaluate_compiled(decoder: Decoder) -> None:
    compiled(decoder)
    tokens = some(2, LENGTH)
    with torch.no_grad(), autocast(GPU, "bf16"), probe(decoder) as seen, _uncompiled(decoder):
        loss = decoder(tokens, tokens, reduction="none")
    for name, values in seen.items():
        if name.endswith(".gate"):
            _moments(values[0])
    assert loss.dtype == torch.float32, f"the loss is {loss.dtype}"


TAILS = (1, 17, 33, 127)
"""How many tokens a chunk of a prompt may have, after the first."""


def prefill(decoder: Decoder) -> None:
    with torch.inference_mode():
        cache = decoder.new_cache()
        for count in (130, *TAILS):
            decoder.hidden(some(1, count), cache=cache)


def prefill_fp32(decoder: Decoder) -> None:
    with torch.inference_mode():
        cache = decoder.new_cache()
        for count in (130, 65):
            decoder.hidden(some(1, count), cache=cache)


def decode(decoder: Decoder) -> None:
    with torch.inference_mode():
        cache = decoder.new_cache(140)
        for count in (130, 1, 1):
            decoder.hidden(some(2, count), cache=cache)


def ragged(decoder: Decoder) -> None:
    with torch.inference_mode():
        caches = []
        for length in (60, 91):
            caches.append(decoder.new_cache(140))
            decoder.hidden(some(1, length), cache=caches[-1])
        cache = Cache.join(caches)
        for _ in range(2):
            decoder.hidden(some(2, 1), cache=cache)


def generate(decoder: Decoder) -> None:
    """Every token waits for the device once; Apple's, for which tokens are drawn on the CPU, twice."""
    most = 1 if GPU.type == "cuda" else 2
    prompts = [[1] * length for length in (9, 40, 9)]
    waited = []
    for count in (2, 5):
        with Waits(allowed=True) as waits:
            decoder.generate(prompts, count, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
        waited.append(waits.count)
    assert waited[1] - waited[0] <= 3 * most, f"3 tokens took {waited[1] - waited[0]} waits for the device"


def skip(decoder: Decoder) -> None:
    if not any(layer.attention.mechanism.skips for layer in decoder.layers):
        return
    with skipping(decoder, 0.1):
        decode(decoder)


MODES: dict[str, Callable[[Decoder], None]] = {
    "train bf16": train,
    "train fp32": lambda decoder: train(decoder, "fp32"),
    "--compile": train_compiled,
    "--recompute": recompute,
    "--shard": train,
    "documents": packed,
    "evaluate after --compile": evaluate_compiled,
    "prefill": prefill,
    "prefill fp32": prefill_fp32,
    "decode": decode,
    "ragged": ragged,
    "generate": generate,
    "skip_below": skip,
}
HALF = ("--shard", "prefill", "decode", "ragged", "generate", "skip_below")
"""Those of models whose weights are in bf16, as FSDP2 gathers them."""
PLAIN = ("train fp32", "train bf16", "prefill fp32", "decode", "generate")
"""Those of a device on which nothing is compiled."""
UNTRACED = ("prefill fp32", "decode", "ragged", "generate", "skip_below")
"""Those without gradients, whose masks the compiler has read in the others."""
SHARED = {
    "cuda": ("train fp32", "--recompute", "prefill fp32", "generate"),
    "mps": ("train fp32", "generate"),
}
"""Those that ask nothing of a mechanism that its other modes do not: the same passes in a wider dtype, or the
decoder's own work around them. Mechanisms share them out, each going through one."""


def modes_of(mechanism: str) -> list[str]:
    """All but the shared ones, and one of those."""
    shared = SHARED[GPU.type]
    own = shared[headgate.mechanisms().index(mechanism) % len(shared)]
    return [mode for mode in (MODES if GPU.type == "cuda" else PLAIN) if mode == own or mode not in shared]


aten = torch.ops.aten
VALUES = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: a value that is asked for, a copy from or to memory
    that is not pinned. Unless they are allowed, one is an error. A value that is asked for is 1."""

    supports_higher_order_operators = True

    def __init__(self, *, allowed: bool = False) -> None:
        super().__init__()
        self.count, self.allowed = 0, allowed

    def note(self, what: str) -> None:
        self.count += 1
        assert self.allowed, f"the host waits for the device: {what}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func in VALUES and isinstance(given[0], FakeTensor):
            if given[0].device.type != "cpu":
                self.note("a value")
            return 1
        if func in (aten._pin_memory.default, aten.pin_memory.default):
            return given[0].clone()
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        is_double = any(t.dtype == torch.float64 and t.device.type == "mps" for t in made)
        assert not is_double, f"{func} makes a tensor in double precision"
        places = {t.device.type for t in (*given, *made) if t.dim() or t.device.type != "cpu"}
        is_copy = func in (aten._to_copy.default, aten.copy_.default)
        blocking = is_copy and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2])
        if len(places) > 1 and (blocking or func is aten.index.Tensor):
            self.note(f"{func} between {' and '.join(sorted(places))}")
        return result


@contextmanager
def values_from_nowhere() -> Iterator[None]:
    """A list of what is on the device is one wait for all of it."""

    def tolist(t: FakeTensor) -> list[int]:
        assert t.dim() == 1
        return [int(t[0])] * len(t)

    with patch.object(FakeTensor, "tolist", tolist):
        yield


@contextmanager
def flex_as_it_would_be(*, traced: bool) -> Iterator[None]:
    """FlexAttention without its kernels, after asking whether it would have one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        has_kernel(q, k, options["block_mask"], options.get("kernel_options") or {})
        counting = isinstance(_get_current_dispatch_mode(), Waits)  # which cannot be traced
        with _pop_mode_temporarily() if counting else nullcontext():
            return torch_flex.flex_attention(q, k, v, **options)

    before = flex._compiled
    flex._compiled = lambda: attend
    try:
        with patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not traced):
            yield
    finally:
        flex._compiled = before


@contextmanager
def grouped_in_training() -> Iterator[None]:
    """Block selection by groups, which at this length would not pay, and by a mask elsewhere."""
    with patch.object(grouped, "pays", lambda q, k, chosen, block: q.requires_grad and chosen.shape[3] > 0):
        yield


def has_kernel(q: Tensor, k: Tensor, mask: Any, options: dict[str, Any]) -> None:
    """FlexAttention's rules in PyTorch 2.13 (_inductor/kernel/flex/flex_decoding.py): for fewer queries than
    a block it takes another kernel, whose tile must divide a block of the mask. test_lowering.py holds these
    against the compiler itself."""
    repeat, block = q.shape[1] // k.shape[1], mask.BLOCK_SIZE[0]
    one_mask = mask.kv_indices.shape[1] == 1 or (repeat == 1 and mask.kv_indices.shape[1] == q.shape[1])
    decoding = q.shape[2] < 128 and one_mask and repeat & (repeat - 1) == 0
    if not decoding or options.get("FORCE_USE_FLEX_ATTENTION"):
        return
    rows = max(16, 1 << (q.shape[2] * repeat - 1).bit_length())
    assert block % rows == 0, f"FlexAttention has no kernel for {tuple(q.shape)} over {tuple(k.shape)}"


def outcome(mechanism: str, mode: str) -> dict[str, Any]:
    before, error = ops.paths_taken(), None
    try:
        flex_attention = flex_as_it_would_be(traced=mode not in UNTRACED)
        with FakeTensorMode(), flex_attention, values_from_nowhere(), grouped_in_training():
            torch.set_default_dtype(torch.bfloat16 if mode in HALF else torch.float32)
            with GPU:
                layers = 2 if MECHANISMS.get(mechanism).uses_first_values else 1
                decoder = headgate.build_model(replace(CONFIG, n_layers=layers), mechanism)
            torch.set_default_dtype(torch.float32)
            with nullcontext() if mode in ("generate", "--compile", "evaluate after --compile") else Waits():
                MODES[mode](decoder)
    except Exception as raised:
        error = "".join(traceback.format_exception(raised))
    taken = [path for path, count in ops.paths_taken().items() if count > before.get(path, 0)]
    return {"mechanism": mechanism, "mode": mode, "error": error, "paths": sorted(taken)}


def main() -> None:
    warnings.simplefilter("ignore")
    for mechanism in sys.argv[3:] or headgate.mechanisms():
        for mode in modes_of(mechanism):
            print(json.dumps(outcome(mechanism, mode)), flush=True)


if __name__ == "__main__":
    main()
