"""Things of several lengths into few samples of one length."""

from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put numbered things into bins, longest first, each where the least space remains (best fit decreasing).

    Uses at most 11/9 of the fewest possible bins and one more (D. S. Johnson, 1973); local, O(n * capacity / 64).

    Args:
        lengths: of each thing, 1 .. capacity.
        capacity: of each bin.

    Returns:
        The numbers in each bin, ascending; bins in the order of their first number.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s of `spaces` says whether a bin with space s exists: the least sufficient space is its lowest bit from there.
    spaces = 0
    for i in order:
        length = lengths[i]
        sufficient = spaces >> length
        if sufficient:
            space = length + (sufficient & -sufficient).bit_length() - 1
            which = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space, which = capacity, len(bins)
            bins.append([])
        bins[which].append(i)
        with_space[space - length].append(which)
        if space > length:
            spaces |= 1 << (space - length)
    return sorted(sorted(members) for members in bins)
