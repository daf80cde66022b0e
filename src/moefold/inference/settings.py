"""The config of evaluation and generation: the model of a source under a mapping of their own. Torch-free.

How much memory a wish needs beside the weights, and what to say where it ends. Torch-free at import.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any, Literal, get_args

from moefold.config.load import Tree, apply_overrides, config_from_dict
from moefold.config.schema import Config, ParallelConfig, RunConfig, TrainConfig
from moefold.config.suggestions import describe_type, nearest_numbers
from moefold.cost.stages import plan_stages
from moefold.errors import ConfigError, raise_all
from moefold.inference.source import ModelSource
from moefold.launch.exit import oom_reason
from moefold.topology.dispatchers import dispatcher_of, inference_dispatchers
from moefold.topology.layout import divisors
from moefold.validate.config import check_config

Purpose = Literal["evaluate", "generate"]

UNUSED_AXIS_KEYS = {
    "schedule": "stages work without gradients, in order",
    "virtual_stages": "stages work without gradients, in order",
    "schedule_csv": "stages work without gradients, in order",
    "zero": "there are no gradients and no optimizer",
}
_MODEL_SIZE_HINT = re.compile(r"; choose model\.\w+=\d+(?: or \d+)?, or (?=parallel\.)")
_MODEL_SIZE_ONLY_HINT = re.compile(
    r"(?P<before>parallel\.(?P<axis>\w+)=(?P<degree>\d+) must (?P<rule>divide|be at most) model\.\w+=(?P<size>\d+)"
    r"[^;\n]*); choose model\.\w+=\d+(?: or \d+)?(?=\n|$)"
)
"""Ways out that `validate/parallel.py` offers."""
DROP_KEYS = ("eval_capacity_factor", "drop_policy", "drop_scope")


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """What the user asked for, beside the model."""

    overrides: tuple[str, ...] = ()
    """Words `parallel.tp=2` and so on."""
    dtype: str = "auto"
    """Compute type; auto is the type that the weights are stored in."""
    device: str = "auto"
    world_size: int | None = None
    """Ranks that a launcher started; None where ranks are still to be started."""
    seq_len: int
    """Tokens of a sample that the model must be able to take."""
    batch_size: int
    """Samples that a data-parallel rank works on at the same time."""


def inference_config(source: ModelSource, request: InferenceRequest, purpose: Purpose) -> Config:
    """Put the config together and check it.

    Tokens are not dropped unless `moe.eval_capacity_factor` asks for it. `train.seq_len` is what was wished, rounded up
    to what the mapping can cut: samples are filled up behind, where causal attention does not look.

    Raises:
        ConfigError: an override has no meaning here, or the mapping does not fit the model.
    """
    tree: Tree = {}
    apply_overrides(tree, request.overrides)
    _reject_unknown_keys(tree, purpose)
    parallel = config_from_dict({"parallel": tree.get("parallel", {})}).parallel
    raise_all(f"parallel.{name}={value} must be at least 1" for name, value in _degrees(parallel).items() if value < 1)
    if "world_size" not in tree.get("parallel", {}):
        p = parallel
        parallel = replace(p, world_size=request.world_size or p.pp * lcm(p.tp * p.cp, p.ep * p.etp))
    parallel = replace(parallel, schedule="gpipe", zero=0)
    drops: dict[str, Any] = tree.get("moe", {})
    moe = config_from_dict({"moe": {"eval_capacity_factor": 0.0, **drops}}).moe
    moe = replace(
        source.moe,
        eval_capacity_factor=moe.eval_capacity_factor,
        drop_policy=moe.drop_policy,
        drop_scope=moe.drop_scope,
        pad_to_capacity=False,
    )
    step = lcm(parallel.cp * parallel.tp, 2 * parallel.cp)
    cfg = Config(
        run=RunConfig(dtype=_resolve_dtype(source, request), device=_check_device(request)),
        model=source.model,
        parallel=parallel,
        moe=moe,
        train=TrainConfig(
            seq_len=-(-request.seq_len // step) * step,
            micro_batch_size=request.batch_size,
            global_batch_size=request.batch_size * max(1, parallel.dp),
        ),
        data=source.data,
    )
    _check_keys_have_effect(cfg, drops, purpose)
    try:
        check_config(cfg, is_training=False)
    except ConfigError as error:
        raise ConfigError(_remove_model_size_hints(str(error))) from error
    if purpose == "generate":
        _check_generation(cfg)
    return cfg


def _remove_model_size_hints(message: str) -> str:
    """Leave out of the ways out of faults those that change the model, which is trained: the mapping can be changed."""
    message = _MODEL_SIZE_HINT.sub("; choose ", message)
    message = _MODEL_SIZE_ONLY_HINT.sub(_suggest_degrees, message)
    return message.replace("; choose a pattern with M", "; the model is trained, so leave that degree out")


def _suggest_degrees(match: re.Match[str]) -> str:
    size = int(match["size"])
    legal = divisors(size) if match["rule"] == "divide" else range(1, size + 1)
    return f"{match['before']}; choose parallel.{match['axis']}={nearest_numbers(int(match['degree']), legal)}"


def _reject_unknown_keys(tree: Tree, purpose: Purpose) -> None:
    axes = [field.name for field in fields(ParallelConfig) if field.name not in UNUSED_AXIS_KEYS]
    legal = {f"parallel.{name}" for name in axes}
    if purpose == "evaluate":
        legal |= {f"moe.{name}" for name in DROP_KEYS}
    for section, keys in tree.items():
        for key in keys:
            name = f"{section}.{key}"
            if section == "parallel" and key in UNUSED_AXIS_KEYS:
                raise ConfigError(f"{name} has no effect here: {UNUSED_AXIS_KEYS[key]}; leave it out")
            if name not in legal and (section != "parallel" or key in ("dp", "edp")):
                raise ConfigError(
                    f"{name} cannot be set here: the model says it, or nothing would read it; "
                    f"the keys are {', '.join(sorted(legal))}"
                )


def _check_keys_have_effect(cfg: Config, drops: dict[str, Any], purpose: Purpose) -> None:
    if not dispatcher_of(cfg).for_inference:
        raise ConfigError(
            f"parallel.dispatcher={cfg.parallel.dispatcher!r} is for training; choose one of "
            f"{', '.join(inference_dispatchers())}"
        )
    idle = [key for key in drops if key != "eval_capacity_factor"]
    if idle and cfg.moe.eval_capacity_factor <= 0:
        raise ConfigError(
            f"moe.{idle[0]} has no effect: no token is dropped; set moe.eval_capacity_factor above 0, or leave it out"
        )
    if drops and cfg.moe.eval_capacity_factor < 0:
        raise ConfigError("moe.eval_capacity_factor=-1.0 must be at least 0 here (0: dropless)")


def _check_generation(cfg: Config) -> None:
    p = cfg.parallel
    if p.cp > 1:
        raise ConfigError(
            f"parallel.cp={p.cp} cannot generate: one token at a time has no context to share out; choose cp=1, with "
            "tp for memory and speed"
        )
    if p.dp > 1:
        raise ConfigError(
            f"parallel.dp={p.dp} (world_size/(tp*cp*pp)) cannot generate: every rank works on the same prompts; choose "
            f"parallel.tp={p.tp * p.dp}, or parallel.world_size={p.tp * p.pp} with ep*etp of at most {p.tp}"
        )
    if dispatcher_of(cfg).needs_equal_token_counts and p.tp > 1:
        raise ConfigError(
            f"parallel.dispatcher={p.dispatcher!r} needs equally many tokens on each rank, which one token at a time "
            "is not; choose 'alltoall'"
        )
    if cfg.moe.choice in ("round_robin", "skewed"):
        raise ConfigError(
            f"the run of this checkpoint forced its routing (moe.choice={cfg.moe.choice!r}, a benchmark), by places in "
            "a micro-batch that generation does not have; `moefold eval` takes it"
        )


def _degrees(p: ParallelConfig) -> dict[str, int]:
    return {name: getattr(p, name) for name in ("world_size", "tp", "cp", "pp", "ep", "etp")}


def _resolve_dtype(source: ModelSource, request: InferenceRequest) -> Any:
    choices = get_args(RunConfig.__annotations__["dtype"])
    if request.dtype != "auto" and request.dtype not in choices:
        raise ConfigError(
            f"--dtype {request.dtype} must be auto or {describe_type(RunConfig.__annotations__['dtype'])}"
        )
    return source.dtype if request.dtype == "auto" else request.dtype


def _check_device(request: InferenceRequest) -> Any:
    choices = get_args(RunConfig.__annotations__["device"])
    if request.device not in choices:
        raise ConfigError(f"--device {request.device} must be {describe_type(RunConfig.__annotations__['device'])}")
    return request.device


EVAL_OOM_HINT = "give a smaller --batch-size or --seq-len, or cut the model with parallel.tp and pp"
GENERATE_OOM_HINT = "give a smaller --max-tokens or fewer prompts, or cut the model with parallel.tp and pp"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def kv_cache_bytes(cfg: Config, num_tokens: int, batch_size: int) -> int:
    """What is kept of all tokens of a batch on the rank that has most layers: latents, or keys and values."""
    m, p = cfg.model, cfg.parallel
    if m.attention == "mla":
        width = m.kv_lora_rank + m.qk_rope_head_dim
    else:
        width = m.num_query_groups * 2 * (m.head_dim or m.hidden_size // m.num_attention_heads) // p.tp
    # Layers of multi-token prediction do not decode.
    layers = Counter(rank for i, rank in plan_stages(cfg).rank_of_layers(m.num_layers).items() if i < m.num_layers)
    return num_tokens * batch_size * max(layers.values()) * width * DTYPE_BYTES[cfg.run.dtype]


def batch_bytes(cfg: Config) -> int:
    """Ids of a batch (tokens, labels, whether they count) and the logits of it on one rank."""
    tokens = cfg.train.micro_batch_size * cfg.train.seq_len
    logits = tokens // cfg.parallel.cp * (cfg.model.vocab_size // cfg.parallel.tp) * DTYPE_BYTES[cfg.run.dtype]
    return tokens * (2 * 8 + 1) + logits


@contextmanager
def explain_oom(hint: str) -> Iterator[None]:
    """Inside, memory that ends on the way is one message.

    Raises:
        ConfigError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (reason := oom_reason(error)):
            raise
        raise ConfigError(f"there is not enough memory ({reason}); {hint}") from error
