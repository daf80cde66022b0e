"""Runs interrupted at random moments take the samples of an uninterrupted run: none twice, none left out."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moefold.config.sections.data import DataConfig
from moefold.data.dataset import DataRequest
from moefold.data.sampler import Sampler
from tests.slow import slow

from .test_skip_corrupt import BROKEN, KINDS, make, recipe

S = 96
BATCH = 12
STEPS = 100
"""More samples than a block of a stream has."""
DEGREES = (1, 2, 3, 4, 6)


def single(kind: str, **changes: object) -> Callable[[Path], DataConfig]:
    return lambda folder: recipe(kind, make(folder / kind, kind, [0, 1, 2]), **changes)


def broken(kind: str) -> Callable[[Path], DataConfig]:
    def build(folder: Path) -> DataConfig:
        files = make(folder / kind, kind, [0, 1, 2, 3])
        KINDS[kind][1](sorted(files.iterdir())[BROKEN])
        return recipe(kind, files, corrupt="skip")

    return build


def mixed(kind: str, **changes: object) -> Callable[[Path], DataConfig]:
    def build(folder: Path) -> DataConfig:
        parts = tuple(make(folder / name, kind, numbers) for name, numbers in (("a", [0, 1]), ("b", [2]), ("c", [3])))
        return recipe(kind, parts, weights=(5.0, 2.0, 1.0), **changes)

    return build


DATA = {
    "tokens": single("npy"),
    "tokens in order": single("bin", shuffle=False),
    "text": single("text"),
    "huggingface": single("parquet"),
    "streamed": single("streamed"),
    "sft": single("sft"),
    "mixed tokens": mixed("npy"),
    "mixed streams": mixed("streamed"),
    "mixed conversations": mixed("sft"),
    "tokens with a corrupt file": broken("npy"),
    "text with a corrupt file": broken("text"),
    "stream with a corrupt file": broken("streamed"),
    "conversations with a corrupt file": broken("sft"),
    "made up": lambda folder: DataConfig(kind="synthetic"),
}


def _open(data: DataConfig) -> Sampler:
    return DataRequest(data, seq_len=S, vocab_size=256, seed=7).open().train


def _life(data: DataConfig, first: int, state: object, steps: int, dp: int) -> tuple[list[bytes], object]:
    """The samples that the ranks of one life take, in the order of the global batches, and the first rank's state.

    As `BatchSharder` cuts a batch: rank d has the samples from d * BATCH / dp on.
    """
    rows = [_open(data) for _ in range(dp)]
    for row in rows:
        row.restore(state)
    count = BATCH // dp
    taken = []
    for step in range(steps):
        for rank, row in enumerate(rows):
            tokens = row.batch(first + step * BATCH + rank * count, count).tokens
            taken += [sample.tobytes() for sample in tokens]
    return taken, json.loads(json.dumps(rows[0].state(first + steps * BATCH)))


SLOW_DATA = ("mixed conversations", "conversations with a corrupt file")
"""`sft`, `mixed streams` and `stream with a corrupt file` are fast."""


@pytest.mark.parametrize("kind", [*(kind for kind in DATA if kind not in SLOW_DATA), *slow((k,) for k in SLOW_DATA)])
def test_interrupted_runs_take_the_samples_of_an_uninterrupted_one(tmp_path, kind):
    data = DATA[kind](tmp_path)
    whole, _ = _life(data, 0, None, STEPS, 1)
    chance = random.Random(kind)
    taken: list[bytes] = []
    state: object = None
    while len(taken) < len(whole):
        steps = min(chance.randint(1, 40), STEPS - len(taken) // BATCH)
        more, state = _life(data, len(taken), state, steps, chance.choice(DEGREES))
        taken += more
    assert taken == whole


def test_the_comparison_would_notice_a_sample_too_many(tmp_path):
    data = DATA["tokens"](tmp_path)
    whole, _ = _life(data, 0, None, 4, 1)
    late, _ = _life(data, 1, None, 4, 1)
    assert late != whole
    assert late[:-1] == whole[1:]
