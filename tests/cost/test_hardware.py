"""Devices by name and from files, and errors of a file."""

import pytest

from moefold.cost.hardware import DECIDING_CONSTANTS, SiteLink, device_names, load_device
from moefold.errors import ConfigError


@pytest.mark.parametrize("name", device_names())
def test_every_shipped_device_has_all_rates_and_links(name):
    device = load_device(name)
    assert device.name == name
    assert set(device.gemm_fraction) >= {"bf16"}
    assert set(device.peak_flops) <= set(device.gemm_fraction)
    assert all(0.1 < fraction <= 1 for fraction in device.gemm_fraction.values())
    assert device.links[-1].gpus == 0
    assert device.links[0].gpus >= 0
    assert all(0 < link.fraction <= 1 for link in device.links)


def test_the_devices_of_the_command_are_there():
    assert {"h100", "h200", "b200", "gb200", "gb300", "a100", "mi300x"} <= set(device_names())
    assert load_device("H100") == load_device("h100")
    assert load_device("h100").peak("nvfp4") == load_device("h100").peak("bf16")


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        load_device("h1000")


def test_a_file_states_its_differences_from_a_known_device(tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text('base = "h100"\nname = "slow"\nmemory_gib = 40\n[peak_flops]\nbf16 = 5e14\n')
    device = load_device(str(path))
    assert (device.name, device.memory_gib, device.peak("bf16")) == ("slow", 40, 5e14)
    assert device.peak("fp8") == load_device("h100").peak("fp8")
    assert device.links == load_device("h100").links


SITE_LINK = 'base = "h100"\n[site_link]\nbytes_per_s = {}\nlatency_s = {}\n'


def test_a_file_may_give_the_link_to_other_sites(tmp_path):
    path = tmp_path / "home.toml"
    path.write_text(SITE_LINK.format(2.5e7, 0))
    assert load_device(str(path)).site_link == SiteLink(bytes_per_s=2.5e7, latency_s=0.0)
    assert load_device("h100").site_link is None


def test_a_constant_is_measured_where_the_file_says_by_what(tmp_path):
    """Absent means unmeasured: a number that a file inherits or only states was not measured."""
    assert load_device("h100").unmeasured == tuple(DECIDING_CONSTANTS)
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\nsync_s = 3e-4\nhost_launch_s = 4e-5\nexposed_offload_fraction = 0\n'
        '[sources]\nsync_s = "make gpu"\nexposed_offload_fraction = "make gpu"\n'
    )
    device = load_device(str(path))
    assert device.exposed_offload_fraction == 0
    assert device.unmeasured == ("host_launch_s", "exposed_zero3_fraction")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "h100"\nmemory_gb = 3', "unknown key 'memory_gb'; did you mean 'memory_gib'"),
        ('base = "h1"', "base='h1' is unknown"),
        ('name = "x"', "missing; give them, or start from a device with base = 'h100'"),
        ('base = "h100"\nmemory_gib = -3', "memory_gib=-3 must be a number above 0"),
        ('base = "h100"\nmemory_gib = true', "memory_gib=True must be a number above 0"),
        ('base = "h100"\nname = 3', "name=3 must be text"),
        ('base = "h100"\nname = 1979-05-27', "name must be text"),
        ('base = "h100"\npeak_flops = 1979-05-27', "peak_flops"),
        (
            'base = "h100"\nlinks = []',
            r"links must be \[\[links\]\] tables, .*; its keys are level, gpus, bytes_per_s, latency_s, fraction",
        ),
        ('base = "h100"\npeak_flops = 3', "peak_flops=3 must be a table of numbers by precision with at least bf16"),
        ('base = "h100"\nlinks = 3', "links=3 must be a list of tables; its keys are level, gpus"),
        ('base = "h100"\ngemm_fraction = 0.5', "gemm_fraction=0.5 must be a table of .* with at least bf16"),
        ('base = "h100"\nmemory_gib = "80"', "memory_gib='80' must be a number above 0"),
        ('base = "h100"\nmemory_gib = inf', "memory_gib='?inf'? must be a number above 0"),
        ("base = ", "not TOML"),
        ('base = "h100"\ntile_rows = 0.5', "tile_rows=0.5 must be a whole number of at least 1"),
        ('base = "h100"\nmultiprocessors = 0.5', "multiprocessors=0.5 must be a whole number of at least 1"),
        ('base = "h100"\nhbm_fraction = 5', "hbm_fraction=5 must be above 0 and at most 1, .*; 0.8 is 80 %"),
        (
            'base = "h100"\n[wide_flops]\ntf32 = 1e14',
            "wide_flops must be a table of numbers by type, of float32 and float64",
        ),
        ('base = "h100"\n[wide_flops]\nfloat32 = 0', "wide_flops.float32=0 must be a number above 0"),
        ('base = "h100"\nexposed_zero3_fraction = 1.5', "exposed_zero3_fraction=1.5 must be a part, from 0 to 1"),
        (
            'base = "h100"\nexposed_zero3_fraction = 0.5',
            r"has no source; say what measured it as \[sources\] exposed_z",
        ),
        (
            'base = "h100"\n[sources]\nexposed_zero3_fraction = "x"',
            "sources.exposed_zero3_fraction has no number; give",
        ),
        ('base = "h100"\nhost_copy_fraction = 0.5', "unknown key 'host_copy_fraction'"),
        ('base = "h100"\n[sources]\nhost_copy_fraction = "x"', "sources must be a table of texts, of host_launch_s"),
        ('base = "h100"\n[sources]\nhbm_fraction = "x"', "sources must be a table of texts, of host_launch_s, sync_s,"),
        ('base = "h100"\n[sources]\nsync_s = " "', "sources must be a table of texts, of host_launch_s, sync_s,"),
        ('base = "h100"\n[sources]\nsync_s = 3', "sources.sync_s=3 must be text"),
        (
            'base = "h100"\nsite_link = 1e8',
            "site_link=100000000.0 must be a table; its keys are bytes_per_s, latency_s",
        ),
        (
            'base = "h100"\n[site_link]\nbytes_per_s = 1e8',
            "site_link.latency_s missing; give it$",
        ),
        ('base = "h100"\n[spine]\npod_gpus = 3', "unknown key 'spine'"),
        ('base = "h100"\n[[links]]\nlatency = 3', "unknown key 'links.0.latency'; did you mean 'links.0.latency_s'"),
        ('base = "h100"\n[site_link]\nfoo = 3', "'site_link.foo'; the keys are bytes_per_s, latency_s"),
        (SITE_LINK.format(0, 0.1), "site_link.bytes_per_s=0 must be a number above 0"),
        (SITE_LINK.format(1e8, -1), "site_link.latency_s=-1 must be a number of at least 0"),
        (SITE_LINK.format(1e8, "false"), "site_link.latency_s=False must be a number of at least 0"),
        ('base = "h100"\nsite_lnk = 3', "unknown key 'site_lnk'; did you mean 'site_link'"),
        (
            'base = "h100"\n[gemm_fraction]\nbf16 = 1.5',
            "gemm_fraction.bf16=1.5 must be above 0 and at most 1, .*; 0.8 is 80 %",
        ),
    ],
)
def test_errors_of_a_file_are_named(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_device(str(path))


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_device(str(path))


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_device("absent.toml")


def test_the_last_link_connects_all(tmp_path):
    link = '[[links]]\nlevel = "nvlink"\ngpus = {}\nbytes_per_s = 1e9\nlatency_s = 1e-6\nfraction = 0.8\n'
    path = tmp_path / "links.toml"
    path.write_text('base = "h100"\n' + link.format(8))
    with pytest.raises(ConfigError, match="the last one connects all ranks"):
        load_device(str(path))
    path.write_text('base = "h100"\n' + link.format(8) + link.format(0))
    assert len(load_device(str(path)).links) == 2
