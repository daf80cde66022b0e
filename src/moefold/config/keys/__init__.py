"""Keys of a recipe by name: paths, types, annotations, defaults, help and suggestions."""
