"""Reference model of the KL penalty: a second set of weights under the training mapping, without gradients."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

    def load(self, folder: str = "") -> str:
        """Load the weights of rl.reference, and for "start" the initial adapters. It is collective.

        Args:
            folder: the checkpoint or Hugging Face folder that has them. "": the newest checkpoint of `source`.

        Returns:
            The folder, or "" for random weights.

        Raises:
            ConfigError: the weights cannot be read.
        """
        if self._cfg.rl.reference == "start":
            load_initial_adapters(self._cfg.lora, self._cfg.checkpoint, self._model)
        if not self.source:
            return ""
        # A run may have newer checkpoints when training is resumed.
        folder = folder or str(current_world().all_gather_object(resolve_weights_folder(weights_path(self.source)))[0])
        cfg = self._cfg
        upcycle = cfg.checkpoint.upcycle if cfg.rl.reference == "start" else None
        start = {"upcycle": replace(upcycle, dense=folder)} if upcycle else {"upcycle": None, "init_from": folder}
        checkpoint = replace(cfg.checkpoint, every=0, at_end=False, **start)
        is_first_rank = self._groups.rank == 0
        load_initial_weights(cfg.run, cfg.model, cfg.data, checkpoint, self._model, is_first_rank=is_first_rank)
        return folder

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
        folder = self._plateau.reference_folder if source == self._plateau.reference else ""
        if folder and not Path(folder).exists():
            raise ConfigError(
                f"{folder} is gone, which has the reference weights of this run; restore it, or name other weights by "
                "rl.reference"
            )
        self._plateau = replace(self._plateau, reference=source, reference_folder=self._model.load(folder))
