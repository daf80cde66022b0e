"""Test the documents benchmark: its samples, its recipes, the bytes that it counts, and a run of two ranks."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks import plot_report
from benchmarks.packed_documents import CONTEXT_METHODS, DrawnDocuments, documents_config, main
from benchmarks.process_group import make_group
from benchmarks.sent_bytes import SentBytesCounter
from moefold.comm.collectives import all_gather, all_to_all, send_recv, wait_all
from moefold.validate.config import check_config


def test_the_samples_have_the_documents_of_their_lengths():
    drawn = DrawnDocuments([(3, 5), (8,)], vocab_size=16)
    batch = drawn.batch(0, 2)
    assert batch.tokens.shape == (2, 9)
    assert batch.document_starts().tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [0] * 8]
    assert np.array_equal(drawn.sample(2), drawn.sample(2))
    assert drawn.annotated_sample(2).document_ids.tolist() == drawn.annotated_sample(0).document_ids.tolist()
    assert batch.tokens.max() < 16


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_the_recipe_of_each_method_is_legal(method):
    layout = check_config(documents_config(64, 2, 2, 2, method))
    assert (layout.cp, layout.dp, layout.ep) == (2, 2, 4)


def _bytes_of_collectives():
    rank = dist.get_rank()
    group = make_group([0, 1], rank, dist.group.WORLD)
    with SentBytesCounter() as counter:
        all_gather(torch.zeros(6), group)
    gathered = counter.sent_bytes
    with SentBytesCounter() as counter:
        # One row stays, two are sent; of the other rank, three are sent.
        all_to_all(torch.zeros(3 + rank, 5), group, *([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1]))
    exchanged = counter.sent_bytes
    with SentBytesCounter() as counter:
        wait_all(send_recv(torch.zeros(7), torch.zeros(7), group, 0), group)
    return gathered, exchanged, counter.sent_bytes


@pytest.mark.parity
def test_the_bytes_of_collectives_and_messages(pool):
    assert pool.run(2, _bytes_of_collectives) == [(24.0, 2 * 20.0, 28.0), (24.0, 3 * 20.0, 28.0)]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_documents_benchmark_reports_every_method(tmp_path, capfd):
    report_file = tmp_path / "report.json"
    words = ["--cp", "2", "--dp", "1", "--seq-len", "256", "--micro-batches", "1", "--steps", "1"]
    assert main([*words, "--json", str(report_file)]) == 0
    out = capfd.readouterr().out
    assert "2 ranks, cp=2 dp=1 ep=2, 1 samples of 256 tokens" in out
    report = json.loads(report_file.read_text())
    assert [row["method"] for row in report["methods"]] == list(CONTEXT_METHODS)
    for row in report["methods"]:
        assert out.count(row["method"]) >= 1
        assert row["busiest_cpu_s"] >= row["mean_cpu_s"] > 0
        assert len(row["step_rounds_s"]) == 1
        assert row["sent_bytes"] > 0
    picture = tmp_path / "report.png"
    assert plot_report.main([str(report_file), str(picture)]) == 0
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seq-len", "100"], "must be a multiple of 2*cp=8"),
        (["--cp", "3", "--seq-len", "4092"], "--cp 3 must be 2 or 4"),
        (["--lengths", "wiki"], "did you mean 'wikipedia'"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--seed", str(2**32)], "--seed 4294967296 must be at most 4294967295"),
        (["--dp", "1000"], "--cp times --dp 4000 must be at most 64"),
        (["--seq-len", "99999992"], "--seq-len 99999992 must be at most 16777216"),
    ],
)
def test_bad_options_are_refused(capsys, words, text):
    assert main(words) == 2
    assert text in capsys.readouterr().err
