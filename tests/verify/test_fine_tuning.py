"""Fine-tuning on packed conversations: the same as for each by itself, and the same mean under every mapping."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.data.dataset import DataRequest
from moefold.model.transformer import Transformer, build_model
from moefold.model.weight_init import init_weights
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import DistributedRecord, run_distributed
from tests.models import edit_model
from tests.slow import slow
from tests.verify.recipes import tiny, without_mapping

S = 48
TEMPLATE = """\
{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"""


def fine_tuning(folder: Path, **changes: object) -> Config:
    """A recipe on conversations of 6 to 60 bytes, whose answers have 1 to 30."""
    template, file = folder / "template.jinja", folder / "chats.jsonl"
    template.write_text(TEMPLATE)
    with file.open("w") as lines:
        for i in range(40):
            turns = [("user", f"q{i}"), ("assistant", "b" * (1 + i * i % 30)), ("user", "w"), ("assistant", f"{i}")]
            messages = [{"role": role, "content": content} for role, content in turns[: 2 + 2 * (i % 2)]]
            lines.write(json.dumps({"messages": messages}) + "\n")
    cfg = tiny(model={"vocab_size": 256}, train={"seq_len": S, "global_batch_size": 4}, **changes)
    data = DataConfig(kind="sft", path=str(file), chat_template=str(template), validation_fraction=0.2)
    return replace(cfg, data=data)


def _mapping(cfg: Config, num_steps: int, cache: str) -> DistributedRecord:
    os.environ["XDG_CACHE_HOME"] = cache
    return run_distributed(cfg, num_steps)


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "context": "planned", "placement": "balanced"},
        {"world_size": 2, "cp": 2, "ep": 2},
        *slow([({"world_size": 2},), ({"world_size": 2, "tp": 2},), ({"world_size": 4, "cp": 2},)]),
    ],
)
def test_mappings_equal_the_oracle(pool, mapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = fine_tuning(tmp_path, **mapping)
    split = DataRequest(cfg.data, seq_len=S, vocab_size=256, seed=cfg.run.seed).open().train
    targets = [int(sample.weights.sum()) for sample in (split.annotated_sample(i) for i in range(4))]
    assert sum(targets[:2]) != sum(targets[2:]), "the ranks of dp must not have as many targets"
    ranks = pool.run(cfg.parallel.world_size, _mapping, cfg, 2, str(tmp_path))
    worst = compare_records(run_oracle(without_mapping(cfg), 2), ranks)[0]
    assert worst.error <= 1e-9, worst


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "mapping"),
    [
        *slow(
            (kind, {"world_size": 4, "context": "planned", "placement": placement} | axes)
            for kind in ("micro_batch", "sequence", "global_batch", "last_global_batch")
            for placement, axes in (("balanced", {"tp": 2, "ep": 2}), ("balanced", {"cp": 2}), ("documents", {"cp": 2}))
        )
    ],
)
def test_padding_counts_in_no_loss_wherever_it_is_placed(pool, kind, mapping, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = fine_tuning(tmp_path, **mapping)
    moe = replace(cfg.moe, aux_kind=kind, aux_loss=0.5, input_jitter=0.2)
    cfg = replace(cfg, moe=moe, train=replace(cfg.train, micro_batch_size=2, global_batch_size=8))
    alone = replace(cfg, parallel=ParallelConfig(world_size=cfg.parallel.dp if kind == "global_batch" else 1))
    worst = compare_records(run_oracle(alone, 2), pool.run(4, _mapping, cfg, 2, str(tmp_path)))[0]
    assert worst.error <= 1e-9, worst


@pytest.mark.parity
@pytest.mark.parametrize(
    ("scope", "mapping"),
    [
        *slow(
            [
                ("full_sequence", {"world_size": 2, "tp": 2}),
                ("sub_sequence", {"world_size": 2, "cp": 2}),
                ("full_sequence", {"world_size": 2, "pp": 2}),
                ("full_sequence", {"world_size": 2, "cp": 2}),
                ("full_sequence", {"world_size": 4, "pp": 4}),
                ("full_sequence", {"world_size": 4, "tp": 4}),
                ("sub_sequence", {"world_size": 4, "tp": 2, "cp": 2}),
            ]
        ),
    ],
)
def test_padded_samples_drop_the_same_under_every_mapping(pool, scope, mapping, tmp_path: Path, monkeypatch):
    """Equal tokens with nothing before them that differs have equal probabilities but for rounding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = fine_tuning(tmp_path, **mapping)
    layers = mapping.get("pp", 2)
    cfg = replace(
        cfg,
        model=edit_model(cfg.model, {"layers": layers}),
        moe=replace(cfg.moe, capacity_factor=0.5, drop_scope=scope),
    )
    alone = cfg if scope == "sub_sequence" else without_mapping(cfg)
    worst = compare_records(run_oracle(alone, 2), pool.run(cfg.parallel.world_size, _mapping, cfg, 2, str(tmp_path)))[0]
    assert worst.error <= 1e-9, worst


def _model(cfg: Config) -> Transformer:
    model = build_model(cfg).double()
    init_weights(model, cfg.model, cfg.run.seed)
    return model.train()


def test_packed_conversations_equal_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = fine_tuning(tmp_path)
    cfg = replace(cfg, moe=replace(cfg.moe, aux_loss=0.0, z_loss=0.0))
    batch = DataRequest(cfg.data, seq_len=S, vocab_size=256, seed=0).open().train.batch(0, 4)
    inputs, labels = torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
    weights, starts = batch.target_weights(), batch.document_starts()
    assert weights is not None
    share = torch.from_numpy(weights / weights.sum())
    packed, alone = _model(cfg), _model(cfg)
    packed.set_positions(torch.arange(S))
    loss = packed(inputs, labels=labels, weights=share, document_starts=torch.from_numpy(starts))
    loss.backward()
    # Each conversation by itself: its mean over its own targets counts as many times as it has targets.
    num_targets, total = 0, 0.0
    for row in range(4):
        for document in np.unique(batch.document_ids[row]):
            tokens = torch.from_numpy(batch.tokens[row : row + 1, batch.document_ids[row] == document])
            inside = (batch.document_ids[row, 1:] == document) & (batch.document_ids[row, :-1] == document)
            mine = torch.from_numpy(batch.weights[row : row + 1, inside])
            if not mine.any():
                continue
            alone.set_positions(torch.arange(tokens.shape[1] - 1))
            part = alone(tokens[:, :-1], labels=tokens[:, 1:], weights=mine / mine.sum())
            part = part * mine.sum() / weights.sum()
            part.backward()
            total += float(part.detach())
            num_targets += int(mine.sum())
    assert num_targets == int(weights.sum()) > 50
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in packed.named_parameters():
        error = (parameter.grad - gradients[name]).abs().max()
        assert error <= 1e-11 * gradients[name].abs().max(), name
    crossing = packed(inputs, labels=labels, weights=share)
    assert abs(float(crossing.detach()) - total) > 1e-4
