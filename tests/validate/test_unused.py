import re
import tomllib
from dataclasses import replace

import pytest

from moefold.config.bounds import read_conditions
from moefold.config.chosen import chosen, layer_readers, readers
from moefold.config.find import built_in_kinds, groups
from moefold.config.load import config_from_dict
from moefold.config.routing import aux_coefficient
from moefold.config.schema import Config
from moefold.config.suggestions import choices_of, default_of
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.unused import UNUSED_KEY_RULES, check_unused_keys
from moefold.validate.unused_rule import _holds, why_unread

RL = ["data.kind=task", "rl.group_size=4"]
VLLM = [*RL, "rollout.engine=vllm"]
EXACT = [*RL, "rl.objective=clip", "run.device=cpu", "run.kernels=c"]
QK_NORM = ["model.qk_norm=true", "model.qk_norm_weight=false"]
TEMPERATURE = ["model.rope_pattern=RN", "model.nope_temperature_scale=0.1"]
SHORTCUT = ["model.layer_pattern=MD", "model.shared_expert_ffn_hidden_size=64"]
_GLA = ["model.attention_pattern=LF", "model.linear_attention=gla"]
PLANNED = ["parallel.context=planned", "parallel.world_size=2", "parallel.cp=2"]
ALONE = ["parallel.context=planned", "data.document_end=0"]
PLACED = [*PLANNED, "data.document_end=0", "parallel.context.placement=documents"]
BALANCED_HOSTS = [*PLANNED, "data.document_end=0", "parallel.context.hosts=balanced"]
UNSAVED = ["checkpoint.every=0", "checkpoint.at_end=false"]

# One setting for each idle key, with what would give it an effect.
SPARSE_MIXER = ["model.router_softmax=sparsemixer"]
LONGROPE = [
    "model.rope_scaling=longrope",
    "model.head_dim=2",
    "model.rope_short_factors=[1.0]",
    "model.rope_long_factors=[2.0]",
]
CASES = [
    ("sites.moments=average", ["sites.method=diloco"], ["sites.count=2"]),
    ("sites.residual=0.5", ["sites.count=2"], ["sites.count=2", "sites.precision=int8"]),
    ("model.num_experts=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.top_k=1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.moe_ffn_hidden_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.router_softmax=pre", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.sparsemixer_jitter=0.1", [], SPARSE_MIXER),
    ("moe.sparsemixer_sampling=false", [], SPARSE_MIXER),
    ("model.sparsemixer_jitter=0.1", ["model.layer_pattern=D"], SPARSE_MIXER),
    ("model.rope_short_factors=[2.0]", [], LONGROPE),
    ("model.rope_long_factors=[2.0]", ["model.rope_scaling=linear"], LONGROPE),
    ("model.rope_short_mscale=1.1", [], LONGROPE),
    ("model.rope_long_mscale=1.1", [], LONGROPE),
    ("model.shared_expert_ffn_hidden_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.capacity_factor=1.5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.pad_to_capacity=true", ["model.layer_pattern=D"], ["moe.capacity_factor=1.0"]),
    ("moe.aux_loss=0.1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.weight_in_expert=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.dispatch_precision=fp8-blockwise", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.z_loss=0.1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("parallel.dispatcher=local", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
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
    ("parallel.overlap_experts=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.moe_bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.moe_activation=clamped_swiglu", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.swiglu_alpha=1.5", [], ["model.moe_activation=clamped_swiglu"]),
    ("model.swiglu_limit=5", [], ["model.moe_activation=clamped_swiglu"]),
    ("model.router_bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("run.compile=blocks", [], ["model.qk_norm=true"]),
    ("run.compile=blocks", ["model.qk_norm=true", "model.qk_norm_width=all_heads"], ["model.layer_pattern=MD"]),
    ("run.compile=blocks", ["model.layer_pattern=M"], ["model.shared_expert_ffn_hidden_size=64"]),
    ("model.sliding_window=16", [], ["model.attention_pattern=WF"]),
    ("model.zero_experts=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.moe_shortcut=true", ["model.layer_pattern=D"], SHORTCUT),
    ("model.mla_scale_latents=true", [], ["model.attention=mla"]),
    ("model.attention_chunk_size=16", [], ["model.attention_pattern=CF"]),
    ("model.qk_norm_weight=false", [], ["model.qk_norm=true"]),
    ("model.qk_norm_nope=false", QK_NORM, [*QK_NORM, "model.rope_pattern=RN"]),
    ("model.nope_temperature_scale=0.1", [], ["model.rope_pattern=RN"]),
    ("model.router_probs_on_input=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.linear_attention=kda", [], ["model.attention_pattern=LF"]),
    ("model.linear_num_key_heads=2", [], ["model.attention_pattern=LF"]),
    ("model.linear_num_value_heads=8", [], ["model.attention_pattern=LF"]),
    ("model.linear_key_head_dim=16", [], ["model.attention_pattern=LF"]),
    ("model.linear_value_head_dim=16", [], ["model.attention_pattern=LF"]),
    ("model.linear_conv_kernel=3", [], ["model.attention_pattern=LF"]),
    ("model.linear_num_key_heads=2", ["model.attention_pattern=LF", "model.linear_attention=short_convolution"], _GLA),
    (
        "model.linear_num_value_heads=8",
        ["model.attention_pattern=LF", "model.linear_attention=short_convolution"],
        _GLA,
    ),
    ("model.linear_key_head_dim=8", ["model.attention_pattern=LF", "model.linear_attention=short_convolution"], _GLA),
    ("model.linear_value_head_dim=8", ["model.attention_pattern=LF", "model.linear_attention=short_convolution"], _GLA),
    ("model.linear_conv_kernel=3", _GLA, ["model.attention_pattern=LF", "model.linear_attention=short_convolution"]),
    ("model.linear_conv_bias=true", _GLA, ["model.attention_pattern=LF", "model.linear_attention=short_convolution"]),
    ("model.linear_conv_bias=true", [], ["model.attention_pattern=LF", "model.linear_attention=short_convolution"]),
    ("model.linear_gate_rank=8", ["model.attention_pattern=LF"], _GLA),
    ("model.linear_full_rank_gates=true", _GLA, ["model.attention_pattern=LF", "model.linear_attention=kda"]),
    ("model.linear_decay_bound=-5", _GLA, ["model.attention_pattern=LF", "model.linear_attention=kda"]),
    ("model.attention_gate_width=head", [], ["model.attention_gate=true"]),
    ("model.num_attention_heads=4", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_theta=50", ["model.attention_pattern=LF", "model.rope_pattern=RN"], ["model.rope_pattern=RN"]),
    ("model.attention=mla", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.num_query_groups=2", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.head_dim=16", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.qk_norm=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.qkv_bias=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention_output_bias=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention_sinks=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_theta=1000", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_fraction=0.5", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_scaling=linear", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention_gate=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention_scale=0.3", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_interleaved=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope_pattern=RN", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("train.offload_dir=/scratch", ['train.offload=["moe"]'], ['train.offload=["moe"]', "train.offload_to=ssd"]),
    ("model.ffn_hidden_size=64", [], ["model.layer_pattern=DM"]),
    ("model.upcycle_from=dense", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.q_lora_rank=8", [], ["model.attention=mla"]),
    ("model.kv_lora_rank=8", [], ["model.attention=mla"]),
    ("model.qk_nope_head_dim=8", [], ["model.attention=mla"]),
    ("model.qk_rope_head_dim=8", [], ["model.attention=mla"]),
    ("model.v_head_dim=8", [], ["model.attention=mla"]),
    ("model.num_query_groups=2", ["model.attention=mla"], ["model.attention=gqa"]),
    ("model.head_dim=8", ["model.attention=mla"], ["model.attention=gqa"]),
    ("model.rope_fraction=0.5", ["model.attention=mla"], ["model.attention=gqa"]),
    ("model.qk_norm_width=all_heads", [], ["model.qk_norm=true"]),
    ("model.rope_scaling_factor=2", [], ["model.rope_scaling=linear"]),
    ("model.moe_hidden_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.qk_norm_after_rope=true", [], ["model.qk_norm=true"]),
    ("model.attention_scale=0.1", ["model.attention=mla"], ["model.attention=gqa"]),
    ("model.rope_theta=50", ["model.rope_pattern=N"], ["model.rope_pattern=RN"]),
    ("model.rope_interleaved=true", ["model.rope_pattern=N"], ["model.rope_pattern=RN"]),
    ("model.rope_scaling=yarn", ["model.rope_pattern=N"], ["model.rope_scaling_factor=2"]),
    ("run.compile=blocks", ["model.qk_norm=true", "model.rope_pattern=N"], ["model.qk_norm=true"]),
    ("model.rope_original_seq_len=64", ["model.rope_scaling=linear"], ["model.rope_scaling=llama3"]),
    ("model.rope_beta_fast=16", ["model.rope_scaling=linear"], ["model.rope_scaling=yarn"]),
    ("model.rope_beta_slow=2", [], ["model.rope_scaling=yarn"]),
    ("model.rope_truncate=false", [], ["model.rope_scaling=yarn"]),
    ("model.rope_attention_factor=1.2", [], ["model.rope_scaling=yarn"]),
    ("model.rope_mscale=1.0", [], ["model.rope_scaling=yarn"]),
    ("model.rope_mscale_all_dim=1.0", [], ["model.rope_scaling=yarn"]),
    ("model.rope_low_freq_factor=2", ["model.rope_scaling=linear"], ["model.rope_scaling=llama3"]),
    ("model.rope_high_freq_factor=2", [], ["model.rope_scaling=llama3"]),
    ("moe.drop_policy=position", [], ["moe.capacity_factor=1.0"]),
    ("moe.drop_scope=sub_sequence", [], ["moe.capacity_factor=1.0"]),
    ("moe.trace_every=5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.replay=runs/other", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("metrics.expert_counts_every=5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.router_score=sigmoid", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.router_normalize=false", [], ["model.router_score=sigmoid"]),
    ("model.router_scaling_factor=2.5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.num_groups=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.top_groups=2", ["model.layer_pattern=D"], ["model.num_groups=4"]),
    ("model.expert_bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.aux_kind=sequence", ["moe.choice=sinkhorn"], ["moe.aux_loss=0.1"]),
    ("moe.aux_loss=0.1", ["moe.choice=sinkhorn"], []),
    ("moe.aux_loss=0.1", ["moe.choice=quantile", "model.expert_bias=true"], ["model.expert_bias=true"]),
    ("moe.aux_loss=0.1", ["moe.choice=skewed"], ["moe.choice=topk"]),
    ("moe.aux_loss=0.1", ["moe.choice=round_robin"], ["moe.choice=topk"]),
    ("moe.trace_every=5", ["run.steps=4"], ["run.steps=5"]),
    ("moe.choice=sinkhorn", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.input_jitter=0.1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.index_topk=8", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ('train.recompute=["layer"]', ["model.index_topk=8", "train.indexer_stage=warmup"], ["model.index_topk=8"]),
    ('train.offload=["layer"]', ["model.index_topk=8", "train.indexer_stage=warmup"], ["model.index_topk=8"]),
    ("data.validation_fraction=0.2", ["data.kind=huggingface", "data.streaming=true"], ["data.kind=huggingface"]),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.updates=2"]),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.staleness=1"]),
    ("rl.objective.clip_high=0.1", EXACT, [*EXACT, "parallel.tp=4", "parallel.world_size=4"]),
    ("rl.objective.clip_high=0.1", EXACT, [*RL, "rl.objective=clip", "run.device=cpu"]),
    ("rl.objective.clip_low=0.1", EXACT, [*RL, "rl.objective=clip", "run.kernels=c"]),
    ("rl.correction=mask", EXACT, [*RL, "run.device=cpu"]),
    ("rl.replay=off", [*RL, "model.layer_pattern=D"], RL),
    ("rl.replay=on", EXACT, [*EXACT, "rl.updates=2"]),
    ("rollout.tp=2", [*RL, "parallel.world_size=2", "parallel.tp=2"], [*RL, "parallel.world_size=2"]),
    ("rollout.etp=1", RL, [*RL, "parallel.world_size=2", "parallel.etp=2"]),
    ("rollout.experts=whole", [*RL, "parallel.world_size=2"], [*RL, "parallel.world_size=2", "parallel.ep=2"]),
    ("rollout.experts=fetch", [*RL, "model.layer_pattern=D"], RL),
    ("rollout.cache=heads", RL, [*RL, "model.attention=mla"]),
    ("reward.timeout_s=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.workers=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.on_error=drop", [*RL, "reward.use=exact"], [*RL, "reward.use=reward.py:f"]),
    ("metrics.per_layer=true", ["metrics.wandb=true", "model.layer_pattern=D"], ["metrics.wandb=true"]),
    ("faults.replica_check_every=101", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2", "run.steps=101"]),
    ("faults.replica_check_every=102", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2"]),
    ("faults.spike_window=100", [], ["run.steps=101"]),
    ("faults.straggler_factor=2", [], ["parallel.world_size=2"]),
    ("faults.straggler_factor=3", [f"parallel.{key}=2" for key in ("world_size", "pp")], ["parallel.world_size=2"]),
    ("faults.check_dispatch=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
]


def check_read(word: str, idle: list[str], active: list[str]) -> None:
    """Check that a setting is refused after some words, with the way out, and accepted after others."""
    with pytest.raises(ConfigError) as error:
        load_config(None, [*idle, word])
    key = word.split("=")[0]
    assert str(error.value).startswith(f"{key}=")
    assert " has no effect: " in str(error.value)
    assert str(error.value).endswith(f"or leave {key.partition('.')[2]} out")
    assert "leave it out" not in str(error.value)
    assert "leave them out" not in str(error.value)
    load_config(None, [*active, word])


@pytest.mark.parametrize(("word", "idle", "active"), CASES, ids=[word for word, _, _ in CASES])
def test_a_setting_without_effect_is_refused_and_one_with_effect_accepted(word, idle, active):
    check_read(word, idle, active)


WAY_OUT = re.compile(r"([a-z]+\.[a-z_]+)=('[^' ]*'|true|false|[0-9][0-9.]*)(?=[ ,;]|$)")


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
    """Return the keys that some built-in kind of their group does not read, and those that have no effect with one."""
    found = set()
    for group in groups():
        for kind in built_in_kinds(group.group):
            found |= {
                name for name, owners in readers().items() if owners[0][0] is group and (group, kind) not in owners
            }
            section, key = group.key.split(".")
            cfg = Config(**{section: replace(getattr(Config(), section), **{key: kind})})
            found |= {name for unused in chosen(cfg, group).unused_keys() for name in unused.names.split()}
    return found


def test_every_idle_key_has_a_case():
    ruled = {name for idle in UNUSED_KEY_RULES for name in idle.keys.split()}
    cases = {word.split("=")[0] for word, _, _ in CASES}
    assert ruled | _idle_keys_of_parts() | layer_readers().keys() <= cases | read_conditions().keys()


def _with_values(wanted: dict[str, bool]) -> Config:
    """Return a recipe in which each of some conditions is met or not."""
    cfg = Config()
    for name in dict.fromkeys(condition.partition("=")[0].removesuffix("!") for condition in wanted):
        section, key = name.split(".")
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
        value = next(value for value in choices if all(_holds(one, value) is met for one, met in own.items()))
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{key: value})})
    return cfg


MARKED = [(name, number) for name, marks in read_conditions().items() for number in range(len(marks))]


@pytest.mark.parametrize(("name", "number"), MARKED)
def test_a_key_is_unread_unless_each_of_its_marks_holds(name, number):
    """No row for a key: what `ReadIf` says is asked of the rule, with each mark in turn not met."""
    marks = read_conditions()[name]
    assert why_unread(_with_values({mark.conditions.split()[0]: True for mark in marks}), name) is None
    mark = marks[number]
    others = {other.conditions.split()[0]: True for other in marks if other is not mark}
    conditions = mark.conditions.split()
    cfg = _with_values(others | dict.fromkeys(conditions, False))
    reason, remedy = why_unread(cfg, name)
    assert all(condition.partition("=")[0].removesuffix("!") in reason for condition in conditions)
    for key, value in WAY_OUT.findall(remedy):
        section, _, field = key.partition(".")
        typed = getattr(getattr(config_from_dict(tomllib.loads(f"{key}={value}")), section), field)
        typed_cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{field: typed})})
        assert why_unread(typed_cfg, name) is None


def _words_of(key: str) -> set[str]:
    """Return the words that a condition may ask of a key: its choices, true and false, or a number."""
    section, name = key.split(".")
    default = default_of(section, name)
    if isinstance(default, bool):
        return {"true", "false"}
    return (
        {repr(0 * default)} if isinstance(default, int | float) else {*map(str, choices_of(section, name))} or {"never"}
    )


def test_a_condition_asks_for_a_value_that_its_key_may_have():
    marks = {mark for marks in read_conditions().values() for mark in marks}
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


def test_the_message_says_why_and_what_to_do():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["moe.drop_policy=position"])
    assert str(error.value) == (
        "moe.drop_policy='position' has no effect: moe.capacity_factor=0.0 drops nothing; "
        "set moe.capacity_factor above 0, or leave drop_policy out"
    )


def test_several_are_listed_and_each_once():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["model.layer_pattern=D", "moe.drop_policy=position", "train.mtp_loss=0.1"])
    lines = str(error.value).splitlines()
    assert lines[0] == "2 settings cannot work:"
    assert [line.split("=")[0].strip() for line in lines[1:]] == ["moe.drop_policy", "train.mtp_loss"]


def test_a_default_that_is_spelled_out_asks_for_nothing():
    load_config(None, ["moe.drop_policy=probs", "moe.drop_scope=full_sequence", "train.eval_samples=16"])


def test_what_a_preset_brings_along_is_not_asked_for():
    assert load_config(None, ["model.preset=quickstart"]).model.ffn_hidden_size == 512


def test_only_given_keys_are_judged():
    cfg = load_config(None, ["model.layer_pattern=DM", "model.ffn_hidden_size=64"])
    check_unused_keys(frozenset(), Config(model=cfg.model))


def test_a_choice_that_balances_turns_the_default_loss_off_without_a_word():
    assert aux_coefficient(load_config(None, []).moe) == 0.01
    for words in (["moe.choice=round_robin"], ["moe.choice=sinkhorn", "moe.aux_loss=0.0"]):
        assert aux_coefficient(load_config(None, words).moe) == 0
