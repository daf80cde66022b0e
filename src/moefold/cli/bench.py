"""`moefold bench`: our training step beside the same model in a bare loop and in transformers."""

import argparse
import json
import statistics
from functools import partial

from moefold.config.load import config_from_dict
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.place import Place


def run(argv: list[str]) -> int:
    """Measure and print a table; returns 0."""
    if argv[:1] == ["leastloaded"]:
        from moefold.cli import bench_leastloaded

        return bench_leastloaded.run(argv[1:])
    args = _parser().parse_args(argv)
    for name in ("steps", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1")
    from moefold.launch.ranks import start_ranks

    return start_ranks(partial(_measure, bench_config(args.dtype), args), 1, "cpu")


def bench_config(dtype: str) -> Config:
    """The small shape of the bench: 4 layers, hidden 256, 8 experts top-2 of 512, vocabulary 4096, batch 8 x 256."""
    return config_from_dict(
        {
            "run": {"dtype": dtype, "device": "cpu"},
            "model": {"preset": "bench-small"},
            "train": {"seq_len": 256, "micro_batch_size": 8, "global_batch_size": 8},
            "data": {"kind": "synthetic"},
        }
    )


def _measure(cfg: Config, args: argparse.Namespace, place: Place, device_type: str) -> int:
    import torch

    from moefold.launch.ranks import joined

    torch.set_num_threads(args.threads)
    with joined(place, device_type):
        return _compare(cfg, args)


def _compare(cfg: Config, args: argparse.Namespace) -> int:
    from moefold.bench.contestants import EXPERTS_IMPLEMENTATIONS, bare_step, trainer_step, transformers_step
    from moefold.bench.race import median_ratio, race

    contestants = {"moefold": trainer_step(cfg), "moefold, bare loop": bare_step(cfg)}
    try:
        peers = {f"transformers, {kind}": transformers_step(cfg, kind) for kind in EXPERTS_IMPLEMENTATIONS}
    except ImportError:
        raise ConfigError(
            "moefold bench compares with transformers, which is missing: pip install 'moefold[hf]'"
        ) from None
    quick = race(peers, warmup=1, rounds=2)
    fastest = min(quick, key=lambda name: statistics.median(quick[name]))
    times_s = race(contestants | {fastest: peers[fastest]}, warmup=5, rounds=args.steps)
    ours_s = times_s["moefold"]
    report = {
        "dtype": cfg.run.dtype,
        "threads": args.threads,
        "steps": args.steps,
        "tokens_per_s": {name: cfg.tokens_per_step / statistics.median(t) for name, t in times_s.items()},
        "ratio_to_transformers": median_ratio(ours_s, times_s[fastest]),
        "ratio_to_bare_loop": median_ratio(ours_s, times_s["moefold, bare loop"]),
    }
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"{cfg.run.dtype}, {args.threads} threads, medians of {args.steps} steps in turn, after 5")
    for name, seconds in times_s.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds) * 1e3:.0f} .. {max(seconds) * 1e3:.0f}"
        print(f"  {name:28} {cfg.tokens_per_step / middle:8.0f} tokens/s   {middle * 1e3:6.1f} ms ({spread})")
    print(f"ratio to transformers: {report['ratio_to_transformers']:.3f}")
    print(f"ratio to the bare loop: {report['ratio_to_bare_loop']:.3f}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moefold bench",
        description="Time forward, backward and AdamW of a small MoE model in one process: the trainer's step, the "
        "same model in a bare loop, and transformers' MixtralForCausalLM with its fastest experts implementation.",
        epilog="`moefold bench leastloaded` measures least-loaded dispatch under skewed routing; it has a --help too.",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the maths (default float32)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (default 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser
