"""The legal settings nearest to a wrong one, in words: the way out that an error offers."""

from collections.abc import Iterable


def nearest_numbers(value: int, legal: Iterable[int], count: int = 6) -> str:
    """Up to `count` of the legal values closest to `value`, ascending: "1, 2 or 4"."""
    closest = sorted(sorted(set(legal), key=lambda number: (abs(number - value), number))[:count])
    return join_with_or([str(number) for number in closest])


def nearest_multiples(value: int, step: int, *, up_only: bool = False) -> str:
    """The positive multiples of `step` on both sides of `value`, which is none itself: "252 or 256"."""
    below = value // step * step
    return join_with_or([str(number) for number in (0 if up_only else below, below + step) if number > 0])


def join_with_or(options: list[str]) -> str:
    """Words as a choice: "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
