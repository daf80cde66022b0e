"""Score functions of the router."""
