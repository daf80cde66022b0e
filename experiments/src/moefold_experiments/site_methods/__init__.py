"""Methods of sites: presets of the rounds in which jobs exchange their weights."""
