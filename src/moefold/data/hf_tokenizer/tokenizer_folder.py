"""Reader of a tokenizer folder: ids, special tokens, chat templates and ends, like transformers.

`read_tokenizer_folder` reads every file that `AutoTokenizer` uses: tokenizer.json (or vocab.json and merges.txt),
tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja and additional_chat_templates. It
reads config.json too, which may choose the class of the tokenizer, and generation_config.json for the ends of a text.
No code of the folder is run. A subprocess (`TokenizerProcess`) loads the tokenizer itself and applies the declarations
to it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moefold.bounded_read import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    read_bytes,
    read_json_object,
    read_text,
)
from moefold.data.hf_tokenizer.class_table import PLAIN, ClassTable, TokenizerClass
from moefold.data.hf_tokenizer.tokenizer_process import TokenizerError, TokenizerLimits, TokenizerProcess, TokenTable
from moefold.data.input_paths import (
    ADDED_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATE_DIR,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENS_MAP_FILE,
)
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting

_CANNOT_ENCODE = "cannot make tokens of a text"
SLOW_FILES = ("vocab.json", "merges.txt")
"""Files of a byte-pair encoder without a tokenizer.json."""
UNREAD_FILES = ("*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
"""Patterns of vocabularies that are not read, except vocab.json with merges.txt. transformers converts them."""
_VERSIONED_FILE = re.compile(r"tokenizer\..*\.json")
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools, if there are several templates."""
END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)
"""End-of-text tokens of published tokenizers, in order of preference, for a folder without a declaration."""


@dataclass(frozen=True)
class TokenizerFolder:
    """Declarations of the files of a tokenizer folder."""

    file: Path
    """tokenizer.json, or vocab.json."""
    process: TokenizerProcess
    """The tokenizer, with the declared tokens, parts and post-processor."""
    vocab_size: int
    """One more than the largest id, or 0 for an empty vocabulary."""
    added_ids: tuple[int, ...]
    """Ids of the tokens that divide a text before it is tokenised, in order."""
    ids: Mapping[str, int]
    """Ids of the special tokens, and of `END_OF_TEXT_NAMES` in the vocabulary."""
    special_tokens: Mapping[str, str]
    """Declared tokens by name, such as `bos_token`. A template may use each by its name."""
    templates: Mapping[str, str]
    """Chat templates by name. A template without a name is `DEFAULT_TEMPLATE`."""
    template_file: Path
    """Origin of the templates, for messages."""
    usable_end: int | None
    """First id of `declared_ends`, if it is in the vocabulary."""
    notes: tuple[str, ...]
    """Notes on guesses for missing declarations, and on declarations that are not supported."""

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token by its name, such as "bos_token", or None if it is not declared."""
        token = self.special_tokens.get(name)
        return None if token is None else self.ids.get(token)

    def end_of_text(self) -> tuple[int | None, str]:
        """Return the id that ends documents, and a note if no file declares it.

        The id is the declared eos_token, else `usable_end`, else the first of `END_OF_TEXT_NAMES` in the vocabulary,
        else None.
        """
        if (declared := self.token_id("eos_token")) is not None:
            return declared, ""
        if self.usable_end is not None:
            return self.usable_end, ""
        for name in END_OF_TEXT_NAMES:
            if (number := self.ids.get(name)) is not None:
                note = (
                    f"{self.file}: no file declares an eos_token: {name} (id {number}) is taken for the end of a text; "
                    f'declare it: {{"eos_token": ...}} in {TOKENIZER_CONFIG_FILE} next to it'
                )
                return number, note
        return None, f"{self.file}: no file declares an eos_token, so no token ends a document"


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a folder, or else its vocab.json. A path of a file is returned unchanged."""
    if not path.is_dir():
        return path
    slow = path / SLOW_FILES[0]
    has_slow_files = slow.is_file() and (path / SLOW_FILES[1]).is_file()
    return slow if has_slow_files and not (path / TOKENIZER_FILE).exists() else path / TOKENIZER_FILE


def missing_file_reason(folder: Path) -> str:
    """Return the reason why a folder without a tokenizer.json cannot be read, and the way out."""
    unread = [file.name for pattern in UNREAD_FILES for file in sorted(folder.glob(pattern))]
    if not unread:
        return f"{str(folder)!r} has no tokenizer ({TOKENIZER_FILE}), so the model could read no text; add its files"
    return (
        f"{str(folder)!r} has {unread[0]}, but no {TOKENIZER_FILE}, which moefold reads text with; save one with "
        "transformers, which converts it (pip install transformers sentencepiece tiktoken protobuf): "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def _check_file_choice(file: Path, settings: Mapping[str, Any]) -> None:
    """Check that no setting replaces tokenizer.json by another file, depending on the version of transformers."""
    files = settings.get("fast_tokenizer_files")
    names = [name for name in files if isinstance(name, str)] if isinstance(files, list) else []
    if versioned := [name for name in names if _VERSIONED_FILE.search(name)]:
        raise ConfigError(
            f"{file.parent / TOKENIZER_CONFIG_FILE}: fast_tokenizer_files names {versioned[0]}, which transformers "
            f"reads in place of {TOKENIZER_FILE} from a version on; copy the file to use to {TOKENIZER_FILE}, and "
            "remove the key"
        )


def declaring_files(path: Path) -> dict[str, Path]:
    """Return the files that `read_tokenizer_folder` reads, by their names in a separate folder.

    A tokenizer file with another name becomes tokenizer.json in that folder.
    """
    file = tokenizer_file(path)
    names = [
        TOKENIZER_CONFIG_FILE,
        TOKENS_MAP_FILE,
        ADDED_TOKENS_FILE,
        CHAT_TEMPLATE_FILE,
        CONFIG_FILE,
        GENERATION_FILE,
    ]
    names += [f"{TEMPLATE_DIR}/{template.name}" for template in sorted((file.parent / TEMPLATE_DIR).glob("*.jinja"))]
    is_slow = file.name == SLOW_FILES[0]
    files = {name: file.with_name(name) for name in SLOW_FILES} if is_slow else {TOKENIZER_FILE: file}
    return files | {name: file.parent / name for name in names if (file.parent / name).is_file()}


def read_tokenizer_folder(path: Path, limits: TokenizerLimits | None = None) -> TokenizerFolder:
    """Read a tokenizer.json and the files next to it, or a folder.

    Raises:
        ConfigError: a file is missing, cannot be read, or does not match its name.
    """
    file = tokenizer_file(path)
    folder = file.parent
    if path.is_dir() and not file.exists():
        raise ConfigError(
            f"{Setting('data.tokenizer', missing_file_reason(path)):s}, or use {Setting('data.tokenizer', 'bytes')}"
        )
    if any(fnmatchcase(file.name, pattern) for pattern in UNREAD_FILES if pattern != SLOW_FILES[0]):
        way_out = "name its folder" if (folder / TOKENIZER_FILE).exists() else missing_file_reason(folder)
        raise ConfigError(Problem("data.tokenizer", str(path), f"is not a {TOKENIZER_FILE}: {way_out}"))
    settings = _read_object(folder / TOKENIZER_CONFIG_FILE)
    config = _read_object(folder / CONFIG_FILE)
    ends = declared_ends(folder)
    is_slow = file.name == SLOW_FILES[0]
    _check_file_choice(file, settings)
    process = _start_process(file, limits or TokenizerLimits())
    table = ClassTable.load()
    name = table.choose(settings, config, is_byte_level=process.is_byte_level and not is_slow)
    rebuilt = table.rebuilt(name, settings)
    if is_slow and (rebuilt is None or not rebuilt.reads_merges):
        reason = f"its class {name} does not read them" if name != PLAIN else "no file names its class"
        raise ConfigError(
            f"{folder} has {SLOW_FILES[0]} and {SLOW_FILES[1]}, but no {TOKENIZER_FILE}, and {reason}; save one "
            "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    notes = [] if is_slow else _class_notes(file, name, rebuilt, process.model)
    declarations = {
        **_declared_tokens(folder, settings),
        "class": None if notes or rebuilt is None else asdict(rebuilt),
        "is_slow": is_slow,
        "asked_tokens": END_OF_TEXT_NAMES,
        "asked_ids": ends[:1],
    }
    with translate_tokenizer_errors(file, "has parts or added tokens that do not fit it"):
        answer = process.declare(declarations)
    if declarations["class"] and "added_tokens_decoder" in settings and answer["unlisted"]:
        notes.append(
            f"{folder / TOKENIZER_CONFIG_FILE}: added_tokens_decoder lacks {answer['unlisted'][0]!r} of {file.name}, "
            f"and transformers' class {name} gives another id to such a token; the id of {file.name} is taken: list it"
        )
    templates, template_file = _read_templates(folder, settings)
    return TokenizerFolder(
        file=file,
        process=process,
        vocab_size=answer["vocab_size"],
        added_ids=tuple(answer["added_ids"]),
        ids=answer["ids"],
        special_tokens=answer["special_tokens"],
        templates=templates,
        template_file=template_file,
        usable_end=ends[0] if answer["known_ids"] else None,
        notes=tuple(notes),
    )


@contextmanager
def translate_tokenizer_errors(file: Path, failure: str) -> Iterator[None]:
    """Turn errors of the tokenizer, and texts that are not Unicode, into a ConfigError."""
    try:
        yield
    except (TokenizerError, UnicodeError) as error:
        rule = f"{failure} ({error})"
        way_out = f"name another tokenizer.json, or use {Setting('data.tokenizer', 'bytes')}"
        raise ConfigError(Problem("data.tokenizer", str(file), rule, way_out)) from error


def _start_process(file: Path, limits: TokenizerLimits) -> TokenizerProcess:
    files = (file, file.with_name(SLOW_FILES[1])) if file.name == SLOW_FILES[0] else (file,)
    with translate_tokenizer_errors(file, "is not a tokenizer.json of the tokenizers package"):
        try:
            return TokenizerProcess(lambda: [read_bytes(file, MAX_TOKENIZER_BYTES) for file in files], limits)
        except OSError as error:
            rule = f"is not readable ({error.strerror})"
            raise ConfigError(Problem("data.tokenizer", str(file), rule, "name a tokenizer.json")) from error


def _declared_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a folder, and the tokens of the files that transformers reads with them."""
    # A template may be long, and declares no token.
    declared = {key: value for key, value in settings.items() if key != "chat_template"}
    if "added_tokens_decoder" not in declared:
        token_files = {"tokens_map": TOKENS_MAP_FILE, "added_tokens": ADDED_TOKENS_FILE}
        return {"settings": declared, **{key: _read_object(folder / name) for key, name in token_files.items()}}
    entries = declared["added_tokens_decoder"]
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(
            f"{folder / TOKENIZER_CONFIG_FILE}: added_tokens_decoder must be an object of objects; mend it"
        )
    return {"settings": declared, "tokens_map": {}, "added_tokens": {}}


def _class_notes(file: Path, name: str, rebuilt: TokenizerClass | None, model: str) -> list[str]:
    """Return a note if transformers would change a tokenizer.json in an unknown way."""
    if rebuilt is None and name != PLAIN:
        return [
            f"{file} is read as it is; transformers has a class {name} for it, whose code may replace parts of it: "
            "compare the ids of a text"
        ]
    if rebuilt is not None and model != "BPE":
        return [
            f"{file} is read as it is: it is not a byte-pair encoder, which transformers' class {name} would take it "
            f'for; set "tokenizer_class": "PreTrainedTokenizerFast" in {TOKENIZER_CONFIG_FILE}'
        ]
    return []


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Return the chat templates of a folder by name, and their origin. Files replace all templates in the settings."""
    templates = {}
    file = folder / CHAT_TEMPLATE_FILE
    if file.is_file():
        templates[DEFAULT_TEMPLATE] = read_template(file)
    for path in sorted((folder / TEMPLATE_DIR).glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = read_template(path)
    if templates:
        return templates, file
    declared = settings.get("chat_template")
    if isinstance(declared, list):
        declared = {str(entry.get("name")): entry.get("template") for entry in declared if isinstance(entry, dict)}
    if not isinstance(declared, dict):
        declared = {DEFAULT_TEMPLATE: declared}
    by_name = {name: source for name, source in declared.items() if isinstance(source, str)}
    return by_name, folder / TOKENIZER_CONFIG_FILE


def read_template(file: Path) -> str:
    """Return the source of a chat template. Raises ConfigError if the file cannot be read, or is not text."""
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not readable text ({error}); name a chat template in UTF-8") from error


def declared_ends(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a generated text, of generation_config.json or else of config.json. There may be none.

    Raises:
        ConfigError: eos_token_id is neither an id nor a list of ids.
    """
    for file in (folder / GENERATION_FILE, folder / CONFIG_FILE):
        declared = _read_object(file).get("eos_token_id")
        ends = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if any(type(number) is not int or number < 0 for number in ends):
            raise ConfigError(
                f"{file}: eos_token_id={declared!r} must be an id, or a list of ids; correct or remove it"
            )
        if ends:
            return tuple(ends)
    return ()


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file, or {} if the file does not exist."""
    try:
        return read_json_object(file, MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable {file.name} ({error}); fix or remove it") from error


def has_same_content_hash(first: Path, second: Path) -> bool:
    """Return whether two tokenizers have the same content hash. Raises ConfigError if one cannot be read."""
    first_hash, second_hash = (read_tokenizer_folder(path).process.content_hash() for path in (first, second))
    return first_hash == second_hash


class JsonTokenizer:
    """The tokenizer of a folder: a tokenizer.json of the `tokenizers` package and the files next to it.

    Documents are separated by the declared end-of-text token (`TokenizerFolder.end_of_text`). Special tokens that occur
    in the text become their ids. The tokenizer runs in a subprocess with limited memory and time: its files are
    untrusted.
    """

    def __init__(self, path: Path, limits: TokenizerLimits | None = None) -> None:
        """Load a tokenizer.json, or a folder with one. Raises ConfigError if it is missing or not a tokenizer."""
        self._limits = limits
        self.folder = read_tokenizer_folder(path, limits)
        """Declarations of the files."""
        self._file = self.folder.file
        self._process = self.folder.process
        self.vocab_size = self.folder.vocab_size
        if not self.vocab_size:
            rule = "has an empty vocabulary"
            raise ConfigError(Problem("data.tokenizer", str(self._file), rule, "name a trained tokenizer.json"))
        self.added_ids = np.array(self.folder.added_ids, dtype=np.int64)
        self.bos_id: int | None = self.folder.token_id("bos_token")
        self.separator_id: int | None
        self.separator_id, note = self.folder.end_of_text()
        self.notes = (*self.folder.notes, *([note] if note else []))
        with translate_tokenizer_errors(self._file, "cannot be compared with others"):
            self.identity = f"{self._process.content_hash()} separator={self.separator_id}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another process starts its own subprocess."""
        return JsonTokenizer, (self._file, self._limits)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text, [tokens], without added special tokens."""
        return self.encode_batch([text])[0]

    def encode_start(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text that begins a document, [tokens], with the special tokens of the post-processor."""
        with translate_tokenizer_errors(self._file, _CANNOT_ENCODE):
            return next(self._process.encode([text], start=True))[0]

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Return the ids of several texts, on all cores."""
        with translate_tokenizer_errors(self._file, _CANNOT_ENCODE):
            return [ids for ids, _ in self._process.encode(texts)]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return the ids of several texts, and the character range of each id, on all cores."""
        with translate_tokenizer_errors(self._file, _CANNOT_ENCODE):
            return list(self._process.encode(texts, offsets=True))

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ids, including special tokens."""
        flat = np.asarray(ids, dtype=np.int64).reshape(-1)
        with translate_tokenizer_errors(self._file, "cannot make text of tokens"):
            return self._process.decode(flat)

    def token_table(self) -> TokenTable:
        """Return the table of the text of each id. It takes about a second for a large vocabulary."""
        with translate_tokenizer_errors(self._file, "cannot list its tokens"):
            return TokenTable(*self._process.pieces())
