"""Pair-gated attention: the op and its paths (native, triton, tiled PyTorch); the reference is in ops."""
