"""Description of a model family of Hugging Face folders, and the tables that families share.

A family lists the meaning of the keys of its config.json and maps its tensors. The code that reads and writes folders
is the same for all families. Keys follow the configuration classes of transformers 5, tensor names the files that it
writes. `layouts` lists the possible layouts of the experts. The first layout is written.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.families.config_fields import (
    NUM_LAYERS,
    AllowedValues,
    ConfigField,
    HeadSize,
    LatentHeadSizes,
    MultiHeadKeyValue,
    Renamed,
    renamed,
    same,
)
from moefold.convert.families.known_keys import Json, overlay
from moefold.convert.families.rope_fields import RopeParameters
from moefold.convert.families.tensor_mapping import (
    ByAttention,
    GroupedRows,
    PerExpertTensors,
    RowGroups,
    TensorBlock,
    TensorRule,
)
from moefold.errors import ConfigError

TensorRules = Mapping[str, TensorRule]
SILU = ("silu", "swish")
"""Names of SiLU in transformers."""


@dataclass(frozen=True)
class MultimodalFolder:
    """Folder of a multimodal model. Only its text model is read.

    Attributes:
        model_type: type of the folder.
        other_tensors: regular expression of the tensors of the other models.
        prefixes: first words of names of the text model's tensors, each with the words in a folder of only the text
            model. The first match counts.
        config_path: path of keys in config.json to the object that describes the text model.
        pairs: keys of that object with a list of two values. The first value is for the text model.
        pair_tensors: regular expression of tensors whose first half of the rows belongs to the text model.
        other_experts: regular expression of the tensors of an expert, with its number as the group. Experts with
            higher numbers than the text model has belong to other models. Empty means there are no others.
    """

    model_type: str
    other_tensors: str
    prefixes: Mapping[str, str] = field(default_factory=dict)
    config_path: tuple[str, ...] = ("text_config",)
    pairs: tuple[str, ...] = ()
    pair_tensors: str = r"(?!)"
    other_experts: str = ""

    def text_name(self, name: str) -> str:
        """Return the name of a tensor in a folder of only the text model. For other models' tensors, any name."""
        words = next((words for words in self.prefixes if name.startswith(words)), "")
        return self.prefixes.get(words, "") + name.removeprefix(words)

    def is_other_tensor(self, name: str, model: ModelConfig) -> bool:
        """Return whether a tensor, by its `text_name`, does not belong to the text model."""
        match = re.fullmatch(self.other_experts, name) if self.other_experts else None
        is_other_expert = match is not None and int(match[1]) >= model.ffn.moe.num_experts
        return is_other_expert or re.fullmatch(self.other_tensors, name) is not None

    def text_config(self, hf_config: Json) -> Json:
        """Return the keys of the text model. The object around them determines whether the embeddings are tied."""
        around = keys = hf_config
        for key in self.config_path:
            config = keys.get(key)
            if not isinstance(config, Mapping):
                raise ConfigError(f"config.json of model_type={self.model_type!r} has {key}={config!r}, no object")
            around, keys = keys, config
        values = {key: around[key] for key in ("tie_word_embeddings",) if key in around}
        for key in self.pairs:
            if isinstance(pair := keys.get(key), list):
                values[key] = pair[0] if len(pair) == 2 else pair
        return overlay(keys, values)


@dataclass(frozen=True)
class Family:
    """Description of a Hugging Face model family: how to read its config.json and its tensors.

    Attributes:
        name: its `model_type`.
        architecture: the transformers class that computes it.
        config_fields: the meaning of the keys of config.json.
        layouts: for each layout of the experts, the table of all tensors.
        default_keys: defaults of the configuration class for keys that config.json lacks and whose null has another
            meaning in `config_fields`.
        aliases: other `model_type`s of the same computation and tensors, which are read but not written.
        has_mtp: True if multi-token prediction (MTP) layers may follow the others.
        mtp_unreported: numbers of the MTP layers that transformers does not report as unexpected tensors of the folder
            (`_keys_to_ignore_on_load_unexpected` of the class), or None if it reports no layers.
        mtp_key: key of config.json with the number of MTP layers.
        mtp_prefix: first words of the names of MTP tensors.
        ignored_tensors: regular expressions of tensors that some folders contain and that are not read.
        zero_expert_tensors: regular expression of tensors of zero-computation experts, which a folder may hold and
            nothing reads. Its group is the number of the expert. Empty means that no folder has them.
        renamed_modules: parts of the names of modules that differ between a folder and transformers' model.
        multimodal: folders of a multimodal model whose text model has this family, or None without such folders.
        exported_as: name of the family that an export writes instead. Empty means this one.
        options: values of keys of config.json. Tests draw one value of each key for small models of transformers, in
            addition to the usual values of declared keys.
    """

    name: str
    architecture: str
    config_fields: tuple[ConfigField, ...]
    layouts: tuple[TensorRules, ...]
    default_keys: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    has_mtp: bool = False
    mtp_unreported: tuple[int, ...] | None = ()
    mtp_key: str = "num_nextn_predict_layers"
    mtp_prefix: str = "model.layers."
    ignored_tensors: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    renamed_modules: Mapping[str, str] = field(default_factory=dict)
    multimodal: MultimodalFolder | None = None
    zero_expert_tensors: str = ""
    exported_as: str = ""
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def folder_type(self) -> str:
        """The `model_type` of the multimodal folder, if there is one, else of the family."""
        return self.name if self.multimodal is None else self.multimodal.model_type

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every `model_type` that means the family."""
        return tuple(dict.fromkeys((self.name, *self.aliases, self.folder_type)))

    def is_of_zero_expert(self, name: str, model: ModelConfig) -> bool:
        """Return whether a tensor of a folder belongs to a zero-computation expert of the model."""
        match = re.fullmatch(self.zero_expert_tensors, name) if self.zero_expert_tensors else None
        return match is not None and model.ffn.moe.num_experts <= int(match[1]) < model.num_router_choices

    def name_in_transformers(self, module: str) -> str:
        """Return the name in transformers' model of a module of a folder."""
        return ".".join(self.renamed_modules.get(word, word) for word in module.split("."))

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of a folder is ignored."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_tensors)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that describe the computation of a model."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for entry in self.config_fields:
            keys |= entry.write(model)
        return keys


LAYER = "model.layers.{l}"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the matrices w_gate, w_up and w_down of a feed-forward network."""
NUMBERED_PROJECTIONS = ("w1", "w3", "w2")
"""Mixtral's names of the matrices w_gate, w_up and w_down."""


def layer_rules(names: Mapping[str, str], layer: str = LAYER) -> dict[str, TensorRule]:
    """Return the rules of a layer's tensors, given our names and their names in the layer."""
    return {f"layers.{{l}}.{ours}": TensorBlock(f"{layer}.{theirs}") for ours, theirs in names.items()}


def ffn_rules(ours: str, theirs: str, names: Sequence[str] = PROJECTIONS, layer: str = LAYER) -> dict[str, TensorRule]:
    """Return the rules of the three matrices of a feed-forward network, such as `ffn.shared`."""
    pairs = zip(("gate", "up", "down"), names, strict=True)
    return layer_rules({f"{ours}.w_{x}": f"{theirs}.{name}.weight" for x, name in pairs}, layer)


def fused(
    ours: Iterable[str], theirs: str, *, axis: int = 0, step: int = 1, dims: tuple[int, ...] = ()
) -> dict[str, TensorRule]:
    """Return the rules of parameters that one HF tensor of the layer fuses. See `TensorBlock`."""
    return {
        f"layers.{{l}}.{name}": TensorBlock(f"{LAYER}.{theirs}", index, axis, step, dims)
        for index, name in enumerate(ours)
    }


def grouped(ours: Iterable[str], theirs: str, groups: RowGroups, num_dims: int = 2) -> dict[str, TensorRule]:
    """Return the rules of parameters whose rows alternate by groups in an HF tensor of a layer. See `GroupedRows`."""
    return {
        f"layers.{{l}}.{name}": GroupedRows(f"{LAYER}.{theirs}", groups, index, num_dims)
        for index, name in enumerate(ours)
    }


def stacked_experts(gate_up: str, down: str) -> dict[str, TensorRule]:
    """Return the rules of experts in one tensor for gate and up, and a tensor for down, each expert transposed."""
    halves = fused(("ffn.experts.w_gate", "ffn.experts.w_up"), gate_up, axis=1, dims=(0, 2, 1))
    return halves | fused(("ffn.experts.w_down",), down, dims=(0, 2, 1))


def untransposed_experts(gate_up: str, down: str) -> dict[str, TensorRule]:
    """Return the rules of experts in one tensor for gate and up, and a tensor for down, as [E, in, out]."""
    halves = fused(("ffn.experts.w_gate", "ffn.experts.w_up"), gate_up, axis=-1)
    return halves | layer_rules({"ffn.experts.w_down": down})


def expert_layouts(
    path: str, names: Sequence[str] = PROJECTIONS, stacked: str = "", layer: str = LAYER
) -> tuple[TensorRules, TensorRules]:
    """Return the layouts of experts: a tensor for each expert, and stacked as in the memory of transformers 5.

    Args:
        path: module of the layer that holds the experts.
        names: names of the matrices of one expert.
        stacked: module that holds the stacked tensors. Empty means `path`.
        layer: module of the layer.
    """
    pairs = zip(("gate", "up", "down"), names, strict=True)
    single = {
        f"layers.{{l}}.ffn.experts.w_{x}": PerExpertTensors(f"{layer}.{path}.{{e}}.{name}.weight") for x, name in pairs
    }
    return single, stacked_experts(f"{stacked or path}.gate_up_proj", f"{stacked or path}.down_proj")


def mla_rules(module: str = "self_attn", layer: str = LAYER) -> dict[str, TensorRule]:
    """Return the rules of latent attention, whose output projection is the usual one."""
    return layer_rules(
        {
            "attention.wq_down": f"{module}.q_a_proj.weight",
            "attention.query_norm.weight": f"{module}.q_a_layernorm.weight",
            "attention.wq_up": f"{module}.q_b_proj.weight",
            "attention.wkv_down": f"{module}.kv_a_proj_with_mqa.weight",
            "attention.key_value_norm.weight": f"{module}.kv_a_layernorm.weight",
            "attention.wkv_up": f"{module}.kv_b_proj.weight",
        },
        layer,
    )


def by_attention(recurrent: TensorRules, softmax: TensorRules) -> dict[str, TensorRule]:
    """Return a joint table of the tables of both kinds of layers."""
    shared = recurrent.keys() & softmax.keys()
    return {**recurrent, **softmax} | {name: ByAttention(recurrent[name], softmax[name]) for name in shared}


def merge_rules(*rules: TensorRules) -> dict[str, TensorRule]:
    """Merge several tables. A later rule of a parameter replaces an earlier rule."""
    return {ours: row for group in rules for ours, row in group.items()}


def layouts(*tables: TensorRules, experts: Sequence[TensorRules] | None = None) -> tuple[TensorRules, ...]:
    """Return the layouts of a family: the usual names, overridden by tables, with each layout of experts."""
    return tuple(merge_rules(USUAL, rules, *tables) for rules in (EXPERTS if experts is None else experts))


USUAL: TensorRules = {
    "embedding.weight": TensorBlock("model.embed_tokens.weight"),
    "head.norm.weight": TensorBlock("model.norm.weight"),
    "head.weight": TensorBlock("lm_head.weight"),
    **layer_rules(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            **{f"attention.w{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
            **{f"attention.b{x}": f"self_attn.{x}_proj.bias" for x in "qkvo"},
            "attention.query_norm.weight": "self_attn.q_norm.weight",
            "attention.key_norm.weight": "self_attn.k_norm.weight",
            "ffn.router.weight": "mlp.gate.weight",
            "ffn.router.expert_bias": "mlp.gate.e_score_correction_bias",
        }
    ),
    **ffn_rules("ffn", "mlp"),
    **ffn_rules("ffn.shared", "mlp.shared_experts"),
}
"""Usual names of the parts that families share."""
EXPERTS = expert_layouts("mlp.experts")
MIXTRAL_EXPERTS = expert_layouts("block_sparse_moe.experts", NUMBERED_PROJECTIONS, "mlp.experts")


def mixtral_layouts(
    released: Mapping[str, str], stacked: Mapping[str, str], *tables: TensorRules
) -> tuple[TensorRules, ...]:
    """Return the layouts of a family whose released folders name experts like Mixtral, given their other names."""
    pairs = zip(MIXTRAL_EXPERTS, (released, stacked), strict=True)
    return tuple(merge_rules(USUAL, rules, layer_rules(names), *tables) for rules, names in pairs)


GATED_SHARED_EXPERT: TensorRules = {
    **ffn_rules("ffn.shared", "mlp.shared_expert"),
    **layer_rules({"ffn.shared_gate": "mlp.shared_expert_gate.weight"}),
}
MLA = mla_rules()
MTP = layer_rules(
    {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "projection": "eh_proj.weight",
        "output_norm.weight": "shared_head.norm.weight",
    }
)
"""Tensors that a multi-token prediction (MTP) layer adds to the tensors of an ordinary layer."""


def backbone_fields(
    norm_eps: float,
    rope: RopeParameters | float | None,
    *,
    tie_embeddings: bool = False,
    layers: ConfigField | None = None,
) -> tuple[ConfigField, ...]:
    """Return the fields that all families share. The arguments are the family's defaults for absent keys.

    Args:
        rope: reader of the RoPE parameters. A number is the default of theta, for whole heads. None means there is no
        RoPE.
        layers: field of the number of layers. None means num_hidden_layers.
    """
    reader = RopeParameters(rope) if isinstance(rope, float) else rope
    return (
        layers or NUM_LAYERS,
        *renamed(hidden_size="hidden_size", num_attention_heads="attention.num_heads", vocab_size="vocab_size"),
        *renamed(
            rms_norm_eps=("norm.eps", norm_eps),
            tie_word_embeddings=("tie_embeddings", tie_embeddings),
            initializer_range=("init_std", 0.02),
        ),
        *(() if reader is None else (reader,)),
        AllowedValues("hidden_act", SILU),
    )


def attention_fields(
    norm_eps: float, rope: RopeParameters | float, *, head_size: int = 0, tie_embeddings: bool = False
) -> tuple[ConfigField, ...]:
    """Return the fields of families with plain attention, like `backbone_fields`.

    Args:
        rope: reader of the RoPE parameters, or theta.
        head_size: width of one head. 0: hidden_size / num_attention_heads.
    """
    backbone = backbone_fields(norm_eps, rope, tie_embeddings=tie_embeddings)
    return (*backbone, KEY_VALUE_HEADS, HeadSize(head_size))


def latent_fields(
    *, has_head_dim: bool = True, writes_head_dim: bool = False, **defaults: int
) -> tuple[ConfigField, ...]:
    """Return the fields of the sizes of latent attention, given their defaults. `LatentHeadSizes` has the flags."""
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return (
        MultiHeadKeyValue(),
        LatentHeadSizes(has_head_dim, writes_head_dim),
        Renamed("q_lora_rank", "attention.q_lora_rank", 0, writes_null=True),
        *same(*(size for size in sizes if size not in defaults), under="attention", **defaults),
        AllowedValues("attention_bias", (False,)),
    )


KEY_VALUE_HEADS = Renamed("num_key_value_heads", "attention.num_kv_heads", default_key="num_attention_heads")
"""Number of key-value heads. If absent, the number of query heads."""
