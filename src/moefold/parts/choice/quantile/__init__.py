"""Choice balanced by quantiles."""
