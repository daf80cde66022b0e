"""The parts: a folder for each group, a file or a folder for each kind. Only `config/find.py` imports them."""
