"""Reference model of the KL penalty: a second set of weights under the training mapping, without gradients."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.adapter_settings import folder_digest
from moefold.checkpoint.load import load_entries
from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.schema import Config
from moefold.config.sections.rl import RLConfig
from moefold.convert.init_from import load_initial_weights
from moefold.convert.preflight import resolve_weights_folder, weights_path
from moefold.errors import ConfigError
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.remote_path import to_path
from moefold.rl.plateau import Plateau
from moefold.train.adapter_weights import load_initial_adapters
from moefold.train.rl.log_probs import LogProbCapture, label_log_probs

ENTRY_PREFIX = "reference."
"""Prefix of the reference weights in a checkpoint, which has them after a reset."""


class ReferenceModel:
    """Computes log-probabilities of batches under reference weights."""

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        """Build the model. It is collective. It has the weights of a new run of the recipe."""
        self._cfg = cfg
        self._groups = groups
        self._capture = LogProbCapture(cfg.rollout.temperature)
        self._model: ParallelModel = parallelize(cfg, groups, self._capture)
        # Recomputed and offloaded parts have nothing to save.
        self._model.train(False)
        for parameter in self._model.named_parameters.values():
            parameter.requires_grad_(False)
        self.is_reset = False
        """True if the weights are the policy's at a reset, which checkpoints must contain."""

    @property
    def source(self) -> str:
        """The weights that rl.reference names: a run, a checkpoint or a Hugging Face folder. "": random weights."""
        cfg = self._cfg
        if cfg.rl.reference != "start":
            return cfg.rl.reference
        return cfg.checkpoint.start

    @property
    def begins_with_adapters(self) -> bool:
        """True for rl.reference="start" of a run that began with trained adapters."""
        return self._cfg.rl.reference == "start" and bool(self._cfg.lora.init_from)

    def load(self, recorded: Plateau) -> Plateau:
        """Load the weights that rl.reference names, with adapters for rl.reference="start". It is collective.

        Args:
            recorded: names the folders of weights and adapters that a run began with. "": the newest checkpoint.

        Returns:
            The same with the folders, "" for random weights and without adapters, and the digest of the weights.

        Raises:
            ConfigError: the weights cannot be read, or differ from the weights that the run began with.
        """
        cfg = self._cfg
        adapters = None
        if self.begins_with_adapters:
            adapters = load_initial_adapters(cfg.lora, cfg.checkpoint, self._model, recorded.reference_adapters)
        folder = recorded.reference_folder
        upcycle = cfg.checkpoint.upcycle if cfg.rl.reference == "start" else None
        if self.source:
            # A run may have newer checkpoints when training is resumed.
            found = folder or str(resolve_weights_folder(weights_path(self.source)))
            folder = current_world().broadcast_object(found)
            start = {"upcycle": replace(upcycle, dense=folder)} if upcycle else {"upcycle": None, "init_from": folder}
            checkpoint = replace(cfg.checkpoint, every=0, at_end=False, **start)
            is_first_rank = self._groups.rank == 0
            load_initial_weights(cfg.run, cfg.model, cfg.data, checkpoint, self._model, is_first_rank=is_first_rank)
        drawn: list[object] = [] if folder and upcycle is None else [cfg.run.seed, cfg.model.init_std]
        drawn += [] if upcycle is None else [upcycle.router_init, upcycle.scaling, upcycle.noise]
        digest = _digest_weights([to_path(folder)] if folder else [], adapters, drawn)
        if recorded.reference_digest not in ("", digest):
            raise ConfigError(
                f"the reference weights of this run, {self._describe(folder, adapters)}, are others now than at its "
                "start: restore them, or name weights in another folder by rl.reference"
            )
        return replace(
            recorded,
            reference_folder=folder,
            reference_adapters="" if adapters is None else str(adapters),
            reference_digest=digest,
        )

    def _describe(self, folder: str, adapters: Path | None) -> str:
        """Name the folders of the weights, or the seed of random ones."""
        weights = folder or f"random weights of run.seed={self._cfg.run.seed}"
        return f"{weights} with the adapters in {adapters}" if adapters else weights

    def log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probability of each label of this rank's shard, [N, S/cp]. It is collective.

        Pipeline ranks other than the last return zeros.
        """
        for layer in self._model.moe_layers().values():
            layer.begin_step(0)
        return label_log_probs(self._model, self._capture, batch, "the reference model")

    def copy_from(self, policy: ParallelModel) -> None:
        """Take the weights of the policy, shard by shard. It does not communicate."""
        targets = {**self._model.named_parameters, **self._model.named_buffers}
        with torch.no_grad():
            for name, tensor in {**policy.named_parameters, **policy.named_buffers}.items():
                targets[name].copy_(tensor)
        self.is_reset = True

    def entries(self) -> dict[str, Tensor]:
        """Return this rank's shards by their names in a checkpoint."""
        weights = {name: parameter.data for name, parameter in self._model.named_parameters.items()}
        return {f"{ENTRY_PREFIX}{name}": tensor for name, tensor in {**weights, **self._model.named_buffers}.items()}


class KLReference:
    """Reference of the KL penalty: a model if `rl.kl` is above 0, and the plateau after which the policy replaces it.

    Args:
        build: builds the reference model. It is collective, and so is the constructor.
    """

    def __init__(self, rl: RLConfig, policy: ParallelModel, build: Callable[[], ReferenceModel]) -> None:
        self._rl = rl
        self._policy = policy
        self._build = build
        self._model = build() if rl.kl else None
        self._plateau = Plateau()

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        """Return the column of a batch that the penalty reads, or empty without a penalty. It is collective."""
        return {} if self._model is None else {"reference_log_probs": self._model.log_probs(batch)}

    @property
    def lacks_evaluation(self) -> bool:
        """True if a signal has prevented the evaluation after the last step."""
        return self._plateau.lacks_evaluation

    def note_evaluation(self, *, is_done: bool) -> None:
        """Note whether an evaluation that was due has been done."""
        self._plateau = replace(self._plateau, lacks_evaluation=not is_done)

    def record(self, reward: float) -> bool:
        """Record a held-out reward. On a plateau make the current policy the reference model, and return True.

        Local, on every rank at the same step.
        """
        self._plateau = self._plateau.record(reward)
        patience = self._rl.reset_patience
        if not patience or self._plateau.num_since_best < patience:
            return False
        assert self._model is not None, "checked before the run"
        self._model.copy_from(self._policy)
        self._plateau = replace(self._plateau, num_since_best=0, num_resets=self._plateau.num_resets + 1)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the plateau, and which weights the model has."""
        return asdict(self._plateau)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Take the state of a checkpoint. None means a new run."""
        self._plateau = Plateau.from_json(state_dict)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the model after a reset. Before, they can be loaded again."""
        return self._model.entries() if self._model is not None and self._plateau.num_resets else {}

    def load_tensors(self, path: Path | None, *, is_of_rl: bool) -> None:
        """Load the weights of the model, after `load_state_dict`. It is collective.

        Raises:
            ConfigError: the weights cannot be read.
        """
        if self._model is None:
            # Without a KL penalty the next checkpoint has no weights of a reset.
            self._plateau = replace(self._plateau, num_resets=0)
            return
        if path is not None and self._plateau.num_resets:
            load_entries(path, self._model.entries())
            self._model.is_reset = True
            return
        if self._model.is_reset:
            # A rollback to a checkpoint before the reset. Random weights are drawn again.
            self._model = self._build()
        if path is not None and not is_of_rl and self._rl.reference == "start":
            raise ConfigError(
                f"{path} is of a run without reinforcement learning, so rl.reference='start' is no longer at hand: "
                f"start a new run with checkpoint.init_from={str(path)!r}, or name the weights by rl.reference"
            )
        source = self._model.source
        recorded = self._plateau
        has_adapters = self._model.begins_with_adapters
        is_known = bool(recorded.reference_digest)
        if source != recorded.reference or (is_known and has_adapters != bool(recorded.reference_adapters)):
            recorded = replace(
                recorded, reference=source, reference_folder="", reference_adapters="", reference_digest=""
            )
        for folder in filter(None, (recorded.reference_folder, recorded.reference_adapters)):
            if not to_path(folder).exists():
                raise ConfigError(
                    f"{folder} is gone, which has the reference weights of this run; restore it, or name other weights "
                    "by rl.reference"
                )
        self._plateau = self._model.load(recorded)


def _digest_weights(folders: Sequence[Path], adapters: Path | None, drawn: Sequence[object]) -> str:
    """Return a digest of the files of weights and adapters, and of the settings of weights that are drawn. Collective.

    Only the first rank reads the files.
    """
    world = current_world()
    digest = ""
    if world.is_rank0:
        files = [folder_digest(folder) for folder in (*folders, *filter(None, [adapters]))]
        digest = hashlib.sha256(json.dumps([files, list(drawn)]).encode()).hexdigest()
    return str(world.broadcast_object(digest))
