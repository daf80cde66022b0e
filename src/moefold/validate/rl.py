"""Rules on reinforcement learning: batch, objective, sampling, rewards and settings that sampling does not support."""

from collections.abc import Iterator

from moefold.config.checkpoint import CheckpointConfig
from moefold.config.chosen import chosen_in
from moefold.config.data import DataConfig
from moefold.config.faults import FaultsConfig
from moefold.config.groups.policy import CorrectionPart, ObjectivePart
from moefold.config.groups.router import ChoicePart
from moefold.config.limits import MAX_NUMBER
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.part_registry import kinds_with
from moefold.config.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.run import RunConfig
from moefold.config.suggestions import join_with_or, nearest_numbers
from moefold.config.train import TrainConfig
from moefold.errors import Setting
from moefold.topology.layout import divisors
from moefold.topology.rollout_mapping import has_rollout_mapping
from moefold.validate.exactness import counts_replayed_choices


def validate_vllm(
    parallel: ParallelConfig, faults: FaultsConfig, rl: RLConfig, rollout: RolloutConfig
) -> Iterator[str]:
    """Check that the recipe names the server's folder, and leaves the mapping of sampling to the server."""
    if not rl.is_on or not rollout.uses_server:
        return
    if not rollout.folder:
        yield (
            "rollout.folder='' must name the Hugging Face folder that the vLLM server was started with; write one by "
            "moefold export CHECKPOINT FOLDER"
        )
    if has_rollout_mapping(parallel, rl, rollout):
        yield (
            "rollout.engine='vllm' samples under the mapping of the server (vllm serve --tensor-parallel-size), so "
            "rollout.ranks, tp, pp, ep, etp and experts have no effect; leave them out, or choose rollout.engine='own'"
        )
    if rollout.timeout_s >= faults.timeout_s:
        yield (
            f"rollout.timeout_s={rollout.timeout_s:g} must be less than faults.timeout_s={faults.timeout_s:g}, "
            "after which the other ranks end the run; lower it, or raise faults.timeout_s"
        )


def validate_rl_data(data: DataConfig, rl: RLConfig, reward: RewardConfig) -> Iterator[str]:
    """Check that reinforcement learning has prompts, and that prompts are not trained on as text."""
    kind = data.kind
    if rl.is_on and not data.has_prompts:
        yield (
            f"rl.group_size={rl.group_size} samples rollouts of prompts, and data.kind={kind!r} has none; choose "
            "data.kind='task' or 'prompts', or rl.group_size=0"
        )
    if not rl.is_on and kind == "prompts":
        yield ("data.kind='prompts' has no answers to train on; set rl.group_size above 0, or choose data.kind='sft'")
    if rl.is_on and kind == "prompts" and not reward.functions:
        yield (
            f"{Setting('reward.use', '')} must name the reward of data.kind='prompts': exact, number, sort, countdown, "
            "or FILE.py:FUNCTION"
        )


def validate_rl_batch(run: RunConfig, train: TrainConfig, checkpoint: CheckpointConfig, rl: RLConfig) -> Iterator[str]:
    """Check that groups divide the batch, and that saves come after whole rounds of rollouts."""
    if not rl.is_on:
        return
    size = train.global_batch_size
    if size % rl.group_size:
        legal = [number for number in divisors(size) if number > 1]
        way_out = f"group_size {nearest_numbers(rl.group_size, legal)}, or another batch" if legal else "a larger batch"
        yield (
            f"train.global_batch_size={size} must be a multiple of rl.group_size={rl.group_size}: it counts rollouts; "
            f"choose {way_out}"
        )
    for key, steps in (("run.steps", run.steps), ("checkpoint.every", checkpoint.every)):
        if steps % rl.updates:
            legal = [steps - steps % rl.updates, steps + -steps % rl.updates]
            yield (
                f"{key}={steps} must be a multiple of rl.updates={rl.updates}: rollouts that are not trained on yet "
                f"are not saved; choose {' or '.join(str(number) for number in legal if number)}"
            )


def _correcting_objectives() -> str:
    """Return the built-in objectives that read the probabilities of the sampler, as a choice in words."""
    return join_with_or(list(map(repr, kinds_with(ObjectivePart.group, "reads_sampler"))))


def validate_rl_objective(rl: RLConfig) -> Iterator[str]:
    """Check that the objective corrects for the steps after the first on one round of rollouts."""
    objective = chosen_in(rl, ObjectivePart)
    correction = chosen_in(rl, CorrectionPart)
    if rl.is_on and rl.updates > 1 and not objective.reads_sampler:
        yield (
            f"rl.updates={rl.updates} trains on rollouts of older weights, which rl.objective='{rl.objective}' "
            f"does not correct for; choose objective {_correcting_objectives()}, or updates=1"
        )
    if rl.is_on and rl.updates == 1 and correction.corrects and objective.reads_sampler:
        yield (
            f"rl.objective='{rl.objective}' with rl.correction='{rl.correction}' compares with the weights at the "
            "start of a round, which are those that rl.updates=1 trains, so every ratio is 1; choose objective "
            "'policy', or updates above 1"
        )


def validate_replay(model: ModelConfig, moe: MoEConfig, rl: RLConfig) -> Iterator[str]:
    """Check that replayed choices of experts come from the weights in training."""
    if rl.is_on and rl.replay == "on" and counts_replayed_choices(model, moe, rl):
        yield (
            f"rl.replay='on' with rl.updates={rl.updates} would update the expert bias by choices of older weights "
            f"(moe.bias_update_rate={moe.bias_update_rate:g}); set bias_update_rate=0, updates=1, or replay='off'"
        )
    if rl.is_on and rl.replay == "on" and rl.staleness:
        yield (
            f"rl.replay='on' is incompatible with rl.staleness={rl.staleness}: rollouts that wait for training keep no "
            "expert choices; set replay='auto' (off here), or staleness=0"
        )


def validate_rollout_limits(train: TrainConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Check the tokens of a rollout and of a pass, and settings that count evaluations."""
    if rl.is_on and rl.length_penalty_from >= rollout.max_tokens:
        yield (
            f"rl.length_penalty_from={rl.length_penalty_from} must be below rollout.max_tokens="
            f"{rollout.max_tokens}, where the reward has fallen by 1; choose 0 (none) to {rollout.max_tokens - 1}"
        )
    if rl.is_on and rollout.pass_tokens < rollout.slots:
        yield (
            f"rollout.pass_tokens={rollout.pass_tokens} must be at least rollout.slots={rollout.slots}: each "
            "rollout adds one token to a pass; choose fewer slots or more tokens"
        )
    if rl.is_on and rl.reset_patience and not train.eval_every:
        yield (
            f"rl.reset_patience={rl.reset_patience} counts evaluations, and train.eval_every=0 makes none; set "
            "eval_every, or reset_patience=0"
        )


def validate_staleness(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Check that ranks that only sample have work, and that training corrects for rollouts of older weights."""
    if not rl.is_on:
        return
    ranks = rollout.ranks
    if ranks and not rl.staleness:
        yield (
            f"rollout.ranks={ranks} would wait for each training step, and the other ranks for each round of rollouts: "
            f"rl.staleness=0 trains on rollouts of the newest weights; set rl.staleness={rl.updates} or more, or "
            "rollout.ranks=0"
        )
    if rl.staleness % rl.updates:
        legal = [rl.staleness - rl.staleness % rl.updates, rl.staleness + -rl.staleness % rl.updates]
        yield (
            f"rl.staleness={rl.staleness} must be a multiple of rl.updates={rl.updates}: it counts optimizer steps, "
            f"and rounds of rollouts are whole; choose {legal[0]} or {legal[1]}"
        )
    if rl.staleness and not chosen_in(rl, ObjectivePart).reads_sampler:
        yield (
            f"rl.staleness={rl.staleness} trains on rollouts of older weights, which rl.objective='{rl.objective}' "
            f"does not correct for; choose objective {_correcting_objectives()}, or staleness=0"
        )
    if rl.staleness and chosen_in(rl, CorrectionPart).corrects:
        yield (
            f"rl.correction='{rl.correction}' needs log-probabilities of the weights that sampled, by the training "
            f"forward pass, and with rl.staleness={rl.staleness} these weights are trained further by then; set "
            "correction='none' (objective 'clip' or 'cispo' bounds the ratio to the sampler), or staleness=0"
        )
    if ranks and parallel.elastic:
        yield (
            f"rollout.ranks={ranks} is incompatible with parallel.elastic=true, which gives every process of the "
            "launcher to training; set elastic=false"
        )


def validate_rl_model(model: ModelConfig, moe: MoEConfig, train: TrainConfig, rl: RLConfig) -> Iterator[str]:
    """Check that sampling can compute the forward pass of training token by token."""
    if not rl.is_on:
        return
    depends = "a token's experts would then depend on other tokens, and sampling sees other tokens"
    obstacles = {
        f"moe.choice='{moe.choice}'": (not chosen_in(moe, ChoicePart).scores_decide, depends, "choose 'topk'"),
        f"moe.capacity_factor={moe.capacity_factor}": (moe.capacity_factor > 0, depends, "set 0.0"),
        f"moe.eval_capacity_factor={moe.eval_capacity_factor}": (
            moe.eval_capacity_factor > 0,
            "log-probabilities of the reference and of the weights that sampled would lack experts",
            "leave it out",
        ),
        f"moe.input_jitter={moe.input_jitter}": (
            moe.input_jitter > 0,
            "the noise would differ between sampling and training",
            "set 0.0",
        ),
        "model.ffn.moe.router.softmax.samples=true": (
            model.ffn.moe.router.noise_width(1, 1) > 0,
            "training would sample other experts than rollouts have",
            "set model.ffn.moe.router.softmax.samples=false",
        ),
        f"moe.trace_every={moe.trace_every}": (moe.trace_every > 0, "batches of rollouts vary in size", "set 0"),
        f"moe.replay={moe.replay!r}": (bool(moe.replay), "a trace has the tokens of another run", "leave it out"),
        f"train.precision={train.precision!r}": (
            train.quantizes_gemms,
            "sampling has no rows enough for its blocks",
            "set 'dtype'",
        ),
        f"model.mtp_layers={model.mtp_layers}": (
            model.mtp_layers > 0,
            "the loss of rollouts has no targets for multi-token prediction",
            "set 0, with which checkpoint.init_from leaves these layers out",
        ),
    }
    for setting, (is_present, reason, remedy) in obstacles.items():
        if is_present:
            yield f"{setting} is incompatible with reinforcement learning: {reason}; {remedy}, or rl.group_size=0"


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """Check that each reward function is named once, and that reward.weights has a number for each function."""
    names = ("",) if isinstance(reward.use, str) else reward.use
    if repeated := sorted({name for name in names if name and names.count(name) > 1}):
        yield (
            f"{Setting('reward.use', list(names)):s} names {repeated[0]!r} twice; name it once, and set its share by "
            f"{Setting('reward.weights')}"
        )
    if not isinstance(reward.use, str) and "" in names:
        yield f"{Setting('reward.use', list(names)):s} has an empty name; leave it out"
    weights = list(reward.weights)
    count = len(reward.functions) or 1
    if weights and len(weights) != count:
        yield (
            f"{Setting('reward.weights', weights):s} must have one number for each of the {count} reward functions of "
            f"{Setting('reward.use')}; list as many, or leave weights out for 1 each"
        )
    elif not all(abs(weight) <= MAX_NUMBER for weight in weights):
        yield f"{Setting('reward.weights', weights):s} must hold numbers of at most {MAX_NUMBER:.0e}"
    elif weights and not any(weights):
        yield f"{Setting('reward.weights', weights):s} makes every reward 0; set one of them to another number"


def validate_reward(faults: FaultsConfig, reward: RewardConfig) -> Iterator[str]:
    """Check the reward functions, and that the timeout of a function is shorter than the timeout of ranks."""
    yield from reward_problems(reward)
    if uses_python_reward(reward) and reward.timeout_s >= faults.timeout_s:
        yield (
            f"reward.timeout_s={reward.timeout_s:g} must be less than faults.timeout_s={faults.timeout_s:g}, "
            "after which the other ranks end the run; lower it, or raise faults.timeout_s"
        )


def uses_python_reward(reward: RewardConfig) -> bool:
    """Return whether a Python function of the user computes the rewards."""
    return any(":" in name for name in reward.functions)


RL_RULES = (
    validate_rl_data,
    validate_rl_batch,
    validate_rl_objective,
    validate_replay,
    validate_rollout_limits,
    validate_staleness,
    validate_rl_model,
    validate_reward,
)
