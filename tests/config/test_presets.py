"""Every preset is a model that can run, with the parameters that its card or a count by hand says."""

import re
from dataclasses import replace

import pytest

from moefold.config.base.part import keys_of
from moefold.config.keys.paths import flat_settings
from moefold.config.presets import load_preset, preset_names, preset_summary
from moefold.cost.flops import count_parameters
from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_model_that_can_run(name):
    cfg = load_config(None, [f"model.preset={name}"])
    check_config(replace(cfg, train=replace(cfg.train, seq_len=max(cfg.train.seq_len, cfg.model.selected_keys))))
    ours = flat_settings({f"model.{key}": value for key, value in keys_of(cfg.model).items()})
    preset = flat_settings({f"model.{key}": value for key, value in load_preset(name).items()})
    assert {name: ours[name] for name in preset} == preset


# Totals and active parameters as the model cards print them, with a decimal more where the weights' index gives it.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("mixtral-8x22b", 140_620_634_112, 39.1e9),
        ("qwen2-57b-a14b", 57.41e9, 14.2e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("qwen3-235b-a22b", 235_093_634_560, 22.2e9),
        # transformers counts the same; for DeepSeek-V3 671,026,404,352 without the layer of multi-token prediction.
        ("deepseek-v2-lite", 15_706_484_224, 2.4e9 + 102400 * 2048),
        ("deepseek-v2", 235_741_434_880, 21.4e9),
        ("deepseek-v3", 671_026_404_352 + 11_610_067_968, 37.6e9),
        # Likewise 671,877,929,216 and 743,911,199,232.
        ("deepseek-v3.2", 671_877_929_216 + 11_624_027_392, 38.4e9),
        ("glm-5", 743_911_199_232 + 9_952_920_320, 41.8e9),
        # transformers counts the same for the text models.
        ("llama-4-scout", 107_769_861_120, 17.2e9),
        ("llama-4-maverick", 400_711_848_960, 17.2e9),
        ("olmoe-1b-7b", 6_919_161_856, 1.28e9),
        # Llama-3-70B has 70,553,706,496 parameters; 56,371,445,760 of them are copied by the eight experts.
        ("llama3-8x70b", 70_553_706_496 + 7 * 56_371_445_760 + 80 * 8192 * 8, 126.9e9),
        ("mixtral-8x22b-g8t8", 140_620_634_112 + 56 * 6144 * 56, 22.3e9),
    ],
)
def test_published_models_have_their_published_number_of_parameters(name, total, active):
    count = count_parameters(load_config(None, [f"model.preset={name}"]).model)
    assert count.total == pytest.approx(total, rel=1e-12 if isinstance(total, int) else 1e-4)
    assert count.active == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)]
)
def test_gpt_oss_counts_as_its_card_does(name, total, active):
    """arXiv:2508.10925 table 1, which leaves the embedding out of the active parameters."""
    count = count_parameters(load_config(None, [f"model.preset={name}"]).model)
    assert round(count.total, -7) == total
    assert round(count.active - count.embedding, -7) == active


def test_gpt_oss_20b_by_hand():
    attention = 2880 * 4096 + 4096 + 2 * (2880 * 512 + 512) + 4096 * 2880 + 2880 + 64
    expert = 3 * 2880 * 2880 + 3 * 2880
    layer = attention + 32 * expert + 32 * 2880 + 32 + 2 * 2880
    expected = 24 * layer + 2 * 201088 * 2880 + 2880
    assert count_parameters(load_config(None, ["model.preset=gpt-oss-20b"]).model).total == expected
    assert expected == 20_914_757_184


def test_mixtral_8x7b_by_hand():
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = attention + 8 * 3 * 4096 * 14336 + 4096 * 8 + 2 * 4096
    expected = 32 * layer + 2 * 32000 * 4096 + 4096
    assert count_parameters(load_config(None, ["model.preset=mixtral-8x7b"]).model).total == expected


def test_qwen2_57b_by_hand():
    attention = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512
    shared = 3 * 3584 * 20480 + 3584
    layer = attention + 64 * 3 * 3584 * 2560 + shared + 3584 * 64 + 2 * 3584
    expected = 28 * layer + 2 * 151936 * 3584 + 3584
    assert count_parameters(load_config(None, ["model.preset=qwen2-57b-a14b"]).model).total == expected


def test_qwen3_30b_by_hand():
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128
    layer = attention + 128 * 3 * 2048 * 768 + 2048 * 128 + 2 * 2048
    expected = 48 * layer + 2 * 151936 * 2048 + 2048
    assert count_parameters(load_config(None, ["model.preset=qwen3-30b-a3b"]).model).total == expected


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "qwen2-57b-a14b"])
def test_heads_of_128_where_the_published_config_leaves_them_open(name):
    assert load_config(None, [f"model.preset={name}"]).model.softmax_attention.head_dim == 128


def test_the_bench_preset_is_the_shape_of_the_speed_bar():
    model = load_config(None, ["model.preset=bench-small"]).model
    assert (model.num_layers, model.hidden_size, model.attention.num_heads, model.attention.num_kv_heads) == (
        4,
        256,
        8,
        4,
    )
    assert (model.ffn.moe.num_experts, model.ffn.moe.top_k, model.ffn.moe.intermediate_size, model.vocab_size) == (
        8,
        2,
        512,
        4096,
    )


def test_the_quickstart_preset_is_small():
    assert 1e6 < count_parameters(load_config(None, ["model.preset=quickstart"]).model).total < 3e6


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_description_and_counts_right(name):
    summary = preset_summary(name)
    count = count_parameters(load_config(None, [f"model.preset={name}"]).model)
    stated = re.search(r"([0-9.]+)([BM]) parameters", summary)
    assert stated
    assert float(stated[1]) * {"B": 1e9, "M": 1e6}[stated[2]] == pytest.approx(count.total, rel=0.03)


def test_an_unknown_preset_names_the_nearest_and_lists_all():
    with pytest.raises(ConfigError) as error:
        load_preset("qwen3-30b")
    assert "did you mean 'qwen3-30b-a3b'?" in str(error.value)
    assert all(name in str(error.value) for name in preset_names())
