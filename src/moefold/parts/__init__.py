"""The parts: a module or a folder for each group. Only `config/part_registry.py` imports them."""
