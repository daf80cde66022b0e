"""Grammars of answers from JSON schemas, by the package llguidance."""

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError, install_command
from moefold.inference.engine.requests import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t\r\n]{0,64}"
"""Spaces between the parts of a JSON text. The bound prevents endless spaces."""
CACHED_TOKENIZERS = 8


class GrammarError(ConfigError):
    """A schema is not supported. The message is the reason."""


class JsonGrammars:
    """Grammars over the tokens of a model. The package's tokenizer reads the bytes of ids, not an untrusted file.

    Ids of the model that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._for_ends = lru_cache(CACHED_TOKENIZERS)(self._tokenizer_for)

    def check(self, grammar: str, eos_ids: frozenset[int]) -> None:
        """Check a JSON schema, as JSON, before its request is accepted.

        Raises:
            GrammarError: the package is not installed, the schema is invalid, or no token ends an answer.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise GrammarError(f"JSON formats need the package llguidance: {install_command('serve')}")
        if not eos_ids:
            raise GrammarError("the tokenizer has no end-of-text token that could end a JSON text")
        if reason := self._start(grammar, eos_ids).get_error():
            raise GrammarError(f"the JSON schema cannot be followed: {reason.splitlines()[0]}")

    def start(self, request: Request) -> "JsonConstraint":
        """Start the grammar of a request."""
        assert request.rules is not None, "a request with a grammar"
        return JsonConstraint(self._start(request.rules.grammar, request.eos_ids), self._vocab_size)

    def _start(self, grammar: str, eos_ids: frozenset[int]) -> "LLMatcher":
        from llguidance import LLMatcher

        compiled = LLMatcher.grammar_from_json_schema(grammar, overrides={"whitespace_pattern": WHITESPACE})
        return LLMatcher(self._for_ends(tuple(sorted(eos_ids))), compiled, log_level=0)

    def _tokenizer_for(self, eos_ids: tuple[int, ...]) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_TokenBytes(self._tokenizer, self._vocab_size, eos_ids)), eos_token=list(eos_ids)
        )


class JsonConstraint:
    """State of a grammar after the tokens of one sample."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask of allowed next tokens, [V], after the end of the text the tokens that end an answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def push(self, token: int) -> None:
        """Add an allowed token."""
        self._matcher.consume_token(token)


class _TokenBytes:
    """Vocabulary in the form that the package requires."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        table = tokenizer.token_table()
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        # Ids without a token, and rows of the model beyond the tokenizer, have no text.
        self.tokens = [*table.pieces[:vocab_size], *[b""] * (vocab_size - len(table.pieces))]
        self.special_token_ids = sorted({*table.special_ids, *eos_ids})

    def __call__(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts are strings")
        return [int(token) for token in self._tokenizer.encode(text)]
