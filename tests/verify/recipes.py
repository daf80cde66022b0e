"""Tiny recipes for parity tests, and the legal mappings of a world."""

from dataclasses import replace
from itertools import product
from pathlib import Path

from moefold.config.base.part import make_part
from moefold.config.keys.paths import part_keys
from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.config.upgrade.recipe import upgraded
from moefold.topology.layout import divisors
from moefold.validate.config import check_config
from tests.models import model_of

Mapping = dict[str, int]

LATENT = {
    "attention": "mla",
    "attention.q_lora_rank": 5,
    "attention.kv_lora_rank": 6,
    "attention.qk_nope_head_dim": 4,
    "attention.qk_rope_head_dim": 2,
    "attention.v_head_dim": 3,
}
"""Sizes of latent attention, all different."""


def tiny(
    model: dict[str, object] | None = None,
    moe: dict[str, object] | None = None,
    train: dict[str, object] | None = None,
    faults: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    lora: dict[str, object] | None = None,
    **parallel: object,
) -> Config:
    """A recipe that every legal mapping of 1 to 16 ranks can run, in float64."""
    sections = _with_parts({"parallel": parallel, "moe": {"aux_loss": 0.1, "z_loss": 0.01} | (moe or {})})
    stages = int(parallel.get("pp", 1)) * int(parallel.get("virtual_stages", 1))
    sizes = {
        "layers": max(2, stages),
        "hidden_size": 16,
        "attention.num_heads": 4,
        "attention.num_kv_heads": 2,
        "attention.head_dim": 4,
        "ffn.dense.intermediate_size": 32,
        "vocab_size": 32,
        "ffn.moe.num_experts": 8,
        "ffn.moe.top_k": 2,
        "ffn.moe.intermediate_size": 8,
        "init_std": 0.2,
    }
    cfg = Config(
        run=RunConfig(seed=3, steps=3, device="cpu", dtype="float64"),
        model=model_of(sizes | (model or {})),
        parallel=ParallelConfig(**sections["parallel"]),
        moe=MoEConfig(**sections["moe"]),
        train=TrainConfig(
            **{"seq_len": 16, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-2, "clip_grad": 0.5}
            | (train or {})
        ),
        data=DataConfig(**{"kind": "synthetic"} | (data or {})),
        lora=LoraConfig(**(lora or {})),
        faults=FaultsConfig(**(faults or {})),
    )
    check_config(cfg)
    return cfg


def _with_parts(sections: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return sections with parts made of the short names of their settings, such as `llep_min_tokens`.

    Cases are combined from dicts: one chooses a part and another one sets it up; a setting that the part lacks
    is left out.
    """
    groups = part_keys()
    return {
        section: {
            key: make_part(groups[f"{section}.{key}"], **value) if isinstance(value, dict) else value
            for key, value in keys.items()
        }
        for section, keys in upgraded(sections)[0].items()
    }


def few_samples(most: int, mapping: dict[str, object]) -> int:
    """Return a global batch of two micro-batches of one sample on each data-parallel rank, of four if stages overlap.

    Args:
        most: its upper bound.
        mapping: world_size and degrees; those left out are 1.
    """
    world_size, tp, cp, pp = (int(str(mapping.get(name, 1))) for name in ("world_size", "tp", "cp", "pp"))
    return min(most, world_size // (tp * cp * pp) * (4 if pp > 1 else 2))


def legal_mappings(world_size: int, *, max_pp: int = 4, max_heads: int = 4) -> list[Mapping]:
    """Every (tp, cp, pp, ep, etp) of a world that the tiny recipe can run."""
    found = []
    for tp, cp, pp, ep, etp in product(divisors(world_size), repeat=5):
        stage, rest = divmod(world_size, pp)
        if rest or stage % (tp * cp) or stage % (ep * etp) or tp > max_heads or pp > max_pp:
            continue
        found.append({"world_size": world_size, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp})
    return found


def without_mapping(cfg: Config) -> Config:
    """The same recipe on one rank, as the oracle sees it."""
    return replace(cfg, parallel=ParallelConfig())


def write_split_rows(path: Path, ranks: tuple[int, ...], num_micro_batches: int) -> str:
    """Write a schedule file: all forward passes, then all gradients of inputs, then of weights, last stage first."""
    rows: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    stages = list(enumerate(ranks))
    for kind, order in (("F", stages), ("I", stages[::-1]), ("W", stages[::-1])):
        for stage, rank in order:
            rows[rank] += [f"{stage}{kind}{i}" for i in range(num_micro_batches)]
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return str(path)
