"""The token files of a run as they were when it began, so that its samples keep their numbers when a file breaks.

Which sample has which number follows from the files and their lengths. A checkpoint holds both, and from then on a file
that is lost leaves a gap: samples with a token of it are left out, all others stay what they were.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from moefold.checkpoint.data_files import is_below
from moefold.config.schema import DataConfig
from moefold.data.shard_reader import OutOfVocabError
from moefold.data.source_file import TOKEN_SUFFIXES, named_sources
from moefold.data.token_file import TokenFile, TokenFileStream, check_finished, read_header
from moefold.errors import ConfigError, format_list


@dataclass(frozen=True)
class TokenFileSet:
    """Token files by their names in the recipe, in the order of the data."""

    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """How many tokens each holds, at least one."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Those that are left out, each with the reason."""

    def without(self, dropped: Mapping[str, str]) -> Self:
        """The same files, of which more are left out; a reason that was given stays."""
        return replace(self, dropped={**dropped, **self.dropped})

    def files(self, data: DataConfig) -> tuple[TokenFile, ...]:
        """The files that data.path stands for, those included that are left out.

        Raises:
            ConfigError: there is none, or a path is named twice.
        """
        names = (data.path,) if isinstance(data.path, str) else data.path
        roots = [Path(name) for name in names]
        mine = [name for name in self.num_tokens if any(is_below(Path(name), root) for root in roots)]
        dtype = np.dtype(data.token_dtype).newbyteorder("<")
        files = tuple(
            TokenFile(path, self.num_tokens[name], dtype if path.suffix == ".bin" else None, name)
            for name, path in ((name, Path(name).expanduser().absolute()) for name in mine)
        )
        if not files:
            raise ConfigError(
                f"data.path={format_list([*names])} is empty: no token in its files; name files with tokens"
            )
        return files


def build_token_file_set(data: DataConfig, *, vocab_size: int, skipped: Set[str] = frozenset()) -> TokenFileSet:
    """The token files of a run that begins; under data.corrupt="skip" those with strange ids are left out.

    Args:
        data: the recipe's section, of kind "tokens".
        vocab_size: model.vocab_size.
        skipped: names of files that cannot be read.

    Raises:
        ConfigError: a file is not one of ids, all are empty, or none is sound.
    """
    for name in (data.path,) if isinstance(data.path, str) else data.path:
        check_finished(Path(name).expanduser())
    shards = TokenFileSet(_count_tokens(data, skipped))
    files = shards.files(data)
    if data.corrupt == "fatal":
        return shards
    faults = TokenFileStream(files, vocab_size=vocab_size).find_bad_files()
    if len(faults) == len(files):
        # Where all hold strange ids, it is the vocabulary that is wrong.
        words = [str(fault) if isinstance(fault, OutOfVocabError) else fault.cause for fault in faults.values()]
        raise ConfigError(f"data.path holds no sound file: {format_list(words)}; copy them anew")
    return shards.without({name: fault.cause for name, fault in faults.items()})


def check_same_files(token_file_set: TokenFileSet, data: DataConfig, *, skipped: Set[str]) -> None:
    """Refuse token files of a checkpoint that are not those of the recipe, or are of other lengths or order.

    Args:
        token_file_set: what the checkpoint says; those that are lost cannot be looked at, and are not.
        data: the recipe's section, of kind "tokens".
        skipped: names of files of data.path that the run never had, or that cannot be read now.

    Raises:
        ConfigError: they are; a run would read what nobody named, or number its samples in another way than it did.
    """
    theirs = {name: count for name, count in token_file_set.num_tokens.items() if name not in token_file_set.dropped}
    ours = _count_tokens(data, skipped | token_file_set.dropped.keys())
    wrong = [f"{name} is none of data.path" for name in theirs if name not in ours]
    wrong += [f"{name} is not in the checkpoint" for name in ours if name not in theirs]
    wrong += [
        f"{name} holds {ours[name]} tokens, and {count} in the checkpoint"
        for name, count in theirs.items()
        if ours.get(name, count) != count
    ]
    if not wrong and list(theirs) != list(ours):
        wrong = ["they are in another order"]
    if wrong:
        raise ConfigError(
            f"the checkpoint names other token files than the recipe: {format_list(wrong)}; its description is not of a run "
            "on this data: resume from another checkpoint, or begin anew with its weights (checkpoint.init_from)"
        )


def _count_tokens(data: DataConfig, skipped: Set[str]) -> dict[str, int]:
    """Tokens of the files of data.path that hold any, by name; reads headers."""
    counts = {
        name: read_header(path, data.token_dtype).num_tokens
        for name, path in named_sources(data)
        if name not in skipped and path.suffix in TOKEN_SUFFIXES
    }
    return {name: count for name, count in counts.items() if count}
