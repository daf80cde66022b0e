"""Models without a preset, which tables of measurements name: dense ones, and hybrids that the runtime does not have.

Their sizes come from each config.json; where a source prints its FLOPs for a token, they agree with it
(tests/planner/test_model_spec.py). Layers of a hybrid are parts that can be counted and not built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from moefold.config.find import find_part
from moefold.config.groups.attention import AttentionCore, AttentionPart
from moefold.config.groups.ffn import FeedForwardPart
from moefold.config.layers import Layer
from moefold.config.load import config_from_dict
from moefold.config.model import ModelConfig
from moefold.config.param_spec import ParamSpec
from moefold.cost.saved_tensors import BytesByPart

if TYPE_CHECKING:
    from moefold.cost.block_sizes import BlockSizes


@dataclass(frozen=True, kw_only=True)
class Mamba(AttentionPart):
    """Mamba-2 mixer with heads of 64, a state of 128 and 8 groups; FLOPs of the state as in Megatron-Bridge."""

    is_recurrent: ClassVar[bool] = True
    num_heads: int

    @property
    def _inner(self) -> int:
        return self.num_heads * 64

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield both projections; see base class."""
        width = 2 * self._inner + 2 * 8 * 128 + self.num_heads
        yield ParamSpec("w_in", (width, hidden), "attention", tp_dim=0)
        yield ParamSpec("w_out", (hidden, self._inner), "attention", tp_dim=1)

    def core(self, hidden: int) -> AttentionCore:
        """Return the FLOPs of the states; see base class."""
        return AttentionCore(state_flops=46 * self._inner * 128)


@dataclass(frozen=True, kw_only=True)
class NoMixer(AttentionPart):
    """Nothing, in a layer that is a feed-forward network alone."""

    is_recurrent: ClassVar[bool] = True

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield nothing; see base class."""
        yield from ()

    def core(self, hidden: int) -> AttentionCore:
        """Return a core without states; see base class."""
        return AttentionCore()

    def saved(self, sizes: "BlockSizes") -> BytesByPart:
        """Return nothing, and take back the input of the block; see base class."""
        return BytesByPart({"residual stream": -sizes.hidden_bytes})


@dataclass(frozen=True, kw_only=True)
class NoNetwork(FeedForwardPart):
    """Nothing, in a layer that is a mixer alone."""

    tp_unit: ClassVar[tuple[str, int]] = ("", 0)

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield nothing; see base class."""
        yield from ()

    def saved(self, sizes: "BlockSizes") -> BytesByPart:
        """Return nothing, and take back the input of the block; see base class."""
        return BytesByPart({"residual stream": -sizes.hidden_bytes})

    def delayed_wgrad(self, sizes: "BlockSizes") -> BytesByPart:
        """Return nothing; see base class."""
        return BytesByPart()


class UngatedExperts(find_part("ffn", "moe")):  # type: ignore[misc]
    """Experts, and a shared one, of two matrices."""

    def params(self, hidden: int) -> Iterator[ParamSpec]:
        """Yield the parameters without the gates; see base class."""
        return (weight for weight in super().params(hidden) if not weight.name.endswith("w_gate"))


@dataclass(frozen=True)
class ForeignModel(ModelConfig):
    """Model with layers that the runtime does not have."""

    blocks: tuple[Layer, ...] = ()
    """Each layer in order, then an MTP layer if the model has any."""

    @cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """See base class."""
        return self.blocks[: self.num_layers + self.mtp_layers]


def _dense(layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    return _model(
        {
            "layers": f"{layers} dense",
            "hidden_size": hidden,
            "attention.num_heads": heads,
            "attention.num_kv_heads": 8,
            "ffn.dense.intermediate_size": ffn,
            "vocab_size": 128256,
        }
    )


def _model(settings: Mapping[str, Any]) -> ModelConfig:
    return config_from_dict({"model": dict(settings)}).model


def _nemotron(
    hidden: int, counts: tuple[int, int, int], heads: int, mtp_layers: int, experts: Mapping[str, int]
) -> ForeignModel:
    """Build a hybrid whose layers are a Mamba-2 mixer, attention or experts, each alone; an MTP layer has both."""
    num_mamba, num_attention, num_experts = counts
    heads_of_attention = {"attention.num_heads": 32, "attention.num_kv_heads": 2, "attention.head_dim": 128}
    model = _model({"layers": 1, "hidden_size": hidden, "vocab_size": 131072, **heads_of_attention, **experts})
    whole = model.decoder_layers[0]
    ffn = UngatedExperts(**{field.name: getattr(whole.ffn, field.name) for field in fields(whole.ffn)})
    both = replace(whole, ffn=ffn)
    attention = replace(whole, ffn=NoNetwork())
    pair = [replace(attention, attention=Mamba(num_heads=heads)), replace(both, attention=NoMixer())]
    # The order matters only for pipelines: attention is spread evenly over pairs of a mixer and experts.
    num_pairs = min(num_mamba, num_experts)
    step = num_pairs // num_attention
    layers: list[Layer] = []
    for i in range(num_pairs):
        layers += pair
        if i % step == step - 1 and layers.count(attention) < num_attention:
            layers.append(attention)
    blocks = (*layers, both)
    own = {field.name: getattr(model, field.name) for field in fields(model)}
    return ForeignModel(**own | {"layers": len(layers), "mtp_layers": mtp_layers, "blocks": blocks})


FOREIGN_MODELS: dict[str, ModelConfig] = {
    "llama3-8b": _dense(32, 4096, 32, 14336),
    "llama3-70b": _dense(80, 8192, 64, 28672),
    "llama3-405b": _dense(126, 16384, 128, 53248),
    # moonshotai/Moonlight-16B-A3B.
    "moonlight-16b": _model(
        {
            "layers": "dense, 26 moe",
            "hidden_size": 2048,
            "attention.num_heads": 16,
            "attention": "mla",
            "attention.kv_lora_rank": 512,
            "attention.qk_nope_head_dim": 128,
            "attention.qk_rope_head_dim": 64,
            "attention.v_head_dim": 128,
            "ffn.dense.intermediate_size": 11264,
            "vocab_size": 163840,
            "ffn.moe.num_experts": 64,
            "ffn.moe.top_k": 6,
            "ffn.moe.intermediate_size": 1408,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.expert_bias": True,
            "ffn.moe.shared.intermediate_size": 2816,
        }
    ),
    # Every other one of the 48 layers of Llama-4-Maverick has experts.
    "llama4-maverick": _model(
        {
            "layers": "24 x (dense, moe)",
            "hidden_size": 5120,
            "attention.num_heads": 40,
            "attention.num_kv_heads": 8,
            "ffn.dense.intermediate_size": 16384,
            "vocab_size": 202048,
            "ffn.moe.num_experts": 128,
            "ffn.moe.top_k": 1,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.normalize": False,
            "ffn.moe.intermediate_size": 8192,
            "ffn.moe.shared.intermediate_size": 8192,
        }
    ),
    "llama4-scout": _model(
        {
            "layers": 48,
            "hidden_size": 5120,
            "attention.num_heads": 40,
            "attention.num_kv_heads": 8,
            "vocab_size": 202048,
            "ffn.moe.num_experts": 16,
            "ffn.moe.top_k": 1,
            "ffn.moe.router": "sigmoid",
            "ffn.moe.router.normalize": False,
            "ffn.moe.intermediate_size": 8192,
            "ffn.moe.shared.intermediate_size": 8192,
        }
    ),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: 23 Mamba-2, 6 attention and 23 MoE layers.
    "nemotron-3-nano": _nemotron(
        2688,
        (23, 6, 23),
        64,
        0,
        {
            "ffn.moe.intermediate_size": 1856,
            "ffn.moe.num_experts": 128,
            "ffn.moe.top_k": 6,
            "ffn.moe.shared.intermediate_size": 3712,
        },
    ),
    # nvidia/NVIDIA-Nemotron-3-Super-120B-A12B: 40 Mamba-2, 8 attention and 40 MoE layers with latent experts.
    "nemotron-3-super": _nemotron(
        4096,
        (40, 8, 40),
        128,
        1,
        {
            "ffn.moe.intermediate_size": 2688,
            "ffn.moe.num_experts": 512,
            "ffn.moe.top_k": 22,
            "ffn.moe.shared.intermediate_size": 5376,
            "ffn.moe.latent_size": 1024,
        },
    ),
}
"""By name. Others than a `ForeignModel` can be planned and trained."""
