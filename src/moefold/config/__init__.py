"""The recipe in layers, lowest first: `base/`, `sections/`, `groups/`, and the files here, which read them all."""
