"""The report on the balance of a run, against numbers worked by hand, from each of its sources."""

import json

import numpy as np
import pytest

from moefold.data.routing_trace import RoutingTraceWriter, TraceShape
from moefold.errors import ConfigError
from moefold.metrics.expert_balance import read_balance, split_into_bins
from moefold.metrics.expert_counts import ExpertCountsWriter

E = 4
LAYERS = (1, 3)


def _counts(step: int) -> np.ndarray:
    """Layer 1 is even throughout. Layer 3 leaves expert 2 out and gives expert 0 `step` times the others' copies."""
    return np.array([[6, 6, 6, 6], [4 * step, 4, 0, 4]])


def write_counts(run_dir, steps) -> None:
    with ExpertCountsWriter(run_dir, LAYERS, E) as writer:
        for step in steps:
            writer.write(step, _counts(step))


def write_metrics(run_dir, steps, *, per_layer: bool = True) -> None:
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in steps:
            loads = [float(c.max() / c.mean()) for c in _counts(step)]
            record = {"step": step, "expert_load": loads, "dropped_fraction": 0.25}
            if per_layer:
                record["moe_layers"] = [
                    {"layer": layer, "dropped_fraction": 0.1 * i, "router_entropy": 1.0 + step}
                    for i, layer in enumerate(LAYERS)
                ]
            file.write(json.dumps(record) + "\n")


def test_the_numbers_of_each_layer(tmp_path):
    write_counts(tmp_path, range(1, 21))
    write_metrics(tmp_path, range(1, 21))
    balance = read_balance(tmp_path)
    assert (balance.source, balance.layers, balance.num_experts) == ("expert_counts.bin", LAYERS, E)
    even, skewed = balance.summaries()
    assert (even.load_start, even.load_end, even.load_worst, even.load_cv) == (1, 1, 1, 0)
    assert (even.dead_experts, even.share) == ((), (1, 1, 1, 1))
    assert (even.dropped_fraction, even.router_entropy) == (0, 20.5)
    # Copies 4n, 4, 0, 4: the fullest has 4n / (n + 2) times the mean; start is steps 1 and 2, end is 19 and 20.
    assert skewed.load_start == pytest.approx((4 / 3 + 2) / 2)
    assert skewed.load_end == pytest.approx((76 / 21 + 80 / 22) / 2)
    assert (skewed.load_worst, skewed.worst_step) == (pytest.approx(80 / 22), 20)
    assert skewed.dead_experts == (2,)
    assert skewed.share == pytest.approx([156 / 43, 8 / 43, 0, 8 / 43])
    deviations = [np.std([4 * n, 4, 0, 4]) / (n + 2) for n in (19, 20)]
    assert skewed.load_cv == pytest.approx(np.mean(deviations))
    assert skewed.dropped_fraction == pytest.approx(0.1)


def test_an_expert_that_is_used_now_and_then_is_not_dead(tmp_path):
    with ExpertCountsWriter(tmp_path, (0,), 2) as writer:
        for step in range(1, 21):
            writer.write(step, np.array([[5, step == 19]]))
    (summary,) = read_balance(tmp_path).summaries()
    assert summary.dead_experts == ()


def test_a_trace_adds_up_to_counts(tmp_path):
    # One zero-computation expert, which is the last choice.
    shape = TraceShape(layers=LAYERS, num_experts=E + 1, zero_experts=1, top_k=2, global_batch_size=2, seq_len=3)
    writer = RoutingTraceWriter(tmp_path, shape)
    choices = np.array([[0, 1], [0, 2], [0, 1], [1, 0], [2, 0], [0, 1]], np.uint8).reshape(2, 3, 2)
    choices[0, 0, 1] = E
    writer.write(4, iter([choices, np.where(choices == E, E, choices + 1).astype(np.uint8)]))
    balance = read_balance(tmp_path)
    assert (balance.source, balance.steps.tolist(), balance.layers) == ("routing/", [4], LAYERS)
    assert balance.counts is not None
    assert balance.counts.tolist() == [[[6, 3, 2, 0], [0, 6, 3, 2]]]
    assert balance.load.tolist() == [[24 / 11, 24 / 11]]
    assert [s.dropped_fraction for s in balance.summaries()] == [None, None]


@pytest.mark.parametrize("per_layer", [True, False])
def test_without_expert_counts_metrics_give_the_loads(tmp_path, per_layer):
    write_metrics(tmp_path, [1, 2, 3], per_layer=per_layer)
    balance = read_balance(tmp_path)
    assert (balance.source, balance.counts, balance.num_experts) == ("metrics.jsonl", None, None)
    assert balance.layers == (LAYERS if per_layer else (0, 1))
    even, skewed = balance.summaries()
    assert (skewed.load_end, skewed.worst_step) == (12 / 5, 3)
    assert (skewed.load_cv, skewed.dead_experts, skewed.share) == (None, None, None)
    assert even.dropped_fraction == (0.0 if per_layer else 0.25)
    assert even.router_entropy == (4.0 if per_layer else None)


def test_counts_that_are_rarer_than_metrics(tmp_path):
    write_counts(tmp_path, range(10, 101, 10))
    write_metrics(tmp_path, range(1, 101))
    balance = read_balance(tmp_path)
    assert balance.steps.tolist() == list(range(10, 101, 10))
    # The end is the last of ten records, step 100, also in the words of metrics.jsonl.
    assert balance.summaries()[0].router_entropy == 101


def test_counts_that_end_early_bound_the_end_of_metrics(tmp_path):
    write_counts(tmp_path, range(1, 21))
    write_metrics(tmp_path, range(1, 61))
    balance = read_balance(tmp_path)
    assert balance.cut_short == "counts end at step 20 of 60"
    # The end is steps 19 and 20, not 19 to 60.
    assert balance.summaries()[0].router_entropy == 20.5


def test_counts_that_keep_their_pace_are_not_cut_short(tmp_path):
    write_counts(tmp_path, range(10, 101, 10))
    for last, said in ((100, ""), (109, ""), (110, "counts end at step 100 of 110")):
        write_metrics(tmp_path, range(1, last + 1))
        assert read_balance(tmp_path).cut_short == said


def test_spans_cover_everything_once():
    for count in (1, 2, 7, 100):
        for bins in (1, 3, 7, 1000):
            cut = split_into_bins(count, bins)
            assert [i for a, b in cut for i in range(a, b)] == list(range(count))
            assert len(cut) == min(count, bins)
            assert max(b - a for a, b in cut) - min(b - a for a, b in cut) <= 1


def test_expert_shares_are_means_over_spans_of_steps(tmp_path):
    write_counts(tmp_path, [1, 2, 3, 4])
    shares = read_balance(tmp_path).shares(2)
    assert shares.shape == (2, 2, E)
    assert shares[0, 1] == pytest.approx([12 / 7, 8 / 7, 0, 8 / 7])
    assert shares[:, 0].tolist() == [[1, 1, 1, 1]] * 2


def test_many_steps_are_read_in_parts(tmp_path):
    write_counts(tmp_path, range(1, 1001))
    balance = read_balance(tmp_path)
    np.testing.assert_allclose(balance.load[:, 1], [4 * n / (n + 2) for n in range(1, 1001)])


def test_a_folder_that_is_not_a_run_with_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_balance(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no step of training"):
        read_balance(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "expert_load": []}\n')
    with pytest.raises(ConfigError, match="is of a model without MoE layers"):
        read_balance(tmp_path)
