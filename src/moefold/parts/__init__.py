"""The parts: a folder for each group, a file or a folder for each kind. Only `config/part_registry.py` imports them."""
