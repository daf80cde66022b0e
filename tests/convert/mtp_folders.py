"""Folders whose layers of multi-token prediction transformers computes too."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moefold.config.schema import Config
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.convert.families.hf_config import read_model_config
from moefold.convert.hf_folder import open_hf_folder
from moefold.convert.weight_sources import HfSource, load_shards
from moefold.model.transformer import build_model
from tests.convert.hf_folders import loaded_in_silence
from tests.convert.hf_models import logits_of, tokens_of

WEIGHTS = "model.safetensors"
SEQ_LEN = 16


def as_published(name: str, tensor: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """A tensor of MtpModel under the names of the files."""
    layer, rest = name.split(".", 1)
    prefix, rest = f"model.layers.{count + int(layer)}.", rest.removeprefix("mtp_block.")
    if rest == "mlp.experts.gate_up_proj":
        halves = [half.chunk(2, 0) for half in tensor]
        return {
            f"{prefix}mlp.experts.{e}.{kind}_proj.weight": halves[e][i].clone()
            for e in range(len(tensor))
            for i, kind in enumerate(("gate", "up"))
        }
    if rest == "mlp.experts.down_proj":
        return {f"{prefix}mlp.experts.{e}.down_proj.weight": part.clone() for e, part in enumerate(tensor)}
    return {prefix + rest.replace("post_norm", "shared_head.norm"): tensor.clone()}


def assert_loads(folder: Path, expected: torch.nn.Module, monkeypatch, caplog) -> None:
    """transformers loads a folder without missing or unexpected keys, and computes the same."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded = loaded_in_silence(folder, monkeypatch, caplog, **how)
    tokens = tokens_of(2, SEQ_LEN)
    torch.testing.assert_close(logits_of(loaded, tokens), logits_of(expected, tokens), rtol=1e-5, atol=1e-5)


def assert_mtp_loss_of_transformers(made: SimpleNamespace) -> None:
    """Fail if the MTP layer of a folder has another loss than the drafting layer of transformers."""
    cfg = Config(
        run=RunConfig(device="cpu", dtype="float32"),
        model=read_model_config(made.folder),
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=2, micro_batch_size=2),
    )
    assert cfg.model.mtp_layers == 1
    ours = build_model(cfg)
    source = HfSource(open_hf_folder(made.folder))
    load_shards(source, {**dict(ours.named_parameters()), **dict(ours.named_buffers())}, "folder")
    ours.set_positions(torch.arange(SEQ_LEN))
    tokens = tokens_of(2, SEQ_LEN + 2)
    now, after, ahead = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    shares = torch.full((2, 1, SEQ_LEN), 1 / (2 * SEQ_LEN))
    with torch.no_grad():
        columns = {"labels": after, "weights": torch.zeros(2, SEQ_LEN)}
        mine = ours.train()(now, **columns, mtp_labels=ahead[:, None], mtp_weights=shares)[1]
        hidden = made.model.model(input_ids=now).last_hidden_state
        hidden = made.further.forward_layer(0, hidden, torch.arange(SEQ_LEN)[None], None, input_ids=after)
        logits = made.model.lm_head(hidden)
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ahead.flatten())
    assert mine.item() == pytest.approx(cfg.train.mtp_loss * theirs.item(), rel=1e-5)
