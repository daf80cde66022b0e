"""Dispatcher `leastloaded`."""
