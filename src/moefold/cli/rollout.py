"""`moefold rollout`: sample completions of prompts, score them, and write them as JSON lines."""

import argparse
from functools import partial
from pathlib import Path

from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.inference_options import add_generation_options, add_inference_options, read_options
from moefold.errors import ConfigError

EPILOG = """MODEL is a checkpoint, a run folder or a Hugging Face folder. Prompts are JSON lines with a column "prompt",
a text or a list of messages, and the columns that the reward reads; or the generated problems of a task. FILE.jsonl
gets one line for each completion: its prompt with all columns, completion, reward, log-probability. Standard output
gets one line of JSON: mean reward, and the probability that one of k samples is right. Arguments parallel.KEY=N are
the mapping: tp, pp, ep, etp, world_size; data-parallel ranks share the prompts.

examples:
  moefold rollout runs/countdown --task countdown --held-out --samples 8 --out scored.jsonl
  moefold rollout runs/sft --prompts prompts.jsonl --reward reward.py:reward --samples 4 --out scored.jsonl
  moefold rollout runs/sort --task sort --task-size 8 --temperature 0 --samples 1 --out greedy.jsonl
"""


def run(argv: list[str]) -> int:
    """Run `moefold rollout` and return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    with report_on_local_rank0() as rank_env:
        from moefold.inference.rollout_job import RolloutRequest, prepare_rollouts
        from moefold.inference.sampling import SamplingParams

        if wrong := [word for word in arguments.overrides if not word.startswith("parallel.")]:
            raise ConfigError(
                f"{wrong[0]!r} is not a setting of the mapping, such as parallel.tp=2; prompts are in a file"
            )
        sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
        request = read_options(RolloutRequest, arguments, sampling=sampling)
        job = prepare_rollouts(request, rank_env)
        # torch takes seconds to import: without a GPU, every error above is reported without it.
        from moefold.inference.rollout_worker import rollout_worker
        from moefold.launch.ranks import run_ranks

        return run_ranks(partial(rollout_worker, job), job.cfg.parallel.world_size, job.device_type, rank_env)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold rollout",
        "Sample completions of prompts and score them with a reward function. Starts the ranks itself on\n"
        "one machine; joins them under torchrun or srun.",
        EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="parallel.KEY=N", help="the mapping")
    parser.repeated("--prompts", "FILE", "JSON lines of prompts; may be repeated")
    parser.flag("--skip-bad-rows", "skip rows that are not a prompt, and count them")
    parser.option("--task", "", None, "generated problems instead of prompts", choices=("sort", "add", "countdown"))
    parser.option("--task-size", 4, "N", "as data.task_size in a recipe (4)")
    parser.option("--count", 0, "N", "prompts; 0: all, or 256 problems (0)")
    parser.flag("--held-out", "problems that recipes do not train on")
    parser.repeated(
        "--reward", "NAME", "exact, number, sort, countdown, or FILE.py:FUNCTION; may be repeated, for the sum"
    )
    parser.repeated("--reward-weight", "W", "factor of a reward in the sum, as often as --reward (1)", float)
    parser.option("--samples", 8, "G", "completions of each prompt (8)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="file to write")
    parser.flag("--force", "replace the file if it exists")
    parser.option("--max-tokens", 64, "N", "most new tokens of a completion (64)")
    parser.option("--temperature", 1.0, "T", "divides the logits; 0: greedy decoding (1)")
    parser.option("--seed", 0, None, "seed of the sampled tokens and of the problems (0)")
    parser.option("--slots", 256, "N", "completions that a rank decodes at once (256)")
    parser.option("--cache-gib", 0.0, "GIB", "cache of a rank; 0: as much as the slots need (0)")
    parser.option("--want", "", "REWARD", "reward that prompts ask for, not align.method.want; none: for none")
    add_generation_options(parser)
    parser.option("--tokenizer", "", "PATH", "bytes or a tokenizer.json, not the model's")
    parser.option("--chat-template", "", "FILE", "template of prompts that are messages")
    add_inference_options(parser)
    add_part_option(parser)
    return parser
