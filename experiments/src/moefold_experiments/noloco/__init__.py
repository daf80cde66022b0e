"""Rounds of random pairs of sites (NoLoCo, arXiv:2506.10911)."""
