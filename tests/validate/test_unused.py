"""A setting without effect is refused, and each such key has a case with and without effect."""

import re
import tomllib

import pytest

from moefold.config.base.part_registry import built_in_kinds, groups
from moefold.config.chosen import part_of_kind, read_key, with_key
from moefold.config.groups.router import aux_coefficient
from moefold.config.keys.annotations import read_conditions
from moefold.config.keys.paths import choices_of, default_of, owners_of, tables
from moefold.config.load import config_from_dict
from moefold.config.rule import apply_rule
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.unused import UNUSED_KEY_RULES, check_unused_keys, condition_holds, is_within, why_unread
from tests.validate.idle_keys import assert_read

RL = ["data.kind=task", "rl.group_size=4"]
VLLM = [*RL, "rollout.engine=vllm"]
EXACT = [*RL, "rl.objective=clip", "run.device=cpu", "run.kernels=c"]
QK_NORM = ["model.attention.qk_norm={}", "model.attention.qk_norm.weight=false"]
TEMPERATURE = ["model.layers=2 x (full, nope)", "model.attention.temperature.scale=0.1"]
SHORTCUT = ["model.layers=2 x (moe, dense)", "model.ffn.moe.shared.intermediate_size=64"]
PLANNED = ["parallel.context=planned", "parallel.world_size=2", "parallel.cp=2"]
ALONE = ["parallel.context=planned", "data.document_end=0"]
PLACED = [*PLANNED, "data.document_end=0", "parallel.context.placement=documents"]
BALANCED_HOSTS = [*PLANNED, "data.document_end=0", "parallel.context.hosts=balanced"]
UNSAVED = ["checkpoint.every=0", "checkpoint.at_end=false"]

CONDITIONS = read_conditions(tuple((path, owner) for path, mark in tables().items() for owner in owners_of(mark)))
"""Conditions of the keys of all kinds."""

# One setting for each idle key, with a setting that would give it an effect.
LONGROPE = [
    "model.rope.scaling=longrope",
    "model.attention.head_dim=2",
    "model.rope.scaling.short_factors=[1.0]",
    "model.rope.scaling.long_factors=[2.0]",
]
CASES = [
    ("sites.moments=average", ["sites.method=diloco"], ["sites.count=2"]),
    ("sites.residual=0.5", ["sites.count=2"], ["sites.count=2", "sites.precision=int8"]),
    ("model.ffn.moe.num_experts=4", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.top_k=1", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.intermediate_size=64", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router.softmax=pre", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.shared.intermediate_size=64", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.capacity_factor=1.5", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.pad_to_capacity=true", ["model.layers=4 dense"], ["moe.capacity_factor=1.0"]),
    ("moe.aux_loss=0.1", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.weight_in_expert=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.dispatch_precision=fp8-blockwise", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.z_loss=0.1", ["model.layers=4 dense"], ["model.layers=4"]),
    ("parallel.dispatcher=local", ["model.layers=4 dense"], ["model.layers=4"]),
    ("parallel.context.placement=documents", PLANNED, [*PLANNED, "data.document_end=0"]),
    ("parallel.context.hosts=balanced", PLANNED, [*PLANNED, "data.document_end=0"]),
    ("parallel.context.placement=balanced", ALONE, [*ALONE, "parallel.world_size=2"]),
    ("parallel.context.hosts=balanced", ALONE, [*ALONE, "parallel.world_size=2"]),
    (
        "parallel.context.placement=documents",
        [*ALONE, "parallel.world_size=2"],
        [*ALONE, "parallel.world_size=2", "parallel.cp=2"],
    ),
    ("parallel.context.tolerance=0.2", PLACED, BALANCED_HOSTS),
    ("parallel.context.pool=2", PLACED, BALANCED_HOSTS),
    ("parallel.context.block=64", [*PLANNED, "data.document_end=0"], BALANCED_HOSTS),
    ("parallel.context.block=64", PLANNED, [*PLANNED, "data.document_end=0", "parallel.context.placement=documents"]),
    ("parallel.overlap_experts=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.bias=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.activation=clamped_swiglu", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router.bias=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("run.compile=blocks", [], ["model.attention.qk_norm={}"]),
    (
        "run.compile=blocks",
        ["model.attention.qk_norm={}", "model.attention.qk_norm.over=all_heads"],
        ["model.layers=2 x (moe, dense)"],
    ),
    ("run.compile=blocks", ["model.layers=4"], ["model.ffn.moe.shared.intermediate_size=64"]),
    ("model.sliding_window=16", [], ["model.layers=2 x (window, full)"]),
    ("model.ffn.moe.zero_experts=4", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.shortcut=true", ["model.layers=4 dense"], SHORTCUT),
    ("model.attention_chunk_size=16", [], ["model.layers=2 x (chunk, full)"]),
    ("model.attention.qk_norm.in_nope=false", QK_NORM, [*QK_NORM, "model.layers=2 x (full, nope)"]),
    ("model.ffn.moe.probs_on_input=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.linear_attention=kda", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.num_key_heads=2", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.num_value_heads=8", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.key_head_dim=16", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.value_head_dim=16", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.conv_kernel=3", [], ["model.layers=2 x (linear, full)"]),
    (
        "moe.bias_update_rate=0.1",
        ["model.ffn.moe.router.expert_bias=true", "lora.rank=4"],
        ["model.ffn.moe.router.expert_bias=true"],
    ),
    ("model.ffn.moe.zero_experts=4", ["model.layers=4 dense"], ["model.layers=4"]),
    (
        "model.ffn.moe.active_experts=1.5",
        ["model.ffn.moe.zero_experts=4"],
        ["model.ffn.moe.zero_experts=4", "model.ffn.moe.router.expert_bias=true"],
    ),
    ("model.ffn.moe.shortcut=true", ["model.layers=4 dense"], SHORTCUT),
    ("model.attention_chunk_size=16", [], ["model.layers=2 x (chunk, full)"]),
    ("model.attention.qk_norm.in_nope=false", QK_NORM, [*QK_NORM, "model.layers=2 x (full, nope)"]),
    ("model.ffn.moe.probs_on_input=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.weight_in_expert=true", ["model.ffn.moe.probs_on_input=true"], ["model.ffn.moe.probs_on_input=false"]),
    ("model.linear_attention=kda", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.num_key_heads=2", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.num_value_heads=8", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.key_head_dim=16", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.value_head_dim=16", [], ["model.layers=2 x (linear, full)"]),
    ("model.linear_attention.conv_kernel=3", [], ["model.layers=2 x (linear, full)"]),
    ("model.attention.num_heads=4", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    (
        "model.rope.theta=50",
        [
            "model.layers=2 x (linear, full/nope)",
        ],
        ["model.layers=2 x (full, nope)"],
    ),
    ("model.attention=mla", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.num_kv_heads=2", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.head_dim=16", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.qk_norm={}", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.qkv_bias=true", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.output_bias=true", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.sinks=true", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.rope.theta=1000", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.rope.scaling=linear", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.gate={}", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.scale=0.3", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.rope.interleaved=true", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.temperature={}", [], ["model.layers=2 x (full, nope)"]),
    ("model.attention.rope_fraction=0.5", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    ("model.attention.qk_norm.after_rope=true", ["model.layers=4 nope"], []),
    ("train.offload_dir=/scratch", ['train.offload=["moe"]'], ['train.offload=["moe"]', "train.offload_to=ssd"]),
    ("model.ffn.dense.intermediate_size=64", [], ["model.layers=2 x (dense, moe)"]),
    ("checkpoint.upcycle.dense=dense", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.latent_size=64", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.rope.theta=50", ["model.layers=4 nope"], ["model.layers=2 x (full, nope)"]),
    ("model.rope.interleaved=true", ["model.layers=4 nope"], ["model.layers=2 x (full, nope)"]),
    ("model.rope.scaling=yarn", ["model.layers=4 nope"], ["model.rope.scaling.factor=2"]),
    ("run.compile=blocks", ["model.attention.qk_norm={}", "model.layers=4 nope"], ["model.attention.qk_norm={}"]),
    ("moe.drop_policy=position", [], ["moe.capacity_factor=1.0"]),
    ("moe.drop_scope=sub_sequence", [], ["moe.capacity_factor=1.0"]),
    ("moe.trace_every=5", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.replay=runs/other", ["model.layers=4 dense"], ["model.layers=4"]),
    ("metrics.expert_counts_every=5", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router=sigmoid", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router.scaling_factor=2.5", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router.num_groups=4", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.ffn.moe.router.top_groups=2", ["model.layers=4 dense"], ["model.ffn.moe.router.num_groups=4"]),
    ("model.ffn.moe.router.expert_bias=true", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.aux_kind=sequence", ["moe.choice=sinkhorn"], ["moe.aux_loss=0.1"]),
    ("moe.aux_loss=0.1", ["moe.choice=sinkhorn"], []),
    (
        "moe.aux_loss=0.1",
        ["moe.choice=quantile", "model.ffn.moe.router.expert_bias=true"],
        ["model.ffn.moe.router.expert_bias=true"],
    ),
    ("moe.aux_loss=0.1", ["moe.choice=skewed"], ["moe.choice=topk"]),
    ("moe.aux_loss=0.1", ["moe.choice=round_robin"], ["moe.choice=topk"]),
    ("moe.trace_every=5", ["run.steps=4"], ["run.steps=5"]),
    ("train.reset_moments_every=5", ["run.steps=4"], ["run.steps=5"]),
    ("metrics.memory_every=5", ["run.steps=4"], ["run.steps=5"]),
    ("moe.choice=sinkhorn", ["model.layers=4 dense"], ["model.layers=4"]),
    ("moe.input_jitter=0.1", ["model.layers=4 dense"], ["model.layers=4"]),
    ("model.attention.indexer.top_k=8", ["model.layers=4 linear"], ["model.layers=2 x (linear, full)"]),
    (
        'train.recompute=["layer"]',
        ["model.attention.indexer.top_k=8", "train.indexer_stage=warmup"],
        ["model.attention.indexer.top_k=8"],
    ),
    (
        'train.offload=["layer"]',
        ["model.attention.indexer.top_k=8", "train.indexer_stage=warmup"],
        ["model.attention.indexer.top_k=8"],
    ),
    ("data.validation_fraction=0.2", ["data.kind=huggingface", "data.streaming=true"], ["data.kind=huggingface"]),
    ("checkpoint.keep_every=500", ["checkpoint.every=0"], []),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.updates=2"]),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.staleness=1"]),
    ("rl.objective.clip_high=0.1", EXACT, [*EXACT, "parallel.tp=4", "parallel.world_size=4"]),
    ("rl.objective.clip_high=0.1", EXACT, [*RL, "rl.objective=clip", "run.device=cpu"]),
    ("rl.objective.clip_low=0.1", EXACT, [*RL, "rl.objective=clip", "run.kernels=c"]),
    ("rl.correction=mask", EXACT, [*RL, "run.device=cpu"]),
    ("rl.replay=off", [*RL, "model.layers=4 dense"], RL),
    ("rl.replay=on", EXACT, [*EXACT, "rl.updates=2"]),
    ("rollout.tp=2", [*RL, "parallel.world_size=2", "parallel.tp=2"], [*RL, "parallel.world_size=2"]),
    ("rollout.etp=1", RL, [*RL, "parallel.world_size=2", "parallel.etp=2"]),
    ("rollout.experts=whole", [*RL, "parallel.world_size=2"], [*RL, "parallel.world_size=2", "parallel.ep=2"]),
    ("rollout.experts=fetch", [*RL, "model.layers=4 dense"], RL),
    ("rollout.cache=heads", RL, [*RL, "model.attention=mla"]),
    ("reward.timeout_s=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.workers=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.on_error=drop", [*RL, "reward.use=exact"], [*RL, "reward.use=reward.py:f"]),
    ("metrics.per_layer=true", ["metrics.wandb=true", "model.layers=4 dense"], ["metrics.wandb=true"]),
    ("faults.replica_check_every=101", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2", "run.steps=101"]),
    ("faults.replica_check_every=102", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2"]),
    ("faults.spike_window=100", [], ["run.steps=101"]),
    ("faults.straggler_factor=2", [], ["parallel.world_size=2"]),
    ("faults.straggler_factor=3", [f"parallel.{key}=2" for key in ("world_size", "pp")], ["parallel.world_size=2"]),
    ("faults.check_dispatch=true", ["model.layers=4 dense"], ["model.layers=4"]),
]


@pytest.mark.parametrize(("word", "idle", "active"), CASES, ids=[word for word, _, _ in CASES])
def test_a_setting_without_effect_is_refused_and_one_with_effect_accepted(word, idle, active):
    assert_read(word, idle, active)


WAY_OUT = re.compile(r"((?:[a-z]+\.)+[a-z_]+)=('[^' ]*'|true|false|[0-9][0-9.]*)(?=[ ,;]|$)")


@pytest.mark.parametrize(("word", "idle", "active"), CASES, ids=[word for word, _, _ in CASES])
def test_a_printed_way_out_has_an_effect_when_it_is_typed(word, idle, active):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*idle, word])
    remedy = str(error.value).partition(" has no effect: ")[2].partition("; ")[2]
    for key, value in WAY_OUT.findall(remedy):
        kept = [other for other in (*idle, word) if other.partition("=")[0] != key]
        refused = ""
        try:
            load_config(None, [*kept, f"{key}={value}"])
        except ConfigError as error_of_way_out:
            refused = str(error_of_way_out)
        assert not re.search(rf"^{re.escape(key)}=\S+ has no effect", refused, re.MULTILINE), refused


def _idle_keys_of_parts() -> set[str]:
    """Return the keys that have no effect with some built-in kind of their group."""
    found = set()
    for group in groups():
        for kind in built_in_kinds(group.group):
            unused_keys = apply_rule(part_of_kind(Config(), group, kind).unused_keys, Config())
            found |= {name for unused in unused_keys for name in unused.names.split()}
    return found


def test_every_idle_key_has_a_case():
    ruled = {name for idle in UNUSED_KEY_RULES for name in idle.keys.split()}
    cases = {word.split("=")[0] for word, _, _ in CASES}
    idle = ruled | _idle_keys_of_parts()
    assert {key for key in idle if not any(is_within(case, key) for case in cases | CONDITIONS.keys())} == set()


def _with_values(wanted: dict[str, bool]) -> Config:
    """Return a recipe that meets or breaks each of some conditions."""
    cfg = Config()
    for name in dict.fromkeys(condition.partition("=")[0].removesuffix("!") for condition in wanted):
        section, key = name.split(".", 1)
        default = default_of(section, key)
        own = {condition: met for condition, met in wanted.items() if condition.startswith((f"{name}=", f"{name}!"))}
        own |= {name: wanted[name]} if name in wanted else {}
        words = [word for one in own for word in filter(None, one.partition("=")[2].split("|"))]
        others = (
            [not default]
            if isinstance(default, bool)
            else [type(default)(0), type(default)(1)]
            if isinstance(default, int | float)
            else words
        )
        choices = (default, *others, *choices_of(section, key), "x" if isinstance(default, str) else ("x",))
        value = next(value for value in choices if all(condition_holds(one, value) is met for one, met in own.items()))
        cfg = with_key(cfg, name, value)
    return cfg


MARKED = [(name, number) for name, marks in CONDITIONS.items() for number in range(len(marks))]


@pytest.mark.parametrize(("name", "number"), MARKED)
def test_a_key_is_unread_unless_each_of_its_marks_holds(name, number):
    """No row for a key: the rule is asked about each condition of `ReadIf`, with each mark not met once."""
    marks = CONDITIONS[name]
    assert why_unread(_with_values({mark.conditions.split()[0]: True for mark in marks}), marks) is None
    mark = marks[number]
    others = {other.conditions.split()[0]: True for other in marks if other is not mark}
    conditions = mark.conditions.split()
    cfg = _with_values(others | dict.fromkeys(conditions, False))
    reason, remedy = why_unread(cfg, marks)
    assert all(condition.partition("=")[0].removesuffix("!") in reason for condition in conditions)
    for key, value in WAY_OUT.findall(remedy):
        typed = read_key(config_from_dict(tomllib.loads(f"{key}={value}")), key)
        assert why_unread(with_key(cfg, key, typed), marks) is None


def _words_of(key: str) -> set[str]:
    """Return the words that a condition may ask of a key: its choices, true and false, or a number."""
    section, name = key.split(".", 1)
    default = default_of(section, name)
    if isinstance(default, bool):
        return {"true", "false"}
    return (
        {repr(0 * default)} if isinstance(default, int | float) else {*map(str, choices_of(section, name))} or {"never"}
    )


def test_a_condition_asks_for_a_value_that_its_key_may_have():
    marks = {mark for marks in CONDITIONS.values() for mark in marks}
    for key, _, words in (condition.partition("=") for mark in marks for condition in mark.conditions.split()):
        assert not words or {*words.split("|")} <= _words_of(key.removesuffix("!")), key


def test_a_condition_on_several_keys_names_all_of_them():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["faults.max_skips=5"])
    assert str(error.value) == (
        "faults.max_skips=5 has no effect: nothing reads it with faults.nonfinite='stop' and faults.spike='log'; "
        "set faults.nonfinite='skip' or faults.spike='skip', or leave max_skips out"
    )


def test_a_condition_on_a_section_is_one_on_its_other_keys():
    with pytest.raises(ConfigError, match=r"lora.alpha=8.0 has no effect: nothing reads it with lora.rank=0; set "):
        load_config(None, ["lora.alpha=8"])


def test_the_message_says_the_reason_and_the_way_out():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["moe.drop_policy=position"])
    assert str(error.value) == (
        "moe.drop_policy='position' has no effect: moe.capacity_factor=0.0 drops nothing; "
        "set moe.capacity_factor above 0, or leave drop_policy out"
    )


def test_several_are_listed_and_each_once():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["model.layers=4 dense", "moe.drop_policy=position", "train.mtp_loss=0.1"])
    lines = str(error.value).splitlines()
    assert lines[0] == "2 settings cannot work:"
    assert [line.split("=")[0].strip() for line in lines[1:]] == ["moe.drop_policy", "train.mtp_loss"]


def test_a_default_that_is_spelled_out_asks_for_nothing():
    load_config(None, ["moe.drop_policy=probs", "moe.drop_scope=full_sequence", "train.eval_samples=16"])


def test_keys_of_a_preset_are_not_asked_for():
    assert load_config(None, ["model.preset=quickstart"]).model.ffn.dense.intermediate_size == 512


def test_only_given_keys_are_judged():
    cfg = load_config(None, ["model.layers=2 x (dense, moe)", "model.ffn.dense.intermediate_size=64"])
    check_unused_keys(frozenset(), Config(model=cfg.model))


def test_a_choice_that_balances_turns_the_default_loss_off_without_a_word():
    assert aux_coefficient(load_config(None, []).moe) == 0.01
    for words in (["moe.choice=round_robin"], ["moe.choice=sinkhorn", "moe.aux_loss=0.0"]):
        assert aux_coefficient(load_config(None, words).moe) == 0
