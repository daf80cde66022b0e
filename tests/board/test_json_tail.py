"""Files of JSON lines are read while they grow, are truncated and are replaced."""

import os

from moefold.board import json_tail
from moefold.board.json_tail import JsonTail


def steps(tail: JsonTail, **limits: int) -> list[int]:
    return [line.record["step"] for line in tail.read(**limits)]


def append(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_each_line_is_read_once_and_a_half_line_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = JsonTail(path)
    assert steps(tail) == []
    append(path, '{"step": 1}\n{"step": 2}\n{"st')
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    assert tail.read_fraction == 24 / 28
    append(path, 'ep": 3}\n')
    assert steps(tail) == [3]
    assert tail.read_fraction == 1
    assert (tail.generation, tail.problems) == (0, [])


def test_invalid_lines_are_named_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\nnot JSON\n[2]\n' + "\n" * 9 + '{"step": 3}\n')
    tail = JsonTail(path)
    assert steps(tail) == [1, 3]
    assert tail.problems[:2] == [
        "metrics.jsonl: line 2 is not a JSON object; left out",
        "metrics.jsonl: line 3 is not a JSON object; left out",
    ]
    assert tail.problems[-1] == "metrics.jsonl: 6 more lines are not JSON objects"


def test_bytes_that_are_no_text_are_an_invalid_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n{"step": 2, "a": "\\r"}\r\n')
    tail = JsonTail(path)
    assert steps(tail) == [1, 2]
    assert len(tail.problems) == 1


def test_a_truncated_file_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    tail = JsonTail(path)
    assert steps(tail) == [1, 2]
    os.truncate(path, 12)
    assert steps(tail) == [1]
    assert tail.generation == 1


def test_a_file_truncated_and_grown_beyond_its_length_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    tail = JsonTail(path)
    assert steps(tail) == [1, 2]
    os.truncate(path, 12)
    append(path, '{"step": 7}\n{"step": 8}\n')
    assert steps(tail) == [1, 7, 8]
    assert tail.generation == 1


def test_a_replaced_file_is_read_again_and_a_removed_one_is_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    tail = JsonTail(path)
    assert steps(tail) == [1, 2]
    # As a resumed run does: the kept lines under another inode.
    append(tmp_path / "new", '{"step": 1}\n{"step": 2}\n')
    (tmp_path / "new").replace(path)
    assert steps(tail) == [1, 2]
    assert tail.generation == 1
    path.unlink()
    assert steps(tail) == []
    assert tail.generation == 2


def test_a_long_file_is_read_in_parts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(f'{{"step": {i}}}\n' for i in range(10)))
    tail = JsonTail(path)
    assert steps(tail, max_bytes=30) == [0, 1]
    assert tail.has_more
    assert 0 < tail.read_fraction < 1
    rest = []
    while tail.has_more:
        rest += steps(tail, max_bytes=30)
    assert rest == list(range(2, 10))
    # A line that is longer than a part is read whole.
    append(path, '{"step": 10, "text": "' + "x" * 100 + '"}\n')
    assert steps(tail, max_bytes=30) == [10]


def test_a_line_without_end_stops_the_reading_with_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(json_tail, "MAX_LINE_BYTES", 50)
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n' + "x" * 200)
    tail = JsonTail(path)
    assert steps(tail, max_bytes=20) == [1]
    assert steps(tail, max_bytes=20) == []
    assert steps(tail, max_bytes=20) == []
    assert tail.problems == ["metrics.jsonl: line 2 is longer than 50 bytes; the file is read up to it"]
    assert not tail.has_more


def test_a_pipe_in_place_of_a_file_is_one_problem(tmp_path):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    tail = JsonTail(path)
    assert steps(tail) == []
    assert tail.problems == ["metrics.jsonl cannot be read: it is a named pipe, not a regular file"]
