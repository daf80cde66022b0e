"""Few differences in few bits (SparseLoCo, arXiv:2508.15706)."""
