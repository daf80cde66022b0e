"""All sites of a run on this machine: a meeting point in this process, and one child process for each site.

The children are forked before torch starts threads. Their output is passed on line by line, after the number of the
site.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from moefold.errors import EXIT_FAILED, SIGNAL_STATUS, ConfigError
from moefold.host.listen import listen
from moefold.host.processes import signal_on_parent_death
from moefold.host.rank_env import RankEnv
from moefold.launch.accelerator import has_no_gpu
from moefold.launch.exit import hard_exit
from moefold.launch.meet_server import MeetServer
from moefold.launch.signed_lines import SECRET_VARIABLE
from moefold.message_text import Problem
from moefold.terminal import print_escaped

HOST = "127.0.0.1"
THREADS_VARIABLE = "OMP_NUM_THREADS"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
MAX_LINE_BYTES = 2**16
"""Longest line of a site that is printed as one."""
ENDED_EARLY = "its process has ended with an error; start all sites again once that is mended"
ALREADY_DONE = "it has all of its run.steps; raise run.steps, or start a new run with another run.dir"

SiteMain = Callable[[int, int], int]
"""Main function of a site: called with its number and the port of the meeting point, returns the exit status."""


def run_local_sites(main: SiteMain, count: int, min_members: int, environments: Sequence[dict[str, str]]) -> int:
    """Run all sites, wait for them, and return the exit status: the largest one, or a signal's.

    Ctrl-C and SIGTERM are passed on to the sites, which save and end. After a site has failed, the other sites are
    ended too if they are too few for a round. Their statuses do not count.
    """
    listener = listen(HOST, 0)
    secret = secrets.token_hex(32)
    port = int(listener.getsockname()[1])
    sites: list[_SiteProcess] = []
    for environment in environments[:count]:
        sites.append(_fork(main, sites, port, listener, environment | {SECRET_VARIABLE: secret}))
    return asyncio.run(_Sites(sites, min_members).run(listener, secret.encode()))


def site_environments(count: int, num_ranks: int, device: str, rank_env: RankEnv | None) -> list[dict[str, str]]:
    """Return the environment variables that divide the cores or GPUs of this machine among the sites.

    Raises:
        ConfigError: a launcher started this process, or there are too few GPUs.
    """
    if rank_env is not None:
        rule = "starts all sites on this machine, and a launcher started this process as a rank of one job"
        raise ConfigError(Problem("sites.number", -1, rule, "set sites.number and sites.meet for each job"))
    gpus: list[str] = []
    if device != "cpu" and not has_no_gpu():
        # Lazy import: without a GPU driver, only the sites import torch.
        import torch

        numbers = [str(number) for number in range(torch.cuda.device_count())]
        gpus = os.environ.get(GPUS_VARIABLE, ",".join(numbers)).split(",")[: len(numbers)]
    if not gpus and device != "cuda":
        threads = max(1, len(os.sched_getaffinity(0)) // (count * num_ranks))
        return [{THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, str(threads))}] * count
    if len(gpus) < count * num_ranks:
        raise ConfigError(
            f"sites.count={count} sites of {num_ranks} ranks need {count * num_ranks} GPUs on this machine, which has "
            f"{len(gpus)}; set run.device=cpu, or sites.number and sites.meet to start each site on another machine"
        )
    return [{GPUS_VARIABLE: ",".join(gpus[number * num_ranks : (number + 1) * num_ranks])} for number in range(count)]


class _SiteProcess:
    """A child process and the read ends of its output."""

    def __init__(self, number: int, pid: int, out: int, err: int) -> None:
        self.number = number
        self.pid = pid
        self.outputs = ((out, sys.stdout), (err, sys.stderr))
        self.status: int | None = None
        self.is_ended = False
        """True if the site was ordered to end, as too few sites are left."""


def _fork(
    main: SiteMain, before: Sequence[_SiteProcess], port: int, listener: socket.socket, environment: dict[str, str]
) -> _SiteProcess:
    """Start the next site in a child process."""
    number = len(before)
    sys.stdout.flush()
    sys.stderr.flush()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(out_write)
        os.close(err_write)
        return _SiteProcess(number, pid, out_read, err_read)
    status = EXIT_FAILED
    try:
        listener.close()
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        # With a copy of their read ends, a site whose reader is gone would not notice it.
        descriptors = (descriptor for site in before for descriptor, _ in site.outputs)
        for descriptor in (out_read, err_read, out_write, err_write, *descriptors):
            os.close(descriptor)
        signal_on_parent_death(signal.SIGTERM, parent)
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)
        threads = environment.get(THREADS_VARIABLE)
        # If the parent had imported torch, torch has read the variable already.
        if threads and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(threads))
        status = main(number, port)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # The callers of this function belong to the parent.
        hard_exit(status)


class _Sites:
    """Waits for the sites of this machine."""

    def __init__(self, sites: Sequence[_SiteProcess], min_members: int) -> None:
        self._sites = sites
        self._min_members = min_members
        self._received: list[int] = []

    async def run(self, listener: socket.socket, secret: bytes) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._forward, number)
        async with MeetServer(listener, secret, _log) as server:
            await asyncio.gather(*(self._wait(site, server) for site in self._sites))
        status = max(site.status or 0 for site in self._sites if not site.is_ended)
        if self._received and status in (0, *(SIGNAL_STATUS + number for number in self._received)):
            if self._received[0] == signal.SIGINT:
                raise KeyboardInterrupt
            return SIGNAL_STATUS + self._received[0]
        return status

    def _forward(self, number: int) -> None:
        self._received.append(number)
        is_repeated = self._received.count(signal.SIGINT) > 2
        self._send(signal.SIGKILL if is_repeated else signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for site in self._sites:
            if site.status is None:
                os.kill(site.pid, number)

    async def _wait(self, site: _SiteProcess, server: MeetServer) -> None:
        """Pass on the output of a site until it closes, wait for the end of the site, and inform the meeting point."""
        await asyncio.gather(*(pass_on(descriptor, f"site {site.number}: ", to) for descriptor, to in site.outputs))
        _, status = await asyncio.to_thread(os.waitpid, site.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        site.status = code if code >= 0 else SIGNAL_STATUS - code
        server.end_site(site.number, ENDED_EARLY if site.status else ALREADY_DONE)
        if site.status and not self._received:
            running = [other for other in self._sites if other.status is None]
            is_enough = len(running) >= self._min_members
            outlook = "the others go on" if is_enough else "the others are too few for a round, and end"
            print_escaped(
                f"moefold: site {site.number} ended with status {site.status}" + (f"; {outlook}" if running else ""),
                file=sys.stderr,
                flush=True,
            )
            if not is_enough:
                for other in running:
                    other.is_ended = True
                self._send(signal.SIGTERM)


def _log(line: str) -> None:
    print_escaped(f"meeting point: {line}", flush=True)


async def pass_on(descriptor: int, prefix: str, stream: TextIO) -> None:
    """Print the lines of a pipe until it closes. A line beyond `MAX_LINE_BYTES` is split."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        tail = b""
        while block := await reader.read(MAX_LINE_BYTES):
            *lines, tail = (tail + block).split(b"\n")
            if len(tail) >= MAX_LINE_BYTES:
                lines.append(tail)
                tail = b""
            for line in lines:
                print_escaped(prefix + line.decode(errors="replace"), file=stream, flush=True)
        if tail:
            print_escaped(prefix + tail.decode(errors="replace"), file=stream, flush=True)
    finally:
        transport.close()
