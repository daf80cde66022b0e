"""The parts: a folder for each group, a file or a folder for each kind. `config/find.py` alone imports them."""
