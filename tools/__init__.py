"""Tools that count and record properties that a change of the code must not make worse."""
