"""Reference model of the KL penalty: a second set of weights under the training mapping, without gradients."""

from dataclasses import replace

import torch
from torch import Tensor

from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.schema import Config
from moefold.convert.init_from import load_initial_weights
from moefold.convert.preflight import resolve_weights_folder, weights_path
from moefold.parallel.batch import Batch
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.train.adapter_weights import load_initial_adapters
from moefold.train.log_probs import LogProbCapture, label_log_probs

ENTRY_PREFIX = "reference."
"""Prefix of the reference weights in a checkpoint, which has them after a reset."""


class ReferenceModel:
    """Computes log-probabilities of batches under reference weights."""

    def __init__(self, cfg: Config, groups: ParallelGroups) -> None:
        """Build the model; collective. It has the weights of a new run of the recipe.

        Args:
            cfg: the recipe; rl.reference names the weights.
            groups: the process groups of the training mapping.
        """
        self._cfg = cfg
        self._groups = groups
        self._capture = LogProbCapture(cfg.rollout.temperature)
        self._model: ParallelModel = parallelize(cfg, groups, self._capture)
        # Recomputed and offloaded parts have nothing to save.
        self._model.train(False)
        for parameter in self._model.named_parameters.values():
            parameter.requires_grad_(False)
        self.is_reset = False
        """Whether the weights are the policy's at a reset, which checkpoints must contain."""

    @property
    def source(self) -> str:
        """The weights that rl.reference names: a run, a checkpoint or a Hugging Face folder; "" for random weights."""
        cfg = self._cfg
        if cfg.rl.reference != "start":
            return cfg.rl.reference
        return cfg.checkpoint.start

    def load(self, folder: str = "") -> str:
        """Load the weights that rl.reference names, with the initial adapters for rl.reference="start"; collective.

        Args:
            folder: the checkpoint or Hugging Face folder that has them; "": the newest checkpoint of `source`.

        Returns:
            The folder; "" for random weights.

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
        """Return the log-probability of each label of this rank's shard, [N, S/cp]; collective.

        Pipeline ranks other than the last return zeros.
        """
        self._groups.recorder.set_phase("log-probabilities of the reference model")
        for layer in self._model.moe_layers().values():
            layer.begin_step(0)
        return label_log_probs(self._model, self._capture, batch)

    def copy_from(self, policy: ParallelModel) -> None:
        """Take the weights of the policy, shard by shard; local."""
        targets = {**self._model.named_parameters, **self._model.named_buffers}
        with torch.no_grad():
            for name, tensor in {**policy.named_parameters, **policy.named_buffers}.items():
                targets[name].copy_(tensor)
        self.is_reset = True

    def entries(self) -> dict[str, Tensor]:
        """Return this rank's shards by their names in a checkpoint."""
        weights = {name: parameter.data for name, parameter in self._model.named_parameters.items()}
        return {f"{ENTRY_PREFIX}{name}": tensor for name, tensor in {**weights, **self._model.named_buffers}.items()}
