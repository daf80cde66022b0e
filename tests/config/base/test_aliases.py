"""Test that names of other software are answered with moefold's: keys, values, matrices, options of commands."""

import pytest

from moefold.cli.main import main
from moefold.config.base.aliases import key_hint, our_names, our_values
from moefold.config.keys.paths import choices_of, key_types, kind_settings, sections
from moefold.errors import ConfigError
from moefold.recipe import load_config

KEY_OF = our_names("keys")
RELATED_KEY_OF = our_names("related")
ANSWER_OF = our_names("answers")
OUR_KEYS = {f"{section}.{key}" for section in sections() for key in key_types(section)} | kind_settings().keys()


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    return str(error.value)


def test_the_table_names_keys_and_values_that_exist():
    assert {*KEY_OF.values(), *RELATED_KEY_OF.values()} <= OUR_KEYS
    for key, value_of in our_values().items():
        section, _, name = key.partition(".")
        values = choices_of(section, name)
        assert {*value_of.values()} <= {*values}, key
        assert not value_of.keys() & {*values}, key


def test_a_name_of_ours_has_no_other_meaning():
    """The name of a key of any section is answered with that section, before the table is asked."""
    ambiguous = {
        theirs
        for theirs in (*KEY_OF, *RELATED_KEY_OF, *ANSWER_OF)
        if any(theirs in key_types(section) for section in sections())
    }
    assert ambiguous <= {"lr", "optim", "precision", "group_size", "load", "resume", "packing"}
    assert not KEY_OF.keys() & RELATED_KEY_OF.keys()
    assert not ANSWER_OF.keys() & {*KEY_OF, *RELATED_KEY_OF}


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("train.learning_rate=1e-3", "unknown key train.learning_rate; moefold calls this train.lr"),
        ("model.num_experts_per_tok=2", "moefold calls this model.ffn.moe.top_k"),
        ("train.max_steps=3", "unknown key train.max_steps; moefold calls this run.steps"),
        ("parallel.tensor_parallel_size=2", "moefold calls this parallel.tp"),
        ("parallel.tensor-model-parallel-size=2", "moefold calls this parallel.tp"),
        ("training.steps=3", "override 'training.steps=3': unknown key training.steps; moefold calls this run.steps"),
        ("parallelism.expert_parallel_degree=2", "moefold calls this parallel.ep"),
        ("optimizer.lr=1e-3", "moefold calls this train.lr"),
        ("max_steps=3", "override 'max_steps=3' names no section; moefold calls this run.steps"),
        ("--max_steps=3", "moefold calls this run.steps"),
        ("train.warmup_ratio=0.1", "unknown key train.warmup_ratio; moefold sets this by train.warmup_steps"),
        ("train.num_train_epochs=3", "moefold calls this run.epochs"),
        ("run.dtype=float16", "must be one of 'bfloat16', 'float32', 'float64'; did you mean 'bfloat16'?"),
        ("run.dtype=fp32", "did you mean 'float32'?"),
        ("parallel.schedule=1F1B", "did you mean '1f1b'?"),
        ("parallel.dispatcher=flex", "did you mean 'deepep'?"),
    ],
)  # fmt: skip
def test_a_name_of_others_is_answered_with_ours(word, answer):
    assert answer in refused(word)
    assert "\n" not in refused(word)


def test_a_recipe_is_answered_as_an_override_is(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("learning_rate = 1e-3\n[model]\nnum_local_experts = 8\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "unknown key learning_rate; moefold calls this train.lr" in str(error.value)
    assert "unknown key model.num_local_experts; moefold calls this model.ffn.moe.num_experts" in str(error.value)


@pytest.mark.parametrize(
    ("target", "ours"), [("q_proj", "wq"), ("linear_fc1", '"w_gate", "w_up"'), ("all-linear", "all"), ("o_proj", "wo")]
)
def test_a_matrix_of_others_is_answered_with_ours(target, ours):
    settings = ("lora.rank=2", f"lora.targets=['{target}']", "model.preset=tiny")
    from moefold.validate.config import check_config

    with pytest.raises(ConfigError, match=f"moefold calls it {ours}; choose "):
        check_config(load_config(None, settings))
    assert "." not in our_names("matrices")[target]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["train", "--train.lr", "1e-3"], "settings have no dashes: train.lr=VALUE"),
        (["train", "--learning-rate=1e-3"], "moefold calls this train.lr"),
        (["train", "--num_train_epochs", "3"], "moefold calls this run.epochs"),
        (["generate", "runs/x", "--prompt", "a", "--max-new-tokens", "3"], "moefold calls this --max-tokens"),
        (["generate", "runs/x", "--prompt", "a", "--learning-rate", "3"], "`moefold generate --help`"),
    ],
)
def test_an_option_of_others_is_answered_with_ours(capsys, words, answer):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"; {answer}" in err
    assert err.count("\n") == 1
    assert all(option.startswith("--") for option in our_names("options").values())


TRAINING_ARGUMENTS = """
output_dir per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate weight_decay
adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs
warmup_ratio warmup_steps logging_dir logging_strategy logging_first_step logging_steps save_strategy save_steps
save_total_limit save_only_model seed data_seed bf16 fp16 tf32 eval_strategy eval_steps eval_delay
dataloader_num_workers dataloader_pin_memory run_name report_to remove_unused_columns load_best_model_at_end
ignore_data_skip metric_for_best_model greater_is_better fsdp deepspeed gradient_checkpointing optim group_by_length
gradient_checkpointing_kwargs label_smoothing_factor ddp_find_unused_parameters ddp_timeout push_to_hub hub_model_id
resume_from_checkpoint torch_compile
auto_find_batch_size neftune_noise_alpha full_determinism use_liger_kernel do_train do_eval disable_tqdm local_rank
"""
TRL_ARGUMENTS = """
model_name_or_path attn_implementation use_peft lora_r lora_alpha lora_dropout lora_target_modules load_in_4bit
dataset_name dataset_text_field dataset_num_proc max_length max_seq_length packing packing_strategy padding_free
assistant_only_loss completion_only_loss eos_token pad_token chat_template_path activation_offloading model_init_kwargs
beta loss_type label_smoothing max_prompt_length truncation_mode precompute_ref_log_probs disable_dropout sync_ref_model
desirable_weight undesirable_weight num_generations max_completion_length temperature top_p min_p repetition_penalty
use_vllm vllm_mode vllm_server_host vllm_gpu_memory_utilization num_iterations epsilon epsilon_high delta reward_weights
reward_funcs scale_rewards mask_truncated_completions importance_sampling_level log_completions steps_per_generation
shuffle_dataset generation_kwargs vllm_importance_sampling_correction top_entropy_quantile
"""


@pytest.mark.parametrize("names", [TRAINING_ARGUMENTS, TRL_ARGUMENTS], ids=["transformers", "trl"])
def test_arguments_of_transformers_and_trl_are_answered(names):
    """By a key of the same name, by another key, or by an instruction."""
    for name in names.split():
        for text in (refused(f"{name}=1"), refused(f"sites.{name}=1")):
            is_named = any(
                f"; {words} " in text for words in ("did you mean", "moefold calls this", "moefold sets this")
            )
            assert is_named or text.endswith(f"; {ANSWER_OF[name]}"), text


def test_a_name_of_ours_that_means_another_thing_in_a_section_of_theirs():
    assert refused("rl.beta=0.1") == "unknown key rl.beta; moefold calls this rl.kl"
    assert "rollout.temperature alone changes the sampling" in refused("rollout.top_k=50")
    assert refused("train.beta=0.1").endswith("did you mean align.method.beta?")


def test_an_unknown_name_has_no_hint():
    assert key_hint("frobnicate") == ""
