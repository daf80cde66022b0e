"""`moefold verify`: prove on CPU that a recipe's mapping computes what one process computes."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from moefold.config.checks import check_config
from moefold.config.checks_dispatch import check_dispatch_device
from moefold.config.checks_machine import check_data_source, check_replay
from moefold.config.load import load_config
from moefold.config.schema import Config
from moefold.errors import ConfigError

TOLERANCE = 1e-9
"""Largest relative error that counts as equal, in float64."""

RANK_GIB = 0.35
"""Resident memory of one small CPU rank, torch included."""


def run(argv: list[str]) -> int:
    """Verify; returns 0 if the mapping equals the oracle, 1 if not."""
    args = _parser().parse_args(argv)
    cfg = load_config(Path(args.recipe), args.overrides)
    check_config(cfg)
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    if args.shrink:
        from moefold.verify.shrink import shrink

        cfg = shrink(cfg)
    _refuse_too_many(cfg.parallel.world_size)
    check_data_source(cfg)
    cfg = replace(cfg, run=replace(cfg.run, dtype="float64", device="cpu", steps=max(cfg.run.steps, args.steps)))
    check_replay(replace(cfg, run=replace(cfg.run, steps=args.steps)))
    check_dispatch_device(cfg, "cpu")
    return _verify(cfg, args.steps)


def _verify(cfg: Config, steps: int) -> int:
    from moefold.data import prepare
    from moefold.testing.pool import WorkerPool
    from moefold.verify.compare import differences, run_oracle
    from moefold.verify.mapping import run_mapping

    p, model = cfg.parallel, cfg.model
    print(
        f"attention tp={p.tp} cp={p.cp} dp={p.dp} pp={p.pp}, experts etp={p.etp} ep={p.ep} edp={p.edp} pp={p.pp}: "
        f"{p.world_size} ranks, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_experts} experts, float64"
    )
    prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=model.vocab_size, seed=cfg.run.seed)
    oracle = run_oracle(cfg, steps)
    ranks = WorkerPool().run(p.world_size, run_mapping, cfg, steps, timeout_s=3600.0)
    for i, (mine, theirs) in enumerate(zip(ranks[0].steps, oracle.steps, strict=True)):
        print(f"step {i + 1}   loss {mine.loss:.12f} (oracle {theirs.loss:.12f})   ", end="")
        print(f"grad norm {mine.grad_norm:.12f} (oracle {theirs.grad_norm:.12f})")
    found = differences(oracle, ranks)
    for kind, what in (("gradients", "worst gradient"), ("weights", f"worst weight after {steps} steps")):
        worst = next(d for d in found if d.name.startswith(kind))
        print(f"{what}: {worst.name.removeprefix(kind + ' ')}, relative error {worst.error:.2e}")
    is_equal = found[0].error <= TOLERANCE
    if is_equal:
        print(f"equal: all {len(found)} numbers and tensors agree within {TOLERANCE:.0e}")
    else:
        num_wrong = sum(d.error > TOLERANCE for d in found)
        print(f"NOT equal: {num_wrong} of {len(found)} differ by more than {TOLERANCE:.0e}:")
        print("\n".join(f"  {d.error:.2e}  {d.name}" for d in found[:10]))
    return 0 if is_equal else 1


def _refuse_too_many(world_size: int) -> None:
    have_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if world_size * RANK_GIB > have_gib:
        raise ConfigError(
            f"parallel.world_size={world_size} ranks of about {RANK_GIB} GiB do not fit this machine's "
            f"{have_gib:.0f} GiB; "
            "add --shrink, which keeps every degree but dp, or lower the degrees"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moefold verify",
        description="Train some steps in float64 on this machine's CPU, once in one process with plain maths and once "
        "under the recipe's mapping, and compare every loss, gradient and weight. Exit 0: equal. Exit 1: not.",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml", help="the recipe whose mapping is to be proved")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that win over the recipe")
    parser.add_argument("--shrink", action="store_true", help="make the model as small as the mapping allows")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    return parser
