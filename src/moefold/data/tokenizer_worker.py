"""Program of the subprocess that runs a tokenizer.json; imports only `tokenizers` and the standard library.

A tokenizer.json is untrusted: its normalizer may turn a short text into gigabytes, and its regular expressions may
never end. So it runs in a separate process, with limits on memory and on the CPU time of each request.

A request is a line of JSON with the size of what follows; so is its answer. The first request is the tokenizer.json.
It is run by `limited_worker.py`.
"""

import array
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

# The threads of the package do not survive a fork, but there is none here.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SetMemoryLimit = Callable[[int], None]
Answer = tuple[dict[str, Any], bytes]


class Worker:
    """A tokenizer that answers requests."""

    def __init__(self, content: bytes) -> None:
        """Load a tokenizer.json."""
        self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # A file may enable both (sentence embedding models do), which would truncate and pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._post_processor: Any = self._tokenizer.post_processor
        # Without special tokens, a post-processor would only trim the offsets.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    def encode(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the ids of texts, and the character offset of each id if `offsets` is set."""
        texts = []
        start = 0
        for size in request["sizes"]:
            texts.append(payload[start : start + size].decode())
            start += size
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        if request["start"] and self._post_processor is not None:
            encodings = [self._post_processor.process(encoding, None, True) for encoding in encodings]
        data = b"".join(array.array("I", encoding.ids).tobytes() for encoding in encodings)
        if request["offsets"]:
            starts = (array.array("I", [start for start, _ in encoding.offsets]) for encoding in encodings)
            data += b"".join(part.tobytes() for part in starts)
        return {"counts": [len(encoding) for encoding in encodings]}, data

    def decode(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the text of ids, including special tokens."""
        ids = array.array("I", payload).tolist()
        return {}, self._tokenizer.decode(ids, skip_special_tokens=False).encode()

    def vocabulary(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the number of entries, one more than the largest id, and the ids of the tokens in `names`."""
        entries = self._tokenizer.get_vocab(with_added_tokens=True)
        found = {name: entries[name] for name in request["names"] if name in entries}
        return {"entries": len(entries), "vocab_size": max(entries.values(), default=-1) + 1, "ids": found}, b""

    def pieces(self, request: dict[str, Any], payload: bytes) -> Answer:
        """Return the bytes of each id in a text, and the ids of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        decoders = {step["type"] for step in _steps(json.loads(self._tokenizer.to_str())["decoder"])}
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        found = []
        for number in range(size):
            piece = self._tokenizer.id_to_token(number)
            if number in added or piece is None:
                found.append((added[number].content if number in added else "").encode())
            elif "ByteLevel" in decoders:
                found.append(_unmapped(piece))
            elif not decoders & {"Metaspace", "ByteFallback"}:
                found.append(self._tokenizer.decode([number], skip_special_tokens=False).encode())
            elif "ByteFallback" in decoders and (match := _BYTE_PIECE.fullmatch(piece)):
                found.append(bytes([int(match[1], 16)]))
            else:
                found.append(piece.replace("\u2581", " ").encode())
        special = sorted(number for number, token in added.items() if token.special)
        return {"sizes": [len(piece) for piece in found], "special": special}, b"".join(found)


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
    """Return the byte that each character of a byte-level vocabulary stands for, as in GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_of_character()


def _unmapped(piece: str) -> bytes:
    """Return the bytes of an entry of a byte-level vocabulary."""
    return bytes(_BYTES[one] for one in piece) if all(one in _BYTES for one in piece) else piece.encode()


def main(set_memory_limit: SetMemoryLimit) -> None:
    """Answer requests until standard input ends."""
    requests = sys.stdin.buffer
    worker: Worker | None = None
    while line := requests.readline():
        request = json.loads(line)
        payload = requests.read(request["bytes"])
        set_memory_limit(request["memory_bytes"])
        # The timer's SIGPROF kills the process when the time is over.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        try:
            if worker is None:
                worker = Worker(payload)
                header, data = {}, b""
            else:
                header, data = getattr(worker, request["do"])(request, payload)
        except BaseException as error:  # noqa: BLE001 - the Rust core panics by an exception that is no Exception
            header, data = {"refused": str(error) or type(error).__name__}, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, header, data)


def _write(answers: BinaryIO, header: dict[str, Any], data: bytes) -> None:
    answers.write(json.dumps(header | {"bytes": len(data)}).encode() + b"\n")
    answers.write(data)
    answers.flush()


if __name__ == "__main__":
    main(globals()["set_memory_limit"])
