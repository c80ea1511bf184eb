"""Which implementation an op takes: one ordered list of paths per op, and a reason for every refusal.

The paths, where an op has them: `native` (C++ on the CPU), `sdpa` and `varlen` (PyTorch's fused attention on
a GPU), `flex` (FlexAttention on a GPU), `triton` (our kernels on a GPU), `whole` (all heads of a decoding
step instead of some), `torch` (plain PyTorch, any device and dtype), `reference` (dense, the truth).
`backend="auto"` takes the first that does not refuse; naming a path takes that one or raises its reason.
Nothing falls back silently: `explain` shows the choice, `paths_taken` what has run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headgate.errors import HeadgateError, suggestion
from headgate.ops.gpu import is_planned

FUSED = ("sdpa", "varlen", "flex", "triton")
"""Paths of a GPU, each a kernel or two that write no scores out."""
Refusal = Callable[..., str | None]
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)
_forced = {"backend": "auto"}  # no ContextVar: torch.compile cannot trace one
_taken: Counter[str] = Counter()


@dataclass(frozen=True)
class Explanation:
    """The path an op would take for given arguments, and why not the ones before it."""

    op: str
    path: str
    refusals: tuple[tuple[str, str], ...]
    kernel: str = ""
    """Which of its kernels, if the path has several: `sdpa` takes PyTorch's flash, cudnn or efficient."""

    @property
    def name(self) -> str:
        """As `paths_taken` counts it, without the op."""
        return f"{self.path}:{self.kernel}" if self.kernel else self.path

    def __str__(self) -> str:
        lines = [f"{self.op} takes the path {self.name!r}"]
        return "\n".join(lines + [f"  not {path!r}: {reason}" for path, reason in self.refusals])


class _Explained(Exception):
    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


@dataclass(frozen=True)
class Path:
    name: str
    run: Callable[..., Any]
    refuse: Refusal
    kernel: Callable[..., str] | None


def _note(op: str, path: str) -> None:
    """Runs while code is being compiled, never inside it."""
    _taken[f"{op}:{path}"] += 1


# Does what torch.compiler.assume_constant_result does, which would import the compiler.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Op:
    """A named op with its paths in the order in which they are tried."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paths: list[Path] = []

    def path(
        self,
        name: str,
        *,
        refuse: Refusal = lambda *args, **kwargs: None,
        kernel: Callable[..., str] | None = None,
    ) -> Callable[..., Any]:
        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            self.paths.append(Path(name, run, refuse, kernel))
            return run

        return add

    def __call__(self, backend: str, *args: Any, **kwargs: Any) -> Any:
        path, explanation = self._choose(backend if backend != "auto" else _forced["backend"], args, kwargs)
        if torch.compiler.is_compiling():
            _note(self.name, explanation.name)
        else:
            if _explaining.get():
                raise _Explained(explanation)
            _taken[f"{self.name}:{explanation.name}"] += 1
        if is_planned() and path.name in FUSED:  # it has no kernel here; a traced op of ours looks like one
            path = next(other for other in self.paths if other.name == "torch")
        return path.run(*args, **kwargs)

    def _choose(self, backend: str, args: Any, kwargs: Any) -> tuple[Path, Explanation]:
        known = [path.name for path in self.paths]
        if backend != "auto" and backend not in known:
            raise HeadgateError(
                f"backend={backend!r} is not a path of {self.name}; {suggestion(backend, known)}"
            )
        refusals: list[tuple[str, str]] = []
        transformed = is_transformed()
        for path in self.paths:
            if backend not in ("auto", path.name):
                continue
            if transformed and path.name != "reference":
                reason: str | None = "torch.func and forward derivatives take the formula in plain PyTorch"
            else:
                reason = path.refuse(*args, **kwargs)
            if reason is None:
                kernel = "" if path.kernel is None else path.kernel(*args, **kwargs)
                return path, Explanation(self.name, path.name, tuple(refusals), kernel)
            refusals.append((path.name, reason))
        raise HeadgateError(
            f"{self.name} has no path for this: " + "; ".join(f"{p}: {r}" for p, r in refusals)
        )


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp ...) or a forward derivative is under way: ops with
    their own backward pass then take their formula."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """The path that `op` (a function of headgate.ops, or its name) would take for these arguments, and
    why."""
    from headgate import ops

    if isinstance(op, str):
        if op not in ops.__all__:
            raise HeadgateError(f"unknown op {op!r}; {suggestion(op, ops.__all__)}")
        op = getattr(ops, op)
    assert callable(op)
    token = _explaining.set(True)
    try:
        op(*args, **kwargs)
    except _Explained as explained:
        return explained.explanation
    finally:
        _explaining.reset(token)
    raise HeadgateError(f"{op.__name__} chooses no path: it is not an attention op")


def paths_taken() -> dict[str, int]:
    """How often each `op:path` has run in this process; in compiled code, how often it was compiled."""
    return dict(_taken)


def forced_backend() -> str:
    """The path that `forced` asks every op to take; "auto" outside of it."""
    return _forced["backend"]


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Every op inside takes this path or raises, in all threads; for tests and measurements."""
    before, _forced["backend"] = _forced["backend"], backend
    try:
        yield
    finally:
        _forced["backend"] = before


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise if q, k, v do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise HeadgateError(f"q, k and v have shapes {shapes}; expected q (B,H,Tq,D), k and v (B,G,Tk,D)")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise HeadgateError(f"{shapes} do not fit: k and v must agree, and share batch and head width with q")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise HeadgateError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if not 1 <= q.shape[2] <= k.shape[2]:
        raise HeadgateError(
            f"{q.shape[2]} queries over {k.shape[2]} keys: expected at least one query, each with its own key"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{n} {t.dtype} on {t.device}" for n, t in (("q", q), ("k", k), ("v", v)))
        raise HeadgateError(f"{kinds}: expected one dtype and one device")
