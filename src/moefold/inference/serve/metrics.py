"""Numbers of a server in the text format of Prometheus. Torch-free; called on the thread of the event loop."""

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""Upper bounds of the histograms."""


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Counts of requests and tokens, and times."""

    def __init__(self) -> None:
        self.num_open = 0
        """Samples that run or wait."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._new_tokens = 0
        self._request_seconds = _Histogram()
        self._first_token_seconds = _Histogram()

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request, of a path of the server or "other"."""
        self._requests[path, status] += 1
        self._request_seconds.add(seconds)

    def add_tokens(self, num_prompt: int, num_new: int) -> None:
        """Count the tokens of a completion."""
        self._prompt_tokens += num_prompt
        self._new_tokens += num_new

    def add_first_token(self, seconds: float) -> None:
        """Count the time from a request to its first token."""
        self._first_token_seconds.add(seconds)

    def text(self) -> str:
        """Return all numbers."""
        answered = [
            f'moefold_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        blocks: list[tuple[str, str, int | Sequence[str] | _Histogram]] = [
            ("moefold_samples_open gauge", "Samples that run or wait.", self.num_open),
            ("moefold_requests_total counter", "Answered requests.", answered),
            ("moefold_prompt_tokens_total counter", "Tokens of prompts.", self._prompt_tokens),
            ("moefold_generation_tokens_total counter", "Generated tokens.", self._new_tokens),
            ("moefold_request_seconds histogram", "Time of a request.", self._request_seconds),
            (
                "moefold_first_token_seconds histogram",
                "Time to the first token of a request.",
                self._first_token_seconds,
            ),
        ]
        text = ""
        for kind, words, value in blocks:
            name = kind.partition(" ")[0]
            if isinstance(value, int):
                value = [f"{name} {value}"]
            lines = value.lines(name) if isinstance(value, _Histogram) else value
            text += f"# HELP {name} {words}\n# TYPE {kind}\n" + "".join(f"{line}\n" for line in lines)
        return text
