"""Tokens that share a capacity."""
