"""moefold trains Mixture-of-Experts language models with MoE Parallel Folding (arXiv:2504.14960)."""

__version__ = "0.1.0"
