"""FP8 in blocks of 128 values."""
