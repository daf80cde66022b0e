"""Names of other software for recipe keys, values, matrices and options, for hints on unknown keys.

Covers the configuration of Hugging Face models and TrainingArguments, TRL and PEFT, Megatron's flags, torchtitan and
vLLM.
"""

from types import MappingProxyType

_KEYS = """
train.lr: learning_rate lr optimizer.lr optim.lr
train.lr_schedule.min_lr: min_learning_rate lr_end
train.lr_schedule: lr_scheduler_type lr_decay_style lr_scheduler decay_type
train.lr_schedule.decay_steps: lr_wsd_decay_iters num_decay_steps
train.warmup_steps: num_warmup_steps lr_warmup_iters warmup_iters lr_scheduler.warmup_steps
train.optimizer: optim optimizer_name optimizer.name
train.optimizer.weight_decay: wd
train.optimizer.beta1: adam_beta1
train.optimizer.beta2: adam_beta2
train.optimizer.eps: adam_epsilon adam_eps optimizer.eps
train.clip_grad: max_grad_norm max_norm grad_clip gradient_clipping gradient_clip_val clip_grad_norm
train.clip_grad: training.max_norm
train.micro_batch_size: per_device_train_batch_size local_batch_size micro_batch training.local_batch_size
train.global_batch_size: train_batch_size batch_size training.global_batch_size
train.seq_len: seq_length sequence_length max_seq_length max_seq_len block_size max_model_len training.seq_len
train.eval_every: eval_steps eval_interval
train.eval_at_start: eval_on_start
train.eval_samples: max_eval_samples
train.recompute: recompute_modules
train.optimizer.moment_dtype: optimizer_state_dtype exp_avg_dtype
train.precision: fp8_format
train.offload_optimizer: optimizer_cpu_offload
train.mtp_loss: mtp_loss_scaling_factor
run.steps: max_steps train_iters num_train_steps training_steps total_steps max_iters training.steps
run.epochs: num_train_epochs num_epochs max_epochs total_epochs
run.dtype: torch_dtype precision mixed_precision params_dtype mixed_precision_param
run.dir: output_dir save_dir dump_folder job.dump_folder
run.seed: random_seed data_seed
run.compile: torch_compile
run.cuda_graphs: enable_cuda_graph cuda_graph_impl
run.deterministic: full_determinism
checkpoint.every: save_steps save_interval checkpoint_interval checkpoint.interval
checkpoint.keep: save_total_limit keep_latest_k checkpoint.keep_latest_k
checkpoint.dir: checkpoint_dir checkpoint.folder
checkpoint.resume: resume_from_checkpoint resume
checkpoint.init_from: model_name_or_path pretrained_model_name_or_path finetune pretrained_checkpoint
checkpoint.init_from: initial_load_path
metrics.wandb: enable_wandb
metrics.tensorboard: enable_tensorboard tensorboard_dir
data.path: dataset dataset_path data_path train_file dataset_name train_data_path
data.tokenizer: tokenizer_name tokenizer_path tokenizer_model hf_assets_path
data.validation_fraction: test_size
data.packing: packing pack_sequences
data.chat_template: chat_template_path
model.hidden_size: hidden_dim d_model n_embd dim embed_dim
model.layers: num_layers num_hidden_layers n_layers n_layer decoder_layers
model.attention.num_heads: n_heads n_head num_heads
model.attention.num_kv_heads: num_key_value_heads n_kv_heads num_kv_heads
model.attention.head_dim: kv_channels
model.ffn.dense.intermediate_size: intermediate_size d_ff
model.ffn.moe.intermediate_size: moe_intermediate_size moe_ffn_size expert_ffn_hidden_size moe_inter_dim
model.ffn.moe.shared.intermediate_size: shared_expert_intermediate_size moe_shared_expert_intermediate_size
model.ffn.moe.num_experts: num_local_experts n_routed_experts num_moe_experts
model.ffn.moe.top_k: num_experts_per_tok num_experts_per_token moe_router_topk moe_topk n_activated_experts
model.ffn.moe.router.num_groups: n_group moe_router_num_groups
model.ffn.moe.router.top_groups: topk_group moe_router_group_topk
model.ffn.moe.router: scoring_func moe_router_score_function score_func
model.ffn.moe.router.normalize: norm_topk_prob route_norm
model.ffn.moe.router.scaling_factor: routed_scaling_factor moe_router_topk_scaling_factor route_scale
model.ffn.moe.router.expert_bias: moe_router_enable_expert_bias
model.tie_embeddings: tie_word_embeddings share_embeddings
model.norm: normalization
model.norm.eps: rms_norm_eps layer_norm_eps layernorm_epsilon norm_epsilon
model.attention.qk_norm: qk_layernorm use_qk_norm
model.attention.qkv_bias: attention_bias add_qkv_bias
model.rope.theta: rotary_base rope_base
model.attention.rope_fraction: partial_rotary_factor rotary_percent
model.rope.scaling: rope_type
model.rope.scaling.original_seq_len: original_max_position_embeddings
model.sliding_window: window_size
model.mtp_layers: num_nextn_predict_layers mtp_num_layers
model.init_std: initializer_range init_method_std
model.attention.q_lora_rank: q_rank
moe.aux_loss: router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha
moe.z_loss: moe_z_loss_coeff router_z_loss_coef
moe.aux_kind: moe_router_load_balancing_type
moe.bias_update_rate: moe_router_bias_update_rate load_balance_coeff
moe.capacity_factor: moe_expert_capacity_factor expert_capacity_factor
moe.drop_policy: moe_token_drop_policy
moe.pad_to_capacity: moe_pad_expert_input_to_capacity
moe.input_jitter: moe_input_jitter_eps router_jitter_noise
parallel.world_size: nproc_per_node num_gpus n_gpus ngpus
parallel.tp: tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size tensor_parallel
parallel.pp: pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size pipeline_parallel
parallel.cp: context_parallel_size context_parallel_degree cp_size
parallel.ep: expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size
parallel.etp: expert_tensor_parallel_size expert_tensor_parallel_degree
parallel.zero: zero_stage
parallel.virtual_stages: virtual_pipeline_model_parallel_size
parallel.schedule: pipeline_parallel_schedule
parallel.dispatcher: moe_token_dispatcher_type expert_parallel_comm_backend
parallel.context: cp_comm_type context_parallel_rotate_method
lora.rank: lora_r lora_rank lora_dim
lora.alpha: lora_alpha
lora.targets: target_modules lora_target_modules
align.method.beta: dpo_beta kl_beta
rl.group_size: num_generations group_size n_samples_per_prompt rollout_n
rl.kl: kl_coef kl_loss_coef init_kl_coef
rl.objective.clip_low: epsilon clip_ratio_low cliprange
rl.objective.clip_high: epsilon_high clip_ratio_high
rl.advantage: adv_estimator
rl.updates: num_iterations ppo_epochs
rollout.max_tokens: max_new_tokens max_completion_length max_response_length
rl.kl: rl.beta
reward.use: reward_funcs reward_fn
reward.weights: reward_weights
rollout.url: vllm_server_base_url
rollout.timeout_s: vllm_server_timeout
data.column: dataset_text_field
data.shuffle: shuffle_dataset
faults.timeout_s: ddp_timeout
metrics.rollouts_every: log_completions
"""
_RELATED = """
train.lr_schedule.min_lr: min_lr_factor
train.lr_schedule.decay_steps: lr_decay_iters lr_decay_steps
train.warmup_steps: lr_warmup_samples warmup_ratio
train.global_batch_size: gradient_accumulation_steps
train.seq_len: max_length
train.eval_every: evaluation_strategy eval_strategy
train.eval_samples: eval_iters
train.recompute: gradient_checkpointing activation_checkpointing activation_checkpoint recompute_granularity
train.recompute: recompute_activations
train.precision: fp8 fp8_recipe quantization
train.offload_optimizer: cpu_offload offload_optimizer_device
run.dtype: bf16 fp16
run.dir: run_name
run.cuda_graphs: enforce_eager
run.deterministic: deterministic_mode
checkpoint.dir: save
checkpoint.resume: load
metrics.wandb: report_to
data.validation_fraction: validation_split_percentage
data.document_end: eod_token eos_token_id reset_position_ids reset_attention_mask
model.ffn.moe.shared.intermediate_size: n_shared_experts
model.ffn.moe.router.softmax: moe_router_pre_softmax
model.layers: first_k_dense_replace moe_layer_freq decoder_sparse_step mlp_only_layers
model.tie_embeddings: untie_embeddings_and_output_weights
model.attention: multi_latent_attention
parallel.world_size: num_processes
parallel.cp: sequence_parallel_size
parallel.ep: enable_expert_parallel
parallel.zero: fsdp fsdp_sharding sharding_strategy use_distributed_optimizer zero_optimization
parallel.virtual_stages: num_layers_per_virtual_pipeline_stage
parallel.world_size: data_parallel_size data_parallel_replicate_degree data_parallel_shard_degree dp_size
rl.advantage: scale_rewards
rl.updates: steps_per_generation generation_batch_size
rl.objective: importance_sampling_level
rl.truncated: mask_truncated_completions
rl.reset_patience: sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
rl.correction: vllm_importance_sampling_correction vllm_importance_sampling_mode off_policy_mask_threshold
rl.correction.high: vllm_importance_sampling_clip_max vllm_importance_sampling_cap
rl.correction.low: vllm_importance_sampling_clip_min
rollout.engine: use_vllm vllm_mode use_transformers_paged use_transformers_continuous_batching
rollout.engine: transformers_continuous_batching_config ds3_gather_for_generation
rollout.url: vllm_server_host vllm_server_port vllm_group_port
metrics.rollouts_every: log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
metrics.wandb_project: project
train.lr_schedule: lr_scheduler_kwargs
train.optimizer: optim_args optim_target_modules
train.micro_batch_size: auto_find_batch_size
train.recompute: activation_checkpointing_kwargs gradient_checkpointing_kwargs
train.offload: activation_offloading
train.precision: load_in_8bit load_in_4bit use_bnb_nested_quant
train.eval_samples: eval_max_batches
data.overlong: truncation_mode max_prompt_length
data.packing: packing_strategy padding_free
checkpoint.every: save_strategy
checkpoint.keep_best: load_best_model_at_end metric_for_best_model greater_is_better
run.device: use_cpu no_cuda
run.dir: logging_dir
run.dtype: tf32
run.compile: torch_compile_backend torch_compile_mode
run.kernels: use_liger_kernel liger_kernel_config attn_implementation
lora.rank: use_peft
parallel.zero: deepspeed fsdp_config
faults.nonfinite: logging_nan_inf_filter
"""
_INSTEAD = """
metrics.jsonl records every step; leave it out: logging_steps logging_strategy logging_first_step log_interval
the first rank logs in a form that fits the terminal; leave it out: log_level log_level_replica log_on_each_node \
disable_tqdm
a checkpoint has the whole state of a run; `moefold export` writes only the weights: save_only_model \
save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip overwrite_output_dir
`moefold push` uploads a model after its run: push_to_hub hub_token hub_private_repo \
hub_model_id hub_strategy hub_always_push hub_revision
trackers are set by metrics.tensorboard and metrics.wandb: trackio_space_id trackio_bucket_id trackio_static_space_id
data is read without loader processes; leave it out: dataloader_drop_last dataloader_num_workers \
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context \
dataloader_in_order
the keys of [parallel] set the mapping, and the launcher the ranks: ddp_find_unused_parameters ddp_bucket_cap_mb \
ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank accelerator_config parallelism_config
train.eval_every and train.eval_samples set the evaluation, in the batches and the dtype of training: do_train \
do_eval do_predict prediction_loss_only eval_delay eval_do_concat_batches eval_use_gather_object \
eval_accumulation_steps include_for_metrics batch_eval_metrics label_names per_device_eval_batch_size \
bf16_full_eval fp16_full_eval eval_packing num_generations_eval
columns that nothing reads are ignored; leave it out: remove_unused_columns dataset_kwargs
moefold trains without dropout; leave it out: disable_dropout lora_dropout attention_dropout hidden_dropout
in conversations (data.kind="sft") only the answers are trained; leave it out: assistant_only_loss \
completion_only_loss train_on_inputs
log-probabilities of the reference are computed once, before training; leave it out: precompute_ref_log_probs \
precompute_ref_batch_size
conversations are packed by best fit, with little padding; leave it out: group_by_length \
train_sampling_strategy length_column_name pad_to_multiple_of
the folder of data.tokenizer declares its tokens; leave it out: pad_token eos_token
`moefold tokenize --processes N` tokenizes texts before training: dataset_num_proc
checkpoint.init_from names the model, and no code of its folder is run: model_init_kwargs trust_remote_code \
model_revision
the loss needs the probabilities of all tokens, so that rollout.temperature alone changes the sampling: top_p min_p \
rollout.top_k rl.top_k repetition_penalty generation_kwargs cache_implementation
give these options to the vLLM server (rollout.engine="vllm"): vllm_model_impl \
vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size \
vllm_structured_outputs_regex
set align.method for preferences, rl.objective and rl.loss_mean for rollouts: loss_type
losses are means over the tokens of the whole batch, and metrics.jsonl counts them; leave it out: \
average_tokens_across_devices include_num_input_tokens_seen
moefold trains plain LoRA, by lora.rank, lora.alpha and lora.targets: use_rslora use_dora lora_modules_to_save \
lora_target_parameters lora_task_type
rewards are summed by reward.weights, and rl.advantage normalises the sum: multi_objective_aggregation
a rollout is one turn, without calls of tools; leave it out: max_tool_calling_iterations
a chat template has no variables in training; write them into a template of your own (data.chat_template): \
chat_template_kwargs
moefold has no such loss term; leave it out: label_smoothing_factor label_smoothing neftune_noise_alpha ld_alpha \
loss_weights f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau delta sapo_temperature_neg \
sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg top_entropy_quantile entropy_coef \
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target use_bias_correction_kl \
rpo_alpha
moefold has no such option; leave it out: use_cache torch_empty_cache_steps debug skip_memory_metrics \
cast_lm_head_to_fp32
"""
_VALUES = """
run.dtype=bfloat16: bf16 bf16-mixed float16 fp16 half torch.bfloat16
run.dtype=float32: fp32 float single tf32 torch.float32
run.dtype=float64: fp64 double torch.float64
run.device=cuda: gpu cuda:0
train.optimizer=adamw: adam adamw_torch adamw_torch_fused fused_adam
train.lr_schedule=cosine: cosine_with_min_lr cosine_decay
train.lr_schedule=constant: constant_with_warmup
train.lr_schedule=wsd: warmup_stable_decay
train.precision=fp8-blockwise: fp8 blockwise float8
parallel.schedule=1f1b: OneFOneB
parallel.schedule=interleaved: Interleaved1F1B interleaved_1f1b
parallel.schedule=zbv: ZBVZeroBubble
parallel.schedule=zero-bubble: InterleavedZeroBubble zb zb-h1
parallel.context=ring: p2p
parallel.context=allgather: all_gather
parallel.context=ulysses: a2a all2all
parallel.dispatcher=alltoall: all_to_all a2a standard
parallel.dispatcher=deepep: flex deep_ep
model.attention=gqa: mha mqa MultiHeadAttention
model.ffn.moe.router=sqrtsoftplus: sqrt_softplus
model.norm=rmsnorm: rms_norm
model.norm=layernorm: layer_norm
model.rope.scaling=none: default
moe.aux_kind=micro_batch: aux_loss
moe.aux_kind=sequence: seq_aux_loss
moe.aux_kind=global_batch: global_aux_loss
moe.choice=sinkhorn: s_base
data.kind=huggingface: hf hub
data.kind=sft: chat conversations messages
data.kind=preference: dpo pairs
rl.objective=clip: grpo ppo dapo
rl.objective=sequence: gspo
rl.objective=policy: reinforce
rl.advantage=leave_one_out: rloo
"""
_MATRICES = """
wq: q_proj query linear_q_proj
wk: k_proj
wv: v_proj linear_v_proj
"wq", "wk", "wv": linear_qkv qkv_proj
wo: o_proj linear_proj out_proj
wq_down: q_a_proj
wq_up: q_b_proj
wkv_down: kv_a_proj_with_mqa
wkv_up: kv_b_proj
w_gate: gate_proj w1
w_up: up_proj w3
"w_gate", "w_up": linear_fc1 gate_up_proj
w_down: down_proj w2 linear_fc2
all: all-linear all_linear
dense_mlp: mlp
"""
_OPTIONS = """
--max-tokens: max_new_tokens max_length n_predict
--json: output_json
--tokenizer: tokenizer_path tokenizer_name
--dtype: torch_dtype
"""


def _table(text: str) -> MappingProxyType[str, str]:
    """Return the names of moefold by the names of other frameworks, in lower case."""
    rows = (line.partition(": ") for line in text.strip().splitlines())
    return MappingProxyType({theirs.lower(): ours for ours, _, names in rows for theirs in names.split()})


def _values(text: str) -> MappingProxyType[tuple[str, str], str]:
    """Return the value of moefold by key and the value of another framework, in lower case."""
    rows = (line.partition(": ") for line in text.strip().splitlines())
    pairs = ((*ours.split("="), names) for ours, _, names in rows)
    return MappingProxyType({(key, theirs.lower()): value for key, value, names in pairs for theirs in names.split()})


KEY_OF = _table(_KEYS)
RELATED_KEY_OF = _table(_RELATED)
"""Recipe key for a name of other software that has another unit or form."""
ANSWER_OF = _table(_INSTEAD)
"""Advice for names without a recipe key."""
VALUE_OF = _values(_VALUES)
MATRIX_OF = _table(_MATRICES)
OPTION_OF = _table(_OPTIONS)


def key_hint(name: str) -> str:
    """Return the recipe key for a name of other software, whatever its section, dashes and case, or "" if unknown."""
    plain = name.strip().lstrip("-").replace("-", "_").lower()
    for spelling in (plain, plain.rpartition(".")[2]):
        if ours := KEY_OF.get(spelling, ""):
            return f"moefold calls this {ours}"
        if ours := RELATED_KEY_OF.get(spelling, ""):
            return f"moefold sets this by {ours}"
        if answer := ANSWER_OF.get(spelling, ""):
            return answer
    return ""


def is_known_path(name: str) -> bool:
    """Return whether a name of other software is known with its section, such as rl.beta."""
    path = name.lower()
    return "." in path and any(path in table for table in (KEY_OF, RELATED_KEY_OF, ANSWER_OF))


def moefold_value(key: str, value: str) -> str:
    """Return the value of a recipe key for a value of other software, or "" if none is known."""
    return VALUE_OF.get((key, value.lower()), "")
