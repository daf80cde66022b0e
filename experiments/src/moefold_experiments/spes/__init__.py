"""Experts that sites own (SPES, arXiv:2602.11543)."""
