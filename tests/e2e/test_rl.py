"""Reinforcement learning from the command line: fine-tune on a task, learn by rewards, sample and score."""

import json

import pytest

from tests.e2e.command import metrics, moefold, small, train

pytestmark = pytest.mark.e2e

GROUPS = ("rl.group_size=4", "train.global_batch_size=4")
TASK = ("data.kind=task", "data.task=sort", "data.task_size=3", "train.seq_len=32", "checkpoint.every=50")
RL = (
    *TASK,
    "rl.group_size=8",
    "rl.advantage=group_std",
    "rollout.max_tokens=5",
    "train.global_batch_size=128",
    "train.micro_batch_size=8",
    "train.lr_schedule=constant",
    "train.lr=1e-3",
    "moe.aux_loss=0.0",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model that was fine-tuned for some steps."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    train(folder, *TASK, "run.steps=40", "train.global_batch_size=16", "train.micro_batch_size=16", "train.lr=3e-3")
    return folder


def test_a_run_learns_by_rewards_and_its_rollouts_are_written(start, tmp_path):
    run = tmp_path / "rl"
    settings = (f"checkpoint.init_from={start}", "run.steps=22", "train.eval_every=22", "metrics.rollouts_every=10")
    done = train(run, *RL, *settings)
    assert "greedy reward" in done.stdout
    records = metrics(run)
    rewards = [record["rl"]["reward"] for record in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert records[-1]["rl"]["eval_reward"] > rewards[0]
    assert records[0]["rl"]["ratio_max"] == pytest.approx(1, abs=1e-3)
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {record["step"] for record in rollouts} == {10, 20}
    assert len(rollouts) == 2 * 128
    right = next(record for record in rollouts if record["reward"] == 1)
    assert right["completion"] == "".join(sorted(right["prompt"][:3]))


def test_rollout_scores_completions_and_prints_a_summary(start, tmp_path):
    out = tmp_path / "scored.jsonl"
    command = ("rollout", str(start), "--task", "sort", "--task-size", "3", "--max-tokens", "5", "--count", "20")
    done = moefold(*command, "--samples", "4", "--out", str(out))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == summary["rollouts"] == 80
    assert summary["reward"] == pytest.approx(sum(record["reward"] for record in records) / 80)
    assert summary["pass_at"]["1"] == pytest.approx(summary["reward"])
    assert summary["pass_at"]["4"] > summary["pass_at"]["1"]
    refused = moefold(*command, "--out", str(out))
    assert refused.returncode == 2
    assert "exists already" in refused.stderr


def test_a_missing_reward_is_refused_before_ranks_start(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n' * 40)
    words = ("data.kind=prompts", f"data.path={prompts}", "reward.use=absent.py:reward")
    done = moefold(*small(tmp_path / "run", *words, *GROUPS, "train.seq_len=128"))
    assert done.returncode == 2
    assert "reward.use='absent.py:reward': 'absent.py' does not exist; name a Python file" in done.stderr


def test_conversations_are_sampled_scored_and_sampled_again(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "answer": str(i)} for i in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward(prompts, completions, answer, **columns):\n"
        "    return [float(len(one[0]['content']) % 2) for one in completions]\n"
    )
    words = ("data.kind=prompts", f"data.path={prompts}", f"reward.use={reward}:reward", *GROUPS)
    run = tmp_path / "run"
    done = train(run, *words, "rollout.max_tokens=6", "train.seq_len=128", "run.steps=1", "checkpoint.every=1")
    assert "next: moefold rollout " in done.stdout
    out = tmp_path / "scored.jsonl"
    options = ("--prompts", str(prompts), "--reward", f"{reward}:reward", "--max-tokens", "6", "--count", "4")
    done = moefold("rollout", str(run), *options, "--samples", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text().splitlines()[0])
    assert record["prompt"] == rows[0]["prompt"]
    assert record["completion"][0]["role"] == "assistant"
