"""How the sites of one machine share it."""

import asyncio
import io
import os
import threading

import pytest

from moefold.errors import ConfigError
from moefold.host.listen import listen
from moefold.host.rank_env import RankEnv
from moefold.launch.local_sites import MAX_LINE_BYTES, _fork, pass_on, site_environments
from moefold.recipe import LoadedRecipe, load_config
from moefold.train.start import set_up_run


def test_sites_on_a_cpu_share_its_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)))
    assert site_environments(2, 2, "cpu", None) == [{"OMP_NUM_THREADS": "3"}] * 2
    assert site_environments(8, 4, "cpu", None) == [{"OMP_NUM_THREADS": "1"}] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert site_environments(2, 2, "cpu", None) == [{"OMP_NUM_THREADS": "5"}] * 2


def test_output_of_any_length_is_passed_on_by_lines():
    read, write = os.pipe()
    content = b"one\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\n\nend without a line end"

    def send() -> None:
        with os.fdopen(write, "wb") as file:
            file.write(content)

    sending = threading.Thread(target=send)
    sending.start()
    printed = io.StringIO()
    asyncio.run(pass_on(read, "site 1: ", printed))
    sending.join()
    lines = printed.getvalue().splitlines()
    assert all(line.startswith("site 1: ") for line in lines)
    texts = [line.removeprefix("site 1: ") for line in lines]
    assert (texts[0], texts[-2:]) == ("one", ["", "end without a line end"])
    assert "".join(texts[1:-2]) == "x" * (3 * MAX_LINE_BYTES)


def test_sites_need_gpus_of_their_own():
    with pytest.raises(ConfigError, match="sites.count=2 sites of 4 ranks need 8 GPUs on this machine, which has"):
        site_environments(2, 4, "cuda", None)


def test_rank_of_a_launcher_is_one_site():
    with pytest.raises(ConfigError, match="a launcher started this process as a rank of one job"):
        site_environments(2, 1, "cpu", RankEnv(0, 0, 1, "127.0.0.1", 1234))


def test_program_cannot_start_all_sites():
    recipe = LoadedRecipe(load_config(None, ["sites.count=2"]), frozenset(), ())
    with pytest.raises(
        ConfigError, match="sites.count=2 without a number starts all sites, which only `moefold train`"
    ):
        set_up_run(recipe, None)


def _pipe(descriptor: int | str) -> str:
    """Name of the file of a descriptor, or "" if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def test_site_holds_no_pipe_of_another_one():
    """A site would not notice that nothing reads its output, as another one could."""
    with listen("127.0.0.1", 0) as listener:

        def main(number: int, port: int) -> int:
            # Its own output has the descriptors 1 and 2.
            os.write(1, " ".join(_pipe(found) for found in os.listdir("/proc/self/fd") if int(found) > 2).encode())
            return 0

        sites: list = []
        for _ in range(3):
            sites.append(_fork(main, sites, 1, listener, {}))
        of_sites = {_pipe(descriptor) for site in sites for descriptor, _ in site.outputs}
        assert len(of_sites) == 6
        held = []
        for site in sites:
            (out, _), _ = site.outputs
            held.append(set(os.read(out, 2**16).decode().split()))
        assert [pipes & of_sites for pipes in held] == [set()] * 3
        for site in sites:
            for descriptor, _ in site.outputs:
                os.close(descriptor)
            assert os.waitpid(site.pid, 0)[1] == 0
