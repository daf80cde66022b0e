"""Sites of a run on forked ranks: each is a job with a process group of its own, and all share a meeting point."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefold.config.schema import Config
from moefold.host.listen import listen
from moefold.launch.meet_server import MeetServer
from moefold.verify.ranks.pool import WorkerPool


class Server:
    """A meeting point in a thread of this process; `log` has its lines."""

    def __init__(self, secret: bytes = b"", max_connections: int | None = None) -> None:
        self.log: list[str] = []
        self._max_connections = max_connections
        self._secret = secret
        self._is_up = threading.Event()
        self._watched: tuple[Callable[[str], bool], Path] | None = None

    def watch(self, is_it: Callable[[str], bool], file: Path) -> None:
        """Create a file when a line of the log is the awaited one."""
        self._watched = is_it, file

    def _log(self, line: str) -> None:
        self.log.append(line)
        if self._watched is not None and self._watched[0](line):
            self._watched[1].touch()

    async def _serve(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        listener = listen("127.0.0.1", port)
        self.port = listener.getsockname()[1]
        async with MeetServer(listener, self._secret, self._log, self._max_connections):
            self._is_up.set()
            await self._stopped.wait()

    @contextmanager
    def running(self, port: int = 0) -> Iterator["Server"]:
        self._is_up.clear()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(port)))
        thread.start()
        assert self._is_up.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join()


def of_site(cfg: Config, number: int, port: int, **sites: Any) -> Config:
    """The recipe of one site, in a run folder of its own."""
    settings = replace(cfg.sites, number=number, meet=f"127.0.0.1:{port}", **sites)
    return replace(cfg, sites=settings, run=replace(cfg.run, dir=f"{cfg.run.dir}/site-{number}"))


def run_sites(
    pool: WorkerPool, cfgs: Sequence[Config], function: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[list[Any]]:
    """Call `function(cfg, *args)` on every rank of every site; return the results by site and rank."""
    with ThreadPoolExecutor(len(cfgs)) as threads:
        calls = [
            threads.submit(pool.run, cfg.parallel.world_size, function, cfg, *args, timeout_s=timeout_s) for cfg in cfgs
        ]
        return [call.result() for call in calls]
