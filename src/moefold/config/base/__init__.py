"""Annotations of keys, limits, and parts with their kinds: what sections and groups are written with."""
