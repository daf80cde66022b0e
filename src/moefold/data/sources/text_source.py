"""Text corpora in a fixed order: the files that a recipe names, or the text of this Python installation."""

import codecs
import importlib.util
import logging
import sysconfig
import tokenize
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from moefold.bounded_read import open_regular
from moefold.data.input_paths import check_no_duplicates, data_paths, files_below
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

CHUNK_BYTES = 2**20
_SNIFFED_BYTES = 8192
_UTF16_AND_32_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
# Tests have odd bytes and duplicates, encodings are tables of numbers, site-packages differ between machines.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text file with its size and time when it was listed."""

    path: Path
    size_bytes: int
    mtime_ns: int
    is_named: bool
    """True if the recipe names the file itself, not its folder. Such a file may not be skipped."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A part of a document, at most about 1 MiB long, which bounds the memory for documents of any size."""

    text: str
    ends_document: bool
    size_bytes: int
    """Bytes of the source of the chunk, for progress."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in files, in a fixed order, read on demand."""

    kind: str
    files: tuple[TextFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, including files that are not text."""
        return sum(file.size_bytes for file in self.files)

    @property
    def identity(self) -> list[list[str | int]]:
        """Cache key: values that must stay the same for a tokenised copy to stay valid."""
        return [[str(file.path), file.size_bytes, file.mtime_ns] for file in self.files]

    def chunks(self) -> Iterator[TextChunk]:
        """Yield all documents in chunks. Raises ConfigError if a file is not readable or not UTF-8 text."""
        for file in self.files:
            try:
                yield from _file_chunks(self.kind, file)
            except OSError as error:
                raise _unreadable_error(file.path, error) from error


def text_corpus(path: str | tuple[str, ...], skipped: Set[Path] = frozenset()) -> Corpus:
    """Return the text files that data.path names, folders recursively, except skipped files. Each is a document."""
    paths = data_paths(path, "text")
    files = tuple(_stat_text_file(file, is_named=file in paths) for root in paths for file in files_below(root))
    check_no_duplicates(tuple(file.path.resolve() for file in files))
    check_not_empty(paths, num_files=len(files), size_bytes=sum(file.size_bytes for file in files))
    return Corpus("text", tuple(file for file in files if file.path not in skipped))


def check_decodable(file: TextFile) -> None:
    """Decode a text file from start to end. Raises ConfigError if it is not readable or not UTF-8 text."""
    for _ in Corpus("text", (file,)).chunks():
        pass


def check_not_empty(paths: tuple[Path, ...], *, num_files: int, size_bytes: int) -> None:
    """Raise ConfigError if data.path holds no file, or files without any text."""
    names = ", ".join(map(str, paths[:3])) + (", ..." if len(paths) > 3 else "")
    if not num_files:
        raise ConfigError(
            f"{Setting('data.path', names):s} holds no text file; name UTF-8 text files or a folder with some"
        )
    if not size_bytes:
        raise ConfigError(f"{Setting('data.path', names):s} is empty; name files with text in them")


def python_docs_corpus() -> Corpus:
    """Return the language reference (pydoc_data.topics, one document per topic) and the standard library's sources."""
    files = tuple(_stat_text_file(file, is_named=True) for file in _python_docs_files())
    if not files:
        raise ConfigError(
            'data.kind="python-docs" finds neither pydoc_data.topics nor standard library sources in this Python '
            'installation; use data.kind="text" with data.path, or "synthetic"'
        )
    return Corpus("python-docs", files)


def is_text(path: Path) -> bool:
    """Return whether a file looks like text: no zero byte near its start, or a UTF-16/32 byte-order mark.

    Files with such a mark are refused when they are read.
    """
    with _open(path) as file:
        start = file.read(_SNIFFED_BYTES)
    return start.startswith(_UTF16_AND_32_MARKS) or b"\0" not in start


def _python_docs_files() -> Iterator[Path]:
    package = importlib.util.find_spec("pydoc_data")
    for folder in (package and package.submodule_search_locations) or ():
        if (topics := Path(folder, "topics.py")).is_file():
            yield topics
    library = Path(sysconfig.get_path("stdlib"))
    if not library.is_dir():
        return
    for file in files_below(library, skipped_folders=_SKIPPED_FOLDERS):
        # _sysconfigdata depends on how this interpreter was built.
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata"):
            yield file


def _stat_text_file(path: Path, *, is_named: bool) -> TextFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable_error(path, error) from error
    return TextFile(path, status.st_size, status.st_mtime_ns, is_named)


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: Path, error: OSError) -> ConfigError:
    rule = f": {path} is not readable ({error.strerror})"
    return ConfigError(Problem("data.path", None, rule, "give read access or leave it out"))


def _file_chunks(kind: str, file: TextFile) -> Iterator[TextChunk]:
    if not file.size_bytes:
        return iter(())
    if kind == "text":
        return _text_chunks(file)
    return _topic_chunks(file) if file.path.parent.name == "pydoc_data" else _python_chunks(file)


def _topic_chunks(file: TextFile) -> Iterator[TextChunk]:
    from pydoc_data.topics import topics

    for i, name in enumerate(sorted(topics)):
        yield TextChunk(topics[name], ends_document=True, size_bytes=file.size_bytes if i == 0 else 0)


def _python_chunks(file: TextFile) -> Iterator[TextChunk]:
    with _open(file.path) as opened:
        encoding, _ = tokenize.detect_encoding(opened.readline)
        opened.seek(0)
        yield from _decoded_chunks(opened, file, encoding)


def _text_chunks(file: TextFile) -> Iterator[TextChunk]:
    if not is_text(file.path):
        if file.is_named:
            raise ConfigError(
                f"{Setting('data.path', file.path):s} is not text: it holds zero bytes; name UTF-8 text files"
            )
        logger.warning(f"{Setting('data.path')}: left out %s, which is not text (it holds zero bytes)", file.path)
        return
    with _open(file.path) as opened:
        yield from _decoded_chunks(opened, file, "utf-8")


def _decoded_chunks(opened: BinaryIO, file: TextFile, encoding: str) -> Iterator[TextChunk]:
    decoder = codecs.getincrementaldecoder(encoding)()
    text = ""
    read_bytes = 0
    block = opened.read(CHUNK_BYTES)
    while block:
        following = opened.read(CHUNK_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text += decoder.decode(block, final=not following)
        except UnicodeDecodeError as error:
            at_byte = read_bytes - pending + error.start
            rule = f": {file.path} is not UTF-8 text (byte {at_byte}: {error.reason})"
            way_out = "convert it, for example with `iconv -f latin1 -t utf-8`, or leave it out"
            raise ConfigError(Problem("data.path", None, rule, way_out)) from error
        if not read_bytes:
            text = text.removeprefix("\ufeff")
        read_bytes += len(block)
        end = _split_position(text) if following else len(text)
        if end:
            yield TextChunk(text[:end], ends_document=not following, size_bytes=len(block))
        text = text[end:]
        block = following


def _split_position(text: str) -> int:
    """Return the end of the last line that is followed by a line starting with a word.

    Byte-level tokenizers split words there, so that chunks have the same tokens as the whole text.
    """
    end = len(text) - 1
    while (end := text.rfind("\n", 1, end)) > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end + 1
    return len(text)
