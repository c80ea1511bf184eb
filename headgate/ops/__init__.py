"""Attention as pure tensor functions: q (B,H,Tq,D); k and v (B,G,Tk,D), whose last Tq are the queries'
own."""

from headgate.ops.active import active_attention, among_active, windows_attention
from headgate.ops.blocks import block_means, block_selected_attention, choose_blocks, selection_recall
from headgate.ops.blocks_and_window import blocks_and_window_attention
from headgate.ops.combiner import block_summaries, combiner_attention
from headgate.ops.compressed import compressed_attention
from headgate.ops.delta import gated_delta
from headgate.ops.dispatch import explain, paths_taken
from headgate.ops.documents import document_starts
from headgate.ops.pair_gate.op import pair_gated_attention
from headgate.ops.short import short_convolution
from headgate.ops.span.op import (
    attention,
    biased_attention,
    causal_attention,
    distance_biased_attention,
    far_attention,
    span_attention,
    window_attention,
)
from headgate.ops.span.options import Span
from headgate.ops.strided import strided_attention
from headgate.ops.top_k import top_k_attention

__all__ = [
    "Span",
    "active_attention",
    "among_active",
    "attention",
    "biased_attention",
    "block_means",
    "block_selected_attention",
    "block_summaries",
    "blocks_and_window_attention",
    "causal_attention",
    "choose_blocks",
    "combiner_attention",
    "compressed_attention",
    "distance_biased_attention",
    "document_starts",
    "explain",
    "far_attention",
    "gated_delta",
    "pair_gated_attention",
    "paths_taken",
    "selection_recall",
    "short_convolution",
    "span_attention",
    "strided_attention",
    "top_k_attention",
    "window_attention",
    "windows_attention",
]
