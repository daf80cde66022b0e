"""Weights for ranks that only sample: every value, and no byte that a rank does not need."""

from dataclasses import replace

import pytest
import torch

from moefold.comm.groups import ParallelGroups
from moefold.comm.sharded_tensor import local_slice
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.cost.shard_boxes import WeightSharding
from moefold.model.local_param import local_tensor
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallelize import parallelize
from moefold.parallel.remote_reshard import WeightReceiver, WeightSender
from moefold.parallel.reshard import weight_tensors
from moefold.topology.rollout_mapping import rollout_config
from moefold.validate.config import check_config
from tests.slow import slow
from tests.split_job import split_pool
from tests.verify.recipes import tiny

pytestmark = pytest.mark.parity

MAX_BUCKET_BYTES = 3000


def _recipe(training: dict[str, int], sampling: dict[str, int], **model: object) -> Config:
    cfg = tiny(
        model={
            "layers": 4,
            "tie_embeddings": True,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            **model,
        },
        train={"global_batch_size": 8},
        **training,
    )
    return replace(
        cfg,
        run=RunConfig(seed=3, steps=4, device="cpu", dtype="bfloat16"),
        data=DataConfig(kind="task"),
        rl=RLConfig(group_size=4, objective="clip", staleness=1),
        rollout=RolloutConfig(**{"tp": 1, "pp": 1, "ep": 1, "etp": 1, **sampling}),
    )


@torch.no_grad()
def _transfer(cfg: Config) -> int:
    """Send two versions of the weights and return the bytes that this rank sent of one version.

    Each value of a weight tells its place in the tensor and the version, so a sampling rank knows the right value.
    """
    link = split_pool(cfg)
    sampled = rollout_config(cfg)
    source = WeightSharding.from_config(cfg, for_training=True)
    target = WeightSharding.from_config(sampled, for_training=False)
    device = torch.device("cpu")
    if link.split.samples(link.rank):
        model = InferenceModel.build(sampled, ParallelGroups.create(check_config(sampled, is_training=False), device))
        receiver = WeightReceiver(model, source, target, link, MAX_BUCKET_BYTES)
        for version in range(2):
            for tensor in weight_tensors(model).values():
                local_tensor(tensor).fill_(-1)
            received = receiver.receive()
            tensors = {name: local_slice(tensor) for name, tensor in weight_tensors(model).items()}
            for number, (name, (values, start)) in enumerate(sorted(tensors.items())):
                expected = _values(values.shape, start, name, version).to(values.dtype)
                assert torch.equal(values, expected), (name, number)
            assert received.received_bytes == sum(values.nbytes for values, _ in tensors.values())
            assert received.scratch_bytes <= MAX_BUCKET_BYTES
        return 0
    model = parallelize(cfg, ParallelGroups.create(check_config(cfg), device))
    sender = WeightSender(model, source, target, link, MAX_BUCKET_BYTES)
    sends = []
    for version in range(2):
        for name, tensor in weight_tensors(model).items():
            values, start = local_slice(tensor)
            values.copy_(_values(values.shape, start, name, version))
        # The second version overwrites the weights while the first may be in flight.
        sends.append(sender.send())
    for send in (one for of_version in sends for one in of_version):
        send.wait()
    return sender.sent_bytes


def _values(shape: torch.Size, start: tuple[int, ...], name: str, version: int) -> torch.Tensor:
    """Return 0 to 255, exact in bfloat16, by the indices of the whole tensor."""
    total = torch.full(shape, len(name) + 101 * version)
    for dim, (first, size) in enumerate(zip(start, shape, strict=True)):
        index = (torch.arange(first, first + size) * (7 + 4 * dim)).view(-1, *[1] * (len(shape) - dim - 1))
        total = total + index
    return (total % 256).double()


@pytest.mark.parametrize(
    ("training", "sampling"),
    [
        ({"world_size": 4, "etp": 2, "ep": 2, "zero": 3}, {"ranks": 2, "pp": 2}),
        *slow(
            [
                ({"world_size": 4, "tp": 2, "pp": 2, "ep": 2, "zero": 1}, {"ranks": 3}),
                ({"world_size": 2, "pp": 2}, {"ranks": 4, "tp": 2, "ep": 4}),
                ({"world_size": 4, "cp": 2, "zero": 2}, {"ranks": 2, "etp": 2}),
                ({"world_size": 1}, {"ranks": 1}),
            ]
        ),
    ],
)
def test_sampling_ranks_get_their_weights_and_no_more(pool, training, sampling):
    cfg = _recipe(training, sampling)
    sent = pool.run(cfg.num_job_ranks, _transfer, cfg)
    assert sum(sent) > 0
    assert max(sent[: cfg.parallel.world_size]) <= 2 * sum(sent) / cfg.parallel.world_size
