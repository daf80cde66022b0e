"""A model of transformers and ours from the same weights: logits, gradients of a loss, losses of ten steps of AdamW."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.config.base.part import make_part
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.init_from import load_initial_weights
from moefold.convert.weight_sources import HfSource, load_hf_weights
from moefold.data.dataset import DataRequest
from moefold.model.transformer import build_model
from moefold.parallel.parallel_model import ParallelModel
from moefold.parallel.parallelize import parallelize
from moefold.train.batch_sharding import BatchSharder
from moefold.train.train_step import TrainingStep
from moefold.verify.distributed_run import create_groups, gather_full_tensors
from tests.convert.hf_models import save_model
from tests.convert.regions import full_region
from tests.models import edit_model

SEQ_LEN = 16
STEPS = 10
BATCHES = 2
"""Number of global batches, read one after the other: their loss falls when the model learns."""
LOGITS, GRADIENTS, LOSSES = 1e-5, 1e-4, 1e-4
"""Largest relative errors in float32; of a tensor, over its largest element."""


@dataclass(frozen=True)
class Reference:
    """Results of transformers."""

    logits: Tensor
    """Logits of the first global batch, [S, B, V]."""
    gradients: dict[str, Tensor]
    """Gradients of its mean cross-entropy, by our names and in our shapes."""
    losses: list[float]
    """Before each step."""


@dataclass(frozen=True)
class RankRecord:
    """Results of one rank."""

    positions: Tensor
    tp_rank: int
    logits: Tensor | None
    """[S/cp, B, V/tp] on the last stage."""
    gradients: dict[str, Tensor]
    losses: list[float]


def without_samples(model: ModelConfig) -> ModelConfig:
    """Return a model whose router chooses the best experts in training too."""
    if not model.ffn.moe.router.noise_width(1, 1):
        return model
    return edit_model(model, {"ffn.moe.router.softmax.samples": False})


def recipe(start: Path, model_folder: Path, **parallel: Any) -> Config:
    """Run ten plain steps of AdamW with only the loss of the language model; parameters without a gradient stay."""
    model = without_samples(read_model_config(model_folder))
    if model.attention.selector and parallel.get("cp", 1) > 1:
        parallel["context"] = "allgather"
    return Config(
        run=RunConfig(device="cpu", dtype="float32", steps=STEPS, seed=1),
        model=model,
        parallel=ParallelConfig(**parallel),
        # A SparseMixer samples with the noise of moefold.
        moe=MoEConfig(aux_loss=0.0, bias_update_rate=0.0),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            global_batch_size=4,
            # At 1e-2 rounding by itself moves the tenth loss of some models by 1e-3: clamps and choices are kinks.
            lr=3e-3,
            lr_schedule="constant",
            optimizer=make_part("optimizer", "adamw", weight_decay=0.1),
            clip_grad=1.0,
            # The indexers of transformers have no loss.
            indexer_loss=0.0 if model.attention.selector else 1.0,
        ),
        data=DataConfig(kind="synthetic"),
        checkpoint=CheckpointConfig(init_from=str(start), every=0, at_end=False),
    )


def batch_of(cfg: Config, step: int) -> Tensor:
    """The samples of a step, int64 [global batch, S + 1]."""
    data = DataRequest(cfg.data, seq_len=SEQ_LEN, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed).open()
    size = cfg.train.global_batch_size
    return torch.from_numpy(data.train.batch(step % BATCHES * size, size).tokens)


def run_both(theirs: Any, folder: Path, cfg: Config) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of ours and of theirs for the first batch, [B, S, V], and our gradients; the model has theirs."""
    ours = build_model(cfg)
    ours.set_positions(torch.arange(cfg.train.seq_len))
    load_hf_weights(folder, dict(ours.named_parameters()), dict(ours.named_buffers()))
    tokens = batch_of(cfg, 0)
    logits, expected = ours(tokens[:, :-1]).transpose(0, 1), theirs(input_ids=tokens[:, :-1]).logits
    for output in (logits, expected):
        nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    return logits.detach(), expected.detach(), gradients


def train_theirs(model: Any, cfg: Config, folder: Path) -> Reference:
    """A plain loop of transformers and torch.

    Args:
        model: with the weights of the recipe.
        cfg: batches and optimizer.
        folder: for the gradients, which are read as the weights of the family are.
    """
    train, parameters = cfg.train, list(model.parameters())
    decays = {name: p for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")}
    others = [p for name, p in model.named_parameters() if name not in decays]
    optimizer = torch.optim.AdamW(
        [{"params": list(decays.values())}, {"params": others, "weight_decay": 0.0}],
        lr=train.lr,
        betas=(train.optimizer.beta1, train.optimizer.beta2),
        eps=train.optimizer.eps,
        weight_decay=train.optimizer.weight_decay,
    )
    model.train()
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.eval()
    losses: list[float] = []
    first, gradients = torch.empty(0), dict[str, Tensor]()
    for step in range(STEPS):
        tokens = batch_of(cfg, step)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first, gradients = logits.detach().transpose(0, 1), gradients_by_our_names(model, folder)
        nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        optimizer.step()
        losses.append(loss.item())
    return Reference(first, gradients, losses)


@torch.no_grad()
def gradients_by_our_names(model: Any, folder: Path) -> dict[str, Tensor]:
    """Gradients are saved as if they were weights, and read as weights are; zeros where there is none."""
    twin = copy.deepcopy(model)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.copy_(torch.zeros_like(mine) if theirs.grad is None else theirs.grad)
    source = HfSource(open_hf_folder(save_model(twin, folder)))
    return {name: source.read(name, full_region(shape)) for name, shape in source.shapes.items()}


def train_ours(cfg: Config) -> RankRecord:
    """The same under the recipe's mapping; every rank of the process group calls it."""
    groups = create_groups(cfg)
    model = parallelize(cfg, groups)
    load_initial_weights(cfg.run, cfg.model, cfg.data, cfg.checkpoint, model, is_first_rank=groups.rank == 0)
    logits = _logits(model, cfg)
    training = TrainingStep(model, cfg)
    data = DataRequest(cfg.data, seq_len=SEQ_LEN, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed).open()
    loader = BatchSharder(data.train, cfg.batch_shape, groups, model.positions)
    batch = loader.batch(0)
    training.begin_step(1, batch)
    model.forward_backward(batch)
    for name, parameter in model.named_parameters.items():
        if ".indexer." in name:
            # Without a loss of their own indexers have no gradient, as in transformers.
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    gradients = gather_full_tensors(model, gradients=True)
    training.optimizer.zero_grad(set_to_none=True)
    size = cfg.train.global_batch_size
    losses = [training.run(loader.batch(i % BATCHES * size), i + 1).loss for i in range(STEPS)]
    return RankRecord(model.positions, groups.attn.tp.rank, logits, gradients, losses)


@torch.no_grad()
def _logits(model: ParallelModel, cfg: Config) -> Tensor | None:
    """[S/cp, B, V/tp] of the first global batch, on the last stage."""
    pp, tokens = model.groups.pp, batch_of(cfg, 0)[:, :-1]
    model.train(False)
    (stage,) = model.stages
    x = tokens[:, model.positions]
    if not stage.is_first:
        x = torch.empty(SEQ_LEN // (cfg.parallel.cp * cfg.parallel.tp), len(tokens), cfg.model.hidden_size)
        dist.recv(x, pp.ranks[pp.rank - 1])
    x = stage(x)
    if not stage.is_last:
        dist.send(x.contiguous(), pp.ranks[pp.rank + 1])
    model.train(True)
    return x if stage.is_last else None


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """No element is further off than the tolerance allows for the largest one."""
    error = float((found - expected).abs().max())
    assert error <= tolerance * float(expected.abs().max()), (name, error)


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every gradient of ours is theirs."""
    for name, gradient in found.items():
        assert_close(gradient, expected[name], GRADIENTS, name)


def assert_equal(ranks: Sequence[RankRecord], expected: Reference, tp: int) -> None:
    """Check that all ranks together give the results of transformers."""
    columns = expected.logits.shape[-1] // tp
    seen: set[int] = set()
    gradients: dict[str, Tensor] = {}
    for rank in ranks:
        gradients |= rank.gradients
        if rank.logits is not None:
            seen |= set(rank.positions.tolist())
            mine = expected.logits[rank.positions][..., rank.tp_rank * columns : (rank.tp_rank + 1) * columns]
            assert_close(rank.logits, mine, LOGITS, "logits")
    assert seen == set(range(SEQ_LEN))
    assert gradients.keys() >= {name for name in expected.gradients if not name.endswith("expert_bias")}
    assert_gradients(gradients, expected.gradients)
    for rank in ranks:
        for step, (mine, theirs) in enumerate(zip(rank.losses, expected.losses, strict=True)):
            assert abs(mine - theirs) <= LOSSES * theirs, ("losses", step, mine, theirs)
