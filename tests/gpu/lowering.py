"""FlexAttention's calls through PyTorch's own compiler, for an A100 that is not there; prints the outcomes.

python lowering.py LIBRARY
"""

import sys

if __name__ == "__main__":
    import absent

    absent.load(sys.argv[1])

import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from headgate.ops import flex, grouped


def outcome(heads: int, groups: int, queries: int, *, mended: bool = True) -> str:
    """The kernels' names, or the compiler's complaint."""
    with FakeTensorMode(), torch.device("cuda"):
        q = torch.empty(1, heads, queries, 64, dtype=torch.bfloat16)
        k = torch.empty(1, groups, 300, 64, dtype=torch.bfloat16)
        mask = flex.SeenPairs(queries, 300, 0, 100).mask(q.device)
        options = flex._kernel_options(q, k) if mended else None
        try:
            source = absent.lowered(
                flex_attention, q, k, k, block_mask=mask, enable_gqa=True, kernel_options=options
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "decoding" if "SPLIT_KV : tl.constexpr" in source else "attention"


def grouped_outcome() -> str:
    """Block selection, its choices grouped."""
    with FakeTensorMode(), torch.device("cuda"):
        k = torch.empty(1, 1, 512, 64, dtype=torch.bfloat16)
        chosen = torch.zeros(1, 4, 512, 2, dtype=torch.int64)
        mask = grouped._mask(grouped.Grouping.of(chosen, 1, 8).blocks, 64, 512)
        q = k.new_empty(1, 1, mask.seq_lengths[0], 64)
        try:
            return "attention" if absent.lowered(flex_attention, q, k, k, block_mask=mask) else "nothing"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    absent.compile_for(80, 108, 163 << 10)
    print(
        json.dumps(
            {
                "training": outcome(4, 1, 300),
                "grouped blocks": grouped_outcome(),
                "a token": outcome(4, 1, 1),
                "a tail, as PyTorch has it": outcome(4, 1, 40, mended=False),
                "a tail": outcome(4, 1, 40),
            }
        )
    )
