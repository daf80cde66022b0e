"""Sampling of rollouts by a vLLM server.

Weights are sent through a folder, requests by a rank of each dp rank.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from moefold.comm.collectives import broadcast_object
from moefold.comm.groups import current_world
from moefold.config.model import ModelConfig
from moefold.config.sections.rl import RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.rollout_weights import RolloutWeightWriter
from moefold.errors import RunError
from moefold.inference.engine.engine import StopCondition
from moefold.inference.engine.requests import Completion, Request
from moefold.inference.sampling import SamplingParams
from moefold.inference.vllm_server import VllmError, vllm_server
from moefold.parallel.parallel_model import ParallelModel


class VllmEngine:
    """Engine that generates completions by a vLLM server. `update` sends it the weights of training.

    All methods are collective over all ranks. Raises ConfigError if rollout.folder has another model, or cannot be
    written to.
    """

    def __init__(
        self,
        run: RunConfig,
        sizes: ModelConfig,
        train: TrainConfig,
        rollout: RolloutConfig,
        model: ParallelModel,
        *,
        records_routing: bool,
    ) -> None:
        self._groups = model.groups
        self._server = vllm_server(run, train, rollout, returns_experts=records_routing)
        self._slots = rollout.slots
        self._sampling = SamplingParams(temperature=rollout.temperature, seed=run.seed)
        self._layers = [number for stage in model.stages for number in stage.moe_layers()]
        self._model = sizes
        self._export = RolloutWeightWriter(model, Path(rollout.folder))
        self._version = ""

    def update(self) -> float:
        """Write the current weights to the folder and let the server load them, and return the seconds.

        Raises:
            RunError: the server did not load them. Raised on all ranks.
        """
        started_s = time.perf_counter()
        self._groups.recorder.set_phase("sending the weights to vLLM")
        self._export.write()
        world = current_world()
        version = f"moefold-{uuid4().hex}"
        reason = ""
        if world.is_rank0:
            try:
                self._server.load_weights(self._export.out.resolve(), version)
            except VllmError as error:
                reason = str(error)
        self._version, reason = world.all_gather_object((version, reason))[0]
        if reason:
            raise RunError(reason)
        return time.perf_counter() - started_s

    def generate(self, requests: Sequence[Request], *, is_complete: StopCondition | None = None) -> list[Completion]:
        """Generate a completion of every request, in their order.

        Args:
            requests: requests of this data-parallel rank, possibly none, the same on its ranks of tp and pp.
            is_complete: stop condition. A completion ends after the first token that satisfies it.

        Raises:
            RunError: the server failed. Raised on all ranks.
        """
        assert self._version, "update() before the first round"
        tp = self._groups.attn.tp
        pp = self._groups.pp
        results: list[tuple[Completion, NDArray[np.integer] | None]] = []
        reason = ""
        if tp.rank == 0 and pp.rank == 0:
            try:
                results = self._send(requests)
            except VllmError as error:
                reason = str(error)
        if reasons := [text for text in current_world().all_gather_object(reason) if text]:
            raise RunError(reasons[0])
        if pp.rank == 0:
            results = broadcast_object(results, tp, 0)
        results = broadcast_object(results, pp, 0)
        # With the experts of the MoE layers of this rank.
        completions = [
            completion if rows is None else replace(completion, expert_ids=rows[:, self._layers].transpose(1, 0, 2))
            for completion, rows in results
        ]
        if is_complete is None:
            return completions
        return [cut_off(number, completion, is_complete) for number, completion in enumerate(completions)]

    def _send(self, requests: Sequence[Request]) -> list[tuple[Completion, NDArray[np.integer] | None]]:
        """Send all requests, at most rollout.slots at a time, and return the answers in their order."""
        if not requests:
            return []
        deadline_s = time.monotonic() + self._server.timeout_s
        with ThreadPoolExecutor(min(self._slots, len(requests))) as pool:
            futures = [
                pool.submit(
                    self._server.complete, request, request.sampling or self._sampling, self._version, deadline_s
                )
                for request in requests
            ]
            try:
                results = [future.result() for future in futures]
            except VllmError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for _, experts in results:
            if experts is not None:
                self._check_experts(experts)
        return results

    def _check_experts(self, experts: NDArray[np.integer]) -> None:
        """Check that experts fit the model in training. Raise VllmError if they do not."""
        num_layers, top_k = experts.shape[1:]
        highest = int(experts.max(initial=0))
        moe = self._model.experts
        if (num_layers, top_k) != (self._model.num_layers, moe.top_k) or highest >= moe.num_choices:
            raise VllmError(
                f"vLLM returned {top_k} experts of each token in {num_layers} layers, numbered up to {highest}, and "
                f"the model has {moe.top_k} of {moe.num_experts} in {self._model.num_layers} layers; "
                "set rl.replay='off'"
            )


def cut_off(number: int, completion: Completion, is_complete: StopCondition) -> Completion:
    """End a completion after the first token, except the end-of-text token, that satisfies a stop condition."""
    is_eos = completion.finish_reason == "eos"
    for count in range(1, len(completion.tokens) + 1 - is_eos):
        if is_complete(number, completion.tokens[:count]):
            removed = len(completion.tokens) - count
            experts = completion.expert_ids
            return Completion(
                tokens=completion.tokens[:count],
                log_probs=completion.log_probs[:count],
                finish_reason="stop",
                expert_ids=None if experts is None else experts[:, : experts.shape[1] - removed],
            )
    return completion
