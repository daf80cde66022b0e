"""Context parallelism: how attention sees the whole sequence."""
