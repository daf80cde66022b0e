"""Dispatchers."""
