"""The loss of reinforcement learning of the package: equal to its formula and to the oracle."""

from dataclasses import replace

import pytest
import torch

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import ProgramData
from moefold.recipe import load_config
from moefold.verify.compare import compare_records, run_oracle
from moefold.verify.distributed_run import run_distributed
from moefold.verify.oracle_objectives import policy_objective
from tests.objectives.example import example
from tests.objectives.losses import policy
from tests.verify.oracle import TOLERANCE
from tests.verify.packed_rollouts import VOCAB, PackedRollouts, S
from tests.verify.recipes import tiny, without_mapping

WORDS = ("rl.group_size=4", "rl.objective=simple_policy", "rl.objective.epsilon=0.3")


def loss(**keys):
    return policy(objective=load_config(None, ["data.kind=task", *WORDS]).rl.objective, **keys)


def test_the_objective_equals_its_formula():
    case = example()
    terms, gradient, recorded = case.run(loss())

    def formula(log_probs, c):
        is_trained = c["weights"] != 0
        distance = (log_probs - c["old_log_probs"])[is_trained].exp() - 1
        advantages = c["advantages"][is_trained]
        gain = (1 + distance) * advantages - advantages.abs() / 0.6 * distance**2
        return -(gain * c["weights"][is_trained]).sum()

    value, expected = case.expect(formula)
    torch.testing.assert_close(terms, value.view(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
    assert 0 < recorded["outside"] < 1


def _run(cfg, steps):
    return run_distributed(cfg, steps, loss=loss(kl=0.2), data=ProgramData(PackedRollouts(), PackedRollouts()))


@pytest.mark.parity
@pytest.mark.slow
def test_it_equals_the_oracle_under_a_mapping(pool):
    train = {"global_batch_size": 4, "micro_batch_size": 1, "seq_len": S}
    cfg = tiny(model={"vocab_size": VOCAB}, train=train, world_size=4, tp=2, pp=2, ep=2)
    cfg = replace(cfg, data=DataConfig(kind="program"))
    records = pool.run(4, _run, cfg, 2)
    data = ProgramData(PackedRollouts(), PackedRollouts())
    oracle = run_oracle(without_mapping(cfg), 2, objective=policy_objective(loss(kl=0.2)), data=data)
    assert compare_records(oracle, records)[0].error < TOLERANCE
