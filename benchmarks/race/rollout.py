"""Time generation by the rollout engine and, in turn in one process, by transformers with the same random weights.

    python -m benchmarks.race.rollout [OPTIONS]

Scenarios: 1, 8 and 64 samples, rollouts of log-normal lengths, and samples that share prompts against the same ones
that do not.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.race.rivals import hugging_face_model
from moefold.bench.timing import describe_device
from moefold.cli.command_parser import CommandParser
from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError, install_command
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.engine import RolloutEngine
from moefold.inference.engine.requests import EngineSettings, Request
from moefold.inference.load import LoadedModel, load_model
from moefold.inference.sampling import SamplingParams
from moefold.inference.settings import InferenceRequest, inference_config
from moefold.inference.source import find_source
from moefold.launch.ranks import init_distributed, spawn_ranks
from moefold.model.transformer import TORCH_DTYPES
from moefold.progress import ProgressCallback, WorkProgress, ignore_progress
from moefold.terminal import print_escaped

OURS = "moefold"
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Experts implementations of transformers; the faster one of a scenario counts. batched_mm is ten times slower."""
MAX_POSITIONS = 1024
SLOTS = 256
"""Samples that run at once; also the batch size of transformers."""


@dataclass(frozen=True)
class Scenario:
    """Requests of one measurement."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """New tokens of each prompt."""

    @property
    def num_new_tokens(self) -> int:
        """New tokens in all."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Timing:
    """Times of one implementation, of each round."""

    name: str
    cpu_s: list[float]
    wall_s: list[float]


@dataclass(frozen=True)
class ScenarioResult:
    """Times of all implementations, ours first."""

    name: str
    num_new_tokens: int
    timings: list[Timing]
    absent: list[str]
    """Implementations that could not run, with the reason."""

    def ratio(self, timing: Timing) -> tuple[float, float]:
        """Return the medians over the rounds of its CPU time and wall time over ours."""
        ours = self.timings[0]
        pairs = (ours.cpu_s, timing.cpu_s), (ours.wall_s, timing.wall_s)
        cpu, wall = (statistics.median(t / o for o, t in zip(*pair, strict=True)) for pair in pairs)
        return cpu, wall


def make_scenarios(*, seed: int = 0) -> dict[str, Scenario]:
    """Return the scenarios by name: batches of equal samples, rollouts of log-normal lengths, shared prompts."""
    generator = torch.Generator().manual_seed(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(256, (length,), generator=generator).tolist())

    found = [
        Scenario(f"{count} samples, 32 + 64 tokens", tuple(prompt(32) for _ in range(count)), (64,) * count)
        for count in (1, 8, 64)
    ]
    lengths = torch.empty(256).log_normal_(mean=3.5, std=0.8, generator=generator).clamp(1, 256).long().tolist()
    found.append(Scenario("256 rollouts of log-normal lengths", tuple(prompt(32) for _ in lengths), tuple(lengths)))
    shared = tuple(p for p in [prompt(512) for _ in range(32)] for _ in range(8))
    found.append(Scenario("32 prompts of 512 tokens x 8 samples", shared, (32,) * len(shared)))
    return {scenario.name: scenario for scenario in found}


def rollout_config(preset: str, dtype: str) -> Config:
    """Return the recipe of the model.

    Raises:
        ConfigError: there is no such preset, or its vocabulary is too small for the prompts.
    """
    cfg = config_from_dict(
        {
            "run": {"dtype": dtype},
            "model": {"preset": preset},
            "train": {"seq_len": MAX_POSITIONS},
            "data": {"kind": "synthetic"},
        }
    )
    if cfg.model.vocab_size < 256:
        raise ConfigError(f"--preset {preset}: the prompts are bytes, and its vocabulary has {cfg.model.vocab_size}")
    return cfg


class RolloutBench:
    """Both models with the same random weights.

    Args:
        cfg: of `rollout_config`.
        device: device of both.
    """

    def __init__(self, cfg: Config, device: torch.device) -> None:
        self._theirs = hugging_face_model(cfg, device, TORCH_DTYPES[cfg.run.dtype]).eval()
        self._theirs.config.use_cache = True
        self._theirs.config.output_router_logits = False
        self._device = device
        with tempfile.TemporaryDirectory() as folder:
            self._theirs.save_pretrained(Path(folder))
            self._ours = _load(folder, cfg, device)

    def run(self, scenario: Scenario, rounds: int, on_progress: ProgressCallback = ignore_progress) -> ScenarioResult:
        """Time all implementations in turn, after a round that does not count."""
        steps: dict[str, Callable[[], None]] = {OURS: lambda: self._run_engine(scenario, share_prompts=True)}
        if len(set(scenario.prompts)) < len(scenario.prompts):
            steps["moefold, prompts not shared"] = lambda: self._run_engine(scenario, share_prompts=False)
        else:
            for kind in EXPERTS_IMPLEMENTATIONS:
                steps[f"transformers generate, {kind}"] = lambda kind=kind: self._run_static(scenario, kind)  # type: ignore[misc]
            if len(set(scenario.lengths)) > 1:
                steps["transformers continuous batching"] = lambda: self._run_continuous(scenario)
        timings = {name: Timing(name, [], []) for name in steps}
        absent = []
        for i in range(1 + rounds):
            for name in list(steps):
                on_progress(f"{scenario.name}: {name}, round {i} of {rounds}")
                started = time.process_time(), time.perf_counter()
                try:
                    steps[name]()
                except _UnavailableError as reason:
                    absent.append(f"{name}: {reason}")
                    del steps[name], timings[name]
                    continue
                if i:
                    timings[name].cpu_s.append(time.process_time() - started[0])
                    timings[name].wall_s.append(time.perf_counter() - started[1])
        return ScenarioResult(scenario.name, scenario.num_new_tokens, list(timings.values()), absent)

    def _run_engine(self, scenario: Scenario, *, share_prompts: bool) -> None:
        requests = [
            Request(prompt=prompt, prompt_number=i, max_tokens=length)
            for i, (prompt, length) in enumerate(zip(scenario.prompts, scenario.lengths, strict=True))
        ]
        settings = EngineSettings(slots=SLOTS, cache_gib=0, share_prompts=share_prompts)
        found = RolloutEngine(self._ours.model, settings, SamplingParams()).generate(requests)
        _check_lengths([len(completion.tokens) for completion in found], scenario)

    @torch.no_grad()
    def _run_static(self, scenario: Scenario, experts: str) -> None:
        """Generate batch by batch, each to the length of its longest sample."""
        self._theirs.set_experts_implementation(experts)
        for first in range(0, len(scenario.prompts), SLOTS):
            ids = torch.tensor(scenario.prompts[first : first + SLOTS], device=self._device)
            length = max(scenario.lengths[first : first + SLOTS])
            out = self._theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
            assert out.shape[1] == ids.shape[1] + length

    @torch.no_grad()
    def _run_continuous(self, scenario: Scenario) -> None:
        """Generate with transformers' continuous batching.

        Raises:
            _UnavailableError: this version has none, or it does not run here.
        """
        from transformers import GenerationConfig

        if not hasattr(self._theirs, "continuous_batching_context_manager"):
            raise _UnavailableError("this version of transformers has none")
        self._theirs.set_experts_implementation(EXPERTS_IMPLEMENTATIONS[0])
        generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
        lengths: list[int] = []
        with (
            _quiet_logs(),
            self._theirs.continuous_batching_context_manager(generation_config=generation_config) as manager,
        ):
            for prompt, length in zip(scenario.prompts, scenario.lengths, strict=True):
                manager.add_request(list(prompt), max_new_tokens=length)
            while len(lengths) < len(scenario.lengths):
                result: Any = manager.get_result(timeout=10)
                if result is None and not manager.is_running():
                    raise _UnavailableError("its thread ended")
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
        if sum(lengths) != scenario.num_new_tokens:
            raise _UnavailableError(f"it generated {sum(lengths)} tokens instead of {scenario.num_new_tokens}")


class _UnavailableError(Exception):
    """An implementation that cannot run, with the reason."""


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Suppress log lines inside this context."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _check_lengths(lengths: Sequence[int], scenario: Scenario) -> None:
    assert lengths == list(scenario.lengths), "the engine generated other lengths than asked for"


def _load(folder: str, cfg: Config, device: torch.device) -> LoadedModel:
    source = find_source(folder)
    request = InferenceRequest(device=device.type, dtype=cfg.run.dtype, seq_len=MAX_POSITIONS, batch_size=1)
    return load_model(source, inference_config(source, request, "generate"), device)


def _measure(args: argparse.Namespace, rank_env: RankEnv, device_type: str) -> int:
    torch.set_num_threads(args.threads)
    scenarios = make_scenarios()
    chosen = [scenario for name, scenario in scenarios.items() if any(part in name for part in args.only or [""])]
    if not chosen:
        raise ConfigError(f"--only {' '.join(args.only)} matches none of: {'; '.join(scenarios)}")
    with init_distributed(rank_env, device_type) as device, WorkProgress("race") as progress:
        bench = RolloutBench(rollout_config(args.preset, args.dtype), device)
        found = [bench.run(scenario, args.rounds, progress.report) for scenario in chosen]
        machine = describe_device(device)
    if args.json:
        report = {"preset": args.preset, "dtype": args.dtype, "machine": machine}
        print_escaped(json.dumps(report | {"scenarios": [asdict(result) for result in found]}), flush=True)
        return 0
    title = f"{args.preset}, {args.dtype}, {machine}; medians of {args.rounds} rounds in turn, after one"
    print_escaped("\n".join([title, *(line for result in found for line in _table(result))]), flush=True)
    return 0


def _table(result: ScenarioResult) -> list[str]:
    lines = ["", f"{result.name:38}  {'CPU s':>8}  {'wall s':>8}  {'tokens/CPU s':>12}  {'CPU ratio':>9}  wall ratio"]
    for timing in result.timings:
        cpu_s = statistics.median(timing.cpu_s)
        ratios = result.ratio(timing)
        lines.append(
            f"  {timing.name:36}  {cpu_s:8.3f}  {statistics.median(timing.wall_s):8.3f}  "
            f"{result.num_new_tokens / cpu_s:12,.0f}  {ratios[0]:8.2f}x  {ratios[1]:9.2f}x"
        )
    return lines + [f"  {reason}" for reason in result.absent]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.race.rollout",
        description="Time generation by the rollout engine and, in turn in the same process, transformers' generate\n"
        "and continuous batching with the same random weights: 1, 8 and 64 samples, rollouts of log-normal lengths,\n"
        "and samples that share prompts against the same ones that do not.",
    )
    parser.add_argument("--preset", default="quickstart", help="model (default quickstart)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only scenarios whose name has one of these texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on one rank and print a table; return 0, and 2 for wrong options."""
    args = _parser().parse_args(argv)
    try:
        for name in ("rounds", "threads"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
        if find_spec("transformers") is None:
            raise ConfigError(f"the race needs transformers, which is missing: {install_command('hf')}")
        return spawn_ranks(partial(_measure, args), 1, "cpu")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
