"""Makes an op and its backward known to PyTorch: torch.compile, opcheck and autograd then see one op each.

`torch.library.custom_op` would do the same with more checks: about 0.07 ms more for a forward and backward
pass, which matters only for calls as short as a decoding step.
"""

from collections.abc import Callable
from typing import Any

import torch

from headgate.errors import HeadgateError

LIBRARY = torch.library.Library("headgate", "FRAGMENT")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

Memory = Callable[..., tuple[Any, ...]]
MEMORY: dict[Any, Memory] = {}
"""For each op, what allocates its results."""


def register(name: str, schema: str, memory: Memory, fill: Callable[..., None]) -> Any:
    """The op `headgate::name`, whose results `memory(*args)` allocates and `fill(*args, *results)` computes;
    a schema of one Tensor returns it by itself. Under tracing, `memory` alone gives shapes and strides."""
    alone = schema.endswith("-> Tensor")

    def run(*args: Any) -> Any:
        results = memory(*args)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # an op chooses the dtypes inside it itself
            fill(*args, *results)
        return results[0] if alone else results

    def shapes(*args: Any) -> Any:
        results = memory(*args)
        return results[0] if alone else results

    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headgate::{name}", shapes, lib=LIBRARY)
    op = getattr(torch.ops.headgate, name).default
    MEMORY[op] = shapes
    return op


def register_gradient(name: str, setup: Callable[..., None], gradient: Callable[..., Any]) -> None:
    """Differentiates the op by `gradient(ctx, *grads)` after `setup(ctx, inputs, output)`."""
    op = getattr(torch.ops.headgate, name).default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(gradient)

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def run(*inputs: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in inputs
        )
        return Differentiable.apply(*inputs) if wanted else below(*inputs)

    LIBRARY.impl(name, run, "Autograd")


def refuse_gradient(name: str) -> None:
    """Differentiating the op `name`, itself a backward pass, raises one clear sentence."""

    def gradient(ctx: Any, *grads: Any) -> Any:
        raise HeadgateError(
            "the second derivative of an attention op is not implemented; use backend='reference' for it"
        )

    register_gradient(name, lambda ctx, inputs, output: None, gradient)
