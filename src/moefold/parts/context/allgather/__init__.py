"""All-gather attention."""
