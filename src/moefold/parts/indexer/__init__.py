"""Selections of keys."""
