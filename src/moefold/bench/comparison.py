"""One table for one shape on one device: who is how fast, where our step spends its time, what the machine allows."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moefold.bench.contestants import EXPERTS_IMPLEMENTATIONS, OURS, Arena, open_arena
from moefold.bench.machine import COPY, ONEDNN, TORCH_MM, Rates, machine_name, rates, yardsticks
from moefold.bench.parts import BARE, Pieces, PieceTime, piece_time, share_of_bare
from moefold.bench.race import CLOCKS, Times, awaited, median_ratio, race
from moefold.bench.shape import Part, Routing, step_flops
from moefold.bench.storage import StorageMeter
from moefold.config.schema import Config
from moefold.model.transformer import TORCH_DTYPES
from moefold.work_progress import Say, say_nothing

GIB = 2**30
YARDSTICKS = (COPY, TORCH_MM, ONEDNN)
TRANSFORMERS = tuple(f"transformers, {kind}" for kind in EXPERTS_IMPLEMENTATIONS)


@dataclass(frozen=True)
class Row:
    """One contestant."""

    name: str
    median_s: float
    low_s: float
    """Lower quartile; `high_s` is the upper one."""
    high_s: float
    tokens_per_s: float
    tflops: float
    mfu: float
    """Against the GEMM rate of the same run."""
    peak_gib: float
    """What a step adds to weights and moments, at most."""


@dataclass(frozen=True)
class Comparison:
    """All that was found."""

    machine: str
    torch: str
    dtype: str
    tokens: int
    num_experts: int
    routing: str
    load: float
    """Copies on the busiest expert over the mean, of the first MoE layer."""
    rounds: int
    clock: str
    gemm_tflops: float
    copy_gbps: float
    rows: list[Row]
    absent: list[str]
    ratio_to_transformers: float
    """Median over the rounds of their fastest time over ours."""
    ratio_to_plain: float | None
    ratios_to_peers: dict[str, float]
    pieces: list[PieceTime]
    experts_of_bare_loop: float
    """The rate of our experts over that of their products alone."""

    @property
    def ours(self) -> Row:
        """Our row."""
        return next(row for row in self.rows if row.name == OURS)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the gaps."""
        found = {"kind": "comparison", **asdict(self)}
        for piece, values in zip(self.pieces, found["pieces"], strict=True):
            values["gap"] = piece.gap if piece.floor_s else None
        return found


def compare(
    cfg: Config,
    part: Part,
    routing: Routing,
    device: torch.device,
    rounds: int,
    clock: str = "wall",
    say: Say = say_nothing,
) -> Comparison:
    """Race all contestants, the machine's yardsticks and the parts of our step, in the same rounds.

    The slower of transformers' experts implementations leaves after a short race of its own.
    """
    say("building the models")
    arena = open_arena(cfg, part, routing, device)
    steps = {name: awaited(step, device) for name, step in arena.steps.items()}
    say("choosing the faster of transformers' implementations")
    quick = race({name: steps[name] for name in TRANSFORMERS}, warmup=1, rounds=2, clock=CLOCKS[clock])
    fastest = min(TRANSFORMERS, key=lambda name: min(quick[name]))
    for name in TRANSFORMERS:
        if name != fastest:
            del steps[name]
    pieces = _pieces(cfg, part, device, arena)
    parts = pieces.all()
    racing: dict[str, Callable[[], None]] = {**steps}
    racing |= {name: awaited(run, device) for name, run in yardsticks(TORCH_DTYPES[cfg.run.dtype], device).items()}
    racing[BARE] = awaited(pieces.bare_gemms(), device)
    racing |= {_tag(piece.name): awaited(piece.run, device) for piece in parts}
    times_s = race(racing, warmup=2, rounds=rounds, clock=CLOCKS[clock], say=say)
    say("measuring memory")
    medians = {name: Times(seconds).median_s for name, seconds in times_s.items()}
    found = rates(medians, device)
    rows = [_row(name, times_s[name], step, cfg, part, found, device) for name, step in steps.items()]
    piece_times = [piece_time(piece, medians[_tag(piece.name)], found) for piece in parts]
    plain = [name for name in steps if name.startswith("plain")]
    best_plain = min(plain, key=lambda name: medians[name]) if plain else None
    return Comparison(
        machine=machine_name(device),
        torch=torch.__version__,
        dtype=cfg.run.dtype,
        tokens=cfg.tokens_per_step,
        num_experts=cfg.model.num_experts,
        routing=routing,
        load=arena.load(),
        rounds=rounds,
        clock=clock,
        gemm_tflops=found.flops / 1e12,
        copy_gbps=found.bytes / 1e9,
        rows=rows,
        absent=arena.absent,
        ratio_to_transformers=median_ratio(times_s[OURS], times_s[fastest]),
        ratio_to_plain=None if best_plain is None else median_ratio(times_s[OURS], times_s[best_plain]),
        ratios_to_peers={name: median_ratio(times_s[OURS], times_s[name]) for name in arena.peers},
        pieces=piece_times,
        experts_of_bare_loop=share_of_bare(piece_times, medians[BARE], cfg.model.num_layers),
    )


def _tag(name: str) -> str:
    return f"part: {name}"


def _row(
    name: str,
    seconds: list[float],
    step: Callable[[], None],
    cfg: Config,
    part: Part,
    found: Rates,
    device: torch.device,
) -> Row:
    times = Times(seconds)
    flops_per_s = step_flops(cfg, part) / times.median_s
    return Row(
        name=name,
        median_s=times.median_s,
        low_s=times.quartiles_s[0],
        high_s=times.quartiles_s[1],
        tokens_per_s=cfg.tokens_per_step / times.median_s,
        tflops=flops_per_s / 1e12,
        mfu=flops_per_s / found.flops,
        peak_gib=_peak_bytes(step, device) / GIB,
    )


def _peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with StorageMeter() as meter:
        step()
    peak_bytes: int = meter.peak_bytes
    return peak_bytes


def _pieces(cfg: Config, part: Part, device: torch.device, arena: Arena) -> Pieces:
    """The parts, over the states that the first router of our step sees."""
    seen: list[Tensor] = []
    router = arena.first.router
    handle = router.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    arena.steps[OURS]()
    handle.remove()
    x = seen[0].view(cfg.train.seq_len, cfg.train.global_batch_size, -1)
    return Pieces(cfg, part, device, x, router.weight.detach())
