"""Base class of each group of parts: what the package asks of a part of the group."""
