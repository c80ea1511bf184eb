"""The shape of an op's result, for tensors without values.

PyTorch's meta device knows this too, but much of that is Python that takes a quarter of a millisecond per
call and imports a compiler first. These are the ops that a training step consists of; all others go there.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headgate.ops.registration import MEMORY

COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"}


def result_of(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """func(*args, **options) on meta tensors: new memory, or a view of what was given."""
    schema = func._schema
    if schema.is_mutable:
        return options["out"] if "out" in options else args[0]
    name = schema.name.removeprefix("aten::")
    rule = RULES.get(name)
    if rule is not None:
        return rule(*args, **options)
    if torch.Tag.pointwise in func.tags:
        return _pointwise(name, args)
    if func in MEMORY:
        with _Rules():
            return MEMORY[func](*args, **options)
    return func(*args, **options)


class _Rules(TorchDispatchMode):
    """For what an op of our own allocates."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {})) if rule is None else rule(*args, **(kwargs or {}))


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """With the same memory layout if the tensor has no gaps or overlaps."""
    strides, step = [0] * tensor.ndim, 1
    for dim in sorted(range(tensor.ndim), key=lambda d: (tensor.stride(d), -d)):
        strides[dim], step = step, step * max(1, tensor.shape[dim])
    return torch.empty_strided(tensor.shape, strides, dtype=dtype or tensor.dtype, device="meta")


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _pointwise(name: str, args: Sequence[Any]) -> Tensor:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shape = _broadcast([t.shape for t in tensors])
    if name in COMPARISONS:
        dtype = torch.bool
    else:
        valued = tensors[1:] if name == "where" else tensors[:1] if name == "masked_fill" else tensors
        scalars = [arg for arg in args[:2] if isinstance(arg, float)]
        dtype = reduce(torch.promote_types, (t.dtype for t in valued if t.ndim), torch.bool)
        if dtype == torch.bool:
            dtype = reduce(torch.promote_types, (t.dtype for t in valued), torch.bool)
        if not dtype.is_floating_point and (scalars or name in ("div", "exp", "log", "sqrt", "rsqrt")):
            dtype = torch.float32
    whole = next((t for t in tensors if t.shape == shape), None)
    return _new(shape, dtype) if whole is None else _like(whole, dtype)


def _reduced(tensor: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    dims = range(tensor.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    gone = {d % tensor.ndim for d in dims}
    kept = [1 if d in gone else n for d, n in enumerate(tensor.shape) if keepdim or d not in gone]
    return _new(kept, options.get("dtype") or tensor.dtype)


def _argmax(tensor: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    return _reduced(tensor, dim, keepdim, dtype=torch.int64)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    tensors = [t for t in tensors if t.shape != (0,)]
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _new(shape, reduce(torch.promote_types, (t.dtype for t in tensors)))


def _topk(tensor: Tensor, k: int, dim: int = -1, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = list(tensor.shape)
    shape[dim] = k
    return _new(shape, tensor.dtype), _new(shape, torch.int64)


def _index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = index.numel()
    return _new(shape, tensor.dtype)


def _padded(tensor: Tensor, padding: Sequence[int], value: Any = 0) -> Tensor:
    shape = list(tensor.shape)
    for n in range(len(padding) // 2):
        shape[-1 - n] += padding[2 * n] + padding[2 * n + 1]
    return _new(shape, tensor.dtype)


def _layer_norm(x: Tensor, normalised: Sequence[int], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = [*x.shape[: x.ndim - len(normalised)], *(1 for _ in normalised)]
    wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    return _new(x.shape, x.dtype), _new(rows, wide), _new(rows, wide)


def _layer_norm_backward(*args: Any) -> tuple[Tensor | None, ...]:
    _, x, _, _, _, weight, bias, wanted = args
    return tuple(
        _like(t) if t is not None and w else None for t, w in zip((x, weight, bias), wanted, strict=True)
    )


def _unsafe_view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor.view(shape)


def _first(tensor: Tensor, *rest: Any, **options: Any) -> Tensor:
    return _like(tensor)


RULES: dict[str, Callable[..., Any]] = {
    "_to_copy": lambda t, **options: _like(t, options.get("dtype")),
    "_softmax": _first,
    "_softmax_backward_data": _first,
    "_unsafe_view": _unsafe_view,
    "addmm": lambda bias, a, b, **options: _new((a.shape[0], b.shape[1]), a.dtype),
    "amax": _reduced,
    "argmax": _argmax,
    "bmm": lambda a, b: _new((*a.shape[:2], b.shape[2]), a.dtype),
    "cat": _cat,
    "clone": lambda t, memory_format=None: (
        _new(t.shape, t.dtype) if memory_format == torch.contiguous_format else _like(t)
    ),
    "constant_pad_nd": _padded,
    "cumsum": lambda t, dim, dtype=None: _like(t, dtype),
    "dot": lambda a, b: _new((), a.dtype),
    "embedding": lambda weight, index, *rest: _new((*index.shape, weight.shape[1]), weight.dtype),
    "embedding_dense_backward": lambda d, index, rows, *rest: _new((rows, d.shape[-1]), d.dtype),
    "empty_like": lambda t, dtype=None, memory_format=None, **options: (
        _new(t.shape, dtype or t.dtype) if memory_format == torch.contiguous_format else _like(t, dtype)
    ),
    "flip": _first,
    "gather": lambda t, dim, index, **options: _new(index.shape, t.dtype),
    "index_select": _index_select,
    "log_sigmoid_backward": lambda d, t, buffer: _like(t),
    "log_sigmoid_forward": lambda t: (_like(t), _like(t)),
    "logsumexp": _reduced,
    "mean": _reduced,
    "mm": lambda a, b: _new((a.shape[0], b.shape[1]), a.dtype),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "new_zeros": lambda t, shape, dtype=None, **options: _new(shape, dtype or t.dtype),
    "ones_like": lambda t, dtype=None, **options: _like(t, dtype),
    "slice_backward": lambda d, shape, *rest: _new(shape, d.dtype),
    "softplus_backward": lambda d, t, *rest: _like(t),
    "sum": _reduced,
    "topk": _topk,
    "unfold_backward": lambda d, shape, *rest: _new(shape, d.dtype),
    "where": lambda condition, a, b: _pointwise("where", (condition, a, b)),
    "zeros_like": lambda t, dtype=None, **options: _like(t, dtype),
}
