"""Somebody else's transformer block with a headgate mechanism in it, and headgate's attention by itself.

    python examples/outside_block.py

Nothing here uses headgate's decoder: a block brings its own norms and projections, and hands the mechanism
what it wants, x (B,T,C), q (B,H,T,D), k and v (B,G,T,D). Training, whole sequences and decoding over cached
keys are the same call.
"""

import torch
from torch import Tensor, nn

import headgate
from headgate import ops


class Block(nn.Module):
    """A plain pre-norm block with LayerNorm, GELU and biases, as GPT-2 has it."""

    def __init__(self, d_model: int, n_heads: int, mechanism: str, **options: object) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.attend = headgate.build_mechanism(
            mechanism, d_model=d_model, n_heads=n_heads, head_dim=d_model // n_heads, **options
        )

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x (B,T,C) -> (B,T,C), and the keys and values so far, to be given back with the next tokens."""
        normed = self.norm1(x)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(normed).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = self.attend(normed, q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), (k, v)


def train_and_decode(mechanism: str, steps: int = 30, **options: object) -> tuple[float, float, float]:
    """Learn to repeat the input three tokens later; then decode token by token over a cache.

    Returns the first loss, the last loss, and the largest difference between decoding and one whole pass.
    """
    torch.manual_seed(0)
    block = Block(64, 4, mechanism, **options)
    optimiser = torch.optim.AdamW(block.parameters(), lr=3e-3)
    x = torch.randn(4, 80, 64)
    wanted = x.roll(3, dims=1)
    losses = []
    for _ in range(steps):
        loss = (block(x)[0] - wanted)[:, 3:].square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    with torch.no_grad():
        whole, past, outputs = block(x)[0], None, []
        for token in x.split(1, dim=1):
            out, past = block(token, past)
            outputs.append(out)
    return losses[0], losses[-1], (torch.cat(outputs, 1) - whole).abs().max().item()


def attention_alone() -> Tensor:
    """headgate.ops are functions of tensors: here a window of 16, grouped heads, and which path it took."""
    q, k, v = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    print(ops.explain("window_attention", q, k, v, 16))
    out = ops.window_attention(q, k, v, 16)
    near, near_lse = ops.span_attention(q, k, v, ops.Span(16))  # with log-sum-exps branches can be merged
    far, far_lse = ops.far_attention(q, k, v, 16)
    share = (far_lse - near_lse[:, :, 17:]).sigmoid()[..., None]
    everything = (1 - share) * near[:, :, 17:] + share * far
    print("window and rest merged, less full attention:",
          (everything - ops.causal_attention(q, k, v)[:, :, 17:]).abs().max().item())  # fmt: skip
    return out


if __name__ == "__main__":
    for name, options in (
        ("head-gated", {"window": 8}),
        ("dynamic-sparse", {"window": 8, "dense_prefix": 16}),
    ):
        first, last, difference = train_and_decode(name, **options)
        print(
            f"{name}: loss {first:.3f} -> {last:.3f}; decoding differs from a whole pass by {difference:.1e}"
        )
    attention_alone()
