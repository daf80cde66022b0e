"""Rules on reinforcement learning: batch, objective, sampling and its experts, rewards, and unsupported settings."""

from collections.abc import Iterator

from moefold.config.base.limits import MAX_NUMBER
from moefold.config.base.part_registry import kinds_with
from moefold.config.chosen import chosen_in
from moefold.config.groups.policy import CorrectionPart, ObjectivePart
from moefold.config.groups.router import ChoicePart
from moefold.config.model import ModelConfig
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.moe import MoEConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.train import TrainConfig
from moefold.config.suggestions import join_with_or, nearest_numbers
from moefold.errors import ConfigError
from moefold.message_text import Problem, Setting
from moefold.topology.layout import divisors, fold_mapping
from moefold.topology.rollout_mapping import FETCH, fetches_experts, has_rollout_mapping, rollout_degrees
from moefold.validate.exactness import counts_replayed_choices


def validate_vllm(
    parallel: ParallelConfig, faults: FaultsConfig, rl: RLConfig, rollout: RolloutConfig
) -> Iterator[Problem]:
    """Check that the recipe names the server's folder, and leaves the mapping of sampling to the server."""
    if not rl.is_on or not rollout.uses_server:
        return
    if not rollout.folder:
        yield Problem(
            "rollout.folder",
            "",
            "must name the Hugging Face folder that the vLLM server was started with",
            "write one by moefold export CHECKPOINT FOLDER",
        )
    if has_rollout_mapping(parallel, rl, rollout):
        rule = (
            "samples under the mapping of the server (vllm serve --tensor-parallel-size), so rollout.ranks, tp, "
            "pp, ep, etp and experts have no effect"
        )
        yield Problem("rollout.engine", "vllm", rule, "leave them out, or choose rollout.engine='own'")
    if rollout.timeout_s >= faults.timeout_s:
        rule = f"must be less than faults.timeout_s={faults.timeout_s}, after which the other ranks end the run"
        yield Problem("rollout.timeout_s", rollout.timeout_s, rule, "lower it, or raise faults.timeout_s")


def validate_rl_data(data: DataConfig, rl: RLConfig, reward: RewardConfig) -> Iterator[Problem]:
    """Check that reinforcement learning has prompts, and that prompts are not trained on as text."""
    kind = data.kind
    if rl.is_on and not data.has_prompts:
        rule = f"samples rollouts of prompts, and data.kind={kind!r} has none"
        way_out = "choose data.kind='task' or 'prompts', or rl.group_size=0"
        yield Problem("rl.group_size", rl.group_size, rule, way_out)
    if not rl.is_on and kind == "prompts":
        rule = "has no answers to train on"
        yield Problem("data.kind", "prompts", rule, "set rl.group_size above 0, or choose data.kind='sft'")
    if rl.is_on and kind == "prompts" and not reward.functions:
        rule = "must name the reward of data.kind='prompts': exact, number, sort, countdown, or FILE.py:FUNCTION"
        yield Problem("reward.use", "", rule)


def validate_rl_batch(
    run: RunConfig, train: TrainConfig, checkpoint: CheckpointConfig, rl: RLConfig
) -> Iterator[Problem]:
    """Check that groups divide the batch, and that saves come after whole rounds of rollouts."""
    if not rl.is_on:
        return
    size = train.global_batch_size
    if size % rl.group_size:
        legal = [number for number in divisors(size) if number > 1]
        way_out = f"group_size {nearest_numbers(rl.group_size, legal)}, or another batch" if legal else "a larger batch"
        rule = f"must be a multiple of rl.group_size={rl.group_size}: it counts rollouts"
        yield Problem("train.global_batch_size", size, rule, f"choose {way_out}")
    for key, steps in (("run.steps", run.steps), ("checkpoint.every", checkpoint.every)):
        if steps % rl.updates:
            legal = [steps - steps % rl.updates, steps + -steps % rl.updates]
            yield Problem(
                key,
                steps,
                f"must be a multiple of rl.updates={rl.updates}: rollouts that are not trained on yet are not saved",
                f"choose {' or '.join(str(number) for number in legal if number)}",
            )


def _correcting_objectives() -> str:
    """Return the built-in objectives that read the probabilities of the sampler, as a choice in words."""
    return join_with_or(list(map(repr, kinds_with(ObjectivePart.group, "reads_sampler"))))


def validate_rl_objective(rl: RLConfig) -> Iterator[Problem]:
    """Check that the objective corrects for the steps after the first on one round of rollouts."""
    objective = chosen_in(rl, ObjectivePart)
    correction = chosen_in(rl, CorrectionPart)
    if rl.is_on and rl.updates > 1 and not objective.reads_sampler:
        rule = f"trains on rollouts of older weights, which rl.objective='{rl.objective}' does not correct for"
        yield Problem("rl.updates", rl.updates, rule, f"choose objective {_correcting_objectives()}, or updates=1")
    if rl.is_on and rl.updates == 1 and correction.corrects and objective.reads_sampler:
        rule = (
            f"with rl.correction='{rl.correction}' compares with the weights at the start of a round, which are "
            "those that rl.updates=1 trains, so every ratio is 1"
        )
        yield Problem("rl.objective", str(rl.objective), rule, "choose objective 'policy', or updates above 1")


def validate_replay(model: ModelConfig, moe: MoEConfig, rl: RLConfig) -> Iterator[Problem]:
    """Check that replayed choices of experts come from the weights in training."""
    if rl.is_on and rl.replay == "on" and counts_replayed_choices(model, moe, rl):
        rule = (
            f"with rl.updates={rl.updates} would update the expert bias by choices of older weights "
            f"(moe.bias_update_rate={moe.bias_update_rate:g})"
        )
        yield Problem("rl.replay", "on", rule, "set bias_update_rate=0, updates=1, or replay='off'")
    if rl.is_on and rl.replay == "on" and rl.staleness:
        rule = (
            f"is incompatible with rl.staleness={rl.staleness}: rollouts that wait for training keep no expert choices"
        )
        yield Problem("rl.replay", "on", rule, "set replay='auto' (off here), or staleness=0")


def validate_rollout_limits(train: TrainConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Check the tokens of a rollout and of a pass, and settings that count evaluations."""
    if rl.is_on and rl.length_penalty_from >= rollout.max_tokens:
        rule = f"must be below rollout.max_tokens={rollout.max_tokens}, where the reward has fallen by 1"
        way_out = f"choose 0 (none) to {rollout.max_tokens - 1}"
        yield Problem("rl.length_penalty_from", rl.length_penalty_from, rule, way_out)
    if rl.is_on and rollout.pass_tokens < rollout.slots:
        rule = f"must be at least rollout.slots={rollout.slots}: each rollout adds one token to a pass"
        yield Problem("rollout.pass_tokens", rollout.pass_tokens, rule, "choose fewer slots or more tokens")
    if rl.is_on and rl.reset_patience and not train.eval_every:
        rule = "counts evaluations, and train.eval_every=0 makes none"
        yield Problem("rl.reset_patience", rl.reset_patience, rule, "set eval_every, or reset_patience=0")


def validate_staleness(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Check that ranks that only sample have work, and that training corrects for rollouts of older weights."""
    if not rl.is_on:
        return
    ranks = rollout.ranks
    if ranks and not rl.staleness:
        rule = (
            "would wait for each training step, and the other ranks for each round of rollouts: rl.staleness=0 "
            "trains on rollouts of the newest weights"
        )
        yield Problem("rollout.ranks", ranks, rule, f"set rl.staleness={rl.updates} or more, or rollout.ranks=0")
    if rl.staleness % rl.updates:
        legal = [rl.staleness - rl.staleness % rl.updates, rl.staleness + -rl.staleness % rl.updates]
        rule = (
            f"must be a multiple of rl.updates={rl.updates}: it counts optimizer steps, and rounds of rollouts "
            "are whole"
        )
        yield Problem("rl.staleness", rl.staleness, rule, f"choose {legal[0]} or {legal[1]}")
    if rl.staleness and not chosen_in(rl, ObjectivePart).reads_sampler:
        rule = f"trains on rollouts of older weights, which rl.objective='{rl.objective}' does not correct for"
        way_out = f"choose objective {_correcting_objectives()}, or staleness=0"
        yield Problem("rl.staleness", rl.staleness, rule, way_out)
    if rl.staleness and chosen_in(rl, CorrectionPart).corrects:
        rule = (
            "needs log-probabilities of the weights that sampled, by the training forward pass, and with "
            f"rl.staleness={rl.staleness} these weights are trained further by then"
        )
        way_out = "set correction='none' (objective 'clip' or 'cispo' bounds the ratio to the sampler), or staleness=0"
        yield Problem("rl.correction", str(rl.correction), rule, way_out)
    if ranks and parallel.elastic:
        rule = "is incompatible with parallel.elastic=true, which gives every process of the launcher to training"
        yield Problem("rollout.ranks", ranks, rule, "set elastic=false")


def validate_rl_model(model: ModelConfig, moe: MoEConfig, train: TrainConfig, rl: RLConfig) -> Iterator[Problem]:
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
            rule = f"{setting} is incompatible with reinforcement learning: {reason}"
            yield Problem("", None, rule, f"{remedy}, or rl.group_size=0")


def reward_problems(reward: RewardConfig) -> Iterator[Problem]:
    """Check that each reward function is named once, and that reward.weights has a number for each function."""
    names = ("",) if isinstance(reward.use, str) else reward.use
    if repeated := sorted({name for name in names if name and names.count(name) > 1}):
        way_out = f"name it once, and set its share by {Setting('reward.weights')}"
        yield Problem("reward.use", list(names), f"names {repeated[0]!r} twice", way_out)
    if not isinstance(reward.use, str) and "" in names:
        yield Problem("reward.use", list(names), "has an empty name", "leave it out")
    weights = list(reward.weights)
    count = len(reward.functions) or 1
    if weights and len(weights) != count:
        rule = f"must have one number for each of the {count} reward functions of {Setting('reward.use')}"
        yield Problem("reward.weights", weights, rule, "list as many, or leave weights out for 1 each")
    elif not all(abs(weight) <= MAX_NUMBER for weight in weights):
        yield Problem("reward.weights", weights, f"must hold numbers of at most {MAX_NUMBER:.0e}")
    elif weights and not any(weights):
        yield Problem("reward.weights", weights, "makes every reward 0", "set one of them to another number")


def validate_reward(faults: FaultsConfig, reward: RewardConfig) -> Iterator[Problem]:
    """Check the reward functions, and that the timeout of a function is shorter than the timeout of ranks."""
    yield from reward_problems(reward)
    if uses_python_reward(reward) and reward.timeout_s >= faults.timeout_s:
        rule = f"must be less than faults.timeout_s={faults.timeout_s}, after which the other ranks end the run"
        yield Problem("reward.timeout_s", reward.timeout_s, rule, "lower it, or raise faults.timeout_s")


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


def validate_rollout_experts(parallel: ParallelConfig, rl: RLConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Check that the mapping of sampling supports the value of rollout.experts."""
    if not rl.is_on:
        return
    degrees = rollout_degrees(parallel, rollout)
    if fetches_experts(rollout):
        yield from fetch_violations(degrees, "rollout")
    if rollout.experts == "whole":
        for axis in ("ep", "etp"):
            if degrees[axis] > 1:
                rule = f"splits the experts, and {Setting('rollout.experts', 'whole')} holds all of them on each rank"
                way_out = f"leave {axis} out, or choose {Setting('rollout.experts', 'exchange')}"
                yield Problem(f"rollout.{axis}", degrees[axis], rule, way_out)


def fetch_violations(degrees: dict[str, int], section: str) -> Iterator[Problem]:
    """Yield a message for each degree with which ranks cannot read each other's experts.

    The section of the recipe that sets the degrees is for the messages.
    """
    for axis in ("tp", "etp"):
        if degrees[axis] > 1:
            rule = f"reads whole experts for whole tokens, and {axis}={degrees[axis]} splits them"
            yield FETCH.problem(rule, f"set {section}.{axis}=1, or choose 'exchange'")
    if degrees["ep"] == 1:
        rule = "has no effect with ep=1: each rank holds all experts"
        yield FETCH.problem(rule, f"set {section}.ep above 1, or leave it out")


def check_fetching_ranks(
    parallel: ParallelConfig, rollout: RolloutConfig, device_type: str, ranks_per_machine: int, first_rank: int = 0
) -> None:
    """Check that ranks can read each other's experts: they must be processes of one machine, on the CPU.

    Args:
        parallel: the mapping of the model that samples.
        ranks_per_machine: consecutive ranks of a machine, counted from rank 0 of the job.
        first_rank: rank of the job that is rank 0 of the config.

    Raises:
        ConfigError: the ranks cannot read each other's experts.
    """
    if not fetches_experts(rollout):
        return
    if device_type != "cpu":
        rule = f"reads experts from the memory of a machine, which is not implemented for the device {device_type!r}"
        raise ConfigError(FETCH.problem(rule, f"choose 'exchange' or 'whole', or {Setting('run.device', 'cpu')}"))
    layout = fold_mapping(parallel)
    for first in range(parallel.world_size):
        ranks = [first_rank + rank for rank in layout.moe.group(first, "ep")]
        if len({rank // ranks_per_machine for rank in ranks}) > 1:
            rule = (
                f"reads experts from the memory of a machine, and ranks {', '.join(map(str, ranks))} share "
                f"experts, with {ranks_per_machine} ranks on a machine"
            )
            raise ConfigError(FETCH.problem(rule, "choose a smaller ep, or 'exchange'"))
