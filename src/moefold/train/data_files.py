"""The files of a run's data, as all ranks see them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moefold.checkpoint.data_files import SKIPPED
from moefold.checkpoint.folder import CheckpointMeta, data_losses, other_order
from moefold.config.schema import Config, DataConfig
from moefold.data.corrupt import corrupt_files
from moefold.data.fingerprint import files_that_differ, fingerprint, outline
from moefold.data.shards import Shards, find_shards, refuse_other_files
from moefold.data.source_file import named_sources
from moefold.errors import ConfigError, some
from moefold.launch.crew import Crew


@dataclass(frozen=True)
class SeenFiles:
    """What the files look like; the same on every rank."""

    looks: dict[str, str] = field(default_factory=dict)
    """As `fingerprint`: of the first rank, which alone reads of them; "skipped" where any rank has to leave one out."""
    faults: dict[str, str] = field(default_factory=dict)
    """What is wrong with those that are left out, as far as it is known."""


def agree_on_files(data: DataConfig, crew: Crew) -> SeenFiles:
    """What the files look like; collective over the crew.

    Raises:
        ConfigError: another rank sees other files, or leaves other ones out as corrupt, and they are not token files
            that may be left out; on every rank alike.
    """
    seen: SeenFiles = crew.gather(_look(data) if crew.is_first else None)[0]
    wrong = {} if crew.is_first else files_that_differ(seen.looks, outline(data))
    looks, faults = dict(seen.looks), dict(seen.faults)
    for rank, differences in enumerate(crew.gather(wrong)):
        words = f"rank {rank} sees other data than rank 0: {some(list(differences.values()))}"
        if differences and not (data.kind == "tokens" and data.corrupt == "skip"):
            raise ConfigError(f"{words}; give all machines the same files")
        for name in differences:
            looks[name] = SKIPPED
            faults.setdefault(name, words)
    return SeenFiles(looks, faults)


def agree_on_shards(cfg: Config, seen: SeenFiles, meta: CheckpointMeta | None, crew: Crew) -> Shards | None:
    """The token files that the samples of a run lie in, and those that are left out; collective over the crew.

    Args:
        cfg: the recipe.
        seen: what the files look like.
        meta: of the checkpoint whose samples the run goes on with; None for a run that begins.
        crew: all ranks.

    Returns:
        None for data of another kind.

    Raises:
        ConfigError: as `find_shards` and `refuse_other_files`, on the first rank; all files are lost.
    """
    if cfg.data.kind != "tokens":
        return None
    skipped = {name for name, look in seen.looks.items() if look == SKIPPED}
    if meta is not None and meta.data_tokens:
        losses = data_losses(meta, seen.looks)
        reasons = {name: meta.data_lost.get(name) or seen.faults.get(name, why) for name, why in losses.items()}
        known = Shards(meta.data_tokens, reasons)
        if crew.is_first:
            then = {name for name, look in meta.data_files.items() if look == SKIPPED}
            refuse_other_files(known, cfg.data, left_out=then | skipped)
        # No rank opens a file before the first one has let it pass.
        crew.gather(None)
        return known
    found = None
    if crew.is_first:
        found = find_shards(cfg.data, vocab_size=cfg.model.vocab_size, skipped=skipped)
    shards: Shards = crew.gather(found)[0]
    return shards


def goes_on(cfg: Config, meta: CheckpointMeta | None, looks: Mapping[str, str]) -> bool:
    """Whether a run takes the samples behind those of a checkpoint, rather than begin its data anew."""
    return meta is not None and not other_order(meta, cfg, looks)


def _look(data: DataConfig) -> SeenFiles:
    looks = fingerprint(data)
    if data.kind != "tokens" or SKIPPED not in looks.values():
        return SeenFiles(looks)
    faults = corrupt_files(data)
    return SeenFiles(looks, {name: faults[file] for name, file in named_sources(data) if file in faults})
