"""Objectives of reinforcement learning."""
