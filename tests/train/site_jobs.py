"""Sites of a run on forked ranks: each is a job with a process group of its own, and all share a meeting point."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.lora import LoraConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.cost.site_traffic import recipe_format, site_traffic, wire_format
from moefold.cost.state_bytes import master_dtype_bytes
from moefold.host.listen import listen
from moefold.launch.meet_server import MeetServer
from moefold.launch.rank_pool import WorkerPool
from moefold.train.callbacks.callback import Callback, FinishedStep, TrainingContext
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.validate.config import check_config
from tests.models import edit_model
from tests.verify.recipes import tiny

MEAN = {"count": 2, "every": 2}
DILOCO = {"count": 2, "every": 2, "lr": 0.7, "momentum": 0.9}
STREAMING = {"count": 2, "every": 4, "fragment_layers": 1, "overlap": 1, "keep_local": 0.5, "lr": 0.4, "momentum": 0.9}
CODED = STREAMING | {"precision": "int8", "residual": 0.9}


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


def recipe(run_dir: Path, steps: int, sites: dict[str, Any], *, every: int = 0, **parallel: Any) -> Config:
    cfg = tiny(
        model={"ffn.moe.router.expert_bias": True, "ffn.moe.router": "sigmoid", "tie_embeddings": True},
        moe={"aux_loss": 0.0, "bias_update_rate": 0.01},
        train={"lr_schedule": "constant", "global_batch_size": 4},
        **parallel,
    )
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=3, steps=steps, device="cpu", dtype="float64"),
        checkpoint=CheckpointConfig(every=every, at_end=True, keep=0),
        sites=SitesConfig(**sites),
    )


def train(cfg: Config) -> int:
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups).run(StopSignals())


def train_until(cfg: Config, last: int) -> int:
    """Train as a job that gets SIGTERM before the end of step `last`."""
    stop = StopSignals()
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    return Trainer(cfg, groups, callbacks=[Stopper(stop, last)]).run(stop)


class Stopper(Callback):
    def __init__(self, stop: StopSignals, last: int) -> None:
        self._stop = stop
        self._last = last

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._last - 1:
            self._stop.request(signal.SIGTERM)


def train_sites(pool, cfg: Config, **sites: Any) -> list[str]:
    """Train all sites of a recipe, and return the log of the meeting point."""
    with Server().running() as server:
        run_sites(pool, [of_site(cfg, n, server.port, **sites) for n in range(cfg.sites.count)], train)
    return server.log


def planned_bytes(cfg: Config, fragment: int, *, is_last: bool = False) -> int:
    """The bytes that the planner counts for a round of a fragment, or of all fragments (-1).

    The last round of sites that met in pairs is one of all sites, which send their weights.
    """
    in_pairs = cfg.sites.part.in_pairs and not is_last
    code = recipe_format(cfg.run, cfg.sites)
    if cfg.sites.part.in_pairs and is_last:
        # The vector has the blocks of the code, and is sent as it is.
        cfg = replace(cfg, sites=replace(cfg.sites, method="mean"))
        code = wire_format("float32", master_dtype_bytes(cfg.run))
    traffic = site_traffic(cfg)
    chosen = traffic if fragment < 0 else [traffic[fragment]]
    return (1 if in_pairs else cfg.sites.count - 1) * sum(part.num_bytes(code) for part in chosen)


def adapted(run_dir: Path, **parallel: Any) -> Config:
    cfg = recipe(run_dir, 4, DILOCO | {"precision": "float32"}, every=1, **parallel)
    return replace(
        cfg,
        model=edit_model(cfg.model, {"ffn.moe.router.expert_bias": False}),
        moe=replace(cfg.moe, bias_update_rate=0.0),
        lora=LoraConfig(rank=2, alpha=6.0),
    )


def train_and_fail(cfg: Config, at: int) -> str:
    """Train; site 2 raises after step `at`, as a bug or a lost machine would end it."""
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    failing = [Failing(at)] if cfg.sites.number == 2 else []
    try:
        Trainer(cfg, groups, callbacks=failing).run(StopSignals())
    except ArithmeticError:
        return "lost"
    return "done"


class Failing(Callback):
    def __init__(self, at: int) -> None:
        self._at = at

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._at:
            raise ArithmeticError


def train_and_come_back(cfg: Config, go: Path, at: int) -> str:
    """Train; site 2 fails after step `at`, and starts again once the others wait for that after step 6."""
    if cfg.sites.number < 2:
        groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
        Trainer(cfg, groups, callbacks=[Waiting(6, go, cfg.sites.number)]).run(StopSignals())
        return "done"
    assert train_and_fail(cfg, at) == "lost"
    wait_for(go.with_name("site-0 waits"))
    wait_for(go.with_name("site-1 waits"))
    groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
    Trainer(cfg, groups).run(StopSignals())
    return "back"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 100
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Waiting(Callback):
    def __init__(self, at: int, go: Path, site: int) -> None:
        self._at = at
        self._go = go
        self._site = site

    def after_step(self, context: TrainingContext, step: FinishedStep) -> None:
        if step.number == self._at:
            self._go.with_name(f"site-{self._site} waits").touch()
            wait_for(self._go)
