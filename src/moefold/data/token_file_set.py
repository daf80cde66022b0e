"""Token files of a run, recorded when it begins.

The numbers of the samples follow from the files and their lengths. A checkpoint stores both: if a file breaks later,
only samples with its tokens are skipped, and all others keep their numbers.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from moefold.config.sections.data import DataConfig
from moefold.data.input_paths import TOKEN_SUFFIXES, data_file_path, is_below
from moefold.data.shard_reader import OutOfVocabError
from moefold.data.source_listing import named_sources
from moefold.data.token_file import TokenFile, read_bin_header, read_header
from moefold.data.token_stream import TokenFileStream
from moefold.data.tokenize_record import check_finished
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting, format_list


@dataclass(frozen=True)
class TokenFileSet:
    """Token files by their names in the recipe, in the order of the data, recorded at the start of a run."""

    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in each file, at least one."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Dropped files, each with the reason."""

    def without(self, dropped: Mapping[str, str]) -> Self:
        """Return the files with more of them dropped. Earlier reasons are kept."""
        return replace(self, dropped={**dropped, **self.dropped})

    def files(self, data: DataConfig) -> tuple[TokenFile, ...]:
        """Return the files that data.path names, including dropped files. Raises ConfigError if there is none."""
        names = data.paths
        roots = [Path(name) for name in names]
        selected = [name for name in self.num_tokens if any(is_below(Path(name), root) for root in roots)]
        files = tuple(
            _recorded_file(data_file_path(name, names), self.num_tokens[name], data.token_dtype, name)
            for name in selected
        )
        if not files:
            raise ConfigError(
                f"{Setting('data.path', format_list([*names])):s} is empty: no token in its files; name files with "
                "tokens"
            )
        return files


def _recorded_file(path: Path, num_tokens: int, token_dtype: str, name: str) -> TokenFile:
    """Return a file of a run by its name. A missing file is reported when it is read."""
    if path.suffix != ".bin":
        return TokenFile(path, num_tokens, None, name)
    if not path.is_file():
        return TokenFile(path, num_tokens, np.dtype(token_dtype).newbyteorder("<"), name)
    return replace(read_bin_header(path, token_dtype), num_tokens=num_tokens, name=name)


def build_token_file_set(data: DataConfig, *, vocab_size: int, skipped: Set[str] = frozenset()) -> TokenFileSet:
    """Return the token files of a new run. data.corrupt="skip" drops files with out-of-vocabulary ids.

    Args:
        skipped: names of files that cannot be read.

    Raises:
        ConfigError: a file is not a token file, all are empty, or none is valid.
    """
    for name in data.paths:
        check_finished(data_file_path(name, [name]))
    shards = TokenFileSet(_count_tokens(data, skipped))
    files = shards.files(data)
    if data.corrupt == "fatal":
        return shards
    faults = TokenFileStream(files, vocab_size=vocab_size).find_bad_files()
    if len(faults) == len(files):
        # If all files have out-of-vocabulary ids, the vocabulary size is probably wrong.
        reasons = [str(fault) if isinstance(fault, OutOfVocabError) else fault.cause for fault in faults.values()]
        raise ConfigError(Problem("data.path", None, f"holds no valid file: {format_list(reasons)}", "copy them again"))
    return shards.without({name: fault.cause for name, fault in faults.items()})


def check_same_files(token_file_set: TokenFileSet, data: DataConfig, *, skipped: Set[str]) -> None:
    """Check that the token files of a checkpoint equal the recipe's, with the same lengths and order.

    Otherwise the run would read files that the recipe does not name, or renumber its samples: raises ConfigError.

    Args:
        token_file_set: the files in the checkpoint, of which dropped files are not checked.
        skipped: names of files of data.path that the run never had, or that cannot be read now.
    """
    recorded = {name: count for name, count in token_file_set.num_tokens.items() if name not in token_file_set.dropped}
    current = _count_tokens(data, skipped | token_file_set.dropped.keys())
    faults = [f"{name} is none of {Setting('data.path')}" for name in recorded if name not in current]
    faults += [f"{name} is not in the checkpoint" for name in current if name not in recorded]
    faults += [
        f"{name} holds {current[name]} tokens, and {count} in the checkpoint"
        for name, count in recorded.items()
        if current.get(name, count) != count
    ]
    if not faults and list(recorded) != list(current):
        faults = ["they are in another order"]
    if faults:
        raise ConfigError(
            f"the checkpoint names other token files than the recipe: {format_list(faults)}; its run used other data: "
            "resume from another checkpoint, or start a new run with its weights (checkpoint.init_from)"
        )


def _count_tokens(data: DataConfig, skipped: Set[str]) -> dict[str, int]:
    """Return the number of tokens of each non-empty file of data.path, by name, from the headers."""
    counts = {
        name: read_header(path, data.token_dtype).num_tokens
        for name, path in named_sources(data)
        if name not in skipped and path.suffix in TOKEN_SUFFIXES
    }
    return {name: count for name, count in counts.items() if count}
