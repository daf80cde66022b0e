"""Bin packing by best fit decreasing."""

from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins by best fit decreasing: longest first, each into the bin with the least sufficient space.

    Uses at most 11/9 of the minimum number of bins, plus one (D. S. Johnson, 1973), in O(n * capacity / 64) operations.
    Lengths are 1 .. capacity.

    Returns:
        The item numbers in each bin, ascending, and the bins in the order of their first number.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit s of `spaces` is set if a bin with space s exists. The lowest set bit from `length` on is the best fit.
    spaces = 0
    for i in order:
        length = lengths[i]
        sufficient = spaces >> length
        if sufficient:
            space = length + (sufficient & -sufficient).bit_length() - 1
            number_of_bin = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space = capacity
            number_of_bin = len(bins)
            bins.append([])
        bins[number_of_bin].append(i)
        with_space[space - length].append(number_of_bin)
        if space > length:
            spaces |= 1 << (space - length)
    return sorted(sorted(members) for members in bins)
