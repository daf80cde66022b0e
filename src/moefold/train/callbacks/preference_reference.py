"""Callback that computes the reference log-probabilities of preference data, by a pass of the initial weights."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moefold.comm.collectives import all_reduce_sum
from moefold.comm.flight_recorder import FlightRecorder
from moefold.comm.groups import current_world
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.data.fingerprint import LOCATION_KEYS
from moefold.errors import ConfigError
from moefold.model.head import ModelOutput
from moefold.objectives.sequences import Sequences
from moefold.parallel.batch import Batch
from moefold.train.batch_sharding import BatchSharder
from moefold.train.callbacks.callback import CallbackStage, StageCallback, TrainingContext
from moefold.train.data_files import RunDataFiles
from moefold.train.data_loader import DataLoader


class ReferencePass(StageCallback):
    """Callback that fills in the column "reference_log_probs" before the first step.

    A new run computes it with its initial weights under its own mapping and stores it in the run folder. A resumed run
    reads it from there.

    Args:
        checkpoint: section of the recipe: the run that checkpoint.resume names also has the file.
    """

    stage = CallbackStage.REFERENCE

    def __init__(self, loader: DataLoader, checkpoint: CheckpointConfig) -> None:
        self._loader = loader
        self._checkpoint = checkpoint

    def on_start(self, context: TrainingContext) -> None:
        """Compute or read the log-probabilities of all pairs. It is collective.

        Raises:
            ConfigError: the run is resumed, and its folder has no log-probabilities for its data.
        """
        reference = self._loader.reference
        if reference is None:
            return
        name = _file_name(self._loader.files)
        path = context.folder / name
        if context.is_resumed:
            reference.values = self._read_on_rank0(context, name, reference.values.shape)
        else:
            reference.values = self.log_probs(context, len(reference.values))
        # A run that resumes from a checkpoint of another folder has its own file from now on.
        if context.is_first_rank and not (context.is_resumed and path.is_file()):
            draft = path.with_suffix(".tmp")
            with draft.open("wb") as file:
                np.save(file, reference.values)
            os.replace(draft, path)

    def log_probs(self, context: TrainingContext, num_pairs: int) -> NDArray[np.float64]:
        """Sum the log-probabilities of both sequences of each pair, float64 [pairs, 2]. It is collective.

        The forward pass is the same as in an evaluation, under the mapping of the training.
        """
        loader = self._loader
        model = context.training.model
        groups = model.groups
        recorder = SequenceLogProbs(tuple(model.stages[-1].loss.terms))
        with model.evaluating("the pass for the log-probabilities of the reference", recorder):
            for sampler in (loader.train_sampler, loader.validation_sampler):
                for batch in _epoch(loader.sharder(sampler), len(sampler), groups.recorder):
                    model.runner.evaluate(batch)
        # Sums and counts: the samples that fill up the last batch of an epoch are computed twice.
        totals = torch.zeros(num_pairs, 3, dtype=torch.float64)
        if groups.attn.tp.rank == 0 and groups.attn.cp.rank == 0:
            for pair_ids, sums in recorder.sums:
                is_pair = pair_ids.flatten() >= 0
                rows = torch.cat((sums.double().reshape(-1, 2), torch.ones(len(is_pair), 1, device=sums.device)), 1)
                totals.index_add_(0, pair_ids.flatten()[is_pair].cpu(), rows[is_pair].cpu())
        totals = all_reduce_sum(totals.to(groups.device), groups.world).cpu()
        return (totals[:, :2] / totals[:, 2:].clamp(min=1)).numpy()

    def _read_on_rank0(self, context: TrainingContext, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Read the file on rank 0, and send its array to all ranks. It is collective.

        It is in the run folder, or next to the checkpoint that checkpoint.resume names.
        """
        log_probs: NDArray[np.float64] | None = None
        folders = [context.folder]
        if self._checkpoint.resume not in ("auto", "never"):
            folders.append(Path(self._checkpoint.resume).resolve().parent.parent)
        if context.is_first_rank:
            names = (name, _former_file_name(self._loader.files))
            path = next((path for folder in folders for path in map(folder.joinpath, names) if path.is_file()), None)
            if path is not None:
                try:
                    log_probs = np.load(path, allow_pickle=False)
                except (OSError, ValueError):
                    log_probs = None
                if log_probs is not None and (log_probs.shape != shape or log_probs.dtype != np.float64):
                    log_probs = None
        on_rank0: NDArray[np.float64] | None = current_world().all_gather_object(log_probs)[0]
        if on_rank0 is None:
            raise ConfigError(
                f"run.dir={str(context.folder)!r} has no readable {name}, the log-probabilities of this data under the "
                "initial weights, which are trained already; restore the file and the data, or start a new run with "
                "checkpoint.init_from"
            )
        return on_rank0


_KEYS_OF_FORMAT_1 = {
    "align.reward": "reward",
    "align.threshold": "best",
    "align.beta": 0.1,
    "align.weight_cap": 20.0,
    "align.template": "{prompt} <reward>{reward:.2f}</reward>",
    "align.gamma": 0.5,
    "align.desirable_weight": 1.0,
    "align.undesirable_weight": 1.0,
}
"""Keys of [align] in every recipe so far: they are part of the names of files that a resumed run looks for."""


def _file_name(files: RunDataFiles) -> str:
    """Return a file name that depends on everything that determines the pairs or their log-probabilities."""
    order = files.order | _KEYS_OF_FORMAT_1
    order = {key: value for key, value in order.items() if key not in LOCATION_KEYS}
    return _hashed_name([order, list(files.fingerprints.values())])


def _former_file_name(files: RunDataFiles) -> str:
    """Return the file name of earlier versions, which also depended on the paths of the data."""
    fingerprints = {name: " ".join(digest.split()[:2]) for name, digest in files.fingerprints.items()}
    return _hashed_name([files.order | _KEYS_OF_FORMAT_1, fingerprints])


def _hashed_name(identity: object) -> str:
    return f"reference-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]}.npy"


def _epoch(sharder: BatchSharder, num_samples: int, recorder: FlightRecorder) -> Iterator[Batch]:
    """Yield this rank's shards of batches that cover each sample of an epoch."""
    for first in range(0, num_samples, sharder.global_batch_size):
        recorder.set_phase(f"log-probabilities of the reference, sample {first} of {num_samples}")
        yield sharder.batch(first)


class SequenceLogProbs:
    """Loss function that is always 0 and keeps the sum of the log-probabilities of each sequence of a row."""

    def __init__(self, terms: tuple[str, ...]) -> None:
        self.terms = terms
        self.sums: list[tuple[Tensor, Tensor]] = []
        """Pairs of "pair_ids", int64 [B, K / 2], and sums, [B, K], one for each micro-batch."""

    def __call__(self, output: ModelOutput, columns: Mapping[str, Tensor]) -> Tensor:
        """Keep the sums, after an all-reduce over cp."""
        sequences = Sequences(columns["sequence_ids"], output.context_parallel)
        (sums,) = sequences.sums(output.log_probs(columns["labels"]).unsqueeze(0))
        pair_ids = columns["pair_ids"]
        self.sums.append((pair_ids, sums[:, : 2 * pair_ids.shape[1]].detach()))
        return sums.new_zeros(len(self.terms))
