"""Rows of data that are skipped since they cannot be used: their number, and the first error."""

from moefold.errors import ConfigError


class SkippedRows:
    """Count of skipped rows.

    Args:
        skips: skip rows that cannot be used, instead of raising their errors.
    """

    def __init__(self, *, skips: bool) -> None:
        self.skips = skips
        self.count = 0
        self.first = ""
        """Error of the first one; empty if there is none."""

    def refuse(self, error: ConfigError) -> None:
        """Count a row that cannot be used.

        Raises:
            ConfigError: `error`, unless such rows are skipped.
        """
        if not self.skips:
            raise error
        self.first = self.first or str(error)
        self.count += 1

    def note(self, setting: str = "data.skip_bad_rows") -> str:
        """Return a message with the number and the first error; empty if there is none."""
        rows = "row" if self.count == 1 else "rows"
        return f"{setting}: {self.count:,} {rows} skipped; the first: {self.first}" if self.count else ""
