"""Experiments: parts of moefold recipes that one paper each proposes, and that few runs need."""
