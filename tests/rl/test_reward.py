"""The reward of a recipe: built-in verifiers, and a Python function in workers that may fail or hang."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.config.schema import Config
from moefold.config.sections.data import DataConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.config.sections.parallel import ParallelConfig
from moefold.config.sections.rl import RewardConfig, RLConfig, RolloutConfig
from moefold.config.sections.train import TrainConfig
from moefold.data.prompts import Prompt, has_conversations, open_prompts
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError, RunError
from moefold.inference.rollouts import rollout_records
from moefold.rl.preflight import check_rollout_data
from moefold.rl.reward import Reward, check_columns, check_reward, short_names
from moefold.rl.reward_pool import RewardError, RewardPool
from moefold.rl.rollout import Rollout, RolloutGroup
from moefold.rl.round_statistics import RoundStatistics

FUNCTIONS = """
import asyncio
import os
import sys
import time

def fine(prompts, completions, answer, **columns):
    print("on standard output")
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def process(prompts, completions, **columns):
    return [os.getpid()] * len(completions)

def raises(prompts, completions, **columns):
    raise KeyError(completions[0])

def hangs(prompts, completions, **columns):
    time.sleep(600 if completions[0] == "slow" else 0)
    return [1] * len(completions)

def dies(prompts, completions, **columns):
    if completions[0] == "die":
        os._exit(3)
    return [None] * len(completions)

def dies_or_hangs(prompts, completions, **columns):
    if completions[0] == "die":
        os._exit(3)
    time.sleep(600)

def short(prompts, completions, **columns):
    return [1.0]

def text(prompts, completions, **columns):
    return ["high"] * len(completions)

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def number(prompts, completions, **columns):
    return 1.0

def needs_more(prompts, completions, missing):
    return [1.0] * len(completions)

def chat(prompts, completions, **columns):
    return [float(prompts[0][0]["content"] + completion[0]["content"] == "ab") for completion in completions]

def forks_and_hangs(prompts, completions, **columns):
    if completions[0] == "slow":
        os.fork()
        time.sleep(600)
    return [1] * len(completions)

def reads(prompts, completions, **columns):
    return [float(len(sys.stdin.read()) == 0)] * len(completions)

def huge(prompts, completions, **columns):
    return [10**400] * len(completions)

def large(prompts, completions, **columns):
    return [1e308] * len(completions)

async def later(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [float(text == "yes") for text in completions]

def length(prompts, completions, **columns):
    return [len(text) if len(text) < 3 else None for text in completions]

constant = 3
"""
PROMPT = Prompt("p", "p", (112,), {"answer": "yes"}, "prompts.jsonl:1")


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def _reward(cfg: Config) -> Reward:
    return Reward(cfg.data, cfg.faults, cfg.reward, num_ranks=cfg.num_job_ranks)


def config(use: str | tuple[str, ...], **reward: object) -> Config:
    return Config(
        data=DataConfig(kind="prompts"),
        reward=RewardConfig(use=use, **{"workers": 1, **reward}),
        rl=RLConfig(group_size=2),
    )


def score(cfg: Config, *texts: str, prompt: Prompt = PROMPT) -> list[float]:
    with _reward(cfg) as reward:
        (scores,) = reward.score([prompt], [texts], [[[1]] * len(texts)])
        return scores.total.tolist()


def test_a_python_function_gets_the_columns_of_each_completion(module):
    assert score(config(f"{module}:fine"), "yes", "no") == [1.0, 0.0]
    assert score(config(f"{module}:later"), "yes", "no") == [1.0, 0.0]


def test_a_verifier_gets_the_columns(module):
    assert score(config("exact"), "yes", "no", "yes ") == [1.0, 0.0, 1.0]


def test_several_functions_are_summed_with_their_weights_where_they_apply(module):
    """As TRL: None leaves a function out of the sum of a row."""
    cfg = config(("exact", f"{module}:length", f"{module}:dies"), weights=(2.0, -0.5, 9.0))
    with _reward(cfg) as reward:
        (scores,) = reward.score([PROMPT], [["yes", "no", "x"]], [[[1]] * 3])
    assert scores.total.tolist() == [2.0, -1.0, -0.5]
    assert list(scores.by_function) == ["exact", "length", "dies"]
    assert np.array_equal(scores.by_function["exact"], [1, 0, 0])
    assert np.array_equal(scores.by_function["length"], [np.nan, 2, 1], equal_nan=True)
    groups = [RolloutGroup(PROMPT, (rollout_of("yes"),) * 3, scores.total, scores.total, scores.by_function)]
    metrics = RoundStatistics().add(groups, 1.0, 1.0).metrics(groups)
    assert metrics["rewards"] == {"exact": pytest.approx(1 / 3), "length": 1.5, "dies": None}
    assert metrics["reward"] == pytest.approx(0.5 / 3)
    record = rollout_records(groups[0], lambda rollout: "yes")[0]
    assert record["rewards"] == {"exact": 1.0, "length": None, "dies": None}
    assert score(config((f"{module}:dies", f"{module}:length")), "long") != score(config("exact"), "long") == [0.0]
    # A weight of 0 only reports: where no other function applies, there is no reward.
    only_reported = config(("exact", f"{module}:length"), weights=(0.0, 1.0))
    assert np.array_equal(score(only_reported, "yes", "no"), [np.nan, 2.0], equal_nan=True)


def rollout_of(text: str) -> Rollout:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return Rollout(0, 0, np.zeros(1, np.int64), tokens, np.zeros(len(tokens)), "eos")


def test_one_of_several_functions_that_fails_leaves_the_prompt_out(module):
    cfg = config(("exact", f"{module}:raises"), on_error="drop")
    with _reward(cfg) as reward:
        first, second = reward.score([PROMPT, PROMPT], [["yes"], ["no"]], [[[1]]] * 2)
        assert [failed.function for failed in reward.pop_failures()] == [f"{module}:raises"] * 2
    assert np.isnan([first.total, second.total, *first.by_function.values()]).all()


def test_functions_of_one_name_in_two_files_keep_their_files_in_metrics():
    assert short_names(["exact", "a.py:f", "b.py:g"]) == ["exact", "f", "g"]
    assert short_names(["a.py:f", "b.py:f", "b.py:g"]) == ["a.py:f", "b.py:f", "g"]


def test_a_conversation_gets_messages(module):
    prompt = replace(PROMPT, source=[{"role": "user", "content": "a"}])
    assert score(config(f"{module}:chat"), "b", "c", prompt=prompt) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "texts", "reason"),
    [
        ("raises", ["x", "y"], "raised KeyError: 'x'"),
        ("hangs", ["slow", "y"], "took longer than 0.5 s"),
        ("dies", ["die", "y"], "ended its process with status 3"),
        ("short", ["x", "y"], "returned 1 rewards for 2 completions"),
        ("text", ["x", "y"], "returned 'high', which is not a finite number"),
        ("nan", ["x", "y"], "returned nan, which is not a finite number"),
        ("number", ["x", "y"], "raised TypeError: 'float' object is not iterable"),
        ("huge", ["x", "y"], "returned 100000000000000000...0000000000000000000, which is not a finite number"),
        ("large", ["x", "y"], "returned 1e+308, and rewards are at most 1e+15"),
    ],
)
def test_a_failure_stops_the_run_or_drops_the_group(module, function, texts, reason):
    cfg = config(f"{module}:{function}", timeout_s=0.5)
    with pytest.raises(RunError) as error:
        score(cfg, *texts)
    line = str(error.value).splitlines()[0]
    assert line.startswith(f"the reward function {module}:{function} {reason}, for the prompt 'p' (prompts.jsonl:1); ")
    dropping = replace(cfg, reward=replace(cfg.reward, on_error="drop"))
    with _reward(dropping) as reward:
        scores = reward.score([PROMPT, PROMPT], [texts, texts], [[[1], [1]]] * 2)
        assert np.isnan([one.total for one in scores]).all()
        assert [failed.reason for failed in reward.pop_failures()] == [reason] * 2


def test_the_pool_goes_on_after_a_hang_and_a_death(module):
    calls = [{"prompts": ["p"], "completions": [text]} for text in ("x", "slow", "y")]
    with RewardPool(module, "hangs", workers=1, timeout_s=0.5) as pool:
        first, hung, last = pool.call_all(calls)
    assert (first, last) == ([1], [1])
    assert isinstance(hung, RewardError)


def test_workers_end_with_the_pool(module):
    pool = RewardPool(module, "process", workers=2, timeout_s=5)
    pids = {int(pid) for (pid,) in pool.call_all([{"prompts": ["p"], "completions": ["x"]}] * 4)}
    assert pids
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_function_that_forks_is_killed_with_its_children(module):
    calls = [{"prompts": ["p"], "completions": [text]} for text in ("slow", "y")]
    with RewardPool(module, "forks_and_hangs", workers=1, timeout_s=0.5) as pool:
        hung, last = pool.call_all(calls)
    assert isinstance(hung, RewardError)
    assert last == [1]


def test_a_worker_that_died_between_calls_is_replaced(module):
    call = {"prompts": ["p"], "completions": ["x"]}
    with RewardPool(module, "process", workers=1, timeout_s=5) as pool:
        ((first,),) = pool.call_all([call])
        os.kill(int(first), signal.SIGKILL)
        os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)
        ((second,),) = pool.call_all([call])
    assert second != first


def test_a_failure_that_stops_the_run_does_not_wait_for_the_other_prompts(module):
    """100 prompts that hang for their time limit of 60 s each."""
    prompts = [PROMPT] * 100
    texts = [["die"], *[["slow"]] * 99]
    before_s = time.monotonic()
    with pytest.raises(RunError), _reward(config(f"{module}:dies_or_hangs", timeout_s=60)) as reward:
        reward.score(prompts, texts, [[[1]]] * 100)
    assert time.monotonic() - before_s < 60


def test_dropped_prompts_that_hang_end_before_the_other_ranks_give_up(module):
    """20 prompts that hang for 0.5 s each on 2 workers, and ranks that wait for 1 s."""
    cfg = config(f"{module}:hangs", timeout_s=0.5, workers=2, on_error="drop")
    several = replace(cfg, faults=FaultsConfig(timeout_s=1.0), parallel=ParallelConfig(world_size=2))
    with pytest.raises(RunError) as error, _reward(several) as reward:
        reward.score([PROMPT] * 20, [["slow"]] * 20, [[[1]]] * 20)
    assert re.fullmatch(
        r"the reward function has scored \d+ of the 20 prompts of a rank after 0\.9 s, of which \d+ timed out; the "
        r"other ranks wait for faults\.timeout_s=1 s: make it faster, lower reward\.timeout_s=0\.5, or raise "
        r"reward\.workers=2 or faults\.timeout_s",
        str(error.value),
    )


def test_a_single_rank_waits_for_all_prompts(module):
    """The watchdog, which ends a run without progress for faults.timeout_s, hears of each prompt."""
    cfg = config(f"{module}:hangs", timeout_s=0.5, on_error="drop")
    scored = []
    with _reward(replace(cfg, faults=FaultsConfig(timeout_s=1.0))) as reward:
        scores = reward.score([PROMPT] * 3, [["slow"]] * 3, [[[1]]] * 3, lambda: scored.append(1))
    assert np.isnan([one.total for one in scores]).all()
    assert len(scored) == 3


def test_a_worker_ends_with_the_process_that_started_it(module):
    code = (
        "import os, sys, threading, time; from pathlib import Path; from moefold.rl.reward_pool import RewardPool;"
        f"pool = RewardPool(Path({str(module)!r}), 'hangs', workers=1, timeout_s=600);"
        "threading.Thread(target=lambda: list(pool.call_all([{'prompts': ['p'], 'completions': ['slow']}])),"
        " daemon=True).start()\n"
        "while not pool._workers or not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "print(next(iter(pool._workers))._process.pid, flush=True); os._exit(1)"
    )
    marker = module.with_suffix(".started")
    module.write_text(FUNCTIONS.replace("time.sleep(600 if", f"open({str(marker)!r}, 'w'); time.sleep(600 if"))
    found = subprocess.run([sys.executable, "-c", code, str(marker)], stdout=subprocess.PIPE, timeout=120)
    pid = int(found.stdout)
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie, which a container without an init process keeps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_function_that_reads_standard_input_gets_none(module):
    assert score(config(f"{module}:reads"), "x") == [1.0]


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("", "reward.use='' must name the reward of data.kind='prompts': one of exact, number, sort, countdown, or"),
        ("exactly", "reward.use='exactly' must be one of exact, number, sort, countdown, or FILE.py:FUNCTION"),
        (
            "countdown",
            "reward.use='countdown' reads the column 'numbers', and prompts.jsonl:1 has the columns ['answer']",
        ),
        ("missing.py:f", "reward.use='missing.py:f': 'missing.py' does not exist; name a Python file"),
        ("MODULE:absent", "cannot be imported: AttributeError: it has no function 'absent'"),
        ("MODULE:constant", "cannot be imported: AttributeError: it has no function 'constant'"),
        ("MODULE:needs_more", "raised TypeError: needs_more() "),
        ("MODULE:short", "returned 1 rewards for 2 completions"),
        ("exact MODULE:short", "functions.py:short' was tried with two empty completions, and returned 1 rewards"),
        ("exact missing.py:f", "reward.use='missing.py:f': 'missing.py' does not exist; name a Python file"),
    ],
)
def test_a_wrong_function_is_refused_before_the_run(module, use, reason):
    cfg = config(tuple(use.replace("MODULE", str(module)).split()))
    with pytest.raises(ConfigError) as error:
        check_reward(cfg.data, cfg.reward, [PROMPT])
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_check_accepts_sound_rewards(module):
    cfg = config(f"{module}:fine")
    check_reward(cfg.data, cfg.reward, [PROMPT])
    recipe = config("exact")
    check_reward(recipe.data, recipe.reward, [PROMPT])


def data(tmp_path: Path, rows: list[object], **train: int) -> Config:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Config(
        data=DataConfig(kind="prompts", path=str(path), validation_fraction=0.0),
        train=TrainConfig(**{"seq_len": 32, "global_batch_size": 4, **train}),
        rl=RLConfig(group_size=2),
        rollout=RolloutConfig(max_tokens=8),
        reward=RewardConfig(use="exact"),
    )


GOOD = [{"prompt": f"question {i}", "answer": str(i)} for i in range(4)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (GOOD[:1], "has 1 prompts to train on, and a step needs 2"),
        ([*GOOD, {"prompt": "x" * 26, "answer": "1"}], "prompts.jsonl:5, 26 tokens, with rollout.max_tokens=8; set"),
        ([*GOOD, {"prompt": "", "answer": "1"}], "prompts.jsonl:5: the prompt is empty"),
        ([*GOOD, {"prompt": "x"}], "prompts.jsonl:5 has the columns [], and"),
        ([*GOOD, {"text": "x"}], "prompts.jsonl:5: no column 'prompt'"),
        ([*GOOD, {"prompt": [{"role": "user"}], "answer": 1}], "the prompt: message 1 has no text"),
        ([{"prompt": "x", "completions": 1}], "the column 'completions' has the name of an argument"),
        ([*GOOD, "{"], "prompts.jsonl:5 is not JSON"),
        ([], "holds no prompt"),
    ],
)
def test_prompts_that_cannot_work_are_refused_with_their_line(tmp_path, rows, reason):
    with pytest.raises(ConfigError) as error:
        check_rollout_data(data(tmp_path, rows))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


BAD_PROMPTS = [
    "{",
    {"prompt": "a\0b", "answer": "1"},
    {"prompt": "", "answer": "1"},
    {"text": "x"},
    {"prompt": "x"},
    {"prompt": "x", "answer": None},
]


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompts_that_cannot_work_are_skipped_and_counted(tmp_path, caplog, is_chat):
    """Also the first row, which otherwise decides on the form of the prompts."""
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in GOOD] if is_chat else GOOD
    bad = [*BAD_PROMPTS, {"prompt": [{"role": "user"}], "answer": "1"}]
    # A row of the other form that lacks a column: it is skipped, and decides nothing.
    other = {"prompt": "x" if is_chat else [{"role": "user", "content": "x"}]}
    cfg = data(tmp_path, [bad[-1], other, *rows[:2], *bad, *rows[2:]], seq_len=128)
    cfg = replace(cfg, data=replace(cfg.data, skip_bad_rows=True))
    with caplog.at_level(logging.WARNING):
        check_rollout_data(cfg)
    first = "prompts.jsonl:1: the prompt: message 1 has no text"
    assert re.search(rf"data.skip_bad_rows: {len(bad) + 2} rows skipped; the first: .*{first}", caplog.text)
    check = check_columns(cfg.data, RewardConfig(use=("exact",)))
    found = open_prompts(cfg.data, ByteTokenizer(), seed=0, check=check).train
    assert sorted(prompt.columns["answer"] for prompt in found.prompts) == ["0", "1", "2", "3"]
    assert has_conversations(cfg.data, ByteTokenizer(), check) == is_chat
    with pytest.raises(
        ConfigError, match=rf"holds no prompt; .* \(data.skip_bad_rows: {len(bad)} rows skipped; the first"
    ):
        check_rollout_data(replace(data(tmp_path, bad), data=cfg.data))


@pytest.mark.parametrize(
    ("use", "columns", "reason"),
    [
        ("number", {"answer": "seven"}, "prompts.jsonl:3: the column 'answer' must have a number for reward.use='numb"),
        ("exact", {"answer": None}, "prompts.jsonl:3: the column 'answer' must not be null for reward.use='exact'"),
        ("countdown", {"numbers": [1, 2], "target": "3"}, "the column 'target' must be a whole number for"),
        ("countdown", {"numbers": "1,2", "target": 3}, "the column 'numbers' must be a list of whole numbers for"),
    ],
)
def test_columns_whose_reward_would_always_be_0_are_refused(tmp_path, use, columns, reason):
    good = {"answer": "7"} if use != "countdown" else {"numbers": [1, 2], "target": 3}
    cfg = data(tmp_path, [{"prompt": "x"} | good, {"prompt": "y"} | good, {"prompt": "z"} | columns])
    with pytest.raises(ConfigError) as error:
        check_rollout_data(replace(cfg, reward=RewardConfig(use=use)))
    assert reason in str(error.value)


def test_good_prompts_are_accepted(tmp_path):
    check_rollout_data(data(tmp_path, GOOD))
    chats = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}] * 4
    check_rollout_data(data(tmp_path, chats, seq_len=128))
