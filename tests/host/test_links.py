"""Network links, read off a copy of the kernel's folders."""

from pathlib import Path

from moefold.cli.doctor import network_links


def test_interfaces_that_are_up_and_adapters_are_listed(tmp_path: Path):
    files = {
        "net/eth0/operstate": "up",
        "net/eth0/speed": "25000",
        "net/lo/operstate": "unknown",
        "net/tap0/operstate": "up",
        "net/tap0/speed": "-1",
        "net/eth1/operstate": "down",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert network_links(tmp_path) == ["eth0 25 Gb/s", "lo", "tap0", "mlx5_0:1 400 Gb/sec (4X NDR), active"]
    assert network_links(tmp_path / "none") == []
