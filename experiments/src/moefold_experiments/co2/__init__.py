"""Rounds that are exchanged during the whole next one (CO2, arXiv:2401.16265)."""
