"""Gated short convolution."""
