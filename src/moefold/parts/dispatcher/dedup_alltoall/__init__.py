"""Dispatcher `dedup_alltoall`."""
