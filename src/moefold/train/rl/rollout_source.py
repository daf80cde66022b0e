"""Sources of the rounds of rollouts of a run: ranks that alternate between sampling and training."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from moefold.comm.groups import ParallelGroups, current_world
from moefold.config.schema import Config
from moefold.config.sections.rl import RLConfig
from moefold.data.prompts import PromptSource
from moefold.data.tokenizer import Tokenizer
from moefold.inference.vllm_engine import VllmEngine
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.kernels.select import select_kernels, uses_c_kernels
from moefold.parallel.paged_decoder import decoding_notice
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.reshard import WeightTransfer
from moefold.parallel.rollout_router_replay import RolloutReplay
from moefold.rl.reward import FailedReward, Reward
from moefold.rl.rollout_table import Round
from moefold.rl.round_statistics import RoundStatistics
from moefold.topology.rollout_mapping import has_rollout_mapping, rollout_config
from moefold.train.rl.rollout_sampler import PromptPosition, RoundSampler
from moefold.validate.config import check_config
from moefold.validate.exactness import inexact_settings, replays_routing


class RolloutModel:
    """The sampling model `model`, and its recipe `cfg`."""

    def __init__(self, cfg: Config, trained: ParallelModel) -> None:
        """Build a second model if the recipe has another mapping for sampling. It is collective."""
        self.model: ParallelModel | InferenceModel = trained
        self.cfg = cfg
        self._transfer: WeightTransfer | None = None
        self._vllm: VllmEngine | None = None
        if has_rollout_mapping(cfg.parallel, cfg.rl, cfg.rollout) and not cfg.rollout.ranks:
            self.cfg = rollout_config(cfg)
            layout = check_config(self.cfg, is_training=False)
            groups = ParallelGroups.create(layout, trained.groups.device, trained.groups.recorder)
            self.model = InferenceModel.build(self.cfg, groups)
            self._transfer = WeightTransfer(trained, self.model)

    def engine(self, *, records_routing: bool) -> VllmEngine | None:
        """Return the engine of rollout.engine="vllm", created once, or None for our own engine. It is collective.

        Raises:
            ConfigError: rollout.folder holds another model, or cannot be written to.
        """
        if self.cfg.rollout.uses_server and self._vllm is None:
            assert isinstance(self.model, ParallelModel), "checked before the run"
            self._vllm = VllmEngine(
                self.cfg.run,
                self.cfg.model,
                self.cfg.train,
                self.cfg.rollout,
                self.model,
                records_routing=records_routing,
            )
        return self._vllm

    def update(self) -> float:
        """Copy the trained weights into the sampling model and return the seconds that it took. It is collective.

        Raises:
            RunError: the vLLM server did not load them.
        """
        if self._vllm is not None:
            return self._vllm.update()
        if self._transfer is None:
            return 0.0
        self.model.groups.recorder.set_phase("copying the weights to the mapping of sampling")
        return self._transfer.run().seconds


class RolloutSource(Protocol):
    """Source of rounds of rollouts, which arrive in the order of the requests. It is collective over training ranks."""

    @property
    def num_ordered(self) -> int:
        """Number of rounds that are ordered and not received."""
        ...

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Order rounds that the current weights sample.

        Args:
            version: number of optimizer steps that produced the weights.
            restart: the prompts to begin with. None means the prompts after the last ordered round.
        """
        ...

    def receive(self) -> Round:
        """Return the next ordered round.

        Raises:
            RunError: a reward function failed.
        """
        ...

    def finish(self) -> None:
        """End the ranks that only sample, after the training loop."""
        ...


class LocalRollouts:
    """Samples at once, on the ranks that train.

    Args:
        update: gives the current weights to the model of the sampler, and returns the seconds that it took.
    """

    def __init__(self, sampler: RoundSampler, update: Callable[[], float], prompts: PromptSource) -> None:
        self._sampler = sampler
        self._update = update
        self._prompts = prompts
        self._rounds: deque[Round] = deque()
        self._position = PromptPosition(0)

    @property
    def num_ordered(self) -> int:
        """Number of rounds that are sampled and not received."""
        return len(self._rounds)

    def order(self, count: int, version: int, restart: PromptPosition | None) -> None:
        """Sample rounds with the current weights, see `RolloutSource.order`. It is collective.

        Raises:
            RunError: a reward function failed.
        """
        self._position = restart or self._position
        statistics = RoundStatistics(reshard_s=self._update())
        for _ in range(count):
            round_ = self._sampler.sample(self._prompts, self._position, version, statistics)
            self._position = replace(self._position, first=round_.prompts[-1] + 1)
            self._rounds.append(round_)
            statistics = RoundStatistics()

    def receive(self) -> Round:
        """Return the oldest round that was sampled and not received yet."""
        return self._rounds.popleft()

    def finish(self) -> None:
        """Do nothing: there are no other ranks."""


class LocalSampling:
    """Samplers of the ranks that train, for rollouts and for held-out prompts, and how exact they are.

    The constructor is collective.
    """

    def __init__(self, cfg: Config, model: ParallelModel, reward: Reward, tokenizer: Tokenizer) -> None:
        self.model = sampling = RolloutModel(cfg, model)
        device = model.groups.device
        has_c_kernels = device.type == "cpu" and uses_c_kernels(select_kernels(cfg, device))
        inexact = inexact_settings(cfg, device.type, has_c_kernels=has_c_kernels)
        # Ranks on other machines may have other kernels.
        self.is_exact = not any(current_world().all_gather_object(bool(inexact)))
        replays, replay_message = replays_routing(cfg.model, cfg.moe, cfg.rl, is_exact=self.is_exact)
        decoding = "" if cfg.rollout.uses_server else decoding_notice(sampling.model, cfg.rollout.cache)
        self.message = "; ".join(filter(None, (exactness_message(cfg.rl, inexact), replay_message, decoding)))
        self.replay: RolloutReplay | None = None
        if replays:
            stages = sampling.model.stages if isinstance(sampling.model, ParallelModel) else [sampling.model.stage]
            layers = [number for stage in stages for number in stage.moe_layers()]
            self.replay = RolloutReplay(model, sampling.model.groups, layers, cfg.model)
        engine = sampling.engine(records_routing=replays)
        self.sampler = RoundSampler(cfg, sampling.model, reward, tokenizer, records_routing=replays, engine=engine)
        self.evaluator = self.sampler
        if cfg.rl.staleness and sampling.model is not model:
            # The second model has older weights by then, or is on other ranks.
            self.evaluator = RoundSampler(cfg, model, reward, tokenizer)

    def evaluate(self, prompts: PromptSource) -> tuple[float | None, list[FailedReward]]:
        """Evaluate held-out prompts by the current weights, see `RoundSampler.evaluate`. It is collective."""
        if self.evaluator is self.sampler:
            self.model.update()
        return self.evaluator.evaluate(prompts)


def exactness_message(rl: RLConfig, inexact: Sequence[str]) -> str:
    """Return a log message that names the settings under which sampling differs from training by rounding."""
    staleness = rl.staleness
    if staleness:
        return f"rollouts are sampled by the weights of {staleness} optimizer step{'s' * (staleness > 1)} before"
    if not inexact:
        return "rollouts have the bits of training: the ratio of policy to sampler is 1"
    return f"rollouts differ from training by rounding: {'; '.join(inexact)}"
