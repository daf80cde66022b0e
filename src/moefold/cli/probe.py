"""`moefold probe`: measure this machine and write a device file for the planner."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold import __version__
from moefold.cli.command_parser import CommandParser
from moefold.cost.hardware import device_names, load_device
from moefold.errors import ConfigError
from moefold.host.output_file import check_output_path, check_writable, refuse_existing
from moefold.host.rank_env import RankEnv, read_rank_env
from moefold.launch.accelerator import DEVICE_NAMES
from moefold.message_text import spelled_as
from moefold.progress import WorkProgress
from moefold.terminal import print_escaped

if TYPE_CHECKING:
    from moefold.bench.device_fit import DeviceMeasurements
    from moefold.cost.hardware import Device

DTYPES = ("float32", "bfloat16")
KEPT_KEYS = "sync_s, tiles, quantize_passes and precisions below 16 bits"
EPILOG = """The ranks measure what the planner prices: copies, GEMMs of several depths, attention at several lengths,
grouped experts, kernel launches, and all-gather and all-to-all by size of group and message, with the kernels and the
threads of a training run and all ranks busy at the same time. Start it with torchrun or srun to measure the network
between machines. Numbers that are not measured are kept from the base device; the file names them. On a GPU, kernels
that are chosen by time are chosen for the probe's shapes, and recorded for runs of this device.

examples:
  moefold probe this-machine.toml --ranks 8
  torchrun --nnodes 2 --nproc-per-node 8 ... -m moefold probe cluster.toml
  moefold plan mixtral-8x22b --gpu cluster.toml --num-gpus 128 --seq-len 4096 --global-batch-size 256
  moefold simulate recipes/quickstart.toml --gpu this-machine.toml
"""


def run(argv: list[str]) -> int:
    """Measure on all ranks, print the comparison with the fitted cost model, and write the file. Return 0."""
    args = _parser().parse_args(argv)
    check_output_path("FILE", args.file, (".toml",))
    for option, path in (("FILE", args.file), ("--json", args.json)):
        if path is not None:
            check_writable(option, path)
            refuse_existing(option, path, force=args.force)
    for name in ("ranks", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    with spelled_as({"--gpu": "--base"}):
        if args.base is not None:
            load_device(args.base)
    rank_env = read_rank_env()
    if rank_env is not None and args.ranks not in (None, rank_env.world_size):
        raise ConfigError(f"--ranks {args.ranks}: the launcher started {rank_env.world_size} ranks; leave --ranks out")
    from moefold.launch.detect_hardware import detect_machine
    from moefold.launch.ranks import choose_device, run_ranks

    with spelled_as(DEVICE_NAMES):
        num_ranks = args.ranks or (
            rank_env.world_size if rank_env is not None else _default_ranks(choose_device(args.device, 1, None))
        )
        device_type = choose_device(args.device, num_ranks, rank_env)
    base = args.base or detect_machine(device_type, rank_env).device
    return run_ranks(partial(_measure, args, base), num_ranks, device_type, rank_env)


def _default_ranks(device_type: str) -> int:
    """Return the number of GPUs of this machine, or one rank on a CPU."""
    import torch

    return torch.cuda.device_count() if device_type == "cuda" else 1


def _measure(args: argparse.Namespace, base: str, rank_env: RankEnv, device_type: str) -> int:
    from moefold.bench.device_probe import SIZES, DeviceProbe
    from moefold.bench.timing import describe_device
    from moefold.launch.ranks import init_distributed

    dtype = args.dtype or ("bfloat16" if device_type == "cuda" else "float32")
    with (
        init_distributed(rank_env, device_type) as device,
        WorkProgress("probe", is_shown=rank_env.rank == 0) as progress,
    ):
        probe = DeviceProbe(
            device,
            dtype,
            rank_env.world_size,
            rank_env.local_world_size,
            args.rounds,
            SIZES[device_type],
            progress.report,
        )
        measured = probe.measure()
        kernel_message = probe.kernel_message
        machine = describe_device(device)
    if rank_env.rank == 0:
        _write(args, load_device(base), machine, rank_env, measured)
        if kernel_message:
            print_escaped(kernel_message, flush=True)
    return 0


def _write(
    args: argparse.Namespace, base: "Device", machine: str, rank_env: RankEnv, measured: "DeviceMeasurements"
) -> None:
    from moefold.bench.device_fit import device_toml, fit_device, predictions

    device = fit_device(base, measured, args.file.stem)
    kept_keys = KEPT_KEYS if measured.collectives else f"{KEPT_KEYS}, and all links"
    comments = [
        f"Measured by moefold {__version__} probe in {measured.dtype}; ranks: {rank_env.world_size}, "
        f"{rank_env.local_world_size} a machine.",
        f"{machine}.",
        f"Not measured, but copied from {base.name}: {kept_keys}.",
    ]
    rows = list(predictions(device, measured))
    try:
        args.file.write_text(device_toml(device, comments), encoding="utf-8")
        if args.json is not None:
            report = {
                "machine": machine,
                "measured": asdict(measured),
                "fitted": asdict(device),
                "predictions": [asdict(row) for row in rows],
            }
            args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    lines = [*comments, "", f"{'':40}  {'measured':>10}  {'fitted':>10}  {'ratio':>6}"]
    lines += [
        f"{row.name:40}  {_milliseconds(row.measured_s)}  {_milliseconds(row.predicted_s)}  {row.ratio:6.2f}"
        for row in rows
    ]
    lines += ["", f"wrote {args.file}; use it as --gpu {args.file} of moefold plan and moefold simulate"]
    print_escaped("\n".join(lines), flush=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:7.3f} ms"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold probe", "Measure this machine and write a device file for moefold plan and moefold simulate.", EPILOG
    )
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="device file to write; its name is the device's")
    parser.option("--ranks", int, None, "ranks of this machine (default: all GPUs, or one rank on a CPU)")
    parser.option("--device", "auto", None, "default auto", choices=("auto", "cpu", "cuda"))
    parser.option(
        "--base",
        str,
        "NAME",
        f"device whose other numbers are kept: {', '.join(device_names())}, or a FILE.toml (default: the detected one)",
    )
    parser.option(
        "--dtype", str, None, "of attention and experts (default: bfloat16 on GPUs, float32 on a CPU)", choices=DTYPES
    )
    parser.option("--rounds", 5, None, "timed rounds of each operation (default 5)")
    parser.option("--json", Path, "FILE", "write measured times and fitted numbers as JSON")
    parser.flag("--force", "replace files that exist")
    return parser
