"""Placements of the norms of the residual stream."""
