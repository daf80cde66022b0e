"""Recipe sections of reinforcement learning: [rl], [rollout] and [reward]; see `config/schema.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig:
    """Reinforcement learning with verifiable rewards; on if group_size is above 0 ([rl.md](rl.md))."""

    group_size: int = 0
    """Rollouts sampled for each prompt, G (arXiv:2402.03300); 0: no reinforcement learning. train.global_batch_size
    counts rollouts, and is a multiple of it."""
    objective: Literal["policy", "clip", "cispo", "sequence"] = "policy"
    """Loss of the sampled tokens. policy: REINFORCE, advantage times log-probability. clip: clipped ratios of the
    policy to the sampler (PPO, GRPO). cispo: clipped importance weights (arXiv:2506.13585). sequence: ratios of whole
    rollouts (GSPO, arXiv:2507.18071)."""
    advantage: Literal["group", "group_std", "leave_one_out", "batch"] = "group"
    """Advantage of a rollout. group: reward minus the mean of its group (Dr. GRPO). group_std: divided by the group's
    standard deviation (GRPO). leave_one_out: minus the mean of the others of its group (RLOO). batch: minus the mean of
    its group, divided by the standard deviation of the batch (REINFORCE++-baseline)."""
    loss_mean: Literal["token", "rollout", "constant"] = "token"
    """Weights of the tokens. token: all sampled tokens of a step count the same (DAPO). rollout: all rollouts of a step
    count the same (GRPO). constant: the sum over tokens, divided by rollouts * rollout.max_tokens (Dr. GRPO)."""
    updates: int = 1
    """Optimizer steps on one round of rollouts: a round has updates * train.global_batch_size rollouts, each of which
    is trained on once. Above 1, the later steps are off-policy: choose objective clip, cispo or sequence."""
    staleness: int = 0
    """Optimizer steps between the weights that sample a rollout and those that first train on it: rollouts of
    step n are sampled by the weights after step n - 1 - staleness, or by the initial ones. A multiple of rl.updates.
    Above 0, rollout.ranks can sample while the other ranks train; without rollout.ranks the training ranks compute the
    same run in turn ([rl.md](rl.md#sampling-on-ranks-of-their-own))."""
    clip_low: float = 0.2
    """Lower clip range of the ratio, below 1."""
    clip_high: float = 0.28
    """Upper clip range of the ratio, above 1 (DAPO's clip-higher, arXiv:2503.14476)."""
    correction: Literal["none", "clamp", "mask", "sequence_mask"] = "none"
    """Importance weight of a token where the sampler computes other log-probabilities than training: c =
    exp(log-probability in training - in sampling), of the weights at the start of a round, without gradient. clamp: c
    is clamped to [correction_low, correction_high] (TIS). mask: 0 outside of it (IcePop). sequence_mask: 0 in a rollout
    whose geometric mean of c is outside of it."""
    correction_low: float = 0.0
    """Lower bound of correction: 0.5 for mask in IcePop, 0.999 for sequence_mask in ProRL v2.1."""
    correction_high: float = 2.0
    """Upper bound of correction: 5.0 for mask in IcePop, 1.002 for sequence_mask in ProRL v2.1."""
    replay: Literal["auto", "on", "off"] = "auto"
    """Routing replay (R3, arXiv:2510.11370): training sends each token to the experts that sampling chose, whose
    weights have gradients as ever. auto: on where sampling differs from training by rounding, or updates is above 1;
    the log says which."""
    mismatch_limit: float = 0.0
    """Largest mean difference between the log-probabilities of the sampler and those of training, in nats, of a step on
    rollouts of its own weights; beyond it the run ends before the update
    ([rl.md](rl.md#the-limit-of-the-mismatch)). 0: 1e-6 where sampling is exact or run.dtype is float64, else 0.01 in
    float32, and 0.1 in bfloat16 or with moe.dispatch_precision."""
    kl: float = 0.0
    """Coefficient of the KL divergence from the reference model; 0: no reference model is in memory."""
    kl_kind: Literal["k3", "k2"] = "k3"
    """Estimator of the KL divergence (J. Schulman, 2020), with d = log(reference/policy). k3: exp(d) - d - 1. k2:
    d**2 / 2."""
    reference: str = "start"
    """Weights of the reference model. start: the initial weights of the run. Else a checkpoint, a run or a Hugging Face
    folder, as for checkpoint.init_from."""
    reset_patience: int = 0
    """Evaluations without a higher reward after which the reference model becomes the current policy and the optimizer
    moments become zero (ProRL, arXiv:2505.24864); 0: never."""
    mixed_only: bool = False
    """Replace groups whose rewards are all equal, which have no gradient, by groups of further prompts (DAPO's dynamic
    sampling)."""
    most_rounds: int = 4
    """Maximum number of rounds of sampling for one batch with mixed_only; then equal groups stay."""
    truncated: Literal["keep", "zero", "ignore"] = "keep"
    """Rollouts that rollout.max_tokens cuts off. keep: scored as any other. zero: reward 0. ignore: not trained on."""
    length_penalty_from: int = 0
    """Tokens of a rollout from which its reward falls linearly, by 1 at rollout.max_tokens (DAPO's soft overlong
    punishment); 0: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of rollouts for reinforcement learning."""

    engine: Literal["own", "vllm"] = "own"
    """What samples. own: the model in training, or a copy of it. vllm: a vLLM server that the user starts
    ([rl.md](rl.md#vllm-as-the-sampler))."""
    url: str = "http://127.0.0.1:8000"
    """Address of the vLLM server."""
    folder: str = ""
    """Hugging Face folder that the vLLM server was started with, as both rank 0 and the server see it; of the model of
    the recipe. Each round's weights are written to its subfolder rollout_weights."""
    timeout_s: float = 300.0
    """Maximum time in which the vLLM server loads weights, or samples the rollouts of a round."""
    ranks: int = 0
    """Ranks that only sample, in addition to the parallel.world_size ranks, which train meanwhile; needs rl.staleness.
    The degrees below are those of these ranks. 0: the ranks that train sample in turn."""
    tp: int = 0
    """Tensor-parallel degree of sampling; 0: that of training. If one of tp, pp, ep and etp differs from training, the
    weights are copied to a second model under this mapping of the same ranks after each round
    ([rl.md](rl.md#another-mapping-for-sampling)); the other ranks are dp."""
    pp: int = 0
    """Pipeline ranks of sampling; 0: those of training."""
    ep: int = 0
    """Expert-parallel degree of sampling; 0: that of training."""
    etp: int = 0
    """Expert-tensor-parallel degree of sampling; 0: that of training."""
    experts: Literal["exchange", "fetch", "whole"] = "exchange"
    """How ranks that sample reach the experts. exchange: tokens are sent to the ranks of their experts, so
    data-parallel ranks that share experts step together. whole: each rank holds all experts (ep = etp = 1). fetch: each
    rank holds its part and reads the others from the memory of its peers, on one machine, so no rank waits for another
    (DWDP, arXiv:2604.01621); CPU only, without tp and etp ([rl.md](rl.md#experts-of-other-ranks))."""
    max_tokens: int = 64
    """Maximum number of new tokens of a rollout, the end-of-text token included."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in the loss."""
    slots: int = 256
    """Maximum number of rollouts that a rank decodes at once, or has in flight at a vLLM server."""
    pass_tokens: int = 2048
    """Maximum number of tokens of one forward pass of a rank, of prompts and rollouts together; at least slots."""
    cache_gib: float = 1.0
    """GiB of cached keys and values of a rank. Rollouts that do not fit wait, or are computed again."""
    cache: Literal["latents", "heads"] = "latents"
    """What latent attention (model.attention="mla") caches. latents: small. heads: keys and values of all heads,
    computed as in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Reward of rollouts."""

    use: str | tuple[str, ...] = ""
    """Reward function, or a list of them: exact, number, sort, countdown, or FILE.py:FUNCTION, a Python function with
    TRL's signature f(prompts, completions, **columns); empty: that of data.task. The reward of a rollout is the sum of
    those that are not None."""
    weights: tuple[float, ...] = ()
    """Factor of each reward function in the sum, in the order of use (TRL's reward_weights); empty: 1 each."""
    timeout_s: float = 10.0
    """Maximum time of one call of a Python function."""
    workers: int = 2
    """Processes of each rank that run a Python function, for each function."""
    on_error: Literal["stop", "drop"] = "stop"
    """Handling of a Python function that fails or does not return. stop: end the run. drop: leave the prompt's group
    out of the loss."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names in `use`."""
        return tuple(filter(None, (self.use,) if isinstance(self.use, str) else self.use))
