"""Evaluated rows: every token but the first of a sequence is a target once."""

import os

import numpy as np
import pytest

from moefold.data.shard_reader import BrokenShardError
from moefold.errors import ConfigError
from moefold.inference.token_dataset import TokenDataset, check_dataset, open_ids


def row(num_tokens: int, seq_len: int, keeps_tail: bool = False) -> TokenDataset:
    return TokenDataset(np.arange(num_tokens, dtype=np.uint16), seq_len, keeps_tail)


@pytest.mark.parametrize(
    ("num_tokens", "keeps_tail", "sequences", "predicted", "left_out"),
    [(8, False, 2, 6, 0), (11, False, 2, 6, 3), (11, True, 3, 8, 0), (9, True, 2, 6, 1), (3, True, 1, 2, 0)],
)
def test_sequences_and_the_rest(num_tokens, keeps_tail, sequences, predicted, left_out):
    cut = row(num_tokens, 4, keeps_tail)
    assert (cut.num_sequences, cut.num_predicted, cut.num_unused_tokens) == (sequences, predicted, left_out)


def test_every_token_but_the_first_of_a_sequence_is_a_target_once():
    cut = row(23, 4, keeps_tail=True)
    targets = []
    for first in range(0, cut.num_sequences, 4):
        tokens, labels, is_target, is_token = cut.batch(first, 4, 6)
        assert tokens.shape == labels.shape == is_target.shape == is_token.shape == (4, 6)
        assert (is_token[:, 1:] == is_target[:, :-1]).all()
        assert (labels[is_target] == tokens[is_target] + 1).all()
        targets += labels[is_target].tolist()
    assert targets == [i for i in range(23) if i % 4]
    assert len(targets) == cut.num_predicted


def test_rows_that_cannot_be_evaluated():
    check_dataset(row(8, 4), 8, "file")
    with pytest.raises(ConfigError, match="file holds id 7 at token 7, but the model's vocabulary is 7"):
        check_dataset(row(8, 4), 7, "file")
    with pytest.raises(ConfigError, match="id -1 at token 1"):
        check_dataset(TokenDataset(np.array([1, -1, 2]), 2, False), 7, "file")
    with pytest.raises(ConfigError, match="3 tokens, less than one sequence of --seq-len 4; .* or --keep-tail"):
        check_dataset(row(3, 4), 9, "file")
    with pytest.raises(ConfigError, match="--seq-len 1 must be at least 2"):
        check_dataset(row(3, 1), 9, "file")


def test_files_that_hold_no_row(tmp_path):
    np.save(tmp_path / "float.npy", np.ones(5))
    np.save(tmp_path / "table.npy", np.ones((5, 2), dtype=np.int64))
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "ids.bin").touch()
    np.save(tmp_path / "ids.npy", np.arange(5))
    cases = {
        "float.npy": "holds float64, but token ids are integers",
        "table.npy": "has shape",
        "cut.npy": "is not a complete .npy array",
        "ids.bin": "is no .npy file",
        "none.npy": "does not exist",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            open_ids(tmp_path / name)
    assert open_ids(tmp_path / "ids.npy")[:].tolist() == [0, 1, 2, 3, 4]


def test_a_file_that_is_cut_under_an_evaluation_is_named(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(10_000, dtype=np.uint16))
    row = TokenDataset(open_ids(tmp_path / "ids.npy"), 10, keeps_tail=False)
    os.truncate(tmp_path / "ids.npy", 8192)
    assert row.batch(0, 1, 10)[0].tolist() == [list(range(10))]
    with pytest.raises(
        BrokenShardError, match=r"data file .*ids.npy broke while the run read it: it has 8192 of 20128"
    ):
        row.batch(900, 1, 10)
