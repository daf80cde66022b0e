"""Model that samples the rollouts of a run: the trained model, a copy under another mapping, or vLLM's."""

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.inference.vllm_engine import VllmEngine
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
        self._vllm: VllmEngine | None = None
        if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) and not cfg.rollout.ranks:
            self.cfg = rollout_config(cfg)
            layout = check_config(self.cfg, is_training=False)
            self.groups = ParallelGroups.create(layout, groups.device, groups.recorder)
            self.model = InferenceModel(self.cfg, self.groups)
            self._transfer = WeightTransfer(trained, self.model)

    def engine(self, *, records_routing: bool) -> VllmEngine | None:
        """Return the engine of rollout.engine="vllm", which the ranks make once; None for the own one. Collective.

        Raises:
            ConfigError: rollout.folder is of another model, or cannot be written to.
        """
        if self.cfg.rollout.uses_server and self._vllm is None:
            assert isinstance(self.model, ParallelModel), "checked before the run"
            self._vllm = VllmEngine(
                self.cfg.run,
                self.cfg.model,
                self.cfg.train,
                self.cfg.rollout,
                self.groups,
                self.model,
                records_routing=records_routing,
            )
        return self._vllm

    def update(self) -> float:
        """Update the weights to the trained weights; collective. Returns the seconds that it took.

        Raises:
            RunError: the vLLM server did not load them.
        """
        if self._vllm is not None:
            return self._vllm.update()
        if self._transfer is None:
            return 0.0
        self.groups.recorder.set_phase("copying the weights to the mapping of sampling")
        return self._transfer.run().seconds
