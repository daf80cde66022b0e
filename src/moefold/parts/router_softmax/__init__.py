"""Routing weights of a router with softmax scores."""
