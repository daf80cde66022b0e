"""Families of Hugging Face folders, each in a file of its own that `families.py` finds."""
