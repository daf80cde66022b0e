"""Optimizers that apply the gradient of the step before (arXiv:2606.30634)."""
