"""Generated problems: the same for the same number, separate held-out ones, packed with their answers."""

from dataclasses import replace

import numpy as np
import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.prompts import open_prompts
from moefold.data.synthetic_problems import TASKS, Problems
from moefold.data.tokenizer import ByteTokenizer
from moefold.errors import ConfigError
from moefold.rl.verifiers import countdown, evaluate

SORT = DataConfig(kind="task", task="sort", task_size=3, validation_fraction=0.2)


def open_samples(data: DataConfig, seq_len: int = 32):
    return DataRequest(data, seq_len=seq_len, vocab_size=256, seed=1).open()


@pytest.mark.parametrize("task", TASKS)
def test_a_problem_is_a_function_of_seed_and_number(task):
    data = replace(SORT, task=task)
    first, second, other = (Problems(data, seed, is_validation=False) for seed in (1, 1, 2))
    assert [first.problem(i) for i in range(9)] == [second.problem(i) for i in range(9)]
    assert [first.problem(i) for i in range(9)] != [other.problem(i) for i in range(9)]
    assert len({first.problem(i).prompt for i in range(9)}) > 6


def test_held_out_problems_are_never_trained_on():
    parts = [{Problems(SORT, 1, is_validation=part).problem(i).prompt for i in range(300)} for part in (False, True)]
    assert not parts[0] & parts[1]
    # 1,000 problems; a fifth is held out.
    assert len(parts[1]) > 100


def test_a_countdown_problem_has_sorted_numbers_and_an_answer_that_uses_them():
    data = replace(SORT, task="countdown", task_size=4)
    training, held_out = (
        [Problems(data, 1, is_validation=part).problem(i) for i in range(200)] for part in (False, True)
    )
    problems = training + held_out
    numbers, targets = ([problem.columns[name] for problem in problems] for name in ("numbers", "target"))
    assert all(given == sorted(given) for given in numbers)
    answers = [problem.answer for problem in problems]
    assert countdown(answers, answers, numbers, targets) == [1.0] * len(problems)
    # Answers have other orders than the prompt; no order of a held-out problem is trained on.
    assert any(evaluate(problem.answer)[1] != problem.columns["numbers"] for problem in problems)
    keys = [
        {(*problem.columns["numbers"], problem.columns["target"]) for problem in part} for part in (training, held_out)
    ]
    assert not keys[0] & keys[1]


def test_a_task_that_is_too_small_to_hold_problems_out_is_refused():
    data = replace(SORT, task_size=1, validation_fraction=1e-9)
    with pytest.raises(ConfigError, match="leaves no held-out problem of this data.task_size"):
        Problems(data, 1, is_validation=True).problem(0)


def test_samples_hold_whole_problems_and_train_on_the_answers():
    sample = open_samples(SORT).train.annotated_sample(5)
    assert sample.weights is not None
    assert sample.document_ids is not None
    text = ByteTokenizer().decode(sample.tokens)
    problems = text.split("\0")[:3]
    for problem in problems:
        digits, answer = problem.split("->")
        assert "".join(sorted(digits)) == answer
    # Each answer has three digits and the end token; the padding at the end is not trained on.
    targets = sample.tokens[1:][sample.weights]
    assert len(targets) == 4 * (sample.document_ids.max())
    assert (targets == 0).sum() == sample.document_ids.max()
    assert np.diff(sample.document_ids).min() >= 0


def test_validation_samples_and_none_without_a_fraction():
    assert len(open_samples(SORT).validation) > 0
    assert len(open_samples(replace(SORT, validation_fraction=0.0)).validation) == 0


def test_a_problem_longer_than_a_sample_is_refused():
    with pytest.raises(ConfigError, match="train.seq_len=7 is shorter than a problem"):
        open_samples(SORT, seq_len=7)


def test_prompts_of_a_task_have_the_columns_of_the_reward():
    prompts = open_prompts(SORT, ByteTokenizer(), seed=1)
    assert prompts.validation is not None
    prompt = prompts.train.prompt(7)
    assert prompt.text.endswith("->")
    assert prompt.columns["answer"] == "".join(sorted(prompt.text[:3]))
    assert ByteTokenizer().decode(prompt.ids) == prompt.text


def test_file_prompts_are_reshuffled_each_epoch(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i}", "n": {i}}}\n' for i in range(20)))
    data = DataConfig(kind="prompts", path=str(path), validation_fraction=0.25)
    prompts = open_prompts(data, ByteTokenizer(), seed=1)
    assert prompts.validation is not None
    assert (len(prompts.train), len(prompts.validation)) == (15, 5)
    epochs = [[prompts.train.prompt(15 * epoch + i).columns["n"] for i in range(15)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    held_out = {prompts.validation.prompt(i).columns["n"] for i in range(5)}
    assert held_out | set(epochs[0]) == set(range(20))
    unshuffled = open_prompts(replace(data, shuffle=False), ByteTokenizer(), seed=1)
    numbers = [unshuffled.train.prompt(i).columns["n"] for i in range(15)]
    assert numbers == sorted(numbers)
