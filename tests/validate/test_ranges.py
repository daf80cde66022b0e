import tomllib
from dataclasses import fields

import pytest

from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import RANGES, check_config

CASES = [
    ("run.dir=''", "run.dir='' must name a folder"),
    ("run.seed=-1", "run.seed=-1 must be at least 0 and below 2**63"),
    ("run.seed=9223372036854775808", "must be at most 9223372036854775807"),
    ("run.steps=0", "run.steps=0 must be at least 1"),
    ("parallel.attention_tolerance=-0.1", "must lie between 0 and 1: 0.1 keeps 10 % above the mean"),
    ("parallel.attention_tolerance=1.5", "must lie between 0 and 1: 0.1 keeps 10 % above the mean"),
    ("parallel.attention_pool=-1", "must be at least 0 (0: all ranks)"),
    ("parallel.attention_block=0", "must be at least 1"),
    ("model.num_layers=0", "must be at least 1"),
    ("model.hidden_size=-4", "must be at least 1"),
    ("model.num_attention_heads=0", "must be at least 1"),
    ("model.num_query_groups=0", "must be at least 1"),
    ("model.ffn_hidden_size=0", "must be at least 1"),
    ("model.vocab_size=0", "must be at least 1"),
    ("model.num_experts=0", "must be at least 1"),
    ("model.top_k=0", "must be at least 1"),
    ("model.moe_ffn_hidden_size=0", "must be at least 1"),
    ("model.rope_original_seq_len=0", "must be at least 1"),
    ("model.head_dim=-1", "must be at least 0 (0: hidden_size/num_attention_heads)"),
    ("model.shared_expert_ffn_hidden_size=-1", "must be at least 0 (0: none)"),
    ("model.upcycle_noise=-0.1", "must be at least 0 (0: none)"),
    ("model.norm_eps=0", "must be greater than 0"),
    ("model.init_std=-0.1", "must be greater than 0"),
    ("model.rope_low_freq_factor=0", "must be greater than 0"),
    ("model.q_lora_rank=-1", "must be at least 0 (0: no latent)"),
    ("model.kv_lora_rank=0", "must be at least 1"),
    ("model.qk_nope_head_dim=0", "must be at least 1"),
    ("model.qk_rope_head_dim=0", "must be at least 1"),
    ("model.v_head_dim=0", "must be at least 1"),
    ("lora.rank=-1", "must be at least 0 (0: no adapters)"),
    ("lora.alpha=0", "must be greater than 0"),
    ("model.mtp_layers=-1", "must be at least 0 (0: none)"),
    ("train.mtp_loss=0", "must be greater than 0"),
    ("model.index_topk=-1", "must be at least 0 (0: all keys)"),
    ("model.index_heads=0", "must be at least 1"),
    ("model.index_head_dim=0", "must be at least 1"),
    ("train.indexer_loss=-1", "must be at least 0 (0: the indexers do not learn)"),
    ("model.rope_beta_fast=0", "must be greater than 0"),
    ("model.rope_beta_slow=-1", "must be greater than 0"),
    ("model.rope_attention_factor=-1", "must be at least 0 (0: not given)"),
    ("model.rope_mscale=-1", "must be at least 0 (0: not given)"),
    ("model.rope_mscale_all_dim=-1", "must be at least 0 (0: not given)"),
    ("model.rope_high_freq_factor=0", "must be greater than 0"),
    ("model.linear_num_key_heads=0", "must be at least 1"),
    ("model.linear_num_value_heads=0", "must be at least 1"),
    ("model.linear_key_head_dim=0", "must be at least 1"),
    ("model.linear_value_head_dim=0", "must be at least 1"),
    ("model.linear_conv_kernel=1", "must be at least 2"),
    ("model.linear_gate_rank=0", "must be at least 1"),
    ("model.linear_decay_bound=0.1", "must be at most 0 (0: none)"),
    ("model.sliding_window=-1", "must be at least 0 (0: no layer of kind W)"),
    ("model.zero_experts=-1", "must be at least 0 (0: none)"),
    ("model.active_experts=-1", "must be at least 0 (0: as all choices)"),
    ("model.attention_chunk_size=-1", "must be at least 0 (0: no layer of kind C)"),
    ("model.nope_temperature_scale=-0.1", "must be at least 0 (0: none)"),
    ("model.nope_temperature_tokens=0", "must be at least 1"),
    ("model.swiglu_alpha=0", "must be greater than 0"),
    ("model.swiglu_limit=0", "must be greater than 0"),
    ("data.document_end=-2", "must be at least 0, or -1 (a sample is one document)"),
    ("model.rope_theta=1", "must be greater than 1"),
    ("model.rope_fraction=0", "must lie in (0, 1]: above 0 and at most 1"),
    ("model.rope_fraction=1.5", "must lie in (0, 1]: above 0 and at most 1"),
    ("model.rope_scaling_factor=0.5", "must be at least 1"),
    ("model.moe_hidden_size=-1", "must be at least 0 (0: none)"),
    ("model.attention_scale=-1", "must be at least 0 (0: 1/sqrt(head_dim))"),
    ("model.embedding_multiplier=0", "must be greater than 0"),
    ("model.residual_multiplier=-1", "must be greater than 0"),
    ("model.logits_divisor=0", "must be greater than 0"),
    ("parallel.world_size=0", "must be at least 1"),
    ("parallel.tp=0", "must be at least 1"),
    ("parallel.cp=-2", "must be at least 1"),
    ("parallel.pp=0", "must be at least 1"),
    ("parallel.ep=0", "must be at least 1"),
    ("parallel.etp=0", "must be at least 1"),
    ("parallel.virtual_stages=0", "must be at least 1"),
    ("moe.capacity_factor=-1", "must be at least 0 (0: dropless)"),
    ("moe.eval_capacity_factor=-0.5", "must be at least 0 (0: dropless), or -1 (as moe.capacity_factor)"),
    ("moe.input_jitter=1", "must lie in [0, 1): at least 0 (0: off) and below 1"),
    ("moe.skew=0", "must lie in (0, 1]: above 0 and at most 1"),
    ("moe.sinkhorn_iterations=0", "must be at least 1"),
    ("moe.bias_update_rate=-0.1", "must be at least 0"),
    ("model.router_scaling_factor=0", "must be greater than 0"),
    ("model.num_groups=0", "must be at least 1"),
    ("model.top_groups=0", "must be at least 1"),
    ("moe.aux_loss=-1", "must be at least 0 (0: off)"),
    ("moe.z_loss=-1", "must be at least 0 (0: off)"),
    ("moe.trace_every=-1", "must be at least 0 (0: never)"),
    ("metrics.expert_counts_every=-1", "must be at least 0 (0: never)"),
    ("metrics.memory_every=-1", "must be at least 0 (0: never)"),
    ("faults.timeout_s=0.5", "must be at least 1"),
    ("parallel.receive_factor=0.5", "must be at least 1"),
    ("moe.llep_threshold=0.9", "must be at least 1"),
    ("moe.llep_capacity=0.9", "must be at least 1"),
    ("moe.llep_min_tokens=0", "must be at least 1"),
    ("train.seq_len=0", "must be at least 1"),
    ("train.micro_batch_size=0", "must be at least 1"),
    ("train.global_batch_size=0", "must be at least 1"),
    ("train.lr=0", "must be greater than 0"),
    ("train.eps=0", "must be greater than 0"),
    ("train.min_lr=-1e-5", "must be at least 0"),
    ("train.warmup_steps=-1", "must be at least 0"),
    ("train.weight_decay=-0.1", "must be at least 0"),
    ("train.beta1=1", "must lie in [0, 1): at least 0 and below 1"),
    ("train.muon_momentum=1", "must lie in [0, 1): at least 0 and below 1"),
    ("train.muon_ns_steps=0", "must be at least 1"),
    ("train.loss_chunk=-2", "must be at least 0 (0: all), or -1 (automatic)"),
    ("train.beta2=-0.1", "must lie in [0, 1): at least 0 and below 1"),
    ("train.decay_steps=-1", "must be at least 0"),
    ("train.eval_samples=0", "must be at least 1"),
    ("checkpoint.keep=-1", "must be at least 0 (0: all)"),
    ("checkpoint.keep_every=-1", "must be at least 0 (0: none)"),
    ("train.reset_moments_every=-1", "must be at least 0 (0: never)"),
    ("train.clip_grad=-1", "must be at least 0 (0: off)"),
    ("train.eval_every=-1", "must be at least 0 (0: never)"),
    ("data.validation_fraction=1", "must lie in [0, 1): at least 0 and below 1"),
    ("align.reward=''", "must name a column"),
    ("align.beta=0", "must be greater than 0"),
    ("align.desirable_weight=0", "must be greater than 0"),
    ("align.undesirable_weight=0", "must be greater than 0"),
    ("align.gamma=-0.1", "must be at least 0"),
    ("align.want=inf", "must be a finite number"),
    ("align.weight_cap=0.5", "must be at least 1 (0: none)"),
    ("checkpoint.every=-1", "must be at least 0 (0: never)"),
    ("faults.spike_factor=0", "must be greater than 0"),
    ("faults.spike_window=2", "must be at least 3"),
    ("faults.replica_check_every=-1", "must be at least 0 (0: never)"),
    ("faults.straggler_factor=1", "must be above 1, or 0 (off)"),
    ("faults.max_skips=0", "must be at least 1"),
    ("faults.max_rollbacks=0", "must be at least 1"),
    ("train.offload_min_kib=-1", "must be at least 0 (0: all)"),
    ("train.offload_limit_gib=-1", "must be at least 0 (0: no limit)"),
    ("train.memory_budget_gib=-1", "must be at least 0 (0: the device's)"),
    ("metrics.peak_tflops=-1", "must be at least 0 (0: look the device up)"),
    ("metrics.rollouts_every=-1", "must be at least 0 (0: never)"),
    ("data.task_size=0", "must be at least 1"),
    ("rl.group_size=1", "must be at least 2, or 0 (no reinforcement learning)"),
    ("rl.updates=0", "must be at least 1"),
    ("rl.most_rounds=0", "must be at least 1"),
    ("rl.clip_low=0", "must lie in (0, 1]: above 0 and at most 1"),
    ("rl.clip_high=0", "must be greater than 0"),
    ("rl.correction_low=1.5", "must lie in [0, 1]"),
    ("rl.correction_high=0.5", "must be at least 1"),
    ("rl.kl=-1", "must be at least 0 (0: off)"),
    ("rl.reset_patience=-1", "must be at least 0 (0: off)"),
    ("rl.length_penalty_from=-1", "must be at least 0 (0: off)"),
    ("rl.staleness=-1", "must be at least 0 (0: the newest weights sample)"),
    ("rollout.timeout_s=0", "must be greater than 0"),
    ('rollout.url="localhost:8000"', "must begin with http:// or https://"),
    ("rollout.ranks=-1", "must be at least 0 (0: the training ranks sample)"),
    ("rl.reference=''", "must name 'start', a checkpoint, a run or a Hugging Face folder"),
    ("rollout.tp=-1", "must be at least 0 (0: as in training)"),
    ("rollout.pp=-1", "must be at least 0 (0: as in training)"),
    ("rollout.ep=-1", "must be at least 0 (0: as in training)"),
    ("rollout.etp=-1", "must be at least 0 (0: as in training)"),
    ("rollout.max_tokens=0", "must be at least 1"),
    ("rollout.temperature=0", "must be greater than 0"),
    ("rollout.slots=0", "must be at least 1"),
    ("rollout.pass_tokens=0", "must be at least 1"),
    ("rollout.cache_gib=0", "must be greater than 0"),
    ("reward.timeout_s=0", "must be greater than 0"),
    ("reward.workers=0", "must be at least 1"),
    ("metrics.wandb_project='team/x'", "must have at most 128 characters, and none of / \\ # ? % :"),
    ("metrics.wandb_tags=['']", "must be a list of tags of 1 to 64 characters"),
    (f"metrics.wandb_tags=['{'x' * 65}']", "must be a list of tags of 1 to 64 characters"),
]


@pytest.mark.parametrize(("word", "message"), CASES, ids=[word for word, _ in CASES])
def test_a_value_out_of_its_range_is_refused(word, message):
    # By way of the tree, because a recipe that switches the key off would be told so first.
    with pytest.raises(ConfigError) as error:
        check_config(config_from_dict(tomllib.loads(word)))
    assert str(error.value).startswith(word.split("=")[0] + "=")
    assert message in str(error.value)


def test_every_number_of_the_schema_has_a_range():
    ranged = {f"{entry.section}.{key}" for entry in RANGES for key in entry.keys.split()}
    cfg = Config()
    numbers = {
        f"{section.name}.{field.name}"
        for section in fields(cfg)
        for field in fields(getattr(cfg, section.name))
        if type(field.default) in (int, float)
    }
    assert numbers - ranged == {"parallel.zero"}
    assert {word.split("=")[0] for word, _ in CASES} == ranged


def test_the_ends_of_ranges_that_include_them():
    words = ["moe.aux_loss=0", "train.beta1=0", "train.clip_grad=0", "data.validation_fraction=0", "run.seed=0"]
    check_config(load_config(None, words))
