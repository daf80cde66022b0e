"""`moefold template`: print a job file for a cluster, filled from a recipe."""

import argparse
from pathlib import Path

from moefold.cli.command_parser import CommandParser
from moefold.launch.job_file import (
    DEFAULT_GRACE_S,
    DEFAULT_SLURM_TIME,
    SCHEDULERS,
    SITE_KEYS,
    JobRequest,
    write_job_file,
)
from moefold.recipe import load_config
from moefold.terminal import print_escaped
from moefold.validate.config import check_config

EPILOG = (
    "schedulers:\n"
    + "\n".join(f"  {name:10}  {summary}" for name, summary in SCHEDULERS.items())
    + """

example:
  moefold template slurm recipes/mixtral-8x7b.toml run.dir=/shared/mixtral --nodes 8 --gpus-per-node 8
"""
)


def run(argv: list[str]) -> int:
    """Print the job file. Raise ConfigError if the recipe is wrong, or the job contradicts it."""
    arguments = vars(_parser().parse_intermixed_args(argv))
    recipe = arguments.pop("recipe")
    overrides = arguments.pop("overrides")
    cfg = load_config(Path(recipe), overrides)
    check_config(cfg)
    print_escaped(write_job_file(cfg, recipe, overrides, JobRequest(**arguments)), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold template", "Print a job file that trains a recipe on a cluster; save it with > FILE.", EPILOG
    )
    parser.add_argument("scheduler", choices=SCHEDULERS, metavar="SCHEDULER", help="one of those below")
    parser.recipe("the recipe, by the path that the nodes have")
    parser.option("--nodes", int, "N", "number of nodes", required=True)
    parser.option("--gpus-per-node", int, "G", "GPUs of a node, a rank on each", required=True)
    parser.option("--restarts", 3, "R", "starts after a failure, from the newest checkpoint (3)")
    parser.option("--time", "", "T", f"time limit, [DAYS-]HH:MM:SS (slurm: {DEFAULT_SLURM_TIME}; pytorchjob)")
    parser.option("--grace", int, "S", f"seconds from SIGTERM to the end ({DEFAULT_GRACE_S}; slurm, pytorchjob)")
    parser.option("--image", "", "I", "container image with moefold (trainjob, pytorchjob, skypilot)")
    parser.option("--claim", "", "NAME", "shared volume with run.dir (trainjob, pytorchjob, skypilot)")
    parser.option("--gpu", "", "NAME", "name of the GPU, such as H100 (skypilot)")
    parser.option("--cpus-per-task", int, "C", "CPU cores of a rank (slurm: the cores of the node, shared)")
    parser.option("--mem", "", "M", "memory of a node, such as 512G, in GiB; not ray (slurm: all)")
    parser.add_argument(
        "--exclusive",
        action=argparse.BooleanOptionalAction,
        help="whole nodes, or a share of them with --cpus-per-task (slurm: whole nodes)",
    )
    for key in SITE_KEYS:
        parser.add_argument(f"--{key}", default="", metavar="NAME", help=f"{key} of the site, as for sbatch (slurm)")
    return parser
