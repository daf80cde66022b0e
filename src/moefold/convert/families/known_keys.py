"""Keys of other people's JSON files: which were read, which are constant, ignored or refused, and their spellings."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from moefold.errors import ConfigError
from moefold.message_text import Setting

Json = Mapping[str, Any]


class KeyReader(Mapping[str, Any]):
    """Keys of a JSON object, with a record of accessed keys. Nested objects have their own records.

    It does not support iteration, so that a copy does not count as access to every key. `overlay` copies.

    Attributes:
        read_keys: accessed keys, present or not.
        nested: readers of the accessed nested objects.
    """

    def __init__(self, values: Json) -> None:
        self.values_by_key = dict(values)
        self.read_keys: set[str] = set()
        self.nested: dict[str, KeyReader] = {}

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add(key)
        value = self.values_by_key[key]
        if not isinstance(value, dict):
            return value
        return self.nested.setdefault(key, KeyReader(value))

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read_keys.add(key)
        return key in self.values_by_key

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a KeyReader records questions about single keys; copy it with overlay")

    def __len__(self) -> int:
        return len(self.values_by_key)

    def __repr__(self) -> str:
        return repr(self.values_by_key)


def overlay(hf_config: Json, values: Json) -> Json:
    """Return an object with some other values. Access to it is recorded in the original."""
    if not isinstance(hf_config, KeyReader):
        return {**hf_config, **values}
    reader = KeyReader({**hf_config.values_by_key, **values})
    reader.read_keys = hf_config.read_keys
    reader.nested = hf_config.nested
    return reader


def mark_read(hf_config: Json, *keys: str) -> None:
    """Record keys as read that other keys make void. Objects count with all of their keys."""
    for key in keys:
        value = hf_config.get(key)
        if isinstance(value, KeyReader):
            mark_read(value, *value.values_by_key)


def plain(value: Any) -> Any:
    """Return a value of a reader as JSON data."""
    return value.values_by_key if isinstance(value, KeyReader) else value


TABLE = Path(__file__).with_name("declared_keys.json")


@dataclass(frozen=True)
class DeclaredKeys:
    """Keys of the files of other libraries.

    Attributes:
        versions: versions of the libraries of the table.
        generation: keys of generation_config.json.
        adapter: keys of PEFT's LoraConfig.
        others: keys that transformers' classes of causal models of other families declare.
        families: own keys of each `model_type`.
        aliases: other spellings of keys for each `model_type`.
        stacked_by_peft: for each `model_type` whose adapters of single experts PEFT stacks when it loads them, the last
            names of the modules of experts.
    """

    versions: Mapping[str, str]
    generation: Mapping[str, Any]
    adapter: Mapping[str, Any]
    others: frozenset[str]
    families: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, Mapping[str, str]]
    stacked_by_peft: Mapping[str, list[str]]


@lru_cache(maxsize=1)
def declared_keys() -> DeclaredKeys:
    """Read the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return DeclaredKeys(**table | {"others": frozenset(table["others"])})


ALL_KEYS = ("*",)
"""Accept every key, for reading a folder whose keys were sorted before."""
Values = tuple[Any, ...] | None
"""Values of a key that change nothing. None: any value."""


@dataclass(frozen=True)
class KeyReport:
    """Kinds of the keys of one file.

    Attributes:
        constant: keys that change nothing here, by the lists of this module or by their default.
        ignored: keys that are ignored, each with its value.
    """

    file: str
    read: tuple[str, ...]
    constant: tuple[str, ...]
    ignored: tuple[str, ...]

    def note(self) -> str:
        """Return one line that names the ignored keys, or empty if there are none."""
        return f"{self.file} has keys that are ignored: {', '.join(self.ignored)}" if self.ignored else ""


@dataclass(frozen=True)
class KnownKeys:
    """Known keys of an object in addition to its read keys.

    Attributes:
        neutral: for each key the values that change nothing.
        declared: defaults of the keys that the class of another library declares. Moefold computes with these defaults.
        owner: name of that class in messages.
        void: regular expression of keys that are reported and ignored, whatever their value.
    """

    neutral: Mapping[str, Values]
    declared: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    void: str = r"(?!)"


def _any(*keys: str) -> dict[str, Values]:
    return dict.fromkeys(keys)


_OTHER_READERS = _any(
    *("model_type", "architectures", "quantization_config", "dtype", "torch_dtype", "max_position_embeddings"),
    *("model_max_length", "initial_context_length", "eos_token_id", "bos_token_id", "pad_token_id", "tokenizer_class"),
    *("router_aux_loss_coef", "transformers_version", "moefold_version", "_name_or_path"),
)
"""Keys that other modules read, or that record the writer of the file."""
_OUTPUTS = _any(
    *("output_hidden_states", "output_attentions", "output_router_logits", "output_scores", "return_dict"),
    *("return_dict_in_generate", "use_cache", "num_logits_to_keep", "keys_to_ignore_at_inference"),
)
"""Keys that choose additional outputs of a call of transformers."""
_TASKS = _any(
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("classifier_dropout", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "decoder_start_token_id"),
)
"""Labels and heads of tasks other than language modelling, and token ids that are in tokenizer files."""
_GENERATION = _any(
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
    *("diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "bad_words_ids"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "cache_implementation"),
)
"""Settings of sampling that the base class of transformers 4 wrote into config.json. Commands have options for them."""
_SPEED = _any(
    *("chunk_size_feed_forward", "torchscript", "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing"),
    *("attn_implementation", "experts_implementation", "use_grouped_mm", "pretraining_tp", "ep_size"),
    *("for_llm_compressor", "mamba_ssm_dtype", "enable_lm_head_fp32", "initializer_factor", "is_decoder"),
)
"""Keys that change speed, memory or initial weights, but no output."""
_WIDTHS = _any("intermediate_size")
"""Width of dense layers in folders without dense layers. In other folders, the shapes of tensors would contradict a
wrong value."""
_SHAPE_OF_OTHERS: dict[str, Values] = {
    "is_encoder_decoder": (False, None),
    # With false transformers lets a token attend to later tokens, in every family.
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": None,
    "pruned_heads": ({}, [], None),
}
_IDENTITIES: dict[str, Values] = {
    **dict.fromkeys(
        (
            *("logits_scaling", "embedding_multiplier", "residual_multiplier", "logit_scale", "lm_head_multiplier"),
            *("routed_scaling_factor", "router_scaling_factor", "route_scale", "partial_rotary_factor", "scale_emb"),
            *("rope_local_base_freq_factor", "key_multiplier", "attention_out_multiplier", "embedding_scale"),
            *("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period"),
            *("moe_layer_interval", "cla_share_factor", "n_group", "topk_group", "num_expert_group", "n_groups"),
            *("layernorm_full_attention_alpha", "layernorm_full_attention_beta", "layernorm_mlp_alpha"),
            *("layernorm_mlp_beta", "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta"),
        ),
        (1, None),
    ),
    **dict.fromkeys(
        (
            *("final_logit_softcapping", "attn_logit_softcapping", "router_logit_softcapping", "logits_soft_cap"),
            *("output_logit_soft_cap", "clip_qkv", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
            *("attn_pdrop", "dropout", "resid_dropout", "embed_dropout", "hidden_dropout_prob", "router_jitter_noise"),
            *("attention_probs_dropout_prob", "input_jitter_noise", "num_nextn_predict_layers", "num_mtp_layers"),
            *("n_shared_experts", "num_shared_experts", "shared_intermediate_size", "first_k_dense_replace"),
            *("num_dense_layers", "num_experts", "num_local_experts", "n_routed_experts", "zero_expert_num"),
            *("mtp_num_hidden_layers", "moe_layer_num_skipped", "num_kv_shared_layers", "hidden_size_per_layer_input"),
        ),
        (0, None),
    ),
    **dict.fromkeys(("mlp_only_layers", "cross_attention_layers", "no_rope_layers_list"), ([], None)),
}
"""Values of keys of any family's mathematics that change nothing."""
_TRAINING = (
    r"aux_loss_alpha|seq_aux|aux_loss_coef|load_balance_coeff|router_z_loss_coef|z_loss_coefficient|use_aux_loss"
    r"|moe_aux_loss_coef|mtp_loss_scaling_factor"
)
"""Settings of the training loss, which a recipe sets."""
_VENDORS = (
    r"_.*|unsloth.*|auto_map|custom_pipelines|axolotl.*|trl.*|library_name|licen[cs]e|tags|language|model_name"
    r"|datasets|neuron|base_model.*"
)
"""Metadata of programs and hubs, and private keys of transformers."""
VOID = f"{_TRAINING}|{_VENDORS}"

_FAMILY_NEUTRAL: dict[str, dict[str, Values]] = {
    "kimi_linear": _any("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "use_grouped_topk"),
    "bailing_hybrid": _any("rotary_dim"),
    # Tensors of these MTP modules are in no published folder, and would be refused by name.
    "minimax_m2": _any("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size")
    | {"shared_moe_mode": None},
    # The number of tokens that an expert accepts in training, and of MTP layers, whose tensors are refused by name.
    "ernie4_5_moe": _any("moe_capacity", "num_nextn_predict_layers", "multi_token_pred_lambda")
    | {"moe_use_aux_free": (True, None), "moe_gate": ("topk", None)},
    "exaone_moe": _any("num_nextn_predict_layers"),
    "hy_v3": _any("num_nextn_predict_layers"),
    # Sizes of other attention and of the vision model, which use_mla=false and use_cla=false turn off.
    "hunyuan_v1_moe": _any(
        *("attention_head_dim", "dense_list", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "org_vocab_size", "num_media_embeds", "class_num", "im_start_id", "im_end_id", "text_start_id"),
        *("text_end_id", "image_token_id", "video_start_id", "video_end_id", "mask_init_id", "max_seq_length"),
        *("eod_token_id", "im_newline_id", "group_limited_greedy", "capacity_factor", "eos_id", "pad_id"),
    )
    | {"use_rotary_pos_emb": (True, None), "use_mixed_mlp_moe": (True, None), "norm_type": ("rms", None)}
    | {"norm_topk_prob": (True, None)},
    # One dense network over several ranks, and no input noise in training.
    "phimoe": _any("input_jitter_noise"),
    "lfm2_moe": {"use_pos_enc": (True, None), "hidden_act": ("silu", "swish", None)},
    "gpt_oss": {"position_embedding_type": ("rope", None)},
    # Each MTP module is a layer of the same kind as the last layer.
    "deepseek_v32": {
        "mtp_layer_types": (None, *(["indexed_attention"] * count for count in range(9))),
        "mtp_mlp_layer_types": (None, *(["sparse"] * count for count in range(9))),
    },
}
"""Keys of published folders that change nothing in one family, with their values."""
_VISION = _any(
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("image_token_index", "boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id", "language_model_only"),
    *("audio_config", "talker_config", "code2wav_config", "audio_token_id", "audio_start_token_id", "user_token_id"),
    *("position_id_per_seconds", "initializer_range"),
)
"""Keys of multimodal folders about the models that are not read."""
MATHS = re.compile(r"(^|_)(act|activation|type|types|func|method|norm|mode|pattern)$|^(hidden|mlp|ff)_act")
"""Names of keys whose strings choose mathematics."""
_TRIVIAL_LISTS = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "attn_type_list": 1}
"""Lists of kinds of layers with the same meaning as no list."""


def config_known_keys(family: str) -> KnownKeys:
    """Return the known keys of config.json of a family's text model."""
    neutral = {**_OTHER_READERS, **_OUTPUTS, **_TASKS, **_GENERATION, **_SPEED, **_WIDTHS}
    neutral |= {**_SHAPE_OF_OTHERS, **_IDENTITIES}
    table = declared_keys()
    return KnownKeys(
        neutral | _FAMILY_NEUTRAL.get(family, {}), table.families.get(family, {}), f"transformers' {family}", VOID
    )


def multimodal_known_keys(model_type: str) -> KnownKeys:
    """Return the known keys of config.json of a multimodal model around its `text_config`."""
    neutral = {**config_known_keys("").neutral, **_VISION, **_any(*declared_keys().families.get(model_type, {}))}
    return KnownKeys(neutral, void=VOID)


QUANTIZATION_KEYS = KnownKeys(
    _any(
        *("quant_method", "weight_block_size", "fmt", "activation_scheme", "modules_to_not_convert", "ignored_layers"),
        *("scale_fmt", "dequantize", "modules_to_convert", "quantization_status"),
    ),
    void=r"_.*",
)
"""Keys of quantisation. Types of activations and lists of other modules have no effect: weights are dequantised."""
GENERATION_KEYS = _any(
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "max_length"),
    *("max_new_tokens", "use_cache", "cache_implementation", "_from_model_config", "return_dict_in_generate"),
    *(
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
        "max_cache_len",
        "disable_compile",
    ),
    *("chat_format", "max_window_size", "max_context_size"),
)
"""Keys of generation_config.json that are read, or choose lengths and outputs of transformers."""
_TOKENIZER_KEYS = _any(
    *("tokenizer_class", "model_max_length", "max_len", "padding_side", "truncation_side", "truncation", "padding"),
    *("model_input_names", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "backend"),
    *(
        "clean_up_tokenization_spaces",
        "split_special_tokens",
        "add_prefix_space",
        "legacy",
        "use_default_system_prompt",
    ),
    *("add_bos_token", "add_eos_token", "chat_template", "sp_model_kwargs", "spaces_between_special_tokens", "errors"),
    *("from_slow", "use_fast", "is_local", "local_files_only", "tokenizer_file", "vocab_file", "merges_file"),
    *("special_tokens_map_file", "processor_class", "response_schema", "max_length", "stride", "pad_to_multiple_of"),
    *("truncation_strategy", "pad_token_type_id", "do_lower_case", "fix_mistral_regex", "image_token", "video_token"),
    *("audio_token", "unk_id", "trim_offsets", "remove_space", "keep_accents", "verbose", "name_or_path", "add_dummy"),
    *("auto_map", "special_tokens", "model_specific_special_tokens", "return_token_type_ids", "tokenizer_type"),
    *(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "image", "vision_bos")),
)


def tokenizer_known_keys() -> KnownKeys:
    """Return the known keys of tokenizer_config.json: keys of transformers' tokenizers, and special tokens."""
    return KnownKeys(_TOKENIZER_KEYS, void=rf"{_VENDORS}|.*_tokens?|.*_token_ids?")


def generation_known_keys() -> KnownKeys:
    """Return the known keys of generation_config.json. Settings of sampling are ignored by name."""
    declared = declared_keys().generation
    void = "|".join(map(re.escape, declared.keys() - GENERATION_KEYS.keys()))
    return KnownKeys(GENERATION_KEYS, declared, void=f"{void}|{_VENDORS}")


def classify_keys(
    file: str, keys: KeyReader, known: KnownKeys, ignored: Collection[str], prefix: str = ""
) -> tuple[KeyReport, list[str]]:
    """Sort the keys of an object after some were read, and return the kinds, and the reasons to refuse keys.

    Args:
        ignored: keys that the user accepts.
        prefix: path of the object in its file, such as "text_config.".
    """
    kinds: dict[str, list[str]] = {"read": [], "constant": [], "ignored": []}
    refused = []
    for key, value in keys.values_by_key.items():
        name = f"{prefix}{key}"
        kind, reason = _kind_of(key, value, keys, known, {key, name, *ALL_KEYS} & set(ignored) != set())
        if reason:
            refused.append(f"{name}={shorten(value)}, {reason}")
        else:
            kinds[kind].append(f"{name}={shorten(value)}" if kind == "ignored" else name)
    return KeyReport(file, tuple(kinds["read"]), tuple(kinds["constant"]), tuple(kinds["ignored"])), refused


def _kind_of(key: str, value: Any, keys: KeyReader, known: KnownKeys, is_ignored: bool) -> tuple[str, str]:
    """Return the kind of a key, and the reason if it is refused."""
    if is_ignored:
        return "ignored", ""
    has_any_value = key in known.neutral and known.neutral[key] is None
    if value is None and known.declared.get(key) is True and not has_any_value:
        return "", f"which {known.owner} takes as false and moefold as an absent key, which is true; write one of them"
    if key in keys.read_keys:
        return "read", ""
    if key in known.declared and _is_same(value, known.declared[key]):
        return "constant", ""
    if key in known.neutral:
        values = known.neutral[key]
        if values is None or any(_is_same(value, other) for other in values):
            return "constant", ""
    elif key in _TRIVIAL_LISTS and isinstance(value, list) and all(kind == _TRIVIAL_LISTS[key] for kind in value):
        return "constant", ""
    elif re.fullmatch(known.void, key):
        return "ignored", ""
    if key in known.declared and value is not None:
        return "", f"which {known.owner} has and moefold computes only as {known.declared[key]!r}"
    # False may be another value of a key that is neutral with true alone.
    is_empty = value is None or value in ("", [], {}) or (value is False and key not in known.neutral)
    is_text = isinstance(value, str) and not (key in declared_keys().others or MATHS.search(key))
    if is_empty or is_text:
        return "ignored", ""
    declared = declared_keys()
    is_maths = any(key in keys for keys in (known.neutral, declared.others, *declared.families.values()))
    return "", "which other families compute with" if is_maths else "which moefold does not know"


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal. Booleans are only equal to booleans, and 1 is equal to 1.0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shorten(value: Any) -> str:
    """Return a value for a message, truncated if it is long."""
    text = repr(plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def nested_reports(
    file: str, keys: KeyReader, known: Mapping[str, KnownKeys], ignored: Collection[str], prefix: str = ""
) -> Iterator[tuple[KeyReport, list[str]]]:
    """Yield the kinds of the keys of every accessed nested object."""
    for key, inner in keys.nested.items():
        name = f"{prefix}{key}"
        if not {key, name, *ALL_KEYS} & set(ignored):
            yield classify_keys(file, inner, known.get(name, _PLAIN), ignored, f"{name}.")
            yield from nested_reports(file, inner, known, ignored, f"{name}.")


_PLAIN = KnownKeys({}, void=_VENDORS)


def join_reports(file: str, reports: Collection[tuple[KeyReport, list[str]]]) -> KeyReport:
    """Return the kinds of all keys of a file. Raise ConfigError if some are refused."""
    refused = [reason for _, reasons in reports for reason in reasons]
    if refused:
        names = [reason.partition("=")[0] for reason in refused]
        options = " ".join(f"{Setting('--ignore-key', name):s}" for name in names)
        raise ConfigError(
            f"{file} has {'; '.join(refused)}; if the model computes the same without, add {options} "
            f"(checkpoint.ignore_keys of a recipe)"
        )
    merged = [report for report, _ in reports]
    return KeyReport(
        file,
        tuple(key for report in merged for key in report.read),
        tuple(key for report in merged for key in report.constant),
        tuple(key for report in merged for key in report.ignored),
    )


def file_report(file: str, keys: Json, known: KnownKeys, ignored: Collection[str]) -> KeyReport:
    """Sort the keys of a file whose keys are known only by name. Raise ConfigError if some are refused."""
    return join_reports(file, [classify_keys(file, KeyReader(keys), known, ignored)])


def with_all_spellings(hf_config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return config.json with each key under both spellings that transformers reads; refuse two different values."""
    keys = dict(hf_config)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        if keys.get(alias) is None:
            continue
        if keys.get(name, keys[alias]) not in (keys[alias], None):
            raise ConfigError(
                f"config.json has {alias}={keys[alias]!r} and {name}={keys[name]!r}, two spellings of one key; remove "
                "the wrong one"
            )
        keys[name] = keys[alias]
    return keys


def spellings_of(names: Collection[str], family: str) -> set[str]:
    """Return keys with their other spellings."""
    found = set(names)
    for alias, name in declared_keys().aliases.get(family, {}).items():
        found |= {alias} if name in found else set()
    return found
