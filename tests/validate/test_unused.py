import re

import pytest

from moefold.config.bounds import read_conditions
from moefold.config.chosen import part_of_kind
from moefold.config.find import built_in_kinds, groups
from moefold.config.routing import aux_coefficient
from moefold.config.schema import Config
from moefold.config.suggestions import choices_of, default_of
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.unused import UNUSED_KEY_RULES, check_unused_keys, is_within

RL = ["data.kind=task", "rl.group_size=4"]
VLLM = [*RL, "rollout.engine=vllm"]
EXACT = [*RL, "rl.objective=clip", "run.device=cpu", "run.kernels=c"]
QK_NORM = ["model.attention.qk_norm={}", "model.attention.qk_norm.weight=false"]
TEMPERATURE = ["model.rope_pattern=RN", "model.attention.temperature.scale=0.1"]
SHORTCUT = ["model.layer_pattern=MD", "model.ffn.moe.shared.intermediate_size=64"]
_GLA = ["model.attention_pattern=LF", "model.linear_attention=gla"]
PLANNED = ["parallel.context=planned", "parallel.world_size=2", "parallel.cp=2"]
ALONE = ["parallel.context=planned", "data.document_end=0"]
PLACED = [*PLANNED, "data.document_end=0", "parallel.context.placement=documents"]
BALANCED_HOSTS = [*PLANNED, "data.document_end=0", "parallel.context.hosts=balanced"]
UNSAVED = ["checkpoint.every=0", "checkpoint.at_end=false"]

# One setting for each idle key, with what would give it an effect.
SPARSE_MIXER = ["model.ffn.moe.router.softmax=sparsemixer"]
LONGROPE = [
    "model.rope.scaling=longrope",
    "model.attention.head_dim=2",
    "model.rope.scaling.short_factors=[1.0]",
    "model.rope.scaling.long_factors=[2.0]",
]
CASES = [
    ("sites.number=1", [], ["sites.count=2", "sites.meet=host:1"]),
    ("faults.min_ranks=2", [], ["faults.on_loss=regroup"]),
    ("sites.meet=host:1", [], ["sites.count=2", "sites.number=1"]),
    ("sites.secret=file", [], ["sites.count=2", "sites.meet=host:1", "sites.number=1"]),
    ("sites.secret=file", ["sites.count=2"], ["sites.count=2", "sites.meet=host:1", "sites.number=1"]),
    ("sites.quorum=1", [], ["sites.count=2"]),
    ("sites.timeout_s=5", [], ["sites.count=2"]),
    ("sites.grace_s=5", [], ["sites.count=2"]),
    ("sites.topology=pairs", [], ["sites.count=2"]),
    ("sites.precision=int8", [], ["sites.count=2"]),
    ("sites.residual=0.9", [], ["sites.count=2", "sites.precision=int8"]),
    ("sites.residual=0.9", ["sites.count=2"], ["sites.count=2", "sites.precision=int8"]),
    ("sites.fragment_layers=1", [], ["sites.count=2"]),
    ("sites.overlap=1", [], ["sites.count=2"]),
    ("sites.keep_local=0.5", ["sites.count=2"], ["sites.count=2", "sites.overlap=1"]),
    ("sites.keep_local=0.5", ["sites.count=2", "sites.overlap=30"], ["sites.count=2", "sites.overlap=29"]),
    ("sites.density=0.5", [], ["sites.count=2"]),
    ("sites.weigh=even", [], ["sites.count=2"]),
    ("sites.values=2", ["sites.count=2"], ["sites.count=2", "sites.density=0.5"]),
    ("sites.residual=0.8", ["sites.count=2"], ["sites.count=2", "sites.density=0.5"]),
    ("sites.moments=reset", [], ["sites.method=diloco"]),
    ("sites.moments=average", ["sites.method=diloco"], ["sites.count=2"]),
    ("sites.penalty=true", ["sites.count=2", "sites.overlap=1"], ["sites.count=2", "sites.overlap=30"]),
    ("sites.clip=1", ["sites.count=2"], ["sites.count=2", "sites.momentum=0.2"]),
    ("sites.every=5", [], ["sites.count=2"]),
    ("sites.experts=own", [], ["sites.count=2"]),
    ("sites.merge_experts=0.1", ["sites.count=2"], ["sites.count=2", "sites.experts=own"]),
    (
        "sites.merge_every=60",
        ["sites.count=2", "sites.experts=own"],
        ["sites.count=2", "sites.experts=own", "sites.merge_experts=0.01"],
    ),
    (
        "sites.merge_until=60",
        ["sites.count=2", "sites.experts=own"],
        ["sites.count=2", "sites.experts=own", "sites.merge_experts=0.01"],
    ),
    ("sites.method=spes", [], ["sites.count=2"]),
    ("sites.first=5", [], ["sites.method=diloco"]),
    ("sites.nesterov=false", ["sites.count=2"], ["sites.count=2", "sites.method=diloco"]),
    ("model.ffn.moe.num_experts=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.top_k=1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.intermediate_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router.softmax=pre", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.shared.intermediate_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
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
    ("parallel.overlap_tp=true", [], ["parallel.world_size=2", "parallel.tp=2"]),
    ("parallel.overlap_experts=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.activation=clamped_swiglu", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router.bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("run.compile=blocks", [], ["model.attention.qk_norm={}"]),
    (
        "run.compile=blocks",
        ["model.attention.qk_norm={}", "model.attention.qk_norm.over=all_heads"],
        ["model.layer_pattern=MD"],
    ),
    ("run.compile=blocks", ["model.layer_pattern=M"], ["model.ffn.moe.shared.intermediate_size=64"]),
    ("model.sliding_window=16", [], ["model.attention_pattern=WF"]),
    ("lora.alpha=8", [], ["lora.rank=4"]),
    ("lora.targets=['wq']", [], ["lora.rank=4"]),
    ("lora.init_from=runs/a", [], ["lora.rank=4"]),
    (
        "moe.bias_update_rate=0.1",
        ["model.ffn.moe.router.expert_bias=true", "lora.rank=4"],
        ["model.ffn.moe.router.expert_bias=true"],
    ),
    ("model.ffn.moe.zero_experts=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    (
        "model.ffn.moe.active_experts=1.5",
        ["model.ffn.moe.zero_experts=4"],
        ["model.ffn.moe.zero_experts=4", "model.ffn.moe.router.expert_bias=true"],
    ),
    ("model.ffn.moe.shortcut=true", ["model.layer_pattern=D"], SHORTCUT),
    ("model.attention_chunk_size=16", [], ["model.attention_pattern=CF"]),
    ("model.attention.qk_norm.in_nope=false", QK_NORM, [*QK_NORM, "model.rope_pattern=RN"]),
    ("model.ffn.moe.probs_on_input=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.weight_in_expert=true", ["model.ffn.moe.probs_on_input=true"], ["model.ffn.moe.probs_on_input=false"]),
    ("model.linear_attention=kda", [], ["model.attention_pattern=LF"]),
    ("model.linear_attention.num_key_heads=2", [], ["model.attention_pattern=LF"]),
    ("model.linear_attention.num_value_heads=8", [], ["model.attention_pattern=LF"]),
    ("model.linear_attention.key_head_dim=16", [], ["model.attention_pattern=LF"]),
    ("model.linear_attention.value_head_dim=16", [], ["model.attention_pattern=LF"]),
    ("model.linear_attention.conv_kernel=3", [], ["model.attention_pattern=LF"]),
    ("model.attention.num_heads=4", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope.theta=50", ["model.attention_pattern=LF", "model.rope_pattern=RN"], ["model.rope_pattern=RN"]),
    ("model.attention=mla", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.num_kv_heads=2", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.head_dim=16", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.qk_norm={}", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.qkv_bias=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.output_bias=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.sinks=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope.theta=1000", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope.scaling=linear", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.gate={}", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.scale=0.3", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.rope.interleaved=true", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.temperature={}", [], ["model.rope_pattern=RN"]),
    ("model.attention.rope_fraction=0.5", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.attention.qk_norm.after_rope=true", ["model.rope_pattern=N"], []),
    ("model.rope_pattern=RN", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("train.offload_to=ssd", [], ['train.offload=["moe"]']),
    ("train.offload_dir=/scratch", ['train.offload=["moe"]'], ['train.offload=["moe"]', "train.offload_to=ssd"]),
    ("train.offload_min_kib=64", [], ['train.offload=["moe"]']),
    ("train.offload_limit_gib=1", [], ['train.offload=["moe"]']),
    ("train.offload_waits=true", [], ['train.offload=["moe"]']),
    ("model.ffn.dense.intermediate_size=64", [], ["model.layer_pattern=DM"]),
    ("model.upcycle_from=dense", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.upcycle_router=zero", [], ["model.upcycle_from=dense"]),
    ("model.upcycle_scaling=false", [], ["model.upcycle_from=dense"]),
    ("model.upcycle_noise=0.1", [], ["model.upcycle_from=dense"]),
    ("model.ffn.moe.latent_size=64", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.rope.theta=50", ["model.rope_pattern=N"], ["model.rope_pattern=RN"]),
    ("model.rope.interleaved=true", ["model.rope_pattern=N"], ["model.rope_pattern=RN"]),
    ("model.rope.scaling=yarn", ["model.rope_pattern=N"], ["model.rope.scaling.factor=2"]),
    ("run.compile=blocks", ["model.attention.qk_norm={}", "model.rope_pattern=N"], ["model.attention.qk_norm={}"]),
    ("moe.drop_policy=position", [], ["moe.capacity_factor=1.0"]),
    ("moe.drop_scope=sub_sequence", [], ["moe.capacity_factor=1.0"]),
    ("moe.trace_every=5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.replay=runs/other", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("metrics.expert_counts_every=5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router=sigmoid", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router.scaling_factor=2.5", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router.num_groups=4", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("model.ffn.moe.router.top_groups=2", ["model.layer_pattern=D"], ["model.ffn.moe.router.num_groups=4"]),
    ("model.ffn.moe.router.expert_bias=true", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.eval_capacity_factor=1.5", [], ["train.eval_every=10"]),
    ("moe.aux_kind=sequence", ["moe.aux_loss=0.0"], ["moe.aux_loss=0.1"]),
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
    ("moe.bias_update_rate=0.1", [], ["model.ffn.moe.router.expert_bias=true"]),
    ("moe.choice=sinkhorn", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.input_jitter=0.1", ["model.layer_pattern=D"], ["model.layer_pattern=M"]),
    ("moe.router_dtype=float64", ["run.dtype=float64"], ["run.dtype=float32"]),
    ("train.mtp_loss=0.1", [], ["model.mtp_layers=1"]),
    ("model.attention.indexer.top_k=8", ["model.attention_pattern=L"], ["model.attention_pattern=LF"]),
    ("model.index_pattern=FS", [], ["model.attention.indexer.top_k=8"]),
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
    ("train.indexer_stage=warmup", [], ["model.attention.indexer.top_k=8"]),
    ("train.indexer_loss=0.5", [], ["model.attention.indexer.top_k=8"]),
    ("train.eval_samples=8", [], ["train.eval_every=10"]),
    ("data.path=somewhere", [], ["data.kind=text"]),
    ("data.token_dtype=int64", ["data.kind=text"], ["data.kind=tokens"]),
    ("data.weights=[1.0]", [], ["data.kind=text"]),
    ("data.corrupt=skip", [], ["data.kind=text"]),
    ("data.column=body", [], ["data.kind=huggingface"]),
    ("data.split=dev", ["data.kind=text"], ["data.kind=huggingface"]),
    ("data.validation_split=dev", ["data.kind=sft"], ["data.kind=huggingface"]),
    ("data.subset=en", [], ["data.kind=huggingface"]),
    ("data.revision=v1", [], ["data.kind=huggingface"]),
    ("data.streaming=true", [], ["data.kind=huggingface"]),
    ("data.validation_fraction=0.2", ["data.kind=huggingface", "data.streaming=true"], ["data.kind=huggingface"]),
    ("data.document_index=true", ["data.kind=text"], ["data.kind=tokens"]),
    ("data.document_end=2", ["data.kind=sft"], ["data.kind=text"]),
    ("data.chat_template=t.jinja", [], ["data.kind=sft"]),
    ("data.overlong=refuse", ["data.kind=text"], ["data.kind=sft"]),
    ("data.packing=best_fit", ["data.kind=sft"], ["data.kind=text", "data.document_end=0"]),
    ("data.packing=best_fit", ["data.kind=synthetic"], ["data.kind=tokens", "data.document_index=true"]),
    ("data.task=add", [], ["data.kind=task"]),
    ("data.task_size=3", ["data.kind=text"], ["data.kind=task"]),
    ("rl.objective=clip", [], RL),
    ("rl.advantage=batch", [], RL),
    ("rl.loss_mean=rollout", [], RL),
    ("rl.updates=2", [], [*RL, "rl.objective=clip"]),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.updates=2"]),
    ("rl.objective.clip_low=0.1", EXACT, [*EXACT, "rl.staleness=1"]),
    ("rl.staleness=1", [], [*RL, "rl.objective=clip"]),
    ("rollout.ranks=1", [], [*RL, "rl.objective=clip", "rl.staleness=1"]),
    ("rl.objective.clip_high=0.1", EXACT, [*EXACT, "parallel.tp=4", "parallel.world_size=4"]),
    ("rl.objective.clip_high=0.1", EXACT, [*RL, "rl.objective=clip", "run.device=cpu"]),
    ("rl.objective.clip_low=0.1", EXACT, [*RL, "rl.objective=clip", "run.kernels=c"]),
    ("rl.correction=clamp", [], RL),
    ("rl.correction=mask", EXACT, [*RL, "run.device=cpu"]),
    ("rl.mismatch_limit=0.1", [], RL),
    ("rl.replay=off", [], RL),
    ("rl.replay=off", [*RL, "model.layer_pattern=D"], RL),
    ("rl.replay=on", EXACT, [*EXACT, "rl.updates=2"]),
    ("rl.kl=0.1", [], RL),
    ("rl.kl_kind=k2", RL, [*RL, "rl.kl=0.1"]),
    ("rl.reference=runs/other", RL, [*RL, "rl.kl=0.1"]),
    ("rl.reset_patience=2", RL, [*RL, "rl.kl=0.1"]),
    ("rl.mixed_only=true", [], RL),
    ("rl.most_rounds=2", RL, [*RL, "rl.mixed_only=true"]),
    ("rl.truncated=zero", [], RL),
    ("rl.length_penalty_from=9", [], RL),
    ("rollout.tp=2", [], [*RL, "parallel.world_size=2"]),
    ("rollout.tp=2", [*RL, "parallel.world_size=2", "parallel.tp=2"], [*RL, "parallel.world_size=2"]),
    ("rollout.pp=2", [], [*RL, "parallel.world_size=2"]),
    ("rollout.ep=2", [], [*RL, "parallel.world_size=2"]),
    ("rollout.etp=1", RL, [*RL, "parallel.world_size=2", "parallel.etp=2"]),
    ("rollout.experts=whole", [*RL, "parallel.world_size=2"], [*RL, "parallel.world_size=2", "parallel.ep=2"]),
    ("rollout.experts=fetch", [*RL, "model.layer_pattern=D"], RL),
    ("rollout.experts=fetch", [], RL),
    ("rollout.engine=vllm", [], VLLM),
    ("rollout.url=http://node:8000", RL, VLLM),
    ("rollout.folder=hf", RL, VLLM),
    ("rollout.timeout_s=30", RL, VLLM),
    ("rollout.pass_tokens=512", VLLM, RL),
    ("rollout.cache_gib=2", VLLM, RL),
    ("rollout.cache=heads", [*VLLM, "model.attention=mla"], [*RL, "model.attention=mla"]),
    ("rollout.max_tokens=8", [], RL),
    ("rollout.temperature=0.5", [], RL),
    ("rollout.slots=8", [], RL),
    ("rollout.pass_tokens=512", [], RL),
    ("rollout.cache_gib=2", [], RL),
    ("rollout.cache=heads", RL, [*RL, "model.attention=mla"]),
    ("reward.use=exact", [], RL),
    ("reward.weights=[2]", [], RL),
    ("reward.timeout_s=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.workers=1", RL, [*RL, "reward.use=reward.py:f"]),
    ("reward.on_error=drop", [*RL, "reward.use=exact"], [*RL, "reward.use=reward.py:f"]),
    ("metrics.rollouts_every=5", [], RL),
    ("data.weights=[1.0]", ["data.kind=prompts"], ["data.kind=sft"]),
    ("data.shuffle=false", ["data.kind=task"], ["data.kind=prompts"]),
    ("data.skip_bad_rows=true", [], ["data.kind=sft", "data.path=x.jsonl"]),
    ("data.skip_bad_rows=true", ["data.kind=task"], ["data.kind=prompts", "data.path=x.jsonl"]),
    ("checkpoint.keep=2", UNSAVED, ["checkpoint.every=0"]),
    ("checkpoint.async_save=true", UNSAVED, ["checkpoint.at_end=false"]),
    ("checkpoint.peer_every=1", [], ["faults.on_loss=regroup"]),
    ("checkpoint.keep_every=20", ["checkpoint.keep=0"], ["checkpoint.keep=2"]),
    ("checkpoint.keep_best=true", ["checkpoint.keep=0"], ["checkpoint.keep=2"]),
    ("checkpoint.ignore_keys=['x']", [], ["checkpoint.init_from=x"]),
    *((f"metrics.wandb_{key}=x", [], ["metrics.wandb=true"]) for key in ("project", "entity", "name", "group")),
    ("metrics.wandb_tags=['x']", [], ["metrics.wandb=true"]),
    ("metrics.per_layer=true", [], ["metrics.tensorboard=true"]),
    ("metrics.per_layer=true", ["metrics.wandb=true", "model.layer_pattern=D"], ["metrics.wandb=true"]),
    ("faults.spike_factor=5", ["faults.spike=ignore"], ["faults.spike=skip"]),
    ("faults.spike_window=5", ["faults.spike=ignore"], ["faults.spike=skip"]),
    ("faults.replica_check_every=5", [], ["parallel.world_size=2"]),
    ("faults.replica_check_every=101", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2", "run.steps=101"]),
    ("faults.replica_check_every=102", [*UNSAVED, "parallel.world_size=2"], ["parallel.world_size=2"]),
    ("faults.spike_window=100", [], ["run.steps=101"]),
    ("faults.straggler_factor=2", [], ["parallel.world_size=2"]),
    ("faults.straggler_factor=3", [f"parallel.{key}=2" for key in ("world_size", "pp")], ["parallel.world_size=2"]),
    ("faults.max_skips=5", [], ["faults.spike=skip"]),
    ("faults.max_rollbacks=5", [], ["faults.nonfinite=rollback"]),
    ("data.shuffle=false", ["data.kind=program"], ["data.kind=synthetic"]),
    ("checkpoint.verify=false", ["checkpoint.resume=never"], ["checkpoint.resume=auto"]),
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
    """Return the keys that have no effect with some built-in kind of their group."""
    found = set()
    for group in groups():
        for kind in built_in_kinds(group.group):
            unused_keys = part_of_kind(Config(), group, kind).unused_keys()
            found |= {name for unused in unused_keys for name in unused.names.split()}
    return found


def test_every_idle_key_has_a_case():
    ruled = {name for idle in UNUSED_KEY_RULES for name in idle.keys.split()}
    cases = {word.split("=")[0] for word, _, _ in CASES}
    idle = ruled | _idle_keys_of_parts() | read_conditions().keys()
    assert {key for key in idle if not any(is_within(case, key) for case in cases)} == set()
    assert {case for case in cases if not any(is_within(case, key) for key in idle)} == set()


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
    assert load_config(None, ["model.preset=quickstart"]).model.ffn.dense.intermediate_size == 512


def test_only_given_keys_are_judged():
    cfg = load_config(None, ["model.layer_pattern=DM", "model.ffn.dense.intermediate_size=64"])
    check_unused_keys(frozenset(), Config(model=cfg.model))


def test_a_choice_that_balances_turns_the_default_loss_off_without_a_word():
    assert aux_coefficient(load_config(None, []).moe) == 0.01
    for words in (["moe.choice=round_robin"], ["moe.choice=sinkhorn", "moe.aux_loss=0.0"]):
        assert aux_coefficient(load_config(None, words).moe) == 0
