"""Methods of sites."""
