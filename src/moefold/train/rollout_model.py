"""Model that samples the rollouts of a run: that of training in place, or a second one under another mapping."""

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.reshard import WeightTransfer
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.validate.config import check_config


class RolloutModel:
    """The model that samples, `model`, the process groups of its mapping, `groups`, and its recipe, `cfg`."""

    def __init__(self, cfg: Config, groups: ParallelGroups, trained: ParallelModel) -> None:
        """Build a second model if the recipe has another mapping for sampling; collective.

        Args:
            cfg: the recipe.
            groups: the process groups of training.
            trained: the model in training.
        """
        self.model: ParallelModel | InferenceModel = trained
        self.groups = groups
        self.cfg = cfg
        self._transfer: WeightTransfer | None = None
        if has_rollout_mapping(cfg) and not cfg.rollout.ranks:
            self.cfg = rollout_config(cfg)
            layout = check_config(self.cfg, is_training=False)
            self.groups = ParallelGroups.create(layout, groups.device, groups.recorder)
            self.model = InferenceModel(self.cfg, self.groups)
            self._transfer = WeightTransfer(trained, self.model)

    def update(self) -> float:
        """Bring the weights up to those of training; collective. Returns the seconds that it took."""
        if self._transfer is None:
            return 0.0
        self.groups.recorder.set_phase("copying the weights to the mapping of sampling")
        return self._transfer.run().seconds
