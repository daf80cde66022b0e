"""Families of Hugging Face folders, each in its own file, which `families.py` finds."""
