"""Distributions of document lengths: shipped histograms, histograms and lists of lengths in files.

A histogram has the share of the documents in each class of lengths. Within a class the density is proportional to a
power of the length, by default -1, which makes the logarithm of the length uniform.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from moefold.bounded_read import MAX_TABLE_BYTES, read_text
from moefold.config.base.field import Bound
from moefold.config.base.typed_file import STRICT, from_table, parse_table, within
from moefold.errors import ConfigError
from moefold.message_text import Setting, closest_match
from moefold.package_table import package_text, table_names

MAX_LENGTH = 2**40
"""Longest document that a file may have, in tokens."""
MAX_EXPONENT = 200
"""Largest exponent, of either sign, of the density within a class. Its mean is then near an end of the class."""

Lengths = NDArray[np.int64]
Shares = list[Annotated[float, Field(ge=0)]]
ENDS = Bound(
    f"must be ascending integers from 2 to {MAX_LENGTH}, the upper end of each class in tokens",
    lambda ends: ends and all(low < end == int(end) <= MAX_LENGTH for low, end in pairwise([1, *ends])),
)


@dataclass(frozen=True, kw_only=True)
class HistogramFile:
    """Keys of a file with a histogram."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    upper: Annotated[list[float], within(ENDS)]
    """Upper end of each class."""
    documents: Shares
    """Share of the documents in each class."""
    exponents: list[Annotated[float, Field(ge=-MAX_EXPONENT, le=MAX_EXPONENT)]] | None = None
    """Exponent of the density in each class. None: -1."""
    source: str = ""
    """Origin of the numbers."""


@dataclass(frozen=True)
class LengthHistogram:
    """Shares of documents by class of length."""

    name: str
    source: str
    upper: tuple[int, ...]
    """Upper end of each class, ascending. A class begins where the one before it ends, the first at 1 token."""
    documents: tuple[float, ...]
    """Share of the documents in each class."""
    exponents: tuple[float, ...]
    """Exponent of the density within each class: documents of length x are as frequent as x ** exponent."""

    def quantile(self, fractions: NDArray[np.float64]) -> Lengths:
        """Return the lengths below which the given fractions in [0, 1) of the documents lie, each at least 1."""
        shares = np.array(self.documents)
        ends = np.cumsum(shares / shares.sum())
        ends[-1] = 1.0
        index = np.minimum(np.searchsorted(ends, fractions, side="right"), len(ends) - 1)
        starts = np.concatenate(([0.0], ends[:-1]))
        within = (fractions - starts[index]) / np.maximum(ends[index] - starts[index], np.finfo(np.float64).tiny)
        low = np.concatenate(([1.0], np.array(self.upper[:-1], dtype=np.float64)))[index]
        high = np.array(self.upper, dtype=np.float64)[index]
        lengths = _power_quantile(within, np.log(low), np.log(high), np.array(self.exponents)[index])
        return np.maximum(1, lengths.astype(np.int64))


@dataclass(frozen=True)
class ListedLengths:
    """Lengths of single documents. They are drawn with replacement."""

    name: str
    source: str
    lengths: Sequence[int]

    @cached_property
    def _sorted(self) -> Lengths:
        return np.sort(np.array(self.lengths, dtype=np.int64))

    def quantile(self, fractions: NDArray[np.float64]) -> Lengths:
        """Return the lengths below which the given fractions in [0, 1) of the documents lie."""
        return self._sorted[(fractions * len(self._sorted)).astype(np.int64)]


LengthDistribution = LengthHistogram | ListedLengths
"""A distribution of document lengths in tokens: its name for display, the origin of the numbers, and quantiles."""


def _power_quantile(
    fractions: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64], exponents: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return quantiles of densities x ** exponent on [exp(low), exp(high)), element by element."""
    power = exponents + 1.0
    span = power * (high - low)
    is_log_uniform = np.abs(span) < 1e-9
    # In logarithms relative to the end of the greater density, so that no power overflows.
    end = np.where(span > 0, high, low)
    decay = np.exp(-np.abs(span))
    rest = np.where(span > 0, decay + fractions * (1 - decay), 1 - fractions * (1 - decay))
    logs = np.where(
        is_log_uniform, low + fractions * (high - low), end + np.log(rest) / np.where(is_log_uniform, 1.0, power)
    )
    return np.exp(logs)


def histogram_names() -> tuple[str, ...]:
    """Return the names of the shipped histograms."""
    return table_names("planner/lengths/histograms")


def load_distribution(name_or_path: str) -> LengthDistribution:
    """Load a shipped histogram by name, or a file: a histogram (.toml), or one length a line.

    Raises:
        ConfigError: the name is unknown, or the file cannot be read or has entries that are not lengths.
    """
    path = Path(name_or_path)
    if name_or_path in histogram_names():
        return _parse_histogram(package_text(f"planner/lengths/histograms/{name_or_path}.toml"), name_or_path)
    if not path.is_file():
        guess = closest_match(name_or_path, histogram_names())
        hint = f"did you mean {guess!r}? The" if guess else "the"
        raise ConfigError(
            f"{Setting('--lengths', name_or_path)} is neither a histogram nor a file nor a run; {hint} histograms are "
            f"{', '.join(histogram_names())}; a file has one length a line, or is a histogram that ends in .toml"
        )
    try:
        text = read_text(path, MAX_TABLE_BYTES)
    except OSError as error:
        raise ConfigError(f"{Setting('--lengths', name_or_path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{Setting('--lengths', name_or_path)} is no text; a file has one length a line, or is a histogram that "
            "ends in .toml"
        ) from None
    if path.suffix == ".toml":
        return _parse_histogram(text, name_or_path)
    return _parse_list(text, name_or_path)


def _parse_list(text: str, name: str) -> ListedLengths:
    """Parse one length a line. Empty lines are skipped."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and 1 <= len(word) <= 13) or not 1 <= int(word) <= MAX_LENGTH:
            raise ConfigError(
                f"{Setting('--lengths', name)}, line {number}: {word[:40]!r} is no length; each line is the number of "
                f"tokens of a document, an integer from 1 to {MAX_LENGTH}"
            )
        found.append(int(word))
    if not found:
        raise ConfigError(f"{Setting('--lengths', name)} has no length; write the tokens of one document on each line")
    return ListedLengths(name, f"{len(found):,} lengths of {name}", found)


def _parse_histogram(text: str, name: str) -> LengthHistogram:
    where = str(Setting("--lengths", name))
    file = from_table(HistogramFile, parse_table(text, where), where)
    upper = tuple(int(end) for end in file.upper)
    if len(file.documents) != len(upper) or not sum(file.documents) > 0:
        raise ConfigError(
            f"{where}: documents must have a share for each of the {len(upper)} classes of upper, and one above 0"
        )
    exponents = [-1.0] * len(upper) if file.exponents is None else file.exponents
    if len(exponents) != len(upper):
        raise ConfigError(f"{where}: exponents must have one number for each of the {len(upper)} classes of upper")
    return LengthHistogram(name, file.source or name, upper, tuple(file.documents), tuple(exponents))
