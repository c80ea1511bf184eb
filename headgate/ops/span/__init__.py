"""Span attention: options, op and paths (native, sdpa, tiled PyTorch); flex and reference are in ops."""
