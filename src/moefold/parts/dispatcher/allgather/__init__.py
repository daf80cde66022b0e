"""Dispatcher `allgather`."""
