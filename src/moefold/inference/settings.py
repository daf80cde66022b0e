"""Config of evaluation and generation: a source's model under its own mapping, and its memory needs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any, Literal, Self

from moefold.config.base.part_registry import built_in_kinds, find_part
from moefold.config.chosen import chosen, chosen_in
from moefold.config.groups.dispatcher import DispatcherPart
from moefold.config.groups.router import ChoicePart
from moefold.config.keys.paths import choices_of, flat_settings
from moefold.config.keys.suggestions import describe_key
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.overrides import apply_overrides
from moefold.config.schema import Config
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.config.tables.part_class import import_part_files
from moefold.config.tables.tree import Tree
from moefold.cost.state_bytes import ITEM_BYTES
from moefold.errors import ConfigError, raise_all
from moefold.host.rank_env import RankEnv, check_world_size
from moefold.inference.source import ModelSource
from moefold.launch.exit import oom_reason
from moefold.message_text import Problem, Setting, spelled_as
from moefold.topology.layout import DEGREES
from moefold.topology.rollout_mapping import ROLLOUT_DEGREES, fetches_experts
from moefold.validate.config import check_config
from moefold.validate.parallel import DegreeProblem
from moefold.validate.rl import fetch_violations

Purpose = Literal["evaluate", "generate"]

UNUSED_AXIS_KEYS = {
    "schedule": "stages work without gradients, in order",
    "virtual_stages": "stages work without gradients, in order",
    "zero": "there are no gradients and no optimizer",
}
OPTION_NAMES = {
    "run.device": "--device",
    "run.dtype": "--dtype",
    "run.kernels": "--kernels",
    "rollout.experts": "--experts",
    "rollout.cache_gib": "--cache-gib",
    "rollout.slots": "--slots",
}
"""Options of inference commands by the recipe key in error messages."""
REQUEST_OPTIONS = ("dtype", "device", "experts", "kernels")
DROP_KEYS = ("eval_capacity_factor", "drop_policy", "drop_scope")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Settings of all inference commands."""

    tokenizer: str = ""
    """"bytes" or the path of a tokenizer.json, instead of the model's."""
    dtype: str = "auto"
    """Compute type. auto: the type of the stored weights."""
    device: str = "auto"
    """"cpu", "cuda" or "auto"."""
    ignore_key: Sequence[str] = ()
    """Keys of the JSON files of a Hugging Face folder that moefold does not know, and that change nothing."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(ModelOptions):
    """Settings of the commands that sample."""

    chat_template: str = ""
    """File of a chat template instead of the model's."""
    want: str = ""
    """Wanted reward instead of align.method.want, or "none"."""
    experts: Literal["exchange", "fetch"] = "exchange"
    """Access of data-parallel ranks to experts of other ranks, see rollout.experts."""
    kernels: Literal["auto", "plain", "triton", "c"] = "auto"
    """Kernels of the layers, see run.kernels."""


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """User settings of an inference command, except the model."""

    overrides: tuple[str, ...] = ()
    """Config overrides such as `parallel.tp=2`."""
    dtype: str = "auto"
    """Compute dtype. "auto" is the dtype of the stored weights."""
    device: str = "auto"
    world_size: int | None = None
    """Number of ranks started by a launcher, or None if the command starts the ranks itself."""
    seq_len: int
    """Maximum sequence length in tokens."""
    batch_size: int
    """Samples per micro-batch of a data-parallel rank."""
    experts: Literal["exchange", "fetch"] = "exchange"
    """Access of data-parallel ranks to the experts of others, as `rollout.experts` in a recipe."""
    kernels: Literal["auto", "plain", "triton", "c"] = "auto"
    """Implementation of the operations, as `run.kernels` in a recipe."""

    @classmethod
    def of(cls, options: ModelOptions, overrides: Sequence[str], *, seq_len: int = 2, batch_size: int = 1) -> Self:
        """Return the settings in the options of a command."""
        values = {name: value for name, value in vars(options).items() if name in REQUEST_OPTIONS}
        return cls(overrides=tuple(overrides), seq_len=seq_len, batch_size=batch_size, **values)


def inference_config(source: ModelSource, request: InferenceRequest, purpose: Purpose) -> Config:
    """Build and check the config of an inference command.

    No tokens are dropped unless `moe.eval_capacity_factor` is set. `train.seq_len` is the requested length, rounded up
    to a multiple that the mapping can shard. Samples are right-padded. Causal attention ignores the padding.

    Raises:
        ConfigError: an override is not supported here, or the mapping does not fit the model.
    """
    tree: Tree = {}
    apply_overrides(tree, request.overrides)
    import_part_files(tree)
    _refuse_unknown_keys(tree, purpose)
    parallel = config_from_dict({"parallel": tree.get("parallel", {})}).parallel
    degrees = {name: getattr(parallel, name) for name in ("world_size", *DEGREES)}
    raise_all(f"parallel.{name}={value} must be at least 1" for name, value in degrees.items() if value < 1)
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
    if request.dtype not in ("auto", *choices_of("run", "dtype")):
        raise ConfigError(f"{Setting('--dtype', request.dtype):s} must be auto or {describe_key('run', 'dtype')}")
    if request.device not in choices_of("run", "device"):
        raise ConfigError(f"{Setting('--device', request.device):s} must be {describe_key('run', 'device')}")
    dtype: Any = source.dtype if request.dtype == "auto" else request.dtype
    device: Any = request.device
    step = lcm(parallel.cp * parallel.tp, 2 * parallel.cp)
    cfg = Config(
        run=RunConfig(dtype=dtype, device=device, kernels=request.kernels),
        model=source.model,
        parallel=parallel,
        moe=moe,
        train=TrainConfig(
            seq_len=-(-request.seq_len // step) * step,
            micro_batch_size=request.batch_size,
            global_batch_size=request.batch_size * max(1, parallel.dp),
        ),
        data=source.data,
        rollout=RolloutConfig(experts=request.experts),
    )
    _check_keys_have_effect(cfg, drops, purpose)
    with spelled_as(OPTION_NAMES):
        try:
            check_config(cfg, is_training=False)
        except ConfigError as error:
            # The model is trained, so its sizes cannot change.
            problems = [p.without_model() if isinstance(p, DegreeProblem) else p for p in error.problems]
            raise ConfigError(*problems) from error
    if purpose == "generate":
        _check_generation(cfg.parallel, cfg.moe, cfg.rollout)
    return cfg


def launched_config(
    source: ModelSource, request: InferenceRequest, purpose: Purpose, rank_env: RankEnv | None
) -> Config:
    """Build the config of an inference command for the ranks of a launcher, if any. Refuse another number of ranks."""
    if rank_env is None:
        return inference_config(source, request, purpose)
    cfg = inference_config(source, replace(request, world_size=rank_env.world_size), purpose)
    check_world_size(rank_env, cfg.parallel.world_size)
    return cfg


def _refuse_unknown_keys(tree: Tree, purpose: Purpose) -> None:
    axes = [field.name for field in fields(ParallelConfig) if field.name not in UNUSED_AXIS_KEYS]
    legal = {f"parallel.{name}" for name in axes}
    if purpose == "evaluate":
        legal |= {f"moe.{name}" for name in DROP_KEYS}
    for section, keys in tree.items():
        for key in keys:
            name = f"{section}.{key}"
            if section == "parallel" and key in UNUSED_AXIS_KEYS:
                raise ConfigError(Problem(name, None, f"has no effect here: {UNUSED_AXIS_KEYS[key]}", "leave it out"))
            if name not in legal and (section != "parallel" or key in ("dp", "edp")):
                path = next(iter(flat_settings({name: keys[key]})), name)
                raise ConfigError(
                    f"{path} cannot be set here: the model determines it, or it is not used; "
                    f"the keys are {', '.join(sorted(legal))}"
                )


def _check_keys_have_effect(cfg: Config, drops: dict[str, Any], purpose: Purpose) -> None:
    dispatcher = chosen(cfg, DispatcherPart)
    if not dispatcher.for_inference:
        names = built_in_kinds(dispatcher.group)
        legal = [name for name in names if find_part(dispatcher.group, name).for_inference]
        raise ConfigError(f"parallel.dispatcher={dispatcher.kind!r} is for training; choose one of {', '.join(legal)}")
    unused = [key for key in drops if key != "eval_capacity_factor"]
    if unused and cfg.moe.eval_capacity_factor <= 0:
        raise ConfigError(
            f"moe.{unused[0]} has no effect: no token is dropped; set moe.eval_capacity_factor above 0, or leave it out"
        )
    if drops and cfg.moe.eval_capacity_factor < 0:
        raise ConfigError(Problem("moe.eval_capacity_factor", -1.0, "must be at least 0 here (0: dropless)"))


def _check_generation(p: ParallelConfig, moe: MoEConfig, rollout: RolloutConfig) -> None:
    if fetches_experts(rollout):
        degrees = {axis: getattr(p, axis) for axis in ROLLOUT_DEGREES}
        with spelled_as(OPTION_NAMES):
            raise_all(fetch_violations(degrees, "parallel"))
    if p.cp > 1:
        raise ConfigError(
            f"parallel.cp={p.cp} cannot generate: decoding one token at a time has no context to shard; choose cp=1, "
            "with tp for memory, or dp for speed"
        )
    dispatcher = chosen_in(p, DispatcherPart)
    if dispatcher.needs_equal_token_counts and p.world_size > p.pp:
        rule = "needs equally many tokens on each rank, which generation does not have"
        raise ConfigError(Problem("parallel.dispatcher", dispatcher.kind, rule, "choose 'alltoall'"))
    if chosen_in(moe, ChoicePart).is_forced:
        raise ConfigError(
            f"the run of this checkpoint forced its routing (moe.choice='{moe.choice}', a benchmark) by positions "
            "in a micro-batch, which generation does not have; `moefold eval` supports it"
        )


def eval_oom_hint() -> str:
    """Return the way out if the memory is too small for an evaluation."""
    return f"give a smaller {Setting('--batch-size')} or {Setting('--seq-len')}, or {_SHARDS}"


def generate_oom_hint() -> str:
    """Return the way out if the memory is too small for a generation."""
    return f"give a smaller {Setting('--max-tokens')} or {Setting('--cache-gib')}, or {_SHARDS}"


_SHARDS = "shard the model with parallel.tp and pp"


def batch_bytes(run: RunConfig, model: ModelConfig, parallel: ParallelConfig, train: TrainConfig) -> int:
    """Return the bytes of a batch (tokens, labels, target mask) and of its logits on one rank."""
    tokens = train.micro_batch_size * train.seq_len
    logits = tokens // parallel.cp * parallel.vocab_rows(model.vocab_size) * ITEM_BYTES[run.dtype]
    return tokens * (2 * 8 + 1) + logits


@contextmanager
def explain_oom(hint: str) -> Iterator[None]:
    """Convert out-of-memory errors inside the block to one ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (reason := oom_reason(error)):
            raise
        raise ConfigError(f"there is not enough memory ({reason}); {hint}") from error
