"""Activations of routed experts."""
