"""`moefold train`: check the recipe, start or join the ranks, train."""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

from moefold.checkpoint.folder import find_resume, read_meta, refuse_unfit
from moefold.checkpoint.manifest import hash_faults, read_manifest
from moefold.cli.one_voice import one_voice
from moefold.config.checks import check_config, check_machine
from moefold.config.checks_dispatch import check_dispatch_device
from moefold.config.checks_kernels import check_kernel_device
from moefold.config.checks_machine import check_replay_content
from moefold.config.checks_memory import check_memory_device
from moefold.config.checks_offload import check_offload_device
from moefold.config.elastic import with_world_size
from moefold.config.load import config_from_dict, config_to_dict, load_given
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.launch.place import Place, check_world_size, find_place


def run(argv: list[str]) -> int:
    """Train; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.keys:
        from moefold.config.reference import keys_text

        print(keys_text(), end="")
        return 0
    if args.recipe is None:
        raise ConfigError("a recipe is missing: moefold train RECIPE.toml [section.key=value ...]")
    place = find_place()
    with one_voice(place):
        cfg, given = load_given(Path(args.recipe), args.overrides)
        if cfg.parallel.mapping == "auto":
            cfg, _met = _plan(cfg, given, place)
        if place is not None and cfg.parallel.elastic:
            cfg = with_world_size(cfg, place.world_size)
        check_config(cfg)
        check_machine(cfg)
        if place is not None:
            check_world_size(place, cfg.parallel.world_size)
        resume = find_resume(cfg)
    if resume is not None and read_meta(resume).step >= cfg.run.steps and _is_sound(resume, cfg):
        if place is None or place.rank == 0:
            print(f"{resume} has all {cfg.run.steps} steps of run.steps; nothing to do")
        return 0
    return _train(cfg, place, resume)


def _plan(cfg: Config, given: frozenset[str], place: Place | None) -> tuple[Config, object]:
    """The planned recipe, and what must live until the ranks have met."""
    # Only a machine's devices tell what to plan for, and they take torch.
    from moefold.launch.machine import Machine, machine_of, weakest
    from moefold.plan.auto import plan_mapping

    machine = machine_of(cfg.run.device, place)
    if place is None or place.world_size == 1:
        planned, words = plan_mapping(cfg, given, machine)
        print(words)
        return planned, None
    from moefold.launch.one_answer import Facts, one_answer

    def answer(said: list[Facts]) -> Facts:
        planned, words = plan_mapping(cfg, given, weakest([Machine(**facts) for facts in said]))
        tree = config_to_dict(planned)
        return {"parallel": tree["parallel"], "train": tree["train"], "words": words}

    found, store = one_answer(place, cfg.faults.timeout_s, asdict(machine), answer)
    if place.rank == 0:
        print(found["words"])
    sections = {section: found[section] for section in ("parallel", "train")}
    return config_from_dict({**config_to_dict(cfg), **sections}), store


def _is_sound(checkpoint: Path, cfg: Config) -> bool:
    """Whether a finished run has what it needs; if not, the ranks say so and go on from the one before."""
    manifest = read_manifest(checkpoint)
    return not cfg.checkpoint.verify or not hash_faults(checkpoint, manifest, manifest)


def _train(cfg: Config, place: Place | None, resume: Path | None) -> int:
    # torch takes seconds to import: everything above answers without it.
    from moefold.data import prepare
    from moefold.data.fingerprint import fingerprint
    from moefold.launch.ranks import choose_device, run_ranks
    from moefold.train.rank import train_rank

    world_size = cfg.parallel.world_size
    device_type = choose_device(cfg.run.device, world_size, place)
    check_dispatch_device(cfg, device_type)
    check_kernel_device(cfg, device_type)
    check_offload_device(cfg, device_type)
    check_memory_device(cfg, device_type)
    if place is None or place.local_rank == 0:
        check_replay_content(cfg)
        if cfg.data.kind != "tokens" or cfg.data.corrupt == "fatal":
            # Which token files are left out is for the ranks to agree on, and a matter of the checkpoint.
            prepare(cfg.data, seq_len=cfg.train.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.run.seed)
        refuse_unfit(resume, cfg, None if resume is None else fingerprint(cfg.data))
    return run_ranks(partial(train_rank, cfg), world_size, device_type, place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moefold train",
        description="Train a model from a recipe. "
        "Starts the ranks itself on one machine; joins them under torchrun or srun.",
        epilog="Ctrl-C finishes the step, saves if checkpoint.every is set, and exits 130; the same command resumes.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE.toml", help="the recipe, for example recipes/quickstart.toml"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that win over the recipe")
    parser.add_argument("--keys", action="store_true", help="list every key of a recipe, with its default")
    return parser
