"""Losses of the last stage."""
