"""How uneven the recorded routing of a real run loads the ranks of ep. numpy alone."""

from pathlib import Path

import numpy as np

from moefold.config.schema import ModelConfig
from moefold.errors import ConfigError
from moefold.metrics.routing_trace import RoutingTrace


class RecordedRouting:
    """The recorded choices of a run, as loads of expert-parallel ranks.

    Args:
        folder: a run with `moe.trace_every`, or its folder `routing`.
        model: whose mappings are priced; it has the experts of the trace.

    Raises:
        ConfigError: there is no trace, it holds no step, or it is of another model.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self._trace = RoutingTrace(folder, "--trace")
        shape = self._trace.shape
        if (shape.num_experts, shape.top_k) != (model.num_experts, model.top_k):
            raise ConfigError(
                f"--trace={str(folder)!r} was traced with model.num_experts={shape.num_experts} and model.top_k="
                f"{shape.top_k}, and the model has {model.num_experts} and {model.top_k}; name a trace of this model"
            )
        if not self._trace.steps:
            raise ConfigError(f"--trace={str(folder)!r} holds no step; run with moe.trace_every at least once")
        self.num_steps = len(self._trace.steps)
        self._imbalance_by_ep: dict[int, float] = {}

    def imbalance(self, ep: int) -> float:
        """Copies of the busiest ep rank over the mean, averaged over steps, layers and exchanges.

        One exchange is of ep samples, or of the whole batch where it has fewer: a sample for each rank, as with
        micro-batches of one and attention that is not cut.
        """
        if ep not in self._imbalance_by_ep:
            steps = [self._step_imbalance(step, ep) for step in self._trace.steps]
            self._imbalance_by_ep[ep] = float(np.mean(steps))
        return self._imbalance_by_ep[ep]

    def _step_imbalance(self, step: int, ep: int) -> float:
        shape = self._trace.shape
        samples = min(ep, shape.global_batch_size)
        ratios = []
        for choices in self._trace.step(step):
            for first in range(0, shape.global_batch_size - samples + 1, samples):
                some = shape.check_expert_indices(choices[first : first + samples], step, "--trace")
                copies = np.bincount(some.ravel(), minlength=shape.num_experts)
                loads = copies.reshape(ep, -1).sum(1)
                ratios.append(loads.max() / loads.mean())
        return float(np.mean(ratios))
