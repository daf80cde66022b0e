"""Program of the subprocess that runs a tokenizer.

It imports only `tokenizers` and the standard library. A tokenizer.json is untrusted: its normalizer may expand a short
text to gigabytes, and its regular expressions may not terminate. It therefore runs in a separate process, with limits
on memory and on the CPU time of each request.

`limited_worker.py` runs it. The first request loads a tokenizer.json, or vocab.json and merges.txt. The second request
has the declarations of the files next to it (`read_tokenizer_folder`).
"""

import array
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

# The threads of the package do not survive a fork, but there is none here.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UPS = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""Replacements of clean_up_tokenization_spaces, in transformers' order."""
_EVEN_FOR_BPE = "for_bpe_even_though_it_will_corrupt_output"
Answer = tuple[dict[str, Any], bytes]
_STANDARD_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerWorker:
    """A tokenizer that answers requests."""

    _tokenizer: tokenizers.Tokenizer
    _post_processor: Any
    """Post-processor of the tokenizer, which `encode` uses only on request."""
    _cleans_up: bool
    """True if spaces before punctuation are removed from the text of ids."""

    def load(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Load a tokenizer.json, or vocab.json and merges.txt, and return the class of its model."""
        files = _split(payload, request["sizes"])
        if len(files) == 1:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[0])
        else:
            vocab, merges = json.loads(files[0]), _read_merges(files[1])
            self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
        return {"model": type(self._tokenizer.model).__name__, "is_byte_level": b'"ByteLevel"' in payload}, b""

    def declare(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Apply the declarations of the files next to the tokenizer, and return facts of its vocabulary."""
        del request
        spec: dict[str, Any] = json.loads(payload)
        listed = {int(number) for number in spec["settings"].get("added_tokens_decoder", {})}
        unlisted = [t.content for i, t in self._tokenizer.get_added_tokens_decoder().items() if i not in listed]
        names = _apply_declarations(self._tokenizer, spec)
        self._post_processor = self._tokenizer.post_processor
        self._cleans_up = _cleans_up(spec["settings"], is_bpe=isinstance(self._tokenizer.model, tokenizers.models.BPE))
        # Without special tokens, a post-processor would only trim the offsets.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        entries = self._tokenizer.get_vocab(with_added_tokens=True)
        ids = set(entries.values())
        answer = {
            "special_tokens": names,
            "ids": {text: entries[text] for text in (*names.values(), *spec["asked_tokens"]) if text in entries},
            "known_ids": [number for number in spec["asked_ids"] if number in ids],
            "vocab_size": max(ids, default=-1) + 1,
            "added_ids": sorted(self._tokenizer.get_added_tokens_decoder()),
            "unlisted": unlisted,
        }
        return answer, b""

    def encode(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the ids of texts, and the character range of each id if `offsets` is set."""
        texts = [text.decode() for text in _split(payload, request["sizes"])]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        if request["start"] and self._post_processor is not None:
            encodings = [self._post_processor.process(encoding, None, True) for encoding in encodings]
        data = b"".join(array.array("I", encoding.ids).tobytes() for encoding in encodings)
        if request["offsets"]:
            ranges = (array.array("I", itertools.chain.from_iterable(encoding.offsets)) for encoding in encodings)
            data += b"".join(column.tobytes() for column in ranges)
        return {"counts": [len(encoding) for encoding in encodings]}, data

    def decode(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the text of ids, including special tokens."""
        del request
        ids = array.array("I", payload).tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        for spaced, joined in _CLEAN_UPS if self._cleans_up else ():
            text = text.replace(spaced, joined)
        return {}, text.encode()

    def pieces(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the bytes of each id in a text, and the ids of special tokens."""
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        decoders = {step["type"] for step in _steps(json.loads(self._tokenizer.to_str())["decoder"])}
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        pieces = []
        for number in range(size):
            piece = self._tokenizer.id_to_token(number)
            if number in added_tokens or piece is None:
                pieces.append((added_tokens[number].content if number in added_tokens else "").encode())
            elif "ByteLevel" in decoders:
                pieces.append(_unmapped(piece))
            elif not decoders & {"Metaspace", "ByteFallback"}:
                pieces.append(self._tokenizer.decode([number], skip_special_tokens=False).encode())
            elif "ByteFallback" in decoders and (match := _BYTE_PIECE.fullmatch(piece)):
                pieces.append(bytes([int(match[1], 16)]))
            else:
                pieces.append(piece.replace("\u2581", " ").encode())
        special = sorted(number for number, token in added_tokens.items() if token.special)
        return {"sizes": [len(piece) for piece in pieces], "special": special}, b"".join(pieces)

    def serialize(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return a tokenizer.json with the declarations."""
        del request, payload
        without = self._tokenizer.post_processor
        self._tokenizer.post_processor = self._post_processor
        content = self._tokenizer.to_str(pretty=True)
        self._tokenizer.post_processor = without
        return {}, content.encode()

    def content_hash(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return a hash of the facts that determine ids and text.

        These are vocabulary, merges, added tokens, normaliser, pre-tokeniser and decoder. Saving a tokenizer with
        another version of its package changes its bytes, but not these facts.
        """
        del request, payload
        tree = json.loads(self._tokenizer.to_str())
        settings = [tree[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")]
        settings += ["clean up"] * self._cleans_up
        content = json.dumps(_without_defaults(settings), sort_keys=True).encode()
        return {"sha256": hashlib.sha256(content).hexdigest()}, b""


class _Tokens:
    """Special and added tokens of a folder, from its files and the class."""

    def __init__(self, backend: tokenizers.Tokenizer, declarations: Mapping[str, Any]) -> None:
        settings = declarations["settings"]
        defaults = dict(declarations["class"]["special_tokens"]) if declarations["class"] else {}
        declared = dict(settings)
        by_id: dict[int, tokenizers.AddedToken] = {}
        if "added_tokens_decoder" in settings:
            by_id = {int(number): _added_token(entry) for number, entry in settings["added_tokens_decoder"].items()}
        else:
            declared |= declarations["tokens_map"]
            special = {*_named({**defaults, **declared}).values(), *_texts(_extra(declared))}
            for text, number in declarations["added_tokens"].items():
                is_special = text in special
                by_id[int(number)] = tokenizers.AddedToken(text, normalized=not is_special, special=is_special)
            by_id |= backend.get_added_tokens_decoder()
        # Like transformers: added_tokens_decoder replaces tokens of tokenizer.json, which replace added_tokens.json's.
        self.by_id = {**backend.get_added_tokens_decoder(), **by_id}
        padding = backend.padding or {}
        if "pad_token" in padding:
            defaults.setdefault("pad_token", padding["pad_token"])
        self._declared = {**defaults, **declared}
        extra = _extra(declared)
        specific = dict(declared.get("model_specific_special_tokens") or {})
        if isinstance(extra, dict):
            specific = extra | specific
            extra = []
        self._declared |= specific
        self.extra = [_special_token(token) for token in extra]
        self.names = _named(self._declared, specific)
        """The special tokens by name."""

    def special(self) -> list[tokenizers.AddedToken]:
        """Return the named special tokens with their flags."""
        by_text = {token.content: token for token in self.by_id.values()}
        tokens = []
        for name, text in self.names.items():
            tokens.append(by_text.get(text, _special_token(self._declared[name])))
        return tokens


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(
        str(entry.get("content", "")), **{key: bool(entry[key]) for key in flags if key in entry}
    )


def _special_token(declared: Any) -> tokenizers.AddedToken:
    """Return a token declared as a text, or as an object with its flags."""
    return _added_token(declared) if isinstance(declared, dict) else tokenizers.AddedToken(declared, special=True)


def _named(values: Mapping[str, Any], specific: Collection[str] = ()) -> dict[str, str]:
    """Return the tokens of the keys that end in `_token`, and of the `specific` keys."""
    names = {}
    for name, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if (name.endswith("_token") or name in specific) and isinstance(text, str):
            names[name] = text
    return {name: names[name] for name in (*_STANDARD_TOKENS, *names) if name in names}


def _extra(settings: Mapping[str, Any]) -> Any:
    """Return the special tokens without a name, or with model-specific names."""
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []


def _texts(extra: Any) -> set[str]:
    values = extra.values() if isinstance(extra, dict) else extra
    return {str(value.get("content")) if isinstance(value, dict) else str(value) for value in values}


def _apply_declarations(backend: tokenizers.Tokenizer, declarations: Mapping[str, Any]) -> dict[str, str]:
    """Give a tokenizer the declared parts, tokens and post-processor, and return the special tokens by name."""
    tokens = _Tokens(backend, declarations)
    settings, rebuilt = declarations["settings"], declarations["class"]
    if rebuilt:
        _replace_parts(backend, rebuilt, tokens.names)
    # Adding a token again gives it the last declared flags.
    backend.add_tokens([token for _, token in sorted(tokens.by_id.items())])
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in [*tokens.special(), *tokens.extra] if token.content not in special])
    if settings.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
    # A file may enable both (sentence embedding models do), which would truncate and pad documents.
    backend.no_truncation()
    backend.no_padding()
    if declarations["is_slow"]:
        backend.post_processor = _start_and_end(backend, settings, tokens.names)
    elif rebuilt and rebuilt["replaces_post_processor"]:
        backend.post_processor = _start_and_end(backend, {}, {})
    return tokens.names


def _cleans_up(settings: Mapping[str, Any], *, is_bpe: bool) -> bool:
    """Return whether transformers removes spaces before punctuation. For byte-pair encoders a second key decides."""
    key = "clean_up_tokenization_spaces"
    return bool(settings.get(key)) and (not is_bpe or bool(settings.get(f"{key}_{_EVEN_FOR_BPE}")))


def _replace_parts(backend: tokenizers.Tokenizer, rebuilt: Mapping[str, Any], names: Mapping[str, str]) -> None:
    parts = rebuilt["parts"]
    empty = {
        **{key: parts[key] for key in ("normalizer", "pre_tokenizer", "decoder")},
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
        "model": {**parts["model"], "unk_token": None, "type": "BPE", "vocab": {}, "merges": []},
    }
    made = tokenizers.Tokenizer.from_str(json.dumps(empty))
    backend.normalizer = made.normalizer
    backend.pre_tokenizer = made.pre_tokenizer
    backend.decoder = made.decoder
    options = {**parts["model"], "unk_token": names.get("unk_token") if rebuilt["takes_unk_token"] else None}
    for name, value in options.items():
        setattr(backend.model, name, value)


def _start_and_end(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]
) -> tokenizers.processors.PostProcessor:
    """Return the post-processor of the settings add_bos_token and add_eos_token."""
    first = names.get("bos_token") if settings.get("add_bos_token") else None
    last = names.get("eos_token") if settings.get("add_eos_token") else None
    words = [*([first] if first else []), "$A", *([last] if last else [])]
    ids = [(token, backend.token_to_id(token)) for token in {first, last} if token]
    return tokenizers.processors.TemplateProcessing(single=words, special_tokens=ids)


def _read_merges(content: bytes) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt, like the package."""
    pairs = []
    lines = content.decode().split("\n")
    # The last line also ends with a line feed.
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        words = line.removesuffix("\r").split(" ")
        if line.startswith("#version"):
            continue
        if len(words) != 2:
            raise ValueError(f"line {number} of merges.txt is not a pair of tokens")
        pairs.append((words[0], words[1]))
    return pairs


def _without_defaults(value: Any) -> Any:
    """Return a tree without the entries that are null, false or empty: newer versions of the package write more."""
    if isinstance(value, dict):
        return {name: _without_defaults(v) for name, v in value.items() if v or v == 0 and v is not False}
    return [_without_defaults(v) for v in value] if isinstance(value, list) else value


def _split(payload: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(itertools.accumulate(sizes))
    return [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a decoder, or the decoders of a sequence."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _byte_of_character() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_of_character()


def _unmapped(piece: str) -> bytes:
    """Return the bytes of an entry of a byte-level vocabulary."""
    return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else piece.encode()


if __name__ == "__main__":
    globals()["serve"](TokenizerWorker())
