"""Alignment with rewards: rows that are kept, scales of losses, and rewards that are written into a prompt."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from moefold.config.base.part import make_part
from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.errors import ConfigError

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
ROWS = [
    {"prompt": f"q{i // 3}", "response": f"r{i}", "reward": reward}
    for i, reward in enumerate([0.1, 0.9, 0.9, -1.0, 0.25, 0.0, 3, 1.5, 2.0])
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a template, and a token cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def _open(
    folder: Path,
    rows: list[dict[str, object]] | None = None,
    seq_len: int = 16,
    *,
    skips: bool = False,
    method: str,
    **settings: object,
) -> Dataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)))
    cfg = DataConfig(
        kind="sft",
        path=str(file),
        chat_template=str(folder / "template.jinja"),
        validation_fraction=0.0,
        shuffle=False,
        skip_bad_rows=skips,
    )
    align = AlignConfig(method=make_part("alignment", method, **settings))
    request = DataRequest(cfg, seq_len=seq_len, vocab_size=256, seed=0, align=align)
    request.prepare()
    return request.open()


def _texts(data: Dataset) -> list[str]:
    """Return the conversations of all samples."""
    found = []
    for index in range(len(data.train)):
        sample = data.train.annotated_sample(index)
        for number in range(sample.document_ids[-1]):
            found.append(bytes(sample.tokens[sample.document_ids == number].astype(np.uint8)).decode())
    return found


def _numbers(data: Dataset) -> list[int]:
    return sorted(int(text[text.index("r") + 1 : -1]) for text in _texts(data))


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.9, [1, 2, 6, 7, 8]), ("best", [1, 4, 6]), ("q0.75", [6, 7, 8]), ("q1", [6]), ("q0", list(range(9)))],
)
def test_filter_keeps_the_rows_at_the_threshold(files: Path, threshold, kept):
    assert _numbers(_open(files, method="filter", threshold=threshold)) == kept


BAD_ROWS = [{**ROWS[0], "reward": None}, {"prompt": "q0", "reward": 9.0}, {**ROWS[1], "response": "BAD"}]


@pytest.mark.parametrize("method", ["filter", "weight", "condition"])
def test_rewards_belong_to_the_rows_that_are_left_when_bad_ones_are_skipped(files: Path, method, caplog):
    template = "{% if messages[-1].content == 'BAD' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (files / "template.jinja").write_text(template)
    seq_len = 64 if method == "condition" else 24
    expected = _open(files, method=method, seq_len=seq_len)
    rows = [BAD_ROWS[2], *ROWS[:4], *BAD_ROWS, *ROWS[4:], BAD_ROWS[0]]
    with caplog.at_level(logging.WARNING):
        data = _open(files, rows, skips=True, method=method, seq_len=seq_len)
    assert "data.skip_bad_rows: 5 rows skipped; the first: " in caplog.text
    assert len(data.train) == len(expected.train)
    for index in range(len(data.train)):
        ours, theirs = (one.train.annotated_sample(index) for one in (data, expected))
        assert np.array_equal(ours.tokens, theirs.tokens)
        if method == "weight":
            assert np.array_equal(ours.weight_scale, theirs.weight_scale)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("beta", [0.5, 2.0, 1e-3])
def test_weight_scales_by_the_exponential_of_the_reward(files: Path, beta, cap):
    data = _open(files, method="weight", beta=beta, weight_cap=cap)
    reward = np.array([row["reward"] for row in ROWS])
    expected = np.exp(reward / beta - reward.max() / beta)
    expected /= expected.mean()
    assert expected.mean() == pytest.approx(1)
    expected = np.minimum(expected, cap) if cap else expected
    seen = {}
    for index in range(len(data.train)):
        sample = data.train.annotated_sample(index)
        for number in range(sample.document_ids[-1]):
            is_in = sample.document_ids == number
            text = bytes(sample.tokens[is_in].astype(np.uint8)).decode()
            (scale,) = set(sample.weight_scale[is_in[1:] & (sample.document_ids[:-1] == number)])
            seen[int(text[text.index("r") + 1 : -1])] = scale
    assert [seen[i] for i in range(9)] == pytest.approx(expected, rel=1e-14)


def test_condition_writes_the_reward_into_the_message_before_the_answer(files: Path):
    template = "<{reward:.1f}>{prompt}{{}}"
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                      {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "reward": 0.25},
        {"prompt": "x{y}", "response": "z", "reward": -1},
    ]  # fmt: skip
    data = _open(files, rows, method="condition", template=template, seq_len=60)
    assert _texts(data) == ["u:a;a:b;u:<0.2>c{};a:d;", "u:<-1.0>x{y}{};a:z;"]
    assert _texts(_open(files, rows, method="condition", seq_len=60)) == [
        "u:a;a:b;u:c <reward>0.25</reward>;a:d;", "u:x{y} <reward>-1.00</reward>;a:z;",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "the reward in column 'reward' is nan, and must be a finite number"),
        (float("-inf"), "the reward in column 'reward' is -inf"),
        ("1.0", "the reward in column 'reward' is '1.0'"),
        (None, "the reward in column 'reward' is None"),
        (True, "the reward in column 'reward' is True"),
        (10**400, "the reward in column 'reward' is 100000000000000000...0000000000000000000, and must be"),
    ],
)
@pytest.mark.parametrize("method", ["filter", "weight", "condition"])
def test_a_reward_that_is_not_a_number_is_refused_with_its_line(files: Path, method, value, message):
    rows = [*ROWS[:4], {**ROWS[4], "reward": value}]
    with pytest.raises(ConfigError) as error:
        _open(files, rows, method=method)
    assert str(error.value).startswith(f"{files / 'rows.jsonl'}:5: ")
    assert message in str(error.value)


def test_a_column_that_is_missing_is_named(files: Path):
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no column 'rewards'; did you mean 'reward'\?; align.method"):
        _open(files, method="weight", reward="rewards")


@pytest.mark.parametrize("method", ["filter", "weight"])
def test_equal_rewards_are_refused(files: Path, method):
    with pytest.raises(ConfigError, match=f"align.method='{method}' has no effect: all 9 rewards in the column"):
        _open(files, [{**row, "reward": 2} for row in ROWS], method=method)


def test_a_threshold_that_keeps_nothing_is_refused(files: Path):
    with pytest.raises(ConfigError, match=r"align.method.threshold=3.5 keeps none of 9 .* lie in \[-1, 3\]"):
        _open(files, method="filter", threshold=3.5)


def test_a_column_of_that_name_given_twice_is_refused(files: Path):
    file = files / "rows.jsonl"
    file.write_text('{"prompt": "a", "response": "b", "reward": 1, "reward": 2}\n')
    cfg = DataConfig(kind="sft", path=str(file), validation_fraction=0.0)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1 has the key 'reward' twice in one object; remove one"):
        DataRequest(cfg, seq_len=200, vocab_size=256, seed=0, align=AlignConfig(method="weight")).prepare()
