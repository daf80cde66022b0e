"""Base classes of the groups of parts: the interface of each part. They read sections, but not [model]."""
