"""Number formats of dispatched tokens."""
