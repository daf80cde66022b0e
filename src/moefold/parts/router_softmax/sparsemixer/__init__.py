"""SparseMixer-v2 (arXiv:2409.12136)."""
