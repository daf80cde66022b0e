"""The reader of a tokenizer folder: ids, special tokens, chat templates and ends, as transformers declares them.

`read_tokenizer_folder` reads every file that `AutoTokenizer` takes something from: tokenizer.json, or vocab.json and
merges.txt; tokenizer_config.json, special_tokens_map.json, added_tokens.json; chat_template.jinja and
additional_chat_templates; config.json, which may choose the class of the tokenizer; and, for the ends of a text,
generation_config.json. No code of the folder is run. Torch-free.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.bounded_read import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    read_bytes,
    read_json,
    read_text,
)
from moefold.data.tokenizer_classes import PLAIN, ClassTable, TokenizerClass
from moefold.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIR = "additional_chat_templates"
SLOW_FILES = ("vocab.json", "merges.txt")
"""Files of a byte-pair encoder without a tokenizer.json."""
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools, where there are several."""
_STANDARD_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
)
"""End-of-text tokens of published tokenizers, in order of preference, for a folder that declares none."""


@dataclass(frozen=True)
class TokenizerFolder:
    """Declarations of the files of a tokenizer folder."""

    file: Path
    """tokenizer.json, or vocab.json."""
    backend: "tokenizers.Tokenizer"
    """The tokenizer, with the declared tokens, parts and post-processor."""
    special_tokens: Mapping[str, str]
    """Declared tokens by name, such as `bos_token`; a template may use each by its name."""
    templates: Mapping[str, str]
    """Chat templates by name; one without a name is `DEFAULT_TEMPLATE`."""
    template_file: Path
    """Origin of the templates, for messages."""
    ends: tuple[int, ...]
    """Ids that end a generated text, as generation_config.json, else config.json, declares them; may be empty."""
    notes: tuple[str, ...]
    """What is not declared and was guessed, or is declared and cannot be followed."""

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token by its name, such as "bos_token"; None if none is declared."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def end_of_text(self) -> tuple[int | None, str]:
        """Return the id that ends documents, and a note if no file declares it.

        It is the declared eos_token, else the first id of `ends`, else the first of `END_OF_TEXT_NAMES` in the
        vocabulary, else None.
        """
        if (declared := self.token_id("eos_token")) is not None:
            return declared, ""
        if self.ends and self.backend.id_to_token(self.ends[0]) is not None:
            return self.ends[0], ""
        for name in END_OF_TEXT_NAMES:
            if (found := self.backend.token_to_id(name)) is not None:
                note = (
                    f"{self.file}: no file declares an eos_token: {name} (id {found}) is taken for the end of a text; "
                    f'declare it: {{"eos_token": ...}} in {SETTINGS_FILE} next to it'
                )
                return found, note
        return None, f"{self.file}: no file declares an eos_token, so no token ends a document"


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a folder, else its vocab.json; the path itself if it is a file."""
    if not path.is_dir():
        return path
    slow = path / SLOW_FILES[0]
    has_slow_files = slow.is_file() and (path / SLOW_FILES[1]).is_file()
    return slow if has_slow_files and not (path / TOKENIZER_FILE).exists() else path / TOKENIZER_FILE


def declaring_files(path: Path) -> dict[str, Path]:
    """Return the files that `read_tokenizer_folder` reads, by their names in a folder of their own.

    A file of another name than tokenizer.json is one in that folder.
    """
    file = tokenizer_file(path)
    names = [SETTINGS_FILE, TOKENS_MAP_FILE, ADDED_TOKENS_FILE, TEMPLATE_FILE, CONFIG_FILE, GENERATION_FILE]
    names += [f"{TEMPLATE_DIR}/{one.name}" for one in sorted((file.parent / TEMPLATE_DIR).glob("*.jinja"))]
    is_slow = file.name == SLOW_FILES[0]
    own = {name: file.with_name(name) for name in SLOW_FILES} if is_slow else {TOKENIZER_FILE: file}
    return own | {name: file.parent / name for name in names if (file.parent / name).is_file()}


def read_tokenizer_folder(path: Path) -> TokenizerFolder:
    """Read a tokenizer.json and the files next to it, or a folder.

    Raises:
        ConfigError: a file is missing, cannot be read, or is not what its name says.
    """
    file = tokenizer_file(path)
    folder = file.parent
    settings = _read_object(folder / SETTINGS_FILE)
    config = _read_object(folder / CONFIG_FILE)
    generation = _read_object(folder / GENERATION_FILE)
    is_slow = file.name == SLOW_FILES[0]
    content = b"" if is_slow else _read_content(file)
    table = ClassTable.load()
    name = table.choose(settings, config, is_byte_level=b'"ByteLevel"' in content)
    rebuilt = table.rebuilt(name, settings)
    with translate_tokenizer_errors(file, "is not a tokenizer.json of the tokenizers package"):
        backend = _slow_backend(file, name, rebuilt) if is_slow else load_backend(content)
    notes = [] if is_slow else _class_notes(file, name, rebuilt, backend)
    if notes:
        rebuilt = None
    tokens = _Tokens(rebuilt, settings, folder, backend)
    with translate_tokenizer_errors(file, "has parts or added tokens that do not fit it"):
        _apply_declarations(backend, settings, tokens, rebuilt, is_slow=is_slow)
    templates, template_file = _read_templates(folder, settings)
    return TokenizerFolder(
        file, backend, tokens.names(), templates, template_file, _end_ids(generation) or _end_ids(config), tuple(notes)
    )


def load_backend(content: bytes) -> "tokenizers.Tokenizer":
    """Return the tokenizer of the content of a tokenizer.json."""
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content)


@contextmanager
def translate_tokenizer_errors(file: Path, failure: str) -> Iterator[None]:
    """Turn exceptions of the tokenizers package, including panics of its Rust core, into a ConfigError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"data.tokenizer={str(file)!r} {failure} ({error}); name another tokenizer.json, "
            'or use data.tokenizer="bytes"'
        ) from error


class _Tokens:
    """The special and added tokens of a folder: of its files, and of the class."""

    def __init__(
        self,
        rebuilt: TokenizerClass | None,
        settings: Mapping[str, Any],
        folder: Path,
        backend: "tokenizers.Tokenizer",
    ) -> None:
        import tokenizers

        self._make = tokenizers.AddedToken
        declared = dict(settings)
        self.by_id: dict[int, tokenizers.AddedToken] = {}
        if "added_tokens_decoder" in settings:
            entries = settings["added_tokens_decoder"]
            if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
                raise ConfigError(
                    f"{folder / SETTINGS_FILE}: added_tokens_decoder must be an object of objects; mend it"
                )
            self.by_id = {int(number): self._token(entry) for number, entry in entries.items()}
        else:
            declared |= _read_object(folder / TOKENS_MAP_FILE)
            named = self._named({**(rebuilt.special_tokens if rebuilt else {}), **declared})
            for text, number in _read_object(folder / ADDED_TOKENS_FILE).items():
                is_special = text in named.values() or text in _texts(_extra(declared))
                self.by_id[int(number)] = self._make(text, normalized=not is_special, special=is_special)
        # As transformers does, which replaces a token of another file by its id.
        self.by_id = {**backend.get_added_tokens_decoder(), **self.by_id}
        padding = backend.padding or {}
        defaults = {**(rebuilt.special_tokens if rebuilt else {})}
        if "pad_token" in padding:
            defaults.setdefault("pad_token", padding["pad_token"])
        self._declared = {**defaults, **declared}
        extra = _extra(declared)
        if isinstance(extra, dict):
            self._declared |= extra
            extra = []
        self.extra = [self._token(one) if isinstance(one, dict) else self._make(one, special=True) for one in extra]

    def names(self) -> dict[str, str]:
        """Return the special tokens by name."""
        return self._named(self._declared)

    def special(self) -> "list[tokenizers.AddedToken]":
        """Return the named special tokens with their flags."""
        found = []
        known = {token.content: token for token in self.by_id.values()}
        for name, text in self.names().items():
            value = self._declared[name]
            token = self._token(value) if isinstance(value, dict) else self._make(text, special=True)
            found.append(known.get(text, token))
        return found

    def _named(self, values: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return {name: found[name] for name in (*_STANDARD_TOKENS, *found) if name in found}

    def _token(self, entry: Mapping[str, Any]) -> "tokenizers.AddedToken":
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return self._make(str(entry.get("content", "")), **{key: bool(entry[key]) for key in flags if key in entry})


def _extra(settings: Mapping[str, Any]) -> Any:
    """Return the special tokens without a name, or with names of the model's own."""
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []


def _texts(extra: Any) -> set[str]:
    values = extra.values() if isinstance(extra, dict) else extra
    return {str(one.get("content")) if isinstance(one, dict) else str(one) for one in values}


def _apply_declarations(
    backend: "tokenizers.Tokenizer",
    settings: Mapping[str, Any],
    tokens: _Tokens,
    rebuilt: TokenizerClass | None,
    *,
    is_slow: bool,
) -> None:
    """Give a tokenizer the parts of its class, the declared tokens and the declared post-processor."""
    if rebuilt is not None:
        _replace_parts(backend, rebuilt, tokens.names())
    # Adding a token again gives it the flags that are declared last.
    backend.add_tokens([token for _, token in sorted(tokens.by_id.items())])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in [*tokens.special(), *tokens.extra] if token.content not in known])
    if settings.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
    # A file may enable both (sentence embedding models do), which would truncate and pad documents.
    backend.no_truncation()
    backend.no_padding()
    if is_slow:
        backend.post_processor = _start_and_end(backend, settings, tokens.names())
    elif rebuilt is not None and rebuilt.replaces_post_processor:
        backend.post_processor = _start_and_end(backend, {}, {})


def _replace_parts(backend: "tokenizers.Tokenizer", rebuilt: TokenizerClass, names: Mapping[str, str]) -> None:
    import tokenizers

    parts = rebuilt.parts
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
    options = {**parts["model"], "unk_token": names.get("unk_token") if rebuilt.takes_unk_token else None}
    for name, value in options.items():
        setattr(backend.model, name, value)


def _start_and_end(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], names: Mapping[str, str]
) -> "tokenizers.processors.PostProcessor":
    """Return the post-processor of the settings add_bos_token and add_eos_token."""
    import tokenizers

    first = names.get("bos_token") if settings.get("add_bos_token") else None
    last = names.get("eos_token") if settings.get("add_eos_token") else None
    words = [*([first] if first else []), "$A", *([last] if last else [])]
    ids = [(token, backend.token_to_id(token)) for token in {first, last} if token]
    return tokenizers.processors.TemplateProcessing(single=words, special_tokens=ids)


def _slow_backend(file: Path, name: str, rebuilt: TokenizerClass | None) -> "tokenizers.Tokenizer":
    """Return the tokenizer of vocab.json and merges.txt, whose other parts only the class knows."""
    import tokenizers

    if rebuilt is None or not rebuilt.reads_merges:
        named = f"its class {name} does not read them" if name != PLAIN else "no file names its class"
        raise ConfigError(
            f"{file.parent} has {SLOW_FILES[0]} and {SLOW_FILES[1]}, but no {TOKENIZER_FILE}, and {named}; save one "
            "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    for one in (file, file.with_name(SLOW_FILES[1])):
        _read_content(one)
    vocab, merges = tokenizers.models.BPE.read_file(str(file), str(file.with_name(SLOW_FILES[1])))
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))


def _class_notes(file: Path, name: str, rebuilt: TokenizerClass | None, backend: "tokenizers.Tokenizer") -> list[str]:
    """Return a note if transformers would not use a tokenizer.json as it is, and its changes are not known."""
    if rebuilt is None and name != PLAIN:
        return [
            f"{file} is read as it is; transformers has a class {name} for it, whose code may replace parts of it: "
            "compare the ids of a text"
        ]
    if rebuilt is not None and type(backend.model).__name__ != "BPE":
        return [
            f"{file} is read as it is: it is no byte-pair encoder, which transformers' class {name} would take it for; "
            f'set "tokenizer_class": "PreTrainedTokenizerFast" in {SETTINGS_FILE}'
        ]
    return []


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Return the chat templates of a folder by name, and their origin; files take the place of all in the settings."""
    found = {}
    file = folder / TEMPLATE_FILE
    if file.is_file():
        found[DEFAULT_TEMPLATE] = read_template(file)
    for other in sorted((folder / TEMPLATE_DIR).glob("*.jinja")):
        found[other.name.removesuffix(".jinja")] = read_template(other)
    if found:
        return found, file
    declared = settings.get("chat_template")
    if isinstance(declared, list):
        declared = {str(one.get("name")): one.get("template") for one in declared if isinstance(one, dict)}
    if not isinstance(declared, dict):
        declared = {DEFAULT_TEMPLATE: declared}
    named = {name: source for name, source in declared.items() if isinstance(source, str)}
    return named, folder / SETTINGS_FILE


def read_template(file: Path) -> str:
    """Return the source of a chat template.

    Raises:
        ConfigError: it cannot be read, or is not text.
    """
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not readable text ({error}); name a chat template in UTF-8") from error


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ends = config.get("eos_token_id")
    return tuple(number for number in (ends if isinstance(ends, list) else [ends]) if type(number) is int)


def _read_content(file: Path) -> bytes:
    try:
        return read_bytes(file, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={str(file)!r} is not readable ({error.strerror}); name a tokenizer.json"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if the file does not exist."""
    try:
        found = read_json(file, MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable {file.name} ({error}); fix or remove it") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a {file.name}: it holds no object; fix or remove it")
    return found


def content_hash(folder: TokenizerFolder) -> str:
    """Return a hash of what makes the ids of a text and the text of ids.

    These are vocabulary, merges, added tokens, normaliser, pre-tokeniser and decoder. Saving a tokenizer again, with
    another version of its package, rewrites its bytes and keeps them.
    """
    tree = json.loads(folder.backend.to_str())
    parts = [tree[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")]
    return hashlib.sha256(json.dumps(_without_defaults(parts), sort_keys=True).encode()).hexdigest()


def has_same_content_hash(first: Path, second: Path) -> bool:
    """Return whether two tokenizers have the same `content_hash`.

    Raises:
        ConfigError: one cannot be read.
    """
    return content_hash(read_tokenizer_folder(first)) == content_hash(read_tokenizer_folder(second))


def _without_defaults(value: Any) -> Any:
    """Return a tree without the entries that are null, false or empty: newer versions of the package write more."""
    if isinstance(value, dict):
        return {name: _without_defaults(one) for name, one in value.items() if one or one == 0 and one is not False}
    return [_without_defaults(one) for one in value] if isinstance(value, list) else value
