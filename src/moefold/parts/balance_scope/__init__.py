"""Tokens over which the load-balancing loss counts."""
