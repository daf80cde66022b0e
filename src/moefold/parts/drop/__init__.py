"""Orders in which an expert keeps tokens."""
