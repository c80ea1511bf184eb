"""Comparisons: what a mechanism costs and what it gains."""
