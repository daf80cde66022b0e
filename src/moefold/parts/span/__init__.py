"""Limits of the context of a query: windows and chunks."""
