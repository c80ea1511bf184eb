"""Every mechanism through every mode on a GPU that is not there (see absent.py); one line of JSON for each.

python modes.py LIBRARY [MECHANISM ...]
"""

import sys

if __name__ == "__main__":
    import absent

    absent.load(sys.argv[1])

import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import headgate
from headgate import ops
from headgate.config import ModelConfig
from headgate.mechanisms import MECHANISMS
from headgate.mechanisms.contract import probe, skipping
from headgate.model.cache import Cache
from headgate.model.decoder import Decoder
from headgate.ops import flex
from headgate.train.evaluate import _uncompiled, autocast

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
GPU = torch.device("cuda")


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
    with torch.no_grad(), autocast(GPU, "bf16"), probe(decoder), _uncompiled(decoder):
        loss = decoder(tokens, tokens, reduction="none")
    assert loss.dtype == torch.float32, f"the loss is {loss.dtype}"


TAILS = (1, 17, 33, 127)
"""How many tokens the last chunk of a prompt may have."""


def prefill(decoder: Decoder) -> None:
    with torch.inference_mode():
        for tail in TAILS:
            cache = decoder.new_cache()
            for count in (130, tail):
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
    "evaluate after --compile": evaluate_compiled,
    "prefill": prefill,
    "prefill fp32": prefill_fp32,
    "decode": decode,
    "ragged": ragged,
    "skip_below": skip,
}


@contextmanager
def flex_as_it_would_be() -> Iterator[None]:
    """FlexAttention without its kernels, after asking whether it would have one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        has_kernel(q, k, options["block_mask"], options.get("kernel_options") or {})
        return torch_flex.flex_attention(q, k, v, **options)

    before = flex._compiled
    flex._compiled = lambda: attend
    try:
        yield
    finally:
        flex._compiled = before


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
        with FakeTensorMode(), flex_as_it_would_be():
            half = mode in ("prefill", "decode", "ragged", "skip_below")
            torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
            with GPU:
                layers = 2 if MECHANISMS.get(mechanism).uses_first_values else 1
                decoder = headgate.build_model(replace(CONFIG, n_layers=layers), mechanism)
            torch.set_default_dtype(torch.float32)
            MODES[mode](decoder)
    except Exception as raised:
        error = "".join(traceback.format_exception(raised))
    taken = [path for path, count in ops.paths_taken().items() if count > before.get(path, 0)]
    return {"mechanism": mechanism, "mode": mode, "error": error, "paths": sorted(taken)}


def main() -> None:
    warnings.simplefilter("ignore")
    for mechanism in sys.argv[2:] or headgate.mechanisms():
        for mode in MODES:
            print(json.dumps(outcome(mechanism, mode)), flush=True)


if __name__ == "__main__":
    main()
