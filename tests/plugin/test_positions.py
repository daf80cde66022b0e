"""An attention with a temperature that each head learns from its own first value, by the positions of the queries."""

import pytest

from moefold.errors import ConfigError
from moefold.model.transformer import build_model
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.inference.example import write_checkpoint
from tests.inference.generation import GREEDY, run_generation, run_without_cache
from tests.plugin.recipes import mapped, recipe
from tests.slow import slow
from tests.verify.oracle import TOLERANCE

FILE = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from moefold.config.groups.attention import AttentionPart
from moefold.config.base.param_spec import ParamSpec
from moefold.model.local_param import local_param
from moefold_plugin_example.gated_attention import Gated, GatedAttention

@dataclass(frozen=True, kw_only=True)
class Tempered(Gated):
    """Multiply the queries of head i by 1 + t_i * ln(1 + position), with t_i = 2^-i at first."""

    interface: ClassVar[int] = 1
    saved = AttentionPart.saved

    def params(self, hidden):
        yield from super().params(hidden)
        first = tuple(2.0**-head for head in range(self.num_heads))
        yield ParamSpec("temperature", (self.num_heads,), "attention", tp_dim=0, initial=first)

    def build(self, model):
        return TemperedAttention(self, model.hidden_size)

    def formula(self):
        gated = super().formula()

        def heads(given):
            found = gated(given)
            log = (given.positions[:, :, None] + 1).log()
            return found._replace(queries=found.queries * (1 + given.weights["temperature"] * log)[..., None])

        return heads


class TemperedAttention(GatedAttention):
    def __init__(self, part, hidden):
        super().__init__(part, hidden)
        self.temperature = torch.nn.Parameter(torch.empty(part.num_heads))

    def forward(self, x, rope, documents=None):
        columns = [(local_param(weight, x.dtype), None) for weight in (self.wq, self.wk, self.wv, self.wg)]
        *heads, gate = self.sequence_parallel.all_gather_linear(x, columns, self.wgrad_store)
        query, key, value = (projected.unflatten(-1, (-1, self.head_dim)) for projected in heads)
        log_SB = rope.positions.to(x.dtype).log1p()
        factor = 1 + local_param(self.temperature, x.dtype)[:, None] * log_SB[..., None, None]
        attended = self.core_attention(rope(query) * factor, rope(key), value, documents)
        wo = local_param(self.wo, x.dtype)
        return self.sequence_parallel.linear_reduce_scatter(attended.flatten(2) * gate.sigmoid(), wo, self.wgrad_store)
'''


@pytest.fixture
def word(tmp_path):
    path = tmp_path / "tempered.py"
    path.write_text(FILE)
    return f"model.attention={{kind = '{path}:Tempered', num_heads = 4}}"


def test_each_head_begins_with_its_own_value_on_each_rank(pool, word):
    """Also where the heads are sharded."""
    for mapping in ({}, {"world_size": 2, "tp": 2}):
        records = pool.run(mapping.get("world_size", 1), run_distributed, mapped(recipe(word), mapping), 1)
        for record in records:
            for name in (name for name in record.initial if name.endswith("temperature")):
                assert record.initial[name].tolist() == [1, 0.5, 0.25, 0.125]


def test_another_number_of_first_values_is_refused(word, tmp_path):
    (tmp_path / "tempered.py").write_text(FILE.replace("initial=first", "initial=first[:3]"))
    with pytest.raises(ConfigError, match=r"tempered.py\) has 3 initial values of 4 rows of temperature; give one for"):
        build_model(recipe(word))


@pytest.mark.parity
@pytest.mark.parametrize(
    "mapping",
    [
        {"world_size": 2, "cp": 2},
        *slow(
            [
                ({},),
                ({"world_size": 2, "pp": 2},),
                ({"world_size": 2, "ep": 2},),
                ({"world_size": 4, "tp": 2, "cp": 2},),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    "words",
    [("model.vocab_size=16", "data.document_end=3"), *slow([((),), (("model.layers=4 nope",),)])],
    ids=["documents", "one document", "without RoPE"],
)
def test_the_oracle_judges_its_positions(pool, word, mapping, words):
    cfg = recipe(word, *words)
    records = pool.run(mapping.get("world_size", 1), run_distributed, mapped(cfg, mapping), 2)
    assert compare_records(run_oracle(cfg, 2), records)[0].error < TOLERANCE


def tokens(path, word) -> tuple[list[list[int]], list[list[int]]]:
    """Continue prompts with the whole text and with the cache, on a rank where the user names the file."""
    recipe(word)
    completions = run_generation(path, {}, GREEDY)
    return run_without_cache(path), [list(completion.tokens) for completion in completions]


@pytest.mark.parity
def test_its_cache_gives_the_tokens_of_the_whole_text(pool, tmp_path, word):
    path = tmp_path / "run"
    pool.run(1, write_checkpoint, recipe(word, f"run.dir={path}", "train.seq_len=24"))
    [(whole, cached)] = pool.run(1, tokens, path, word)
    assert cached == whole
