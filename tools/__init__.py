"""Tools that count and record what a change of the code must not make worse."""
