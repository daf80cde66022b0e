"""The optimizers by name: the facts that rules, memory formulas and the planner ask. Torch-free.

The classes are in `optim/`, and `optim/registry.py` has a builder for each name. To add an optimizer see
docs/extending.md.
"""

from dataclasses import dataclass

from moefold.config.schema import Config, TrainConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """State and update of one optimizer."""

    name: str
    """As in `train.optimizer`."""
    num_moments: int
    """Tensors of state for each parameter, of its size, in the type of `train.moment_dtype`."""
    step_bytes: int = 0
    """Bytes of the count of steps of each parameter."""
    update_bytes: int
    """Bytes that an update moves for each number of a parameter."""
    bf16_update_bytes: int
    """The same with bfloat16 moments."""
    needs_gradients: bool = True
    """Whether a step has a backward pass; if not, it has two forward passes: it reads train.spsa_*."""

    needs_full_matrix: bool = False
    """Whether matrices of `train.muon_groups` are gathered on one rank for their update: it reads train.muon_*."""
    num_matrix_moments: int = 0
    """Tensors of state for each such matrix, without a count of steps."""
    matrix_update_bytes: int = 0
    """Bytes that an update moves for each number of a rank's own shards of such matrices."""
    bf16_matrix_update_bytes: int = 0
    """The same with bfloat16 moments."""

    def matrix_groups(self, train: TrainConfig) -> tuple[str, ...]:
        """Return the groups of matrices that are gathered for their update."""
        return train.muon_groups if self.needs_full_matrix else ()


ADAMW_BYTES_PER_PARAM = 34
"""Memory traffic of AdamW: gradient 4 twice (norm, update), weight and both moments 4 each read and written, and the
bfloat16 copy written."""

BF16_MOMENTS_ADAMW_BYTES_PER_PARAM = 118
"""The same with bfloat16 moments, which no fused kernel updates: each is upcast, decayed, added to and rounded (26 and
6), the denominator is computed (24) and the weight updated (24), pass by pass (`optim/adamw.py`), in addition to norm
and copy."""

MUON_BYTES_PER_PARAM = 58
"""Memory traffic of Muon for the local shard of its matrices: norm 4, decayed weight 8, momentum 20, Nesterov 12,
update 12, copy 2."""

BF16_MOMENTUM_MUON_BYTES_PER_PARAM = 68
"""The same with a bfloat16 momentum, which is upcast and rounded."""

SPSA_BYTES_PER_PARAM = 26
"""Memory traffic of SPSA: the weight is read and written for each pass and for the update, and the copy written. Normal
numbers, which stay in the cache of a CPU, are not counted."""

ADAMW = OptimizerSpec(
    name="adamw",
    num_moments=2,
    # A float32 for each parameter.
    step_bytes=4,
    update_bytes=ADAMW_BYTES_PER_PARAM,
    bf16_update_bytes=BF16_MOMENTS_ADAMW_BYTES_PER_PARAM,
)
MUON = OptimizerSpec(
    name="muon",
    # All parameters but the matrices of muon_groups are AdamW's.
    num_moments=ADAMW.num_moments,
    step_bytes=ADAMW.step_bytes,
    update_bytes=ADAMW.update_bytes,
    bf16_update_bytes=ADAMW.bf16_update_bytes,
    needs_full_matrix=True,
    num_matrix_moments=1,
    matrix_update_bytes=MUON_BYTES_PER_PARAM,
    bf16_matrix_update_bytes=BF16_MOMENTUM_MUON_BYTES_PER_PARAM,
)
SPSA = OptimizerSpec(
    name="spsa",
    num_moments=0,
    update_bytes=SPSA_BYTES_PER_PARAM,
    bf16_update_bytes=SPSA_BYTES_PER_PARAM,
    needs_gradients=False,
)

OPTIMIZERS: dict[str, OptimizerSpec] = {spec.name: spec for spec in (ADAMW, MUON, SPSA)}
"""Every optimizer by its name in a recipe."""


def optimizer_of(cfg: Config) -> OptimizerSpec:
    """Return the facts about the optimizer of a recipe."""
    return OPTIMIZERS[cfg.train.optimizer]
