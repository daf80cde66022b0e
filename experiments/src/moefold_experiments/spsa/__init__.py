"""SPSA with a gradient of one byte (arXiv:2305.17333, arXiv:2306.10015)."""
