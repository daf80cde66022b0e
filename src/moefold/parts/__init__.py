"""The parts: a module or a folder for each group. Only `config/base/part_registry.py` imports them."""
