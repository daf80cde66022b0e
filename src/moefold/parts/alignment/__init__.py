"""Methods of offline alignment."""
