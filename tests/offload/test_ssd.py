"""Test offloading to a file on disks with faults: a full disk, a cut file, and bytes that changed."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moefold.errors import ConfigError, RunError
from moefold.offload.backend import CopyEngine, HostMemory, pinned_allocation_bytes
from moefold.offload.ssd import ALIGNMENT_BYTES, SsdFile, checksum

CPU = torch.device("cpu")


def _bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _file(folder: Path, limit_bytes: float = float("inf")) -> SsdFile:
    return SsdFile(CopyEngine(CPU), folder, limit_bytes)


def _back(tier, stored, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(like)
    tier.load(stored, out, None)
    return out


@pytest.mark.parametrize("make", [_file, lambda folder: HostMemory(CopyEngine(CPU))])
def test_stored_tensors_come_back(tmp_path, make):
    tier = make(tmp_path)
    sent = [_bytes(count, seed) for seed, count in enumerate((1, 7, 8, 4096, 4097, 100_003))]
    stored = [tier.store(data, None) for data in sent]
    del stored[2], sent[2]
    sent.append(_bytes(5, 99))
    stored.append(tier.store(sent[-1], None))
    for data, place in reversed(list(zip(sent, stored, strict=True))):
        assert torch.equal(_back(tier, place, data), data)


@pytest.mark.parametrize("make", [_file, lambda folder, limit: HostMemory(CopyEngine(CPU), limit)])
def test_beyond_the_limit_there_is_no_room_until_a_tensor_leaves(tmp_path, make):
    tier = make(tmp_path, 3 * ALIGNMENT_BYTES)
    held = [tier.store(_bytes(ALIGNMENT_BYTES), None) for _ in range(3)]
    assert all(held)
    assert tier.store(_bytes(1), None) is None
    held.pop()
    assert tier.store(_bytes(1), None) is not None


class PageLocked(CopyEngine):
    """A link whose host memory is taken as page-locked memory is."""

    def host_allocation_bytes(self, num_bytes: int) -> int:
        return pinned_allocation_bytes(num_bytes)


def test_the_limit_counts_the_size_of_page_locked_memory():
    assert [pinned_allocation_bytes(n) for n in (1, 2, 3, 1023, 1024, 1025)] == [1, 2, 4, 1024, 1024, 2048]
    tier = HostMemory(PageLocked(CPU), 3 * 1024)
    held = [tier.store(_bytes(1025), None)]
    assert tier.store(_bytes(1025), None) is None
    held.append(tier.store(_bytes(1024), None))
    assert all(held)
    held.clear()
    assert tier.store(_bytes(1025), None) is not None


def test_a_file_that_was_cut_ends_the_run(tmp_path):
    tier = _file(tmp_path)
    first, second = _bytes(ALIGNMENT_BYTES), _bytes(ALIGNMENT_BYTES, 1)
    stored = [tier.store(first, None), tier.store(second, None)]
    os.ftruncate(tier.file.fileno(), ALIGNMENT_BYTES + 10)
    assert torch.equal(_back(tier, stored[0], first), first)
    with pytest.raises(
        RunError,
        match=f"train.offload_dir='.*': the offload file was truncated: it ends before byte {4096 + 11}",
    ):
        _back(tier, stored[1], second)


@pytest.mark.parametrize("place", [0, 5000, 9999])
def test_a_changed_byte_ends_the_run(tmp_path, place):
    tier, data = _file(tmp_path), _bytes(10_000)
    stored = tier.store(data, None)
    os.pwrite(tier.file.fileno(), bytes([int(data[place]) ^ 16]), place)
    with pytest.raises(RunError, match="the offloaded bytes differ from the written bytes"):
        _back(tier, stored, data)


def test_the_sum_knows_every_byte():
    data = _bytes(29)
    sums = set()
    for i in range(29):
        changed = data.clone()
        changed[i] += 1
        sums.add(checksum(changed))
    assert checksum(data) not in sums
    assert checksum(torch.full((16,), 255, dtype=torch.uint8)) == 2**64 - 2


def _full_from(tier: SsdFile, room: int) -> None:
    held = [tier.store(_bytes(ALIGNMENT_BYTES, seed), None) for seed in range(room)]
    with pytest.raises(OSError) as error:
        tier.store(_bytes(2 * ALIGNMENT_BYTES), None)
    assert error.value.errno in (errno.ENOSPC, errno.EFBIG)
    # It is not tried again there; returned extents are used.
    assert tier.store(_bytes(2 * ALIGNMENT_BYTES), None) is None
    held.pop(0)
    data = _bytes(ALIGNMENT_BYTES, 7)
    again = tier.store(data, None)
    assert torch.equal(_back(tier, again, data), data)
    assert torch.equal(_back(tier, held[0], data), _bytes(ALIGNMENT_BYTES, 1))


def test_a_file_that_may_not_grow_takes_as_many_tensors_as_fit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * ALIGNMENT_BYTES + 100, before[1]))
    try:
        _full_from(_file(tmp_path), 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_takes_as_many_tensors_as_fit(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={4 * ALIGNMENT_BYTES}", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system")
    tier = _file(tmp_path)
    try:
        _full_from(tier, 4)
    finally:
        tier.file.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_file_has_no_name_and_goes_with_a_killed_process(tmp_path):
    code = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from moefold.offload.ssd import SsdFile\n"
        "from moefold.offload.backend import CopyEngine\n"
        "tier = SsdFile(CopyEngine(torch.device('cpu')), Path(sys.argv[1]))\n"
        "stored = tier.store(torch.ones(1 << 20, dtype=torch.uint8), None)\n"
        "print(oct(__import__('os').fstat(tier.file.fileno()).st_mode & 0o777), flush=True)\n"
        "time.sleep(60)\n"
    )
    folder = tmp_path / "new" / "folder"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "0o600\n"
    assert list(folder.iterdir()) == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"train.offload_dir='.*file/below' cannot be written: .*; choose another"):
        _file(tmp_path / "file" / "below")
