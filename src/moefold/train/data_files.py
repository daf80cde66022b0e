"""The files of a run's data, as all ranks see them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moefold.checkpoint.data_files import SKIPPED
from moefold.checkpoint.folder import CheckpointMeta, data_order_change, dropped_files
from moefold.config.schema import Config, DataConfig
from moefold.data.corrupt import corrupt_files
from moefold.data.fingerprint import file_sizes, fingerprint, size_differences_by_file
from moefold.data.shards import TokenFileSet, build_token_file_set, check_same_files
from moefold.data.source_file import named_sources
from moefold.errors import ConfigError, format_list
from moefold.launch.crew import World


@dataclass(frozen=True)
class DataFingerprints:
    """What the files look like; the same on every rank."""

    by_name: dict[str, str] = field(default_factory=dict)
    """As `fingerprint`: of the first rank, which alone reads of them; "skipped" where any rank has to leave one out."""
    skip_reasons: dict[str, str] = field(default_factory=dict)
    """What is wrong with those that are left out, as far as it is known."""


def resolve_data_files(data: DataConfig, world: World) -> DataFingerprints:
    """What the files look like; collective over the crew.

    Raises:
        ConfigError: another rank sees other files, or leaves other ones out as corrupt, and they are not token files
            that may be left out; on every rank alike.
    """
    seen: DataFingerprints = world.all_gather_object(_read_fingerprints(data) if world.is_rank0 else None)[0]
    wrong = {} if world.is_rank0 else size_differences_by_file(seen.by_name, file_sizes(data))
    looks, faults = dict(seen.by_name), dict(seen.skip_reasons)
    for rank, differences in enumerate(world.all_gather_object(wrong)):
        words = f"rank {rank} sees other data than rank 0: {format_list(list(differences.values()))}"
        if differences and not (data.kind == "tokens" and data.corrupt == "skip"):
            raise ConfigError(f"{words}; give all machines the same files")
        for name in differences:
            looks[name] = SKIPPED
            faults.setdefault(name, words)
    return DataFingerprints(looks, faults)


def resolve_token_files(
    cfg: Config, fingerprints: DataFingerprints, meta: CheckpointMeta | None, world: World
) -> TokenFileSet | None:
    """The token files that the samples of a run lie in, and those that are left out; collective over the crew.

    Args:
        cfg: the recipe.
        fingerprints: what the files look like.
        meta: of the checkpoint whose samples the run goes on with; None for a run that begins.
        world: all ranks.

    Returns:
        None for data of another kind.

    Raises:
        ConfigError: as `build_token_file_set` and `check_same_files`, on the first rank; all files are lost.
    """
    if cfg.data.kind != "tokens":
        return None
    skipped = {name for name, look in fingerprints.by_name.items() if look == SKIPPED}
    if meta is not None and meta.data_tokens:
        losses = dropped_files(meta, fingerprints.by_name)
        reasons = {
            name: meta.data_lost.get(name) or fingerprints.skip_reasons.get(name, why) for name, why in losses.items()
        }
        known = TokenFileSet(meta.data_tokens, reasons)
        if world.is_rank0:
            then = {name for name, look in meta.data_files.items() if look == SKIPPED}
            check_same_files(known, cfg.data, skipped=then | skipped)
        # No rank opens a file before the first one has let it pass.
        world.all_gather_object(None)
        return known
    found = None
    if world.is_rank0:
        found = build_token_file_set(cfg.data, vocab_size=cfg.model.vocab_size, skipped=skipped)
    shards: TokenFileSet = world.all_gather_object(found)[0]
    return shards


def continues_data(cfg: Config, meta: CheckpointMeta | None, fingerprints: Mapping[str, str]) -> bool:
    """Whether a run takes the samples behind those of a checkpoint, rather than begin its data anew."""
    return meta is not None and not data_order_change(meta, cfg, fingerprints)


def _read_fingerprints(data: DataConfig) -> DataFingerprints:
    looks = fingerprint(data)
    if data.kind != "tokens" or SKIPPED not in looks.values():
        return DataFingerprints(looks)
    faults = corrupt_files(data)
    return DataFingerprints(looks, {name: faults[file] for name, file in named_sources(data) if file in faults})
