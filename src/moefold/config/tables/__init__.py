"""Tables of settings: nested trees, the parts that are built from them, and their text."""
