"""A fitted device reproduces the times of the machine, through the planner's own formulas."""

from dataclasses import replace

import pytest

from moefold.bench.device_fit import (
    AttentionTime,
    CollectiveTime,
    DeviceMeasurements,
    ExpertsTime,
    GemmTime,
    device_toml,
    fit_device,
    predictions,
)
from moefold.cost.hardware import load_device


def _machine(device, dtype="bfloat16", local_ranks=8, groups=((2, 1), (8, 1), (4, 8))):
    """Times of a machine that behaves exactly as the cost model says of `device`."""
    blank = DeviceMeasurements(
        dtype=dtype,
        memory_gib=device.memory_gib,
        copy_bytes_per_s=device.hbm_bytes_per_s * device.hbm_fraction,
        host_bytes_per_s=device.host_bytes_per_s,
        multiprocessors=device.multiprocessors,
        kernel_gap_s=device.kernel_gap_s,
        host_launch_s=device.host_launch_s,
        gemms=tuple(
            GemmTime(kind, rows, columns, depth, 1.0)
            for kind in ("bfloat16", "float32")
            for rows, columns, depth in ((8192, 8192, 512), (8192, 4096, 2048), (4096, 8192, 8192))
        ),
        attention=tuple(AttentionTime(2, length, 32, 128, 1.0, 1.0) for length in (1024, 4096, 16384)),
        experts=ExpertsTime(65536, 4096, 2048, 8, 1.0),
        local_ranks=local_ranks,
        collectives=tuple(
            CollectiveTime(kind, size, stride, num_bytes, 1.0)
            for kind in ("all-gather", "all-to-all")
            for size, stride in groups
            for num_bytes in (1 << 16, 1 << 22, 1 << 28)
        ),
    )
    seconds = iter([one.predicted_s for one in predictions(device, blank)])
    gemms = tuple(replace(gemm, seconds=next(seconds)) for gemm in blank.gemms)
    experts = replace(blank.experts, seconds=next(seconds))
    attention = tuple(replace(core, forward_s=next(seconds), backward_s=next(seconds)) for core in blank.attention)
    collectives = tuple(replace(one, seconds=next(seconds)) for one in blank.collectives)
    return replace(blank, gemms=gemms, experts=experts, attention=attention, collectives=collectives)


@pytest.mark.parametrize("base", ["h100", "a100", "cpu"])
def test_the_numbers_of_a_device_are_found_from_any_base(base):
    truth = load_device("h100")
    start = replace(load_device(base), tile_rows=truth.tile_rows, tile_columns=truth.tile_columns)
    measured = _machine(truth)
    found = fit_device(start, measured, "found")
    assert found.half_depth == pytest.approx(truth.half_depth, rel=1e-6)
    reached = found.peak_flops["bf16"] * found.gemm_fraction["bf16"]
    assert reached == pytest.approx(truth.peak_flops["bf16"] * truth.gemm_fraction["bf16"], rel=1e-6)
    assert found.grouped_fraction == pytest.approx(truth.grouped_fraction, rel=1e-6)
    for direction in ("forward", "backward"):
        for key in (f"attention_{direction}_flops", f"attention_{direction}_half"):
            assert getattr(found, key) == pytest.approx(getattr(truth, key), rel=1e-6), key
    for link, true_link in zip(found.links, truth.links, strict=True):
        assert link.bytes_per_s * link.fraction == pytest.approx(true_link.bytes_per_s * true_link.fraction, rel=1e-6)
        assert link.latency_s == pytest.approx(true_link.latency_s, rel=1e-6)
    assert [one.ratio for one in predictions(found, measured)] == pytest.approx([1.0] * 31, rel=1e-6)


def test_the_peak_of_the_vendor_stays_where_it_is_above_the_rate():
    found = fit_device(load_device("h100"), _machine(load_device("h100")), "found")
    assert found.peak_flops["bf16"] == load_device("h100").peak_flops["bf16"]
    assert found.hbm_bytes_per_s == load_device("h100").hbm_bytes_per_s
    slower = fit_device(load_device("a100"), _machine(load_device("h100")), "found")
    assert slower.peak_flops["bf16"] > load_device("a100").peak_flops["bf16"]
    assert slower.gemm_fraction["bf16"] == 1.0


def test_numbers_that_were_not_measured_come_from_the_base():
    base = load_device("h100")
    measured = replace(_machine(base), collectives=(), host_bytes_per_s=None)
    found = fit_device(base, measured, "found")
    assert found.links == base.links
    assert found.peak_flops["fp8"] == base.peak_flops["fp8"]
    assert found.sync_s == base.sync_s
    assert found.host_bytes_per_s == measured.copy_bytes_per_s


def test_links_within_one_machine_do_not_change_the_network():
    base = load_device("h100")
    truth = replace(base, links=(replace(base.links[0], bytes_per_s=1e11, latency_s=3e-6), base.links[1]))
    found = fit_device(base, _machine(truth, groups=((2, 1), (4, 1))), "found")
    assert found.links[0].bytes_per_s * found.links[0].fraction == pytest.approx(1e11 * base.links[0].fraction)
    assert found.links[0].latency_s == pytest.approx(3e-6)
    assert found.links[1] == base.links[1]


def test_times_that_fall_with_the_size_still_give_a_device():
    """Noise: a longer sum took less time. The half depth is then the smallest, and the rate is positive."""
    base = load_device("cpu")
    measured = _machine(base, dtype="float32", groups=((2, 1),))
    gemms = tuple(replace(gemm, seconds=1e-3 / gemm.depth) for gemm in measured.gemms)
    found = fit_device(base, replace(measured, gemms=gemms), "noisy")
    assert found.half_depth == 1.0
    assert found.wide_flops["float32"] > 0


def test_the_file_is_read_back_as_the_same_device(tmp_path):
    found = fit_device(load_device("h100"), _machine(load_device("a100")), "found")
    path = tmp_path / "found.toml"
    path.write_text(device_toml(found, ["measured by moefold probe"]))
    read = load_device(str(path))
    assert read.name == "found"
    assert read.links[0].latency_s == pytest.approx(found.links[0].latency_s, rel=1e-5)
    assert read.peak_flops == pytest.approx(found.peak_flops, rel=1e-5)
    assert read.half_depth == pytest.approx(found.half_depth, rel=1e-5)
    assert read.sources == {}


def test_a_measured_constant_of_the_base_keeps_its_source(tmp_path):
    """The probe's launch is of a bare kernel: it measures no constant that decides between families."""
    sources = dict.fromkeys(("host_launch_s", "exposed_zero3_fraction"), "make gpu")
    base = replace(load_device("h100"), exposed_zero3_fraction=0.25, sources=sources)
    path = tmp_path / "found.toml"
    path.write_text(device_toml(fit_device(base, _machine(base), "found"), []))
    read = load_device(str(path))
    assert read.exposed_zero3_fraction == 0.25
    assert read.sources == {"exposed_zero3_fraction": "make gpu"}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "größe"])
def test_every_name_of_a_file_can_be_read_back(tmp_path, name):
    path = tmp_path / "device.toml"
    path.write_text(device_toml(replace(load_device("cpu"), name=name), []), encoding="utf-8")
    assert load_device(str(path)).name == name
