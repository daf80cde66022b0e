"""Description of a model family of Hugging Face folders, and the tables that families share. Torch-free.

A family lists the meaning of the keys of its config.json and maps its tensors; the code that reads and writes folders
is the same for all families. Keys follow the configuration classes of transformers 5, tensor names the files that it
writes. `layouts` lists the layouts of the experts that a folder may have; the first one is the one that is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moefold.config.model import ModelConfig
from moefold.convert.config_fields import AllowedValues, ConfigField, HeadSize, KeyValueHeads, Renamed
from moefold.convert.key_reader import Json, overlay
from moefold.convert.rope_fields import RopeParameters
from moefold.convert.tensor_mapping import PerExpertTensors, RenamedTensor, StackedExperts, TensorRule
from moefold.errors import ConfigError

TensorRules = Mapping[str, TensorRule]
SILU = ("silu", "swish")
"""Names of SiLU in transformers."""


@dataclass(frozen=True)
class MultimodalFolder:
    """Folders of a multimodal model, of which only the text model is read.

    Attributes:
        model_type: of the folder; `text_config` of its config.json describes the text model.
        text_prefix: first words of the names of the text model's tensors, for `text_root`.
        other_tensors: regular expression of the tensors of the other models.
        text_root: first words of the same names in a folder of the text model alone.
    """

    model_type: str
    text_prefix: str
    other_tensors: str
    text_root: str = "model."

    def text_name(self, name: str) -> str:
        """Return the name that a tensor has in a folder of the text model alone."""
        return f"{self.text_root}{name.removeprefix(self.text_prefix)}" if name.startswith(self.text_prefix) else name

    def text_config(self, hf_config: Json) -> Json:
        """Return the keys of the text model.

        Raises:
            ConfigError: there are none.
        """
        keys = hf_config.get("text_config")
        if not isinstance(keys, Mapping):
            raise ConfigError(f"config.json of model_type={self.model_type!r} has text_config={keys!r}, no object")
        shared = {key: hf_config[key] for key in ("tie_word_embeddings",) if key in hf_config and key not in keys}
        return overlay(keys, shared)


@dataclass(frozen=True)
class Family:
    """One Hugging Face model family.

    Attributes:
        name: its `model_type`.
        architecture: the transformers class that computes it.
        config_fields: the meaning of the keys of config.json.
        layouts: for each layout of the experts, the table of all tensors.
        default_keys: values of keys that config.json lacks, as in the configuration class, for keys whose null means
            something else to `config_fields`.
        aliases: other `model_type`s of the same computation and tensors, which are read and not written.
        has_mtp: whether multi-token prediction (MTP) layers may follow the others.
        mtp_unreported: numbers of the MTP layers that transformers does not report as unexpected tensors of the folder
            (`_keys_to_ignore_on_load_unexpected` of the class); None: it reports none.
        mtp_key: key of config.json with the number of MTP layers.
        mtp_prefix: first words of the names of MTP tensors.
        ignored_tensors: regular expressions of tensors that some folders hold and that are not read.
        zero_expert_tensors: regular expression of tensors that folders may hold for zero-computation experts, which do
            not read them; its group is the number of the expert. Empty: none.
        renamed_modules: parts of the names of modules in a folder that transformers' model calls otherwise.
        multimodal: folders of a multimodal model whose text model is of this family; None: there are none.
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

    def is_of_zero_expert(self, name: str, model: ModelConfig) -> bool:
        """Return whether a tensor of a folder belongs to a zero-computation expert of the model."""
        match = re.fullmatch(self.zero_expert_tensors, name) if self.zero_expert_tensors else None
        return match is not None and model.num_experts <= int(match[1]) < model.num_router_choices

    def name_in_transformers(self, module: str) -> str:
        """Return the name that a module of a folder has in transformers' model."""
        return ".".join(self.renamed_modules.get(part, part) for part in module.split("."))

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of a folder is ignored."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_tensors)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that describe the computation of a model."""
        keys: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for entry in self.config_fields:
            keys |= entry.write(model)
        return keys


def layer_rules(names: Mapping[str, str]) -> dict[str, TensorRule]:
    """Return the rules of a layer's tensors, given the names of ours and of theirs in the layer."""
    return {f"layers.{{l}}.{ours}": RenamedTensor(f"model.layers.{{l}}.{theirs}") for ours, theirs in names.items()}


def merge_rules(*parts: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """Return one table of several; a later rule of a parameter replaces an earlier one."""
    return {ours: row for part in parts for ours, row in part.items()}


BACKBONE: dict[str, TensorRule] = {
    "embedding.weight": RenamedTensor("model.embed_tokens.weight"),
    "head.norm.weight": RenamedTensor("model.norm.weight"),
    "head.weight": RenamedTensor("lm_head.weight"),
    **layer_rules(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "attention.wq": "self_attn.q_proj.weight",
            "attention.wk": "self_attn.k_proj.weight",
            "attention.wv": "self_attn.v_proj.weight",
            "attention.wo": "self_attn.o_proj.weight",
        }
    ),
}
BIASES = layer_rules({f"attention.b{x}": f"self_attn.{x}_proj.bias" for x in "qkvo"})
HEAD_NORMS = layer_rules(
    {"attention.query_norm.weight": "self_attn.q_norm.weight", "attention.key_norm.weight": "self_attn.k_norm.weight"}
)
DENSE_FFN = layer_rules({f"ffn.w_{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")})
SHARED_EXPERTS = layer_rules(
    {f"ffn.shared.w_{x}": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")}
)
ROUTER_BIAS = layer_rules({"ffn.router.expert_bias": "mlp.gate.e_score_correction_bias"})
ROUTER = layer_rules({"ffn.router.weight": "mlp.gate.weight"})
SHARED_EXPERT = layer_rules(
    {
        **{f"ffn.shared.w_{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")},
        "ffn.shared_gate": "mlp.shared_expert_gate.weight",
    }
)
_EXPERTS = "layers.{l}.ffn.experts.w_"
PER_EXPERT: dict[str, TensorRule] = {
    f"{_EXPERTS}{x}": PerExpertTensors(f"model.layers.{{l}}.mlp.experts.{{e}}.{x}_proj.weight")
    for x in ("gate", "up", "down")
}
STACKED_EXPERTS: dict[str, TensorRule] = {
    f"{_EXPERTS}gate": StackedExperts("model.layers.{l}.mlp.experts.gate_up_proj", 0),
    f"{_EXPERTS}up": StackedExperts("model.layers.{l}.mlp.experts.gate_up_proj", 1),
    f"{_EXPERTS}down": StackedExperts("model.layers.{l}.mlp.experts.down_proj"),
}
"""Experts as transformers 5 stacks them in memory; some tools write files in this layout."""

MIXTRAL_EXPERTS: dict[str, TensorRule] = {
    f"{_EXPERTS}{ours}": PerExpertTensors(f"model.layers.{{l}}.block_sparse_moe.experts.{{e}}.{theirs}.weight")
    for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}

MLA = layer_rules(
    {
        "attention.wq_down": "self_attn.q_a_proj.weight",
        "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.wq_up": "self_attn.q_b_proj.weight",
        "attention.wkv_down": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.key_value_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.wkv_up": "self_attn.kv_b_proj.weight",
    }
)
MTP = layer_rules(
    {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "projection": "eh_proj.weight",
        "output_norm.weight": "shared_head.norm.weight",
    }
)
"""Tensors that a multi-token prediction (MTP) layer adds to the tensors of an ordinary layer."""


def family_sizes(
    *,
    norm_eps: float,
    rope_theta: float,
    head_size: int = 0,
    tie_embeddings: bool = False,
    rope: RopeParameters | None = None,
) -> tuple[ConfigField, ...]:
    """Return the fields of families with plain attention; the arguments are the family's defaults for absent keys.

    Args:
        norm_eps: epsilon of the norms.
        rope_theta: base of the RoPE frequencies.
        head_size: width of one head; 0: hidden_size / num_attention_heads.
        tie_embeddings: whether the embedding is the output head.
        rope: reader of the RoPE parameters; None: of the whole head, with `rope_theta`.
    """
    backbone = backbone_sizes(norm_eps, rope or RopeParameters(rope_theta), tie_embeddings)
    return (*backbone, KeyValueHeads(), HeadSize(head_size))


def backbone_sizes(norm_eps: float, rope: RopeParameters, tie_embeddings: bool = False) -> tuple[ConfigField, ...]:
    """Return the fields that all families share."""
    return (
        Renamed("num_hidden_layers", "num_layers"),
        Renamed("hidden_size", "hidden_size"),
        Renamed("num_attention_heads", "num_attention_heads"),
        Renamed("vocab_size", "vocab_size"),
        Renamed("rms_norm_eps", "norm_eps", norm_eps),
        Renamed("tie_word_embeddings", "tie_embeddings", tie_embeddings),
        Renamed("initializer_range", "init_std", 0.02),
        rope,
        AllowedValues("hidden_act", SILU),
    )


@dataclass(frozen=True)
class NumExperts:
    """Field num_experts, which transformers 5 also spells num_local_experts."""

    hf_key: str

    def read(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Read whichever spelling is present."""
        names = [name for name in ("num_experts", "num_local_experts") if hf_config.get(name) is not None]
        return Renamed(names[0] if names else self.hf_key, "num_experts").read(hf_config)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Write the spelling of the released folders."""
        return {self.hf_key: model.num_experts}
