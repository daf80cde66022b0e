"""Ulysses attention."""
