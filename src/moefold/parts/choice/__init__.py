"""Choices of experts."""
