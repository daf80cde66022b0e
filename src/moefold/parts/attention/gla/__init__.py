"""Gated linear attention."""
