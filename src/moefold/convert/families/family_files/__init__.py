"""Families of Hugging Face folders, in files that `families.py` finds."""
