"""The queue of an expert by descending probability."""

from moefold.config.groups.drop import QueueEntry

TIE_TOLERANCE = 2.0**-36
"""Relative difference up to which two probabilities count as equal."""


def by_probability(queue: list[QueueEntry]) -> list[QueueEntry]:
    """Sort a queue by descending probability; consecutive probabilities within the tolerance are sorted by index."""
    ties: list[tuple[int, QueueEntry]] = []
    tie = 0
    last = None
    for entry in sorted(queue, key=lambda entry: (-entry[0], entry[1:])):
        if last is not None and last - entry[0] > TIE_TOLERANCE * abs(last):
            tie += 1
        last = entry[0]
        ties.append((tie, entry))
    return [entry for _, entry in sorted(ties, key=lambda pair: (pair[0], pair[1][1:]))]
