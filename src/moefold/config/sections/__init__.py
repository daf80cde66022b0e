"""Sections of a recipe, a file each. They name groups of parts and import none. [model] is in `config/model.py`."""
