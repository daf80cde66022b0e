"""Data pipeline: the same samples in the same order under every parallel mapping. numpy only."""
