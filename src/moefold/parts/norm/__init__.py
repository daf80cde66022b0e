"""Norms of the residual stream."""
