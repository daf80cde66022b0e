"""Weighted mean of checkpoints, tensor by tensor (model soups, arXiv:2203.05482), in bounded memory.

A mean is only meaningful for weights that were trained from the same ancestor. Independent initialisations have
unrelated orders of hidden dimensions and experts, so that their mean is useless. This can be tested. With a common
ancestor, the embedding of a token or the router row of an expert has its most similar row in the other checkpoint at
the same token or expert.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moefold.checkpoint.checkpoint_meta import CheckpointMeta
from moefold.checkpoint.entries import OPTIONAL_BUFFER_SUFFIX
from moefold.checkpoint.integrity import check_integrity
from moefold.checkpoint.run_tokenizer import find_run_tokenizer, have_same_ids, trained_tokenizer
from moefold.checkpoint.streaming_io import CheckpointSource
from moefold.comm.groups import World
from moefold.convert.families.tensor_mapping import Region, Shape
from moefold.convert.hf_sidecar_files import find_sidecar_dir, recipe_tokenizer
from moefold.convert.import_folder import Conversion, OnBytes, finish_checkpoint, write_checkpoint
from moefold.convert.preflight import read_model
from moefold.convert.tokenizer_export import choose_tokenizer
from moefold.data.hf_tokenizer.tokenizer_folder import tokenizer_file
from moefold.data.input_paths import existing_path
from moefold.errors import ConfigError
from moefold.message_text import format_list
from moefold.remote_path import is_remote

EMBEDDING = "embedding.weight"
ROUTER_SUFFIX = ".ffn.router.weight"
MAX_COMPARED_ROWS = 128
"""Maximum number of tokens, evenly spaced over the vocabulary, whose embeddings are compared."""
MIN_MATCHED_FRACTION = 0.5
"""Minimum fraction of rows whose own row is the most similar. For N rows, independent initialisations have 1/N. With a
common ancestor it is nearly 1."""


class MergedSource:
    """Weighted mean of the weights of several checkpoints of one model, accumulated in float64.

    Each tensor has the widest of its stored dtypes. A read needs memory for its region in float64 and in the stored
    dtype, whatever the number and sharding of the checkpoints. The weights are divided by their sum.
    """

    def __init__(self, sources: Sequence[CheckpointSource], weights: Sequence[float]) -> None:
        self._sources = sources
        total = math.fsum(weights)
        self.fractions = [weight / total for weight in weights]
        self.shapes: Mapping[str, Shape] = _shapes(sources[0])
        for source in sources[1:]:
            _check_shapes(sources[0], source)

    def dtype(self, name: str) -> torch.dtype:
        """Return the widest stored dtype of a tensor."""
        dtypes = [source.dtype(name) for source in self._sources]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    def read(self, name: str, region: Region) -> Tensor:
        """Return the mean of a region."""
        inner = (slice(None), *region[1:])
        mean: Tensor | None = None
        for source, fraction in zip(self._sources, self.fractions, strict=True):
            # The first product is not added to zero, which would turn -0 into 0.
            block = source.read_rows(name, region[0])[inner].double().mul_(fraction)
            mean = block if mean is None else mean.add_(block)
        assert mean is not None
        return mean.to(self.dtype(name))

    def clear_cache(self) -> None:
        """Do nothing: this source has no cache."""


def merge_checkpoints(
    checkpoints: Sequence[Path], weights: Sequence[float], out: Path, world: World, *, on_bytes: OnBytes
) -> Conversion:
    """Write the weighted mean of checkpoints as a checkpoint of weights. It is collective over `world`.

    The result has no optimizer moments, like imported weights. The weights are divided by their sum.

    Args:
        checkpoints: checkpoint folders, as returned by `locate_checkpoint`. Any mapping may have written each.
        out: the checkpoint. It must not exist.

    Raises:
        ConfigError: a checkpoint or `out` cannot be used, the checkpoints have different tokenizers, or they were not
            trained from the same weights. Nothing remains written.
    """
    for checkpoint in checkpoints:
        check_integrity(checkpoint, world)
    sources = [CheckpointSource(checkpoint) for checkpoint in checkpoints]
    source = MergedSource(sources, weights)
    tokenizers = [_tokenizer_of(source.path, source.meta) for source in sources]
    check_same_tokenizer(checkpoints, tokenizers)
    if reasons := unaligned_reasons(sources):
        raise ConfigError(reasons[0])
    shares = ", ".join(f"{fraction:.6g} * {path}" for fraction, path in zip(source.fractions, checkpoints, strict=True))
    sidecar_dir = find_sidecar_dir(checkpoints[0])
    run_tokenizer = find_run_tokenizer(checkpoints[0])
    excluded = choose_tokenizer(sources[0].meta, sidecar_dir, run_tokenizer).excluded if sidecar_dir is not None else ()
    dtypes = {source.meta.dtype for source in sources}
    finish = partial(
        finish_checkpoint,
        out=out,
        model=read_model(checkpoints[0]),
        origin=f"merge of {shares}",
        tokenizer=next(filter(None, tokenizers), ""),
        dtype=min(dtypes) if len(dtypes) == 1 else "",
    )
    return write_checkpoint(source, out, world, finish, sidecar_dir, excluded, on_bytes=on_bytes)


def unaligned_reasons(sources: Sequence[CheckpointSource]) -> list[str]:
    """Return the reasons why a mean of checkpoints is useless: checkpoints without a common ancestor with the first."""
    first = sources[0]
    reasons = []
    for source in sources[1:]:
        pair = f"{str(first.path)!r} ({_describe_origin(first.meta)}) and {str(source.path)!r} "
        pair += f"({_describe_origin(source.meta)}) were not trained from the same weights"
        way_out = "merge checkpoints that continue from one run or from one checkpoint.init_from"
        matched, total = _matched_embeddings(first, source)
        if matched < MIN_MATCHED_FRACTION * total:
            reasons.append(
                f"{pair}: of {total} token embeddings only {matched} resemble the embedding of the same token "
                f"most, so the hidden dimensions are in unrelated orders; {way_out}"
            )
            continue
        matched, total = _matched_experts(first, source)
        if matched < MIN_MATCHED_FRACTION * total:
            reasons.append(
                f"{pair}: of {total} experts only {matched} have a router row that resembles the row of the same "
                f"expert most, so their experts are not aligned; {way_out}"
            )
    return reasons


def check_same_tokenizer(checkpoints: Sequence[Path], tokenizers: Sequence[str]) -> None:
    """Refuse checkpoints with different tokenizers, each "bytes", a path, or "" if it is unknown."""
    pairs = [(path, name) for path, name in zip(checkpoints, tokenizers, strict=True) if name]
    for path, name in pairs[1:]:
        first_path, first = pairs[0]
        is_same = (
            name == first if "bytes" in (name, first) else have_same_ids(_tokenizer_file(first), _tokenizer_file(name))
        )
        if not is_same:
            raise ConfigError(
                f"{str(first_path)!r} and {str(path)!r} were trained with different tokenizers, {first!r} and "
                f"{name!r}: their embeddings belong to different tokens; merge checkpoints with one tokenizer"
            )


def matched_rows(first: Tensor, second: Tensor) -> tuple[int, int]:
    """Count rows whose most similar row of another matrix [N, H], by cosine, has the same index, and all compared rows.

    Rows that are zero in either matrix are not counted. A tie counts as a match.
    """
    is_nonzero = (first.abs().sum(1) > 0) & (second.abs().sum(1) > 0)
    first_rows, second_rows = (rows[is_nonzero] for rows in (first, second))
    if not len(first_rows):
        return 0, 0
    similarity = (first_rows / first_rows.norm(dim=1, keepdim=True)) @ (
        second_rows / second_rows.norm(dim=1, keepdim=True)
    ).T
    return int((similarity.diagonal() >= similarity.amax(1) - 1e-9).sum()), len(first_rows)


def _matched_embeddings(first: CheckpointSource, other: CheckpointSource) -> tuple[int, int]:
    rows = first.shapes[EMBEDDING][0]
    count = min(rows, MAX_COMPARED_ROWS)
    rows_read = [i * rows // count for i in range(count)]
    samples = [
        torch.cat([source.read_rows(EMBEDDING, slice(row, row + 1)) for row in rows_read]).double()
        for source in (first, other)
    ]
    return matched_rows(*samples)


def _matched_experts(first: CheckpointSource, other: CheckpointSource) -> tuple[int, int]:
    """Count the experts of all MoE layers whose own row of the other router is the most similar."""
    pairs = [
        matched_rows(*(source.read_rows(name, slice(0, shape[0])).double() for source in (first, other)))
        for name, shape in first.shapes.items()
        if name.endswith(ROUTER_SUFFIX)
    ]
    return sum(matched for matched, _ in pairs), sum(total for _, total in pairs)


def _describe_origin(meta: CheckpointMeta) -> str:
    return meta.origin or f"step {meta.step} of a run with run.seed={meta.order.get('seed')}"


def _shapes(source: CheckpointSource) -> dict[str, Shape]:
    """Return the shapes of the weights, without the counts of a run's last step."""
    return {name: shape for name, shape in source.shapes.items() if not name.endswith(OPTIONAL_BUFFER_SUFFIX)}


def _check_shapes(first: CheckpointSource, other: CheckpointSource) -> None:
    first_shapes = _shapes(first)
    other_shapes = _shapes(other)
    differing = [
        f"{name} of shape {list(first_shapes.get(name, ()))} and {list(other_shapes.get(name, ()))}"
        for name in sorted(first_shapes.keys() | other_shapes.keys())
        if first_shapes.get(name) != other_shapes.get(name)
    ]
    if differing:
        raise ConfigError(
            f"{str(first.path)!r} and {str(other.path)!r} hold different tensors: {format_list(differing)}; "
            "merge checkpoints of one model"
        )


def _tokenizer_file(name: str) -> Path:
    return tokenizer_file(existing_path("data.tokenizer", name))


def _tokenizer_of(checkpoint: Path, meta: CheckpointMeta) -> str:
    """Return data.tokenizer for the weights of a checkpoint: "bytes", an absolute path, or "" if it is unknown."""
    sidecar_dir = find_sidecar_dir(checkpoint)
    imported = tokenizer_file(checkpoint if sidecar_dir is None else sidecar_dir)
    name = trained_tokenizer(checkpoint, meta) or recipe_tokenizer(checkpoint)
    if is_remote(name):
        return name
    if name == "bytes" or Path(name).is_file():
        return name if name == "bytes" else str(Path(name).absolute())
    return str(imported.absolute()) if imported.is_file() else ""
