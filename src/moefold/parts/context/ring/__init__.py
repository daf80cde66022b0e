"""Ring attention."""
