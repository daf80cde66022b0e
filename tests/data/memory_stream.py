"""A stream of tokens in memory, for tests of packing."""

import numpy as np

from moefold.data.token_stream import TokenStream


class MemoryStream(TokenStream):
    """Tokens in memory."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]
