"""Corrections for a sampler that differs from training."""
