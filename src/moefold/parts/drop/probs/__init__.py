"""Dropping by probability."""
