"""Resharding in memory: every pair of mappings, by bits against the checkpoint of the source."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.checkpoint.checkpoint_meta import TrainState, counted
from moefold.checkpoint.entries import checkpoint_state
from moefold.checkpoint.load import load_weights
from moefold.checkpoint.write_checkpoint import write_checkpoint
from moefold.comm.groups import ParallelGroups
from moefold.comm.sharded_tensor import local_slice
from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.data.dataset import DataRequest
from moefold.model.local_param import local_tensor
from moefold.parallel.inference_model import InferenceModel
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.parallel.reshard import WeightTransfer
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.validate.config import check_config
from tests.slow import slow
from tests.verify.linear_cases import HYBRID
from tests.verify.recipes import LATENT, tiny

pytestmark = pytest.mark.parity

MAPPINGS: dict[str, dict[str, object]] = {
    "data": {"zero": 1},
    "replicas": {"zero": 0, "ep": 2},
    "tensor": {"tp": 4, "zero": 2},
    "folded": {"tp": 2, "pp": 2, "ep": 4, "zero": 1},
    "expert tensor": {"etp": 2, "ep": 2, "zero": 3},
    "wide expert tensor": {"tp": 2, "etp": 4, "zero": 2},
    "context": {"cp": 2, "tp": 2, "ep": 8, "zero": 3},
    "pipeline": {"pp": 4, "ep": 2, "zero": 1},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "etp": 2, "ep": 2},
    "V": {"pp": 2, "ep": 2, "schedule": "zbv", "virtual_stages": 2, "pipeline_layout": "E|ttt||tL"},
    "uneven layers": {"pp": 2, "tp": 2, "pipeline_layout": "Ettt|tL", "zero": 2},
    "other orders": {"tp": 2, "pp": 2, "ep": 2, "order": "pp-tp-dp-cp", "moe_order": "pp-ep-edp-etp", "zero": 1},
}
"""Mappings of 8 ranks, some of them of 4 too."""


def _recipe(name: str, world_size: int = 8, **model: object) -> Config:
    cfg = tiny(
        model={
            "layers": 4,
            # No tp divides it; 13 and 12 rows on four data-parallel ranks are 4 + 4 + 4 + 1 and 3 each.
            "vocab_size": 25,
            "tie_embeddings": True,
            "attention.qk_norm": {},
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            "ffn.moe.shared.intermediate_size": 16,
            **model,
        },
        moe={"bias_update_rate": 0.1},
        train={"global_batch_size": 8},
        world_size=world_size,
        **MAPPINGS[name],
    )
    return replace(cfg, run=RunConfig(seed=3, steps=4, device="cpu", dtype="float32"))


def _model(cfg: Config) -> ParallelModel:
    """A model with other values in every buffer than zero."""
    model = parallelize(cfg, ParallelGroups.create(check_config(cfg), torch.device("cpu")))
    for name, buffer in model.named_buffers.items():
        buffer.copy_(torch.arange(len(buffer)) + len(name))
    return model


def _save(model: ParallelModel, cfg: Config, run_dir: str) -> Path:
    cfg = replace(cfg, run=replace(cfg.run, dir=run_dir))
    training = TrainingStep(model, cfg)
    state = checkpoint_state(training.parameters, training.buffers, training.optimizer)
    return write_checkpoint(cfg, state, TrainState(states=counted(step=1, samples=0, tokens=0)))


@torch.no_grad()
def _build(cfg: Config, is_inference: bool) -> ParallelModel | InferenceModel:
    """A model of no values at all."""
    groups = ParallelGroups.create(check_config(cfg, is_training=not is_inference), torch.device("cpu"))
    model = InferenceModel.build(cfg, groups) if is_inference else parallelize(cfg, groups)
    for tensor in _tensors(model).values():
        local_tensor(tensor).fill_(-1)
    return model


def _tensors(model: ParallelModel | InferenceModel) -> dict[str, torch.Tensor]:
    return {**model.named_parameters, **model.named_buffers}


@torch.no_grad()
def _reshard(
    before: Config, after: Config, run_dir: str, scratch: int, is_inference: bool
) -> tuple[int, int, int, int]:
    """Reshard in memory and by a checkpoint, to equal bits.

    Returns:
        Bytes that this rank sent, received, and lacked by a count of its own; and bytes that the models share.
    """
    source = _model(before)
    saved = _save(source, before, run_dir)
    target = _build(after, is_inference)
    held = {name: local_slice(tensor) for name, tensor in _tensors(source).items()}
    missing = 0
    for name, tensor in _tensors(target).items():
        values, start = local_slice(tensor)
        missing += values.nbytes - _overlap(start, values.shape, *_start_and_size(held.get(name))) * values.itemsize
    stats = WeightTransfer(source, target, max_scratch_bytes=scratch).run()
    expected = _build(after, is_inference)
    load_weights(saved, expected.named_parameters, expected.named_buffers)
    for name, tensor in _tensors(expected).items():
        assert torch.equal(local_tensor(_tensors(target)[name]), local_tensor(tensor)), name
    assert stats.scratch_bytes <= scratch
    return stats.sent_bytes, stats.received_bytes, missing, stats.shared_bytes


def _start_and_size(held: tuple[torch.Tensor, tuple[int, ...]] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if held is None else (held[1], tuple(held[0].shape))


def _overlap(start: tuple[int, ...], size: torch.Size, other: tuple[int, ...], other_size: tuple[int, ...]) -> int:
    """Count the common elements of two boxes, by their indices."""
    if not other_size:
        return 0
    common = 1
    for a, n, b, m in zip(start, size, other, other_size, strict=True):
        common *= len(set(range(a, a + n)) & set(range(b, b + m)))
    return common


def _assert_only_what_lacks_is_sent(results: list[tuple[int, int, int, int]]) -> None:
    assert sum(sent for sent, *_ in results) == sum(received for _, received, *_ in results) > 0
    for _, received, missing, shared in results:
        assert received == missing
        assert shared == 0


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(permutations(MAPPINGS, 2)))
def test_each_mapping_becomes_each_other_one(pool, tmp_path, before, after):
    _assert_only_what_lacks_is_sent(pool.run(8, _reshard, _recipe(before), _recipe(after), str(tmp_path), 4096, False))


SAMPLING: dict[str, dict[str, object]] = {
    "data": {},
    "tensor": {"tp": 2},
    "expert tensor": {"tp": 2, "etp": 4, "ep": 2},
    "pipeline": {"pp": 4, "ep": 2},
}
"""Mappings of 8 ranks for inference."""


def _sampling_recipe(name: str, world_size: int = 8, **model: object) -> Config:
    cfg = _recipe("data", world_size, **model)
    return replace(cfg, parallel=replace(cfg.parallel, zero=0, **SAMPLING[name]))


@pytest.mark.parametrize(
    ("before", "after", "dtype", "count"),
    [
        ("V", "tensor", "bfloat16", 4),
        *slow(
            [
                ("context", "pipeline", "float32", 8),
                ("folded", "expert tensor", "bfloat16", 8),
                ("expert tensor", "data", "float64", 8),
                ("interleaved", "tensor", "float32", 8),
                ("other orders", "pipeline", "bfloat16", 8),
                ("replicas", "expert tensor", "float32", 8),
                ("pipeline", "data", "bfloat16", 8),
            ]
        ),
    ],
)
def test_an_inference_model_gets_the_weights_in_its_own_dtype(pool, tmp_path, before, after, dtype, count):
    recipes = (_recipe(before, count), _sampling_recipe(after, count))
    train, sample = (replace(cfg, run=replace(cfg.run, dtype=dtype)) for cfg in recipes)
    _assert_only_what_lacks_is_sent(pool.run(count, _reshard, train, sample, str(tmp_path), 4096, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        LATENT | {"attention.qk_norm": "none", "mtp_layers": 1, "tie_embeddings": False},
        HYBRID | {"linear_attention": "kda", "mtp_layers": 1, "ffn.moe.latent_size": 8, "attention.gate": {}},
        HYBRID | {"mtp_layers": 1, "residual": "both", "norm.zero_centered": True},
    ],
)
def test_parameters_of_other_blocks_and_multi_token_prediction(pool, tmp_path, model):
    pool.run(8, _reshard, _recipe("folded", **model), _recipe("context", **model), str(tmp_path), 4096, False)
    for mtp_layers in (0, 1):
        sample = _sampling_recipe("pipeline", **model | {"mtp_layers": mtp_layers})
        pool.run(8, _reshard, _recipe("folded", **model), sample, str(tmp_path / str(mtp_layers)), 4096, True)


def _follow(cfg: Config, sample: Config, run_dir: str) -> tuple[list[int], list[int], bool]:
    """Train, transfer, train, transfer; compare with a load of the last checkpoint.

    Returns:
        Bytes sent and shared in both transfers, and whether experts of a layer are one tensor for both models.
    """
    source = _model(cfg)
    training = TrainingStep(source, cfg)
    groups = ParallelGroups.create(check_config(sample, is_training=False), torch.device("cpu"))
    target = InferenceModel.build(sample, groups)
    transfer = WeightTransfer(source, target)
    data = DataRequest.of(cfg).open()
    loader = BatchSharder(data.train, cfg.batch_shape, source.groups, source.positions)
    stats = []
    for step in (1, 2):
        training.run(loader.batch(0), step)
        stats.append(transfer.run())
    saved = _save(source, cfg, run_dir)
    expected = InferenceModel.build(sample, groups)
    load_weights(saved, expected.named_parameters, expected.named_buffers)
    for name, tensor in _tensors(expected).items():
        assert torch.equal(local_tensor(_tensors(target)[name]), local_tensor(tensor)), name
    tokens = torch.arange(sample.train.seq_len).unsqueeze(0) % sample.model.vocab_size
    logits = []
    for model in (target, expected):
        logits.append(model.forward(tokens))
        model.wait_send()
    assert (logits[0] is None) == (logits[1] is None)
    assert logits[0] is None or torch.equal(logits[0], logits[1])
    name = next(name for name in _tensors(target) if name.endswith("experts.w_up"))
    pointers = [local_tensor(_tensors(model)[name]).data_ptr() for model in (source, target) if name in _tensors(model)]
    return [s.sent_bytes for s in stats], [s.shared_bytes for s in stats], pointers == pointers[:1] * 2


@pytest.mark.parametrize("zero", [1, *slow([(0,)])])
def test_a_mapping_that_agrees_shares_its_parameters(pool, tmp_path, zero):
    """Without data parallelism a shard under ZeRO is the whole parameter too."""
    mapping = {"world_size": 2, "tp": 2, "ep": 2, "zero": zero}
    cfg = tiny(
        model={"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid"},
        moe={"bias_update_rate": 0.1},
        **mapping,
    )
    cfg = replace(cfg, run=replace(cfg.run, dtype="float32"))
    for sent, shared, is_one in pool.run(2, _follow, cfg, cfg, str(tmp_path)):
        assert sent == [0, 0]
        assert shared[0] == shared[1] > 0
        assert is_one


def test_resharding_on_one_rank_sends_nothing(pool, tmp_path):
    cfg = tiny()
    ((sent, shared, is_one),) = pool.run(1, _follow, cfg, cfg, str(tmp_path))
    assert (sent, is_one) == ([0, 0], True)
    assert shared[0] == shared[1] > 0


def test_each_transfer_brings_the_weights_of_the_last_step(pool, tmp_path):
    cfg = tiny(train={"global_batch_size": 8}, world_size=4, tp=2, ep=2, zero=3)
    sample = replace(cfg, parallel=replace(cfg.parallel, tp=1, pp=2, ep=1, etp=2, zero=0))
    for sent, shared, is_one in pool.run(4, _follow, cfg, sample, str(tmp_path)):
        assert sent[0] == sent[1] > 0
        assert not is_one
        assert shared[0] < sent[0]


class _LargestAllocation(TorchDispatchMode):
    """Records the largest storage that an operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return result


def _allocate_most(before: Config, after: Config, *scratch_sizes: int) -> list[tuple[int, int, int]]:
    """Return the largest allocation of each transfer, the bytes of the rank's largest shard, and the buckets."""
    source = _model(before)
    target = _build(after, False)
    shard = max(local_tensor(x).nbytes for x in _tensors(target).values())
    found = []
    for scratch in scratch_sizes:
        transfer = WeightTransfer(source, target, max_scratch_bytes=scratch)
        with _LargestAllocation() as largest:
            stats = transfer.run()
        found.append((largest.num_bytes, shard, stats.buckets))
    return found


def test_no_allocation_is_larger_than_half_of_the_scratch_memory(pool):
    sizes = (256, 1 << 20)
    ranks = pool.run(4, _allocate_most, _recipe("expert tensor", 4), _recipe("V", 4), *sizes)
    for scratch, found in zip(sizes, zip(*ranks, strict=True), strict=True):
        assert 0 < max(largest for largest, *_ in found) <= scratch // 2
        for largest, shard, buckets in found:
            assert scratch > 1000 or (largest < shard and buckets > 10)


def _fail(before: Config, *cases: tuple[Config, int]) -> list[str]:
    source = _model(before)
    messages = []
    for after, scratch in cases:
        target = _build(after, False)
        with pytest.raises(ValueError) as error:
            WeightTransfer(source, target, max_scratch_bytes=scratch)
        messages.append(str(error.value))
    return messages


def test_another_model_or_no_memory_is_an_error_on_every_rank(pool):
    cases = (_recipe("tensor", 4, layers=2, vocab_size=64), 4096), (_recipe("tensor", 4), 6)
    messages = pool.run(4, _fail, _recipe("data", 4), *cases)
    assert messages == messages[:1] * 4
    assert "the target needs embedding.weight of shape (64, 16), the source has (25, 16)" in messages[0][0]
    assert "is less than one element" in messages[0][1]
