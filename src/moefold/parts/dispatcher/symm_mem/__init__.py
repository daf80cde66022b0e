"""Dispatcher `symm_mem`."""
