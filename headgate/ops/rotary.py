"""Rotary positions (RoPE): pairs of a head's dimensions rotated by angles that grow with the position."""

import math

import torch
from torch import Tensor

from headgate.config import RopeScaling


def rotation(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, in fp32 whatever the model's dtype: (T,D/2), or (B,1,T,D/2) for positions (B,T)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies, factor = 1.0 / theta**exponent, 1.0  # as Qwen does, to the last digit
    if scaling is not None:
        frequencies, factor = _stretched(frequencies, theta, scaling)
    angle = positions[..., None].float() * frequencies
    if positions.ndim == 2:
        angle = angle[:, None]
    if factor == 1:
        return angle.cos(), angle.sin()
    return angle.cos() * factor, angle.sin() * factor


def _stretched(frequencies: Tensor, theta: float, s: RopeScaling) -> tuple[Tensor, float]:
    """The frequencies (D/2,) for a longer context, and the factor on what is rotated."""
    if s.rope_type == "linear":
        return frequencies / s.factor, 1.0
    before = s.original_max_position_embeddings
    assert before is not None, "RopeScaling checks this"
    if s.rope_type == "llama3":
        turns = before / (2 * math.pi / frequencies)  # over the original context
        share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = (1 - share) * frequencies / s.factor + share * frequencies
        low, high = turns < s.low_freq_factor, turns > s.high_freq_factor
        return torch.where(high, frequencies, torch.where(low, frequencies / s.factor, smooth)), 1.0
    half = len(frequencies)
    first, last = (
        2 * half * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    steps = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((steps - first) / (last - first or 0.001)).clamp(0, 1)
    stretched = frequencies / s.factor * (1 - kept) + frequencies * kept
    if s.attention_factor is not None:
        return stretched, s.attention_factor
    return stretched, 0.1 * math.log(s.factor) + 1.0


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B,heads,T,D) by its positions; dimension d is paired with d + D/2, as in Qwen."""
    a, b = t.chunk(2, dim=-1)
    cos, sin = cos.to(t.dtype), sin.to(t.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
