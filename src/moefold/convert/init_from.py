"""Initial weights that are loaded, not drawn at random: imported, of another run, or upcycled."""

from pathlib import Path

from moefold.checkpoint.checkpoint_dir import check_integrity, skipped_checkpoints
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.comm.groups import current_world
from moefold.config.schema import Config
from moefold.convert.hf_config import is_hf_folder
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.hf_shards import save_sidecar_files
from moefold.convert.init_from_check import resolve_weights_folder
from moefold.convert.tokenizer_export import tokenizer_mismatch_message
from moefold.convert.upcycle import UpcycledSource
from moefold.convert.upcycle_check import export_message
from moefold.convert.weights import HfSource, WeightSource, load_shards
from moefold.parallel.parallelize import ParallelModel


def open_weights(path: Path) -> WeightSource:
    """Open the weights of a checkpoint or of a Hugging Face folder, as returned by `resolve_weights_folder`.

    Raises:
        ConfigError: the folder is neither of them, or damaged.
    """
    return HfSource(open_hf_folder(path)) if is_hf_folder(path) else CheckpointSource(path)


def load_initial_weights(cfg: Config, model: ParallelModel, *, is_first_rank: bool) -> str:
    """Fill this rank's shards from `checkpoint.init_from` or `model.upcycle_from`. Collective over all ranks.

    A run or a folder of checkpoints means its newest one, which the ranks agree on in case a run saves meanwhile. The
    first rank copies the tokenizer of the weights next to the run's checkpoints.

    Returns:
        A description of the loaded weights, on the first rank with a note if the run reads text with another tokenizer
        than that of the weights; "" if the initial weights stay random.

    Raises:
        ConfigError: the weights cannot be read, or are of another model.
    """
    given = cfg.checkpoint.init_from or cfg.model.upcycle_from
    if not given:
        return ""
    world = current_world()
    path: Path = world.all_gather_object(resolve_weights_folder(Path(given)))[0]
    skipped = skipped_checkpoints(Path(given), path) if is_first_rank else []
    if not is_hf_folder(path):
        check_integrity(path, world, checks_hashes=cfg.checkpoint.verify)
    source = open_weights(path)
    if cfg.model.upcycle_from:
        source = UpcycledSource(source, cfg.model, cfg.run.seed)
    load_shards(source, {**model.named_parameters, **model.named_buffers}, str(path))
    if is_first_rank and cfg.checkpoint.saves:
        save_sidecar_files(path, cfg)
    notes = [f"skipped a damaged checkpoint, {description}" for description in skipped]
    notes += [tokenizer_mismatch_message(cfg.data, path) if is_first_rank else ""]
    if cfg.model.upcycle_from:
        notes.append(export_message(cfg.model))
    summary = f"{'upcycled from' if cfg.model.upcycle_from else 'weights from'} {path}"
    return "; note: ".join([summary, *filter(None, notes)])
