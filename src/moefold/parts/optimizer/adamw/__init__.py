"""AdamW (arXiv:1711.05101)."""
