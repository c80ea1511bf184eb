"""Rotary positions (RoPE): pairs of a head's dimensions turned by angles that grow with the position."""

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, in fp32 whatever the model's dtype: (T,D/2), or (B,1,T,D/2) for positions (B,T)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None].float() * (1.0 / theta**exponent)  # as Qwen does, to the last digit
    if positions.ndim == 2:
        angle = angle[:, None]
    return angle.cos(), angle.sin()


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B,heads,T,D) by its positions; dimension d is paired with d + D/2, as Qwen does."""
    a, b = t.chunk(2, dim=-1)
    cos, sin = cos.to(t.dtype), sin.to(t.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
