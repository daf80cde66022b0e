"""Scalings of RoPE, one file each."""
