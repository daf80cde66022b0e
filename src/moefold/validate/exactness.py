"""Settings with which sampling does not have the bits of the forward pass of training. See docs/exact-sampling.md.

Without such a setting, the generation engine and the next training step compute bitwise equal log-probabilities of
sampled tokens from the same weights: the ratio of policy to sampler is 1.
"""

from collections.abc import Iterator

from moefold.config.chosen import chosen, chosen_in
from moefold.config.groups.dispatcher import DispatcherPart, WirePart
from moefold.config.groups.router import ChoicePart
from moefold.config.groups.schedule import SchedulePart
from moefold.config.layers import Layer
from moefold.config.model import ModelConfig
from moefold.config.schema import Config
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.cost.kv_cache import PAGE_POSITIONS
from moefold.message_text import nearest_multiples
from moefold.topology.rollout_mapping import rollout_degrees

MAX_EXACT_SEQ_LEN = 16384
"""Longest sample for the C kernel of attention in training, as `MAX_SEQ_LEN` of ops/cpu/attention.py."""
MAX_EXACT_HEAD_DIM = 256
"""Widest head of the C kernel, as `MAX_HEAD_DIM` of ops/cpu/attention.py."""
MAX_COMMUTING_RANKS = 2
"""Maximum ranks of an all-reduce whose sum does not depend on the order. With more ranks the order depends on the
number of tokens."""


def inexact_settings(cfg: Config, device_type: str, *, has_c_kernels: bool = True) -> tuple[str, ...]:
    """Return a line for each setting with which sampling is not bitwise equal to training.

    Args:
        cfg: a checked recipe, without "auto" values of the mapping.
        has_c_kernels: whether the ranks compute with the C kernels. False only if they were selected and this machine
            has no compiler or faster libraries. See `uses_c_kernels` in parallel/kernels/select.py.
    """
    if cfg.is_rl and cfg.rollout.uses_server:
        return ("rollout.engine='vllm': it computes with kernels of its own; choose 'own'",)
    return (
        *_kernels(cfg, device_type, has_c_kernels),
        *_mapping(cfg.parallel, cfg.moe, cfg.rl, cfg.rollout),
        *_model(cfg.model, cfg.train, cfg.lora, cfg.rollout),
        *_routing(cfg.run, cfg.model, cfg.moe),
    )


def _kernels(cfg: Config, device_type: str, has_c_kernels: bool) -> Iterator[str]:
    run = cfg.run
    if device_type != "cpu":
        yield f"run.device={device_type!r}: sums depend on the number of tokens; only the C kernels of a CPU are exact"
        return
    if run.dtype == "float64":
        yield "run.dtype='float64': computed by torch, whose sums depend on the number of tokens; choose float32"
    elif run.kernels not in ("auto", "c"):
        yield f"run.kernels={run.kernels!r}: sums depend on the number of tokens; choose 'c'"
    elif not has_c_kernels:
        yield f"run.kernels={run.kernels!r}: not all parts are computed in C on this machine; choose 'c'"
    if run.compile != "none":
        yield f"run.compile={run.compile!r}: compiled parts differ with the number of tokens; set 'none'"
    if cfg.train.quantizes_gemms:
        yield f"train.precision={cfg.train.precision!r}: scales are shared by blocks of tokens; set 'dtype'"
    tokens = cfg.train.micro_batch_size * cfg.train.seq_len
    is_single_chunk = not 0 < cfg.loss_chunk_tokens(device_type) < tokens
    if cfg.parallel.pp > 1 and chosen(cfg, SchedulePart).splits_backward and is_single_chunk:
        yield (
            f"parallel.schedule='{cfg.parallel.schedule}': delays the head's weight gradient, and takes another path "
            f"through the loss; choose '1f1b', or train.loss_chunk below {tokens}"
        )


def _mapping(p: ParallelConfig, moe: MoEConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[str]:
    for axis in ("tp", "etp"):
        degree = getattr(p, axis)
        if degree > MAX_COMMUTING_RANKS:
            yield f"parallel.{axis}={degree}: sums of more than two ranks depend on the number of tokens; set 2 or 1"
        sampling = rollout_degrees(p, rollout)[axis]
        if rl.is_on and sampling != degree:
            yield f"rollout.{axis}={sampling}: sums are split otherwise than by parallel.{axis}={degree}; set {degree}"
    if p.cp > 1:
        yield f"parallel.cp={p.cp}: attention is merged over blocks of keys of several ranks; set 1"
    dispatcher = chosen_in(p, DispatcherPart)
    if p.ep * p.etp > 1 and not dispatcher.keeps_sum_order:
        yield (
            f"parallel.dispatcher={dispatcher.kind!r}: sums the outputs of a token's experts otherwise than the "
            "all-to-all, with which sampling runs; choose 'alltoall'"
        )
    if chosen_in(moe, WirePart).rounds:
        yield f"moe.dispatch_precision='{moe.dispatch_precision}': rounds the input of the experts; set 'dtype'"


def caches_latents(layer: Layer) -> bool:
    """Return whether decoding attends to all cached latents with projections that training does not use."""
    return layer.core.cached_expanded > 0 and not layer.core.selected


def _model(model: ModelConfig, train: TrainConfig, lora: LoraConfig, rollout: RolloutConfig) -> Iterator[str]:
    if lora.rank:
        yield f"lora.rank={lora.rank}: the products of adapters are added in another order; train all weights"
    if rollout.cache != "heads" and any(caches_latents(layer) for layer in model.decoder_layers):
        yield (
            "rollout.cache='latents': latent attention decodes by absorbed projections, which training does not use; "
            "choose 'heads'"
        )
    if model.has_linear_attention:
        yield (
            f"model.layers={model.layers!r}: linear attention trains in chunks and decodes token "
            "by token, whose sums differ; choose layers without 'linear'"
        )
    if any(layer.chunk % PAGE_POSITIONS for layer in model.decoder_layers):
        yield (
            f"model.attention_chunk_size={model.attention_chunk_size}: decoding reads pages of {PAGE_POSITIONS} "
            f"positions; choose {nearest_multiples(model.attention_chunk_size, PAGE_POSITIONS)}"
        )
    if model.selected_keys:
        yield (
            f"model.attention.indexer.top_k={model.selected_keys}: torch computes scores and sums over selected "
            "keys, which depend on the number of tokens; choose model.attention.indexer=none"
        )
    core = model.softmax_attention.core(model.hidden_size)
    head_dim = max(core.key_width, core.value_width)
    if head_dim > MAX_EXACT_HEAD_DIM:
        yield f"model.attention.head_dim={head_dim}: the C attention has heads of at most {MAX_EXACT_HEAD_DIM}"
    if train.seq_len > MAX_EXACT_SEQ_LEN:
        yield (
            f"train.seq_len={train.seq_len}: training attends with the C kernel to samples of at most "
            f"{MAX_EXACT_SEQ_LEN} tokens"
        )


def _routing(run: RunConfig, model: ModelConfig, moe: MoEConfig) -> Iterator[str]:
    if moe.capacity_factor > 0:
        yield f"moe.capacity_factor={moe.capacity_factor}: tokens are dropped in training; set 0.0"
    if not chosen_in(moe, ChoicePart).scores_decide:
        yield f"moe.choice='{moe.choice}': a token's experts depend on other tokens, or on its place; choose 'topk'"
    if moe.input_jitter > 0:
        yield f"moe.input_jitter={moe.input_jitter}: training adds noise to the router's input; set 0.0"
    if model.ffn.moe.router.noise_width(1, 1):
        yield "model.ffn.moe.router.softmax.samples=true: training samples a token's experts; set false"
    if moe.replay:
        yield f"moe.replay={moe.replay!r}: training takes the experts of another run; leave it out"
    if moe.router_dtype == "float64" and run.dtype != "float64":
        yield "moe.router_dtype='float64': computed by torch, whose sums depend on the number of tokens; set 'float32'"


def replays_routing(model: ModelConfig, moe: MoEConfig, rl: RLConfig, *, is_exact: bool) -> tuple[bool, str]:
    """Return whether training replays the choices of sampling, and a log message if `rl.replay` is "auto".

    `is_exact`: sampling has the bits of training, see `inexact_settings`.
    """
    if not model.has_moe_layers or rl.replay == "off":
        return False, ""
    if rl.replay == "on":
        return True, ""
    if is_exact and rl.updates == 1:
        return False, ""
    if rl.staleness:
        return False, f"rl.replay='auto': off, as rollouts with rl.staleness={rl.staleness} keep no expert choices"
    if counts_replayed_choices(model, moe, rl):
        return False, (
            f"rl.replay='auto': off, as moe.bias_update_rate={moe.bias_update_rate:g} would count choices of the "
            f"weights before rl.updates={rl.updates} updates"
        )
    cause = f"rl.updates={rl.updates}" if is_exact else "sampling differs by rounding"
    return True, f"rl.replay='auto': training sends each token to the experts that sampling chose, as {cause}"


def counts_replayed_choices(model: ModelConfig, moe: MoEConfig, rl: RLConfig) -> bool:
    """Return whether counts of the choices of older weights would update the expert bias."""
    has_bias = model.routed is not None and model.routed.router.expert_bias
    return rl.updates > 1 and has_bias and moe.bias_update_rate > 0
