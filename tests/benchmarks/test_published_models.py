"""Models of published measurements: the operations and parameters that sources print."""

import pytest

from benchmarks.published.models import find_published_model, hybrid_names, load_published_model
from moefold.cost.flops import count_parameters
from moefold.errors import ConfigError
from moefold.planner.model_spec import train_flops
from moefold.planner.planner import read_model


# published/README.md and the quotients of the two metrics that its rows print, GFLOP for a token, without the router.
@pytest.mark.parametrize(
    ("name", "seq_len", "causal", "printed"),
    [
        ("mixtral-8x22b", 4096, False, 250.6),
        ("deepseek-v3", 4096, True, 260.0),
        ("qwen3-235b-a22b", 4096, True, 148.0),
        ("qwen3-30b-a3b", 4096, True, 23.0),
        ("kimi-k2", 4096, True, 204.5),
        ("gpt-oss-120b", 4096, True, 32.6),
        ("mixtral-8x7b", 4096, False, 82.9),
        ("llama-4-scout", 8192, True, 108.9),
        ("nemotron-3-nano", 8192, True, 22.3),
        ("nemotron-3-super", 8192, True, 85.1),
        ("llama3-70b", 8192, True, 449.2),
    ],
)
def test_operations_are_those_that_sources_print(name, seq_len, causal, printed):
    counted = train_flops(load_published_model(name), seq_len, causal=causal, router=False)
    assert counted / 1e9 == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("nemotron-3-nano", 31.6e9),
        ("nemotron-3-super", 120e9),
        ("moonlight-16b", 16e9),
        ("llama3-8b", 8.03e9),
        ("llama3-405b", 405.9e9),
    ],
)
def test_other_models_have_their_published_number_of_parameters(name, total):
    # Cards leave layers of multi-token prediction out.
    counted = count_parameters(load_published_model(name).config)
    assert counted.total - counted.mtp == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Nemotron-3-Super-120B", "nemotron-3-super"),
        ("Nemotron_3_Nano (pretrain)", "nemotron-3-nano"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("DeepSeekV4 Flash", None),
    ],
)
def test_names_as_tables_spell_them(spelling, name):
    assert find_published_model(spelling) == name


@pytest.mark.parametrize("name", hybrid_names())
def test_a_hybrid_is_not_a_model_of_a_plan(name):
    assert not load_published_model(name).is_trainable
    with pytest.raises(ConfigError, match="is unknown"):
        read_model(name)
