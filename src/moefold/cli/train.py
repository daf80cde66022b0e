"""`moefold train`: check the recipe, start or join the ranks, train."""

import argparse
from functools import partial

from moefold.cli.command_parser import CommandParser, recipe_and_overrides, report_on_local_rank0
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.run import RunConfig
from moefold.config.sections.sites import SitesConfig
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.recipe import load_recipe
from moefold.terminal import MULTILINE_CHARS, print_escaped, printable
from moefold.train.run_summary import next_commands
from moefold.train.start import RunSetup, set_up_run
from moefold.validate.config import check_config


def run(argv: list[str]) -> int:
    """Run `moefold train` and return the exit status."""
    args = _parser().parse_args(argv)
    if args.keys is not None:
        from moefold.config.keys.help import keys_text

        print_escaped(keys_text(args.keys), end="")
        return 0
    if args.recipe is None:
        raise ConfigError("a recipe or a setting is missing: moefold train [RECIPE.toml] [section.key=value ...]")
    with report_on_local_rank0() as rank_env:
        recipe = load_recipe(*recipe_and_overrides(args.recipe, args.overrides))
        if recipe.cfg.sites.starts_all:
            cfg = recipe.cfg
            check_config(cfg)
            return _start_sites(cfg.run, cfg.checkpoint, cfg.sites, cfg.num_job_ranks, argv, rank_env)
        setup = set_up_run(recipe, rank_env)
    if setup.is_finished:
        if rank_env is None or rank_env.rank == 0:
            _report_finished(setup)
        return 0
    return _start_training(setup, rank_env)


def _start_sites(
    run: RunConfig,
    checkpoint: CheckpointConfig,
    sites: SitesConfig,
    num_ranks: int,
    argv: list[str],
    rank_env: RankEnv | None,
) -> int:
    """Start all sites of a run on this machine, each as `moefold train` with its own number and run folder."""
    from moefold.cli.main import main
    from moefold.launch.local_sites import HOST, run_local_sites, site_environments

    environments = site_environments(sites.count, num_ranks, run.device, rank_env)

    def run_site(number: int, port: int) -> int:
        folders = [f"run.dir={run.dir}/site-{number}"]
        folders += [f"checkpoint.dir={checkpoint.dir}/site-{number}"] if checkpoint.dir else []
        own = (f"sites.number={number}", f"sites.meet={HOST}:{port}", *folders)
        keys = tuple(word.partition("=")[0] + "=" for word in own)
        return main(["train", *(word for word in argv if not word.startswith(keys)), *own])

    return run_local_sites(run_site, sites.count, sites.min_members, environments)


def _report_finished(setup: RunSetup) -> None:
    folder = setup.folder
    lines = [folder.message] if folder.message else []
    lines.append(f"{setup.resume} has all {folder.cfg.run.steps} steps of run.steps; nothing to do")
    lines += [*next_commands(folder.cfg), "or start a new run: the same command with run.dir=ANOTHER_FOLDER"]
    print(printable("\n".join(lines), MULTILINE_CHARS))


def _start_training(setup: RunSetup, rank_env: RankEnv | None) -> int:
    """Start or join the ranks."""
    with report_on_local_rank0():
        device_type = setup.choose_device(rank_env)
    setup.prepare_data(rank_env)
    # torch takes seconds to import: without a GPU, every error above is reported without it.
    from moefold.launch.ranks import run_ranks
    from moefold.train.worker import train_worker

    main = partial(train_worker, setup)
    cfg = setup.folder.cfg
    return run_ranks(main, cfg.num_job_ranks, device_type, rank_env, regroups=cfg.faults.regroups)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold train",
        "Train a model from a recipe. Starts the ranks itself on one machine; joins them under torchrun or srun.",
        "Ctrl-C finishes the step, saves, and exits 130; the same command resumes.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE.toml",
        help="the recipe, for example recipes/quickstart.toml; without one, the settings change the defaults",
    )
    parser.settings("settings that override the recipe")
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="PATTERN",
        help="list the keys of a recipe with their defaults: those whose name has PATTERN (lr, rope, parallel.*), or "
        "else whose help has it; all without PATTERN",
    )
    return parser
