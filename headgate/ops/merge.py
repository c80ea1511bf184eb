"""Two softmaxes over disjoint keys become the one over both, by their log-sum-exps."""

from torch import Tensor


def merged(
    near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor, far_weight: Tensor | float = 1.0
) -> Tensor:
    """near + far_weight * (joint - near), where joint is the attention over the keys of both (B,H,T,D).

    joint = (1 - s) * near + s * far, with s = sigmoid(far_lse - near_lse) the far keys' share of the softmax.
    So a weight of 1 gives the joint attention, and one between 0 and 1 mixes it with the near.
    """
    share = (far_lse - near_lse).sigmoid()[..., None].to(near.dtype)
    return near + far_weight * share * (far - near)
