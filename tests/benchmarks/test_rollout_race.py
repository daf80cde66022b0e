"""The rollout benchmark runs every implementation on the same requests."""

import pytest

from benchmarks.race.rollout import OURS, RolloutBench, Scenario, main, make_scenarios, rollout_config

pytest.importorskip("transformers", reason="transformers comes with the extra `dev`")


def results(name: str) -> dict[str, int]:
    """Names of the implementations of a scenario, and rounds that each was timed."""
    prompts = {"lengths": ((1, 2, 3), (4, 5, 6), (7, 8, 9)), "shared": ((1, 2, 3),) * 3}[name]
    scenario = Scenario(name, prompts, (3, 1, 5))
    result = run(scenario)
    assert result.absent == []
    assert result.num_new_tokens == 9
    assert result.ratio(result.timings[0]) == (1.0, 1.0)
    return {timing.name: len(timing.cpu_s) for timing in result.timings}


def run(scenario: Scenario):
    import torch

    from moefold.launch.ranks import init_distributed, single_rank_env

    with init_distributed(single_rank_env(), "cpu") as device:
        assert device == torch.device("cpu")
        return RolloutBench(rollout_config("tiny", "float32"), device).run(scenario, rounds=1)


@pytest.mark.slow
def test_every_implementation_is_timed():
    found = results("lengths")
    expected = [OURS, *(f"transformers {kind}" for kind in ("generate, grouped_mm", "generate, eager"))]
    assert found == dict.fromkeys([*expected, "transformers continuous batching"], 1)


def test_prompts_that_are_shared_are_compared_with_those_that_are_not():
    assert results("shared") == {OURS: 1, "moefold, prompts not shared": 1}


def test_scenarios_are_the_same_each_time():
    found = make_scenarios()
    assert found == make_scenarios()
    assert [len(set(scenario.prompts)) for scenario in found.values()] == [1, 8, 64, 256, 32]


def test_wrong_options_are_one_message(capsys):
    assert main(["--rounds", "0"]) == 2
    assert main(["--only", "nothing"]) == 2
    err = capsys.readouterr().err
    assert "--rounds 0 must be at least 1" in err
    assert "--only nothing matches none of: 1 samples" in err
