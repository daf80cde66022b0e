"""Program of the subprocess that runs a tokenizer.json; imports only `tokenizers` and the standard library.

A tokenizer.json is untrusted: its normalizer may turn a short text into gigabytes, and its regular expressions may
never end. So it runs in a separate process, with limits on memory and on the CPU time of each request.

A request is a line of JSON with the size of what follows; so is its answer. The first request is the tokenizer.json.
It is run by `limited_worker.py`.
"""

import array
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

# The threads of the package do not survive a fork, but there is none here.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
import tokenizers

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
