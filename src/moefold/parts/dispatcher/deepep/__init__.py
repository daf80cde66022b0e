"""Dispatcher `deepep`."""
