"""Spans."""
