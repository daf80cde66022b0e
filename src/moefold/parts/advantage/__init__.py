"""Advantages of rollouts."""
