"""Preference rows: their formats, their packing, and rows that cannot be used."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from moefold.config.sections.align import AlignConfig
from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest, Dataset
from moefold.data.preference import cut_lengths, parse_labelled, parse_pair
from moefold.data.sources.file_formats import JsonlRecord, parse_line
from moefold.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _record(**fields: object) -> JsonlRecord:
    return JsonlRecord("rows.jsonl:7", fields, 0)


PAIR = ([_user("p")], [_answer("a")], [_answer("b")])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, PAIR),
        ({"prompt": [_user("p")], "chosen": [_answer("a")], "rejected": [_answer("b")]}, PAIR),
        ({"chosen": [_user("p"), _answer("a")], "rejected": [_user("p"), _answer("b")]}, PAIR),
        ({"prompt": "p", "chosen": [_user("p"), _answer("a")], "rejected": [_user("p"), _answer("b")]}, PAIR),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            ([_user("The sky is")], [_answer(" blue.")], [_answer(" green.")]),
        ),
        (
            {"system": "s", "prompt": "p", "chosen": "a", "rejected": "b"},
            ([{"role": "system", "content": "s"}, *PAIR[0]], *PAIR[1:]),
        ),
        (
            {
                "system": "s",
                "chosen": [{"role": "system", "content": "s"}, _user("p"), _answer("a")],
                "rejected": [{"role": "system", "content": "s"}, _user("p"), _answer("b")],
            },
            ([{"role": "system", "content": "s"}, *PAIR[0]], *PAIR[1:]),
        ),
    ],
    ids=["texts", "messages", "implicit messages", "prompt twice", "implicit texts", "system", "system twice"],
)
def test_formats_of_a_pair(fields, expected):
    assert parse_pair(_record(**fields)) == expected


def test_a_completion_may_be_empty():
    assert parse_pair(_record(prompt="p", chosen="a", rejected="")) == (PAIR[0], PAIR[1], [_answer("")])


def test_formats_of_a_labelled_completion():
    expected = [([_user("p")], [_answer("a")], True)]
    assert parse_labelled(_record(prompt="p", completion="a", label=True)) == expected
    assert parse_labelled(_record(prompt=[_user("p")], completion=[_answer("a")], label=True)) == expected
    assert parse_labelled(_record(prompt="p", chosen="a", rejected="b")) == [*expected, (PAIR[0], PAIR[2], False)]
    ((prompt, _, _),) = parse_labelled(_record(system="s", prompt="p", completion="a", label=True))
    assert prompt == [{"role": "system", "content": "s"}, _user("p")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "p", "choosen": "a", "rejected": "b"}, "is not a pair: no column 'chosen'; did you mean 'choosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, '"chosen" and "rejected" are equal'),
        ({"prompt": "p", "chosen": "a", "rejected": [_answer("b")]}, "is a text, and the other a list"),
        ({"chosen": "a", "rejected": "b"}, '"chosen" and "rejected" share no prompt'),
        ({"chosen": [_user("p"), _answer("a")], "rejected": [_user("q"), _answer("b")]}, "share no prompt"),
        ({"chosen": [_user("p")], "rejected": [_user("p"), _answer("b")]}, '"chosen" has no completion'),
        ({"chosen": [_user("p"), _answer("a")], "rejected": [_user("p"), _answer("a")]}, '"rejected" are equal'),
        ({"chosen": "p a", "rejected": "p a"}, '"chosen" and "rejected" are equal'),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, '"prompt" is empty'),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, "column 'rejected' holds a number, not text"),
        ({"prompt": [{"content": "p"}], "chosen": "a", "rejected": "b"}, "message 1 has no role"),
        (
            {"prompt": [_user("p")], "chosen": [_answer("a")], "rejected": [_answer([{"type": "text", "text": "a"}])]},
            '"chosen" and "rejected" are equal',
        ),
        (
            {"prompt": "p", "chosen": [_user("q"), _answer("a")], "rejected": [_user("q"), _answer("b")]},
            'begin with other messages than the text "prompt"',
        ),
        (
            {"prompt": [_user("p")], "chosen": [_user("p"), _answer("a")], "rejected": [_user("p"), _answer("b")]},
            '"chosen" begins with the messages of "prompt" again',
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "images": ["c"]}, "has 'images', which is not read"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "weight": 2}, 'has "weight": 2, which is not read'),
    ],
)
def test_a_row_that_is_not_a_pair_is_refused_with_its_line(fields, message):
    with pytest.raises(ConfigError) as error:
        parse_pair(_record(**fields))
    assert "rows.jsonl:7" in str(error.value)
    assert message in str(error.value)


def test_a_column_given_twice_is_refused():
    line = b'{"prompt": "p", "chosen": "\\"chosen\\"", "rejected": "b", "x": {"rejected": 1}, "chosen": "c"}'
    with pytest.raises(ConfigError, match="rows.jsonl:3 has the key 'chosen' twice in one object; remove one"):
        parse_pair(parse_line(line, Path("rows.jsonl"), 3))
    assert parse_pair(parse_line(line.replace(b', "chosen": "c"', b""), Path("rows.jsonl"), 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "p", "completion": "a"}, "no column 'label'"),
        ({"prompt": "p", "completion": "a", "label": 1}, '"label" is 1, and must be true (desirable) or false'),
        ({"completion": "a", "label": True}, "no column 'prompt'"),
        ({"prompt": "p", "completion": "a", "label": True, "image": "b"}, "has 'image', which is not read"),
        ({"prompt": "p", "completion": "a", "label": True, "train": False}, 'has "train": False, which is not read'),
    ],
)
def test_a_row_without_a_label_is_refused_with_its_line(fields, message):
    with pytest.raises(ConfigError) as error:
        parse_labelled(_record(**fields))
    assert "rows.jsonl:7" in str(error.value)
    assert message in str(error.value)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a template, and a token cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def _open(folder: Path, rows: list[dict[str, object]], seq_len: int = 40, method: str = "dpo", **data) -> Dataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"validation_fraction": 0.0, "shuffle": False} | data
    cfg = DataConfig(kind="preference", path=str(file), chat_template=str(folder / "template.jinja"), **settings)
    request = DataRequest(cfg, seq_len=seq_len, vocab_size=256, seed=0, align=AlignConfig(method=method))
    request.prepare()
    return request.open()


def _texts(sample, number: int) -> tuple[str, str]:
    """Return the text of a document of a sample, and the text of its targets."""
    is_in = sample.document_ids == number
    is_target = np.concatenate(([False], sample.token_columns["sequence_ids"] == number))
    return bytes(sample.tokens[is_in].astype(np.uint8)).decode(), bytes(
        sample.tokens[is_target].astype(np.uint8)
    ).decode()


ROWS = [{"prompt": f"q{i}", "chosen": "yes" * (1 + i % 2), "rejected": "no"} for i in range(6)]


def test_both_sequences_of_a_pair_are_documents_of_one_sample(files: Path):
    data = _open(files, ROWS)
    data.reference.values[:] = np.arange(12).reshape(6, 2)
    seen = []
    for index in range(len(data.train)):
        sample = data.train.annotated_sample(index)
        ids, columns = sample.token_columns["sequence_ids"], sample.sample_columns
        for k, pair in enumerate(columns["pair_ids"]):
            if pair < 0:
                assert not (ids // 2 == k).any()
                continue
            row = ROWS[pair]
            assert _texts(sample, 2 * k) == (f"u:q{pair};a:{row['chosen']};", f"{row['chosen']};")
            assert _texts(sample, 2 * k + 1) == (f"u:q{pair};a:no;", "no;")
            assert sample.weights[ids == 2 * k].sum() == pytest.approx(1, abs=1e-15)
            assert list(columns["reference_log_probs"][2 * k : 2 * k + 2]) == [2 * pair, 2 * pair + 1]
            seen.append(int(pair))
        assert not sample.weights[(ids < 0) | (ids % 2 == 1)].any()
    assert sorted(seen) == list(range(6))
    assert len({len(data.train.annotated_sample(i).sample_columns["pair_ids"]) for i in range(len(data.train))}) == 1


def test_turns_of_the_assistant_in_the_prompt_are_no_targets(files: Path):
    prompt = [_user("a"), _answer("b"), _user("c")]
    sample = _open(files, [{"prompt": prompt, "chosen": "d", "rejected": "e"}]).train.annotated_sample(0)
    assert _texts(sample, 0) == ("u:a;a:b;u:c;a:d;", "d;")


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_tools_as_a_text_are_the_tools_of_the_list(files: Path, method: str):
    (files / "template.jinja").write_text("{{ tools | length }}{{ tools[0].name }}" + TEMPLATE)
    texts = []
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        rows = [{"prompt": p, "chosen": "a", "rejected": "b", "tools": tools} for p in "pq"]
        sample = _open(files, rows, 80, method).train.annotated_sample(0)
        texts.append([_texts(sample, number)[0] for number in range(2)])
    assert texts[0] == texts[1]
    assert all(text.startswith("1fu:") for text in texts[0])


def test_kto_adds_the_completion_of_the_next_other_prompt(files: Path):
    rows = [
        {"prompt": prompt, "completion": completion, "label": label}
        for prompt, completion, label in [("p", "1", True), ("p", "2", False), ("q", "3", False), ("r", "4", True)]
    ]
    data = _open(files, rows, method="kto", seq_len=100)
    sample = data.train.annotated_sample(0)
    assert [_texts(sample, number)[0] for number in range(8)] == [
        "u:p;a:1;", "u:p;a:3;", "u:p;a:2;", "u:p;a:3;", "u:q;a:3;", "u:q;a:4;", "u:r;a:4;", "u:r;a:1;",
    ]  # fmt: skip
    assert list(sample.sample_columns["is_desirable"]) == [True, False, False, True]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: all rows have one prompt, and kto compares"):
        _open(files, rows[:2], method="kto", seq_len=100)


def test_kto_compares_the_rows_that_are_left_when_bad_ones_are_skipped(files: Path, caplog):
    """A row that cannot be read or rendered is not trained, and is not the completion of another row."""
    good = [{"prompt": p, "completion": c, "label": c != "2"} for p, c in [("p", "1"), ("q", "2"), ("r", "3")]]
    unread = {"prompt": "s", "completion": "x", "label": None}
    unrendered = {"prompt": "t", "completion": "BAD", "label": True}
    (files / "template.jinja").write_text(
        "{% if 'BAD' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    rows = [unrendered, good[0], unread, unrendered, good[1], unread, good[2], unrendered]
    options = {"method": "kto", "seq_len": 100}
    with caplog.at_level(logging.WARNING):
        skipped = _open(files, rows, skip_bad_rows=True, **options).train.annotated_sample(0)
    assert "data.skip_bad_rows: 5 rows skipped; the first: " in caplog.text
    expected = _open(files, good, **options).train.annotated_sample(0)
    assert np.array_equal(skipped.tokens, expected.tokens)
    assert list(skipped.sample_columns["is_desirable"]) == [True, False, True]
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: \"label\" is None"):
        _open(files, rows[1:3], **options)


def test_the_last_rows_of_kto_take_a_completion_of_another_prompt(files: Path):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in [("p", "1"), ("q", "2"), ("p", "3")]]
    sample = _open(files, rows, method="kto", seq_len=100).train.annotated_sample(0)
    assert _texts(sample, 5) == ("u:p;a:2;", "2;")


def test_simpo_has_no_reference(files: Path):
    assert set(_open(files, ROWS, method="simpo").train.annotated_sample(0).sample_columns) == {"pair_ids"}


def test_pairs_are_cut_to_the_sequence_length():
    lengths = np.array([[4, 5], [2, 20], [20, 2], [20, 20], [30, 1]])
    assert cut_lengths(lengths, 11).tolist() == [[4, 5], [2, 9], [9, 2], [5, 5], [10, 1]]


def test_long_pairs_are_cut_or_refused(files: Path):
    rows = [*ROWS, {"prompt": "long", "chosen": "x" * 50, "rejected": "y" * 50}]
    train = _open(files, rows).train
    assert all(len(train.annotated_sample(i).tokens) == 41 for i in range(len(train)))
    with pytest.raises(ConfigError, match=r"rows.jsonl:7: the pair has 120 tokens, and 1 of 7 have more than the 41"):
        _open(files, rows, overlong="refuse")
    with pytest.raises(ConfigError, match="none of 1 pairs has both completions within train.seq_len=40; raise it"):
        _open(files, [{"prompt": "x" * 50, "chosen": "a", "rejected": "b"}])
