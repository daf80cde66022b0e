"""Streaming DiLoCo of two sites against torchft's DiLoCo (`torchft.local_sgd.DiLoCo`)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.model.transformer import build_model
from moefold.model.weight_init import init_weights
from moefold.verify.compare import oracle_batch, token_chunks
from moefold.verify.distributed_run import open_samples
from moefold.verify.oracle import Oracle
from tests.models import edit_model
from tests.train.site_jobs import recipe, train_sites
from tests.train.site_results import TOLERANCE, checkpoint, largest_error, tensors

pytestmark = [pytest.mark.parity, pytest.mark.slow]

EVERY, NUM_FRAGMENTS, OVERLAP, KEEP_LOCAL = 8, 2, 2, 0.5
LR, MOMENTUM = 0.7, 0.9
LAST = 22
"""Step after which the fifth round is applied."""
STATE = "outer.weights."


class AllReduce:
    """A mean over two replicas that are driven in turn: a replica waits for it after both have begun it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        if len(self._tensors) > 1:
            mean = torch.stack(self._tensors).mean(0)
            for tensor in self._tensors:
                tensor.copy_(mean)
            self._tensors.clear()


class Manager:
    """The methods that torchft's DiLoCo needs of its manager, for replicas in one process whose rounds all succeed.

    Args:
        begun: the tensors of each mean, shared by all replicas.
        step: number of the first round.
    """

    _use_async_quorum = False

    def __init__(self, begun: list[list[Tensor]], step: int) -> None:
        self._begun = begun
        self._num_begun = 0
        self._step = step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> AllReduce:
        assert not should_quantize
        if self._num_begun == len(self._begun):
            self._begun.append([])
        tensors = self._begun[self._num_begun]
        self._num_begun += 1
        tensors.append(tensor)
        return AllReduce(tensors)

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def disallow_state_dict_read(self) -> None: ...

    def register_state_dict_fn(self, *_: Any) -> None: ...


class InnerOptimizer(torch.optim.Optimizer):
    """The steps of an oracle; torchft adds its hooks to the weights."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(list(oracle.weights.values()), {})
        self.oracle = oracle
        self.batch: Any = None

    def step(self, closure: Any = None) -> None:
        self.oracle.step(self.batch)


class Replica:
    """An oracle with torchft's DiLoCo; its rounds begin `OVERLAP` steps later than ours if it starts at step 0."""

    def __init__(self, torchft: Any, cfg: Any, weights: dict[str, Tensor], begun: list[list[Tensor]]) -> None:
        self.inner = InnerOptimizer(Oracle(cfg, weights, token_chunks(cfg.parallel, cfg.train)))
        # Parameters that share memory with the oracle, as torchft sets gradients of its own.
        self.names: list[list[str]] = [[] for _ in range(NUM_FRAGMENTS)]
        for name in weights:
            is_layer = name.startswith("layers.")
            self.names[int(name.split(".")[1]) % NUM_FRAGMENTS if is_layer else NUM_FRAGMENTS - 1].append(name)
        fragments = [
            nn.ParameterList([nn.Parameter(self.inner.oracle.weights[name].detach()) for name in names])
            for names in self.names
        ]
        outer = [torch.optim.SGD(f.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True) for f in fragments]
        self.diloco = torchft.DiLoCo(
            # Our first round is the round of the last fragment.
            Manager(begun, NUM_FRAGMENTS - 1),
            fragments,
            self.inner,
            outer,
            sync_every=EVERY,
            fragment_sync_delay=OVERLAP,
            fragment_update_alpha=KEEP_LOCAL,
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.inner.oracle.weights.items()}

    def outer_weights(self) -> dict[str, Tensor]:
        found = {}
        for names, fragment in zip(self.names, self.diloco._fragments, strict=True):
            found |= dict(zip(names, fragment.original_parameters.values(), strict=True))
        return found


def test_streaming_rounds_equal_torchft(pool, tmp_path):
    """Five rounds of two fragments, with an overlap of two steps and half of the local weights kept."""
    torchft = pytest.importorskip("torchft.local_sgd", reason="pip install torchft-nightly")
    settings = {"count": 2, "every": EVERY, "fragment_layers": 1, "overlap": OVERLAP, "keep_local": KEEP_LOCAL}
    cfg = recipe(tmp_path, LAST + OVERLAP, settings | {"lr": LR, "momentum": MOMENTUM}, every=LAST // 2)
    cfg = replace(
        cfg,
        model=edit_model(cfg.model, {"layers.ffn": "dense", "ffn.moe.router.expert_bias": False}),
        moe=replace(cfg.moe, bias_update_rate=0.0),
    )
    train_sites(pool, cfg)
    model = build_model(cfg)
    init_weights(model, cfg.model, cfg.run.seed)
    begun: list[list[Tensor]] = []
    initial = {name: p.detach().double() for name, p in model.named_parameters()}
    replicas = [Replica(torchft, cfg, {n: w.clone() for n, w in initial.items()}, begun) for _ in range(2)]
    data = open_samples(cfg).train
    size = cfg.train.global_batch_size
    for step in range(1, LAST + 1):
        if step == OVERLAP + 1:
            # torchft sends a fragment `OVERLAP` steps before the end of its interval, ours at the end.
            for replica in replicas:
                replica.diloco.__enter__()
        for number, replica in enumerate(replicas):
            mine = [number + 2 * index for index in range((step - 1) * size, step * size)]
            replica.inner.batch = oracle_batch(data, cfg.train, mine)
            replica.inner.step()
    assert math.isclose(replicas[0].diloco._manager.current_step(), NUM_FRAGMENTS - 1 + 5)
    for number, replica in enumerate(replicas):
        path = checkpoint(tmp_path / f"site-{number}", LAST)
        assert largest_error(tensors(path, "model."), replica.weights()) <= TOLERANCE
        assert largest_error(tensors(path, STATE), replica.outer_weights()) <= TOLERANCE
    assert largest_error(replicas[0].outer_weights(), initial) > 0.01
