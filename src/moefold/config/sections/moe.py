"""The [moe] section: routing of tokens, load balancing and token dropping."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import Bound, ReadIf, VerifyAs, at_least
from moefold.config.base.part import KindOf, Part, Section

TRACE_FOLDER = "routing"
"""Name of the trace in the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(Section):
    """Routing of tokens, load balancing and token dropping."""

    capacity_factor: Annotated[float, at_least(0, "0: dropless")] = 0.0
    """0: dropless. Else an expert keeps at most ceil(tokens * top_k / num_experts * capacity_factor) routed tokens."""
    eval_capacity_factor: Annotated[
        float,
        Bound(
            "must be at least 0 (0: dropless), or -1 (as moe.capacity_factor)",
            lambda factor: factor >= 0 or factor == -1,
        ),
        ReadIf("train.eval_every"),
    ] = -1.0
    """Capacity factor of evaluation. -1: as in training. 0: dropless."""
    drop_policy: Annotated[str | Part, KindOf("drop")] = "probs"
    """Routed tokens that an expert over capacity keeps. Evaluate "probs" with eval_capacity_factor=0."""
    drop_scope: Annotated[str | Part, KindOf("drop_scope")] = "full_sequence"
    """Tokens that share the capacity of an expert."""
    pad_to_capacity: Annotated[bool, VerifyAs.MAPPING] = False
    """Pad the input of every expert with zeros to its capacity, from each rank: static shapes. If cp*tp > 1, only with
    drop_scope "sub_sequence", because ranks that share a capacity would each need a buffer for all of it."""
    aux_loss: Annotated[float, at_least(0, "0: off")] = 0.01
    """Coefficient of the load-balancing loss (arXiv:2101.03961). 0 or a moe.choice other than topk turns it off."""
    aux_kind: Annotated[str | Part, KindOf("balance_scope"), ReadIf("moe.aux_loss!=0.0")] = "micro_batch"
    """Tokens over which the load is balanced."""
    z_loss: Annotated[float, at_least(0, "0: off")] = 0.0
    """Coefficient of the mean squared log-sum-exp of the router logits (arXiv:2202.08906). 0 turns it off."""
    bias_update_rate: Annotated[
        float, at_least(0, "0: the bias stays"), ReadIf("lora.rank=0"), ReadIf("model.ffn.moe.router.expert_bias")
    ] = 1e-3
    """Step size of model.ffn.moe.router.expert_bias: up for an expert with fewer routed tokens than the mean of
    the step, down for more. 0: the bias stays fixed, as in the last part of DeepSeek-V3's training (arXiv:2412.19437
    sec. 4.2)."""
    choice: Annotated[str | Part, KindOf("choice")] = "topk"
    """Choice of experts. With sinkhorn and quantile, the experts of a token in training also depend on later
    tokens (not causal)."""
    input_jitter: Annotated[
        float, Bound("must lie in [0, 1): at least 0 (0: off) and below 1", lambda part: 0 <= part < 1)
    ] = 0.0
    """Multiply the router's input by noise from 1-x to 1+x in training (arXiv:2101.03961). 0 turns it off."""
    router_dtype: Annotated[Literal["float32", "float64"], ReadIf("run.dtype!=float64"), VerifyAs.FORMAT] = "float32"
    """Minimum precision of the router's computation. With run.dtype="float64" it is float64."""
    weight_in_expert: Annotated[bool, ReadIf("model.ffn.moe.probs_on_input=false"), VerifyAs.MAPPING] = False
    """Apply the routing weights between the activation and the down projection of an expert instead of to its output:
    the outputs are then not saved for backward. Exact, with one more number per routed token in the all-to-all."""
    dispatch_precision: Annotated[str | Part, KindOf("wire")] = "dtype"
    """Number format in which routed tokens are dispatched ([fp8.md](fp8.md)), with the same rounding under every
    mapping. Expert outputs and gradients are sent in run.dtype."""
    trace_every: Annotated[int, at_least(0, "0: never"), VerifyAs.FILES] = 0
    """Write each token's experts to RUN_DIR/routing every this many steps, one or two bytes per choice. 0: never."""
    replay: str = ""
    """Run with a routing trace, whose expert choices are replayed step by step. The routing weights are computed from
    the current scores."""
