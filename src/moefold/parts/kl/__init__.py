"""Estimators of the KL divergence."""
