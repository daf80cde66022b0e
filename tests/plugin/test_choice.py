"""A choice of experts from a file that balances by a threshold of its own, which becomes the expert bias."""

from dataclasses import replace

import pytest

from moefold.recipe import load_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from tests.parts.formula_rule import assert_formula
from tests.verify.oracle import TOLERANCE, assert_equals_oracle
from tests.verify.recipes import tiny, without_mapping

FILE = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
from moefold.config.groups.router import ChoiceFormula, ChoicePart

@dataclass(frozen=True, kw_only=True)
class Centred(ChoicePart):
    """The best scores after subtracting from each expert a share of its mean score in the micro-batch."""

    interface: ClassVar[int] = 1
    reads_micro_batch: ClassVar[bool] = True
    sets_bias: ClassVar[bool] = True
    share: float = 1.0

    def thresholds(self, scores_TE, top_k, tokens):
        return self.share * tokens.group.gather(scores_TE).mean(0)

    def select(self, inputs):
        if inputs.thresholds_E is None:
            return inputs.best(inputs.ranking_TE)
        return inputs.best(inputs.scores_TE - inputs.thresholds_E)

    def formula(self):
        def threshold(given):
            return self.share * given.scores[given.is_token].sum(0) / given.is_token.sum()

        def bias(batches):
            return -torch.stack([threshold(given) for given in batches]).mean(0)

        return ChoiceFormula(lambda given: given.scores - threshold(given), bias=bias)
'''


@pytest.mark.parity
def test_it_is_judged_on_two_ranks(pool, tmp_path):
    (tmp_path / "parts.py").write_text(FILE)

    def centred(cfg, share):
        choice = load_config(
            None, [f"moe.choice={tmp_path / 'parts.py'}:Centred", f"moe.choice.share={share}"]
        ).moe.choice
        return replace(cfg, moe=replace(cfg.moe, choice=choice))

    model = {"ffn.moe.router": "sigmoid", "ffn.moe.router.expert_bias": True}
    cfg = centred(tiny(model=model, moe={"aux_loss": 0.0}, world_size=2, tp=2, ep=2), 1.0)
    assert_formula(type(cfg.moe.choice))
    assert_equals_oracle(pool, cfg)
    ranks = pool.run(2, run_distributed, cfg, 1)
    assert any(name.endswith("expert_bias") for name in ranks[0].weights)
    wrong = compare_records(run_oracle(centred(without_mapping(cfg), 1.5), 1), ranks)
    assert max(found.error for found in wrong) > TOLERANCE
