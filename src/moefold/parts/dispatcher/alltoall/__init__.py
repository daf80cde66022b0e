"""Dispatcher `alltoall`."""
