"""The [rl], [rollout] and [reward] sections: reinforcement learning, described in docs/rl.md."""

from dataclasses import dataclass
from typing import Annotated, Literal

from moefold.config.base.field import POSITIVE, Bound, ReadIf, at_least
from moefold.config.base.part import KindOf, Part, Section

HTTP = ("http://", "https://")


@dataclass(frozen=True, kw_only=True, slots=True)
class RLConfig(Section):
    """Reinforcement learning with verifiable rewards, on if group_size is above 0 ([rl.md](rl.md))."""

    group_size: Annotated[
        int, Bound("must be at least 2, or 0 (no reinforcement learning)", lambda size: size >= 2 or size == 0)
    ] = 0
    """Rollouts sampled for each prompt, G (arXiv:2402.03300). 0: no reinforcement learning. train.global_batch_size
    counts rollouts, and is a multiple of it."""
    objective: Annotated[str | Part, KindOf("objective")] = "policy"
    """Loss of the sampled tokens."""
    advantage: Annotated[str | Part, KindOf("advantage")] = "group"
    """Advantage of a rollout."""
    loss_mean: Literal["token", "rollout", "constant"] = "token"
    """Weights of the tokens. token: all sampled tokens of a step count the same (DAPO). rollout: all rollouts of a step
    count the same (GRPO). constant: the sum over tokens, divided by rollouts * rollout.max_tokens (Dr. GRPO)."""
    updates: Annotated[int, at_least(1)] = 1
    """Optimizer steps on one round of rollouts: a round has updates * train.global_batch_size rollouts, each of which
    is trained on once. Above 1, the later steps are off-policy: choose objective clip, cispo or sequence."""
    staleness: Annotated[int, at_least(0, "0: the newest weights sample")] = 0
    """Optimizer steps between the weights that sample a rollout and those that first train on it: rollouts of step n
    are sampled by the weights after step n - 1 - staleness, or by the initial weights. A multiple of rl.updates. Above
    0, rollout.ranks can sample while the other ranks train. Without rollout.ranks the training ranks sample and train
    alternately, with the same results ([rl.md](rl.md#sampling-on-ranks-of-their-own))."""
    correction: Annotated[str | Part, KindOf("correction")] = "none"
    """Importance weight of a token if the log-probabilities of the sampler differ from training: from the factor c =
    exp(log-probability in training - in sampling), of the weights at the start of a round, without gradient."""
    replay: Literal["auto", "on", "off"] = "auto"
    """Routing replay (R3, arXiv:2510.11370): training sends each token to the experts that sampling chose. Their
    routing weights have gradients. auto: on if sampling differs from training by rounding, or updates is above 1. The
    log says which."""
    mismatch_limit: Annotated[float, at_least(0, "0: by dtype and sampler")] = 0.0
    """Largest mean difference between the log-probabilities of the sampler and of training, in nats, in a step on
    rollouts of the current weights. Above it the run ends before the update ([rl.md](rl.md#the-limit-of-the-mismatch)).
    0: 1e-6 where sampling is exact or run.dtype is float64, else 0.01 in float32, and 0.1 in bfloat16 or with
    moe.dispatch_precision. On rollouts of older weights (staleness) the limit is 1, or this if it is larger."""
    kl: Annotated[float, at_least(0, "0: off")] = 0.0
    """Coefficient of the KL divergence from the reference model. 0: no reference model is in memory."""
    kl_kind: Annotated[str | Part, KindOf("kl"), ReadIf("rl.kl")] = "k3"
    """Estimator of the KL divergence (J. Schulman, 2020)."""
    reference: Annotated[
        str, Bound("must name 'start', a checkpoint, a run or a Hugging Face folder", bool), ReadIf("rl.kl")
    ] = "start"
    """Weights of the reference model. start: the initial weights of the run. A path: a checkpoint, a run or a
    Hugging Face folder, as for checkpoint.init_from."""
    reset_patience: Annotated[int, at_least(0, "0: off"), ReadIf("rl.kl")] = 0
    """Evaluations without a higher reward after which the reference model becomes the current policy and the optimizer
    moments become zero (ProRL, arXiv:2505.24864). 0: never."""
    mixed_only: bool = False
    """Replace groups with equal rewards, which have no gradient, by groups of other prompts (DAPO's dynamic
    sampling)."""
    most_rounds: Annotated[int, at_least(1), ReadIf("rl.mixed_only")] = 4
    """Maximum number of rounds of sampling for one batch with mixed_only. Then equal groups stay."""
    truncated: Literal["keep", "zero", "ignore"] = "keep"
    """Rollouts that rollout.max_tokens cuts off. keep: scored as any other. zero: reward 0. ignore: not trained on."""
    length_penalty_from: Annotated[int, at_least(0, "0: off")] = 0
    """Tokens of a rollout from which its reward falls linearly, by 1 at rollout.max_tokens (DAPO's soft overlong
    punishment). 0: never."""

    @property
    def is_on(self) -> bool:
        """Return whether the recipe is reinforcement learning."""
        return self.group_size > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of rollouts for reinforcement learning."""

    engine: Literal["own", "vllm"] = "own"
    """Sampler. own: the model in training, or a copy of it. vllm: a vLLM server that the user starts
    ([rl.md](rl.md#vllm-as-the-sampler))."""
    url: Annotated[
        str,
        Bound("must begin with http:// or https://", lambda url: url.startswith(HTTP)),
        ReadIf("rollout.engine=vllm"),
    ] = "http://127.0.0.1:8000"
    """Address of the vLLM server."""
    folder: Annotated[str, ReadIf("rollout.engine=vllm")] = ""
    """Hugging Face folder that the vLLM server was started with, as both rank 0 and the server see it. It has the model
    of the recipe. Each round's weights are written to its subfolder rollout_weights."""
    timeout_s: Annotated[float, POSITIVE, ReadIf("rollout.engine=vllm")] = 300.0
    """Time limit of the vLLM server for loading weights, and for sampling the rollouts of a round."""
    ranks: Annotated[int, at_least(0, "0: the training ranks sample")] = 0
    """Ranks that only sample, in addition to the parallel.world_size ranks, which train meanwhile. This needs
    rl.staleness. The degrees below apply to these ranks. 0: the ranks that train also sample."""
    tp: Annotated[int, at_least(0, "0: as in training")] = 0
    """Tensor-parallel degree of sampling. 0: as in training. If one of tp, pp, ep and etp differs from training, the
    weights are copied to a second model under this mapping of the same ranks after each round
    ([rl.md](rl.md#another-mapping-for-sampling)). The other ranks are dp."""
    pp: Annotated[int, at_least(0, "0: as in training")] = 0
    """Pipeline ranks of sampling. 0: as in training."""
    ep: Annotated[int, at_least(0, "0: as in training")] = 0
    """Expert-parallel degree of sampling. 0: as in training."""
    etp: Annotated[int, at_least(0, "0: as in training")] = 0
    """Expert-tensor-parallel degree of sampling. 0: as in training."""
    experts: Literal["exchange", "fetch", "whole"] = "exchange"
    """Access of sampling ranks to the experts. exchange: tokens are sent to the ranks of their experts, so
    data-parallel ranks that share experts step together. whole: each rank holds all experts (ep = etp = 1). fetch: each
    rank holds its part and reads the others from the memory of its peers, on one machine, so no rank waits for another
    (DWDP, arXiv:2604.01621), on CPU only and without tp and etp ([rl.md](rl.md#experts-of-other-ranks))."""
    max_tokens: Annotated[int, at_least(1)] = 64
    """Maximum number of new tokens of a rollout, the end-of-text token included."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Divisor of the logits in sampling and in the loss."""
    slots: Annotated[int, at_least(1)] = 256
    """Maximum number of rollouts that a rank decodes at once, or has in flight at a vLLM server."""
    pass_tokens: Annotated[int, at_least(1), ReadIf("rollout.engine=own")] = 2048
    """Maximum number of tokens of one forward pass of a rank, of prompts and rollouts together, at least slots."""
    cache_gib: Annotated[float, POSITIVE, ReadIf("rollout.engine=own")] = 1.0
    """GiB of cached keys and values of a rank. Rollouts that do not fit wait, or are computed again."""
    cache: Annotated[Literal["latents", "heads"], ReadIf("rollout.engine=own")] = "latents"
    """Contents of the cache of latent attention (model.attention="mla"). latents: small. heads: keys and values of all
    heads, computed as in training."""

    @property
    def uses_server(self) -> bool:
        """Return whether a server outside of the job samples."""
        return self.engine == "vllm"

    def num_job_ranks(self, world_size: int) -> int:
        """Return the ranks of the job: `world_size` that train, and those that only sample rollouts."""
        return world_size + self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Reward of rollouts."""

    use: str | tuple[str, ...] = ""
    """Reward function, or a list of them: exact, number, sort, countdown, or FILE.py:FUNCTION, a Python function with
    TRL's signature f(prompts, completions, **columns). Empty: the verifier of data.task. The reward of a rollout is the
    sum of the results that are not None."""
    weights: tuple[float, ...] = ()
    """Factor of each reward function in the sum, in the order of use (TRL's reward_weights). Empty: 1 each."""
    timeout_s: Annotated[float, POSITIVE] = 10.0
    """Maximum time of one call of a Python function."""
    workers: Annotated[int, at_least(1)] = 2
    """Processes of each rank that run a Python function, for each function."""
    on_error: Literal["stop", "drop"] = "stop"
    """Handling of a Python function that fails or does not return. stop: end the run. drop: leave the prompt's group
    out of the loss."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names in `use`."""
        return tuple(filter(None, (self.use,) if isinstance(self.use, str) else self.use))
