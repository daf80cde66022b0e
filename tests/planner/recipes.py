"""Small recipes whose rules differ: the enumeration must be exact for them."""

from dataclasses import replace

from moefold.config.base.part import make_part
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from tests.models import edit_model, model_of

SMALL = model_of(
    {
        "layers": 3,
        "hidden_size": 32,
        "attention.num_heads": 4,
        "attention.num_kv_heads": 2,
        "ffn.dense.intermediate_size": 48,
        "ffn.moe.intermediate_size": 24,
        "vocab_size": 64,
        "ffn.moe.num_experts": 4,
        "ffn.moe.top_k": 2,
        "layers.ffn": "dense, moe",
    }
)

RECIPES = {
    "plain": Config(
        run=RunConfig(device="cuda"),
        model=SMALL,
        parallel=ParallelConfig(dispatcher=make_part("dispatcher", "leastloaded", min_tokens=8)),
        train=TrainConfig(seq_len=16, global_batch_size=4),
    ),
    "windows and an uneven batch": Config(
        run=RunConfig(dtype="float32"),
        model=edit_model(
            SMALL,
            {
                "layers": 2,
                "attention.num_heads": 6,
                "attention.num_kv_heads": 3,
                "attention.head_dim": 8,
                "layers.ffn": "moe",
            },
        ),
        train=TrainConfig(seq_len=24, global_batch_size=6, loss_chunk=10),
        parallel=ParallelConfig(context="ulysses"),
    ),
    "latent attention, padded to a capacity": Config(
        model=edit_model(SMALL, {"attention": "mla", "mtp_layers": 1, "ffn.moe.shared.intermediate_size": 16}),
        moe=MoEConfig(capacity_factor=1.0, pad_to_capacity=True),
        train=TrainConfig(seq_len=16, global_batch_size=4),
        parallel=ParallelConfig(pipeline_layout="auto"),
    ),
    "another order of the ranks": Config(
        model=edit_model(SMALL, {"layers": 2}),
        train=TrainConfig(seq_len=8, global_batch_size=4),
        parallel=ParallelConfig(order="dp-pp-cp-tp", moe_order="edp-pp-ep-etp"),
    ),
    "dense": Config(
        model=edit_model(SMALL, {"layers": 2, "layers.ffn": "dense"}),
        train=TrainConfig(seq_len=8, global_batch_size=4),
    ),
    "stages spelled out": Config(
        model=edit_model(SMALL, {"layers": 3}),
        train=TrainConfig(seq_len=8, global_batch_size=8),
        parallel=ParallelConfig(pipeline_layout="Et|t|t|L"),
    ),
}


def on_ranks(cfg: Config, world_size: int) -> Config:
    """A recipe on a number of ranks."""
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world_size))
