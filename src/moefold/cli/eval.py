"""`moefold eval`: mean cross-entropy of a model over a file of tokens or text."""

import argparse
import sys
from functools import partial
from pathlib import Path

from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.inference_options import add_inference_options, read_options
from moefold.terminal import print_escaped

EPILOG = """MODEL is a checkpoint (RUN_DIR/checkpoints/step-000100), a folder of checkpoints or a run folder, of which
the newest complete one is taken, RUN_DIR/best, the one with the lowest held-out loss, or a Hugging Face folder. The
file is split into consecutive sequences of S tokens, and every token but the first of each is predicted. Tokens after
the last whole sequence are left out, unless --keep-tail is given. Without --seq-len, S is train.seq_len of the run, or,
for a Hugging Face folder, its max_position_embeddings, but at most 2048; stderr reports it.

Overrides are parallel.tp, cp, pp, ep, etp, world_size (by default as many ranks as the others need), order, moe_order,
dispatcher, context; and moe.eval_capacity_factor, drop_policy, drop_scope: without them no token is dropped.

examples:
  moefold eval runs/quickstart --tokens held_out.npy --seq-len 256 --json
  moefold eval runs/quickstart --text README.md parallel.tp=2 parallel.ep=2
"""


def run(argv: list[str]) -> int:
    """Run `moefold eval` and return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    with report_on_local_rank0() as rank_env:
        from moefold.inference.jobs import EvalOptions, EvalRequest, prepare_evaluation

        request = read_options(EvalRequest, arguments, options=read_options(EvalOptions, arguments))
        is_first_rank = rank_env is None or rank_env.rank == 0
        job = prepare_evaluation(
            request, rank_env, lambda notice: print_escaped(notice, file=sys.stderr) if is_first_rank else None
        )
        # torch takes seconds to import: without a GPU, every error above is reported without it.
        from moefold.inference.worker import eval_worker
        from moefold.launch.ranks import run_ranks

        main = partial(eval_worker, job, arguments.json)
        return run_ranks(main, job.cfg.parallel.world_size, job.device_type, rank_env)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold eval",
        "Compute mean cross-entropy and perplexity of a model over a file. Starts the ranks itself on one\n"
        "machine; joins them under torchrun or srun.",
        EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.settings("the mapping; see below")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokens", type=Path, metavar="FILE.npy", help="ids, one row of integers")
    source.add_argument("--text", type=Path, metavar="FILE", help="text in UTF-8, for the model's tokenizer")
    parser.option("--seq-len", int, "S", "tokens per sequence (default: see above)")
    parser.flag("--keep-tail", "evaluate the remaining tokens as a shorter sequence")
    parser.option("--batch-size", 8, "N", "sequences at once on each data-parallel rank (8)")
    parser.option("--logits", Path, "OUT.npy", "write float32 logits [sequences, S, V]")
    parser.flag("--force", "replace the file of --logits if it exists")
    parser.option("--tokenizer", "", "PATH", "for --text: bytes or a tokenizer.json")
    add_inference_options(parser)
    parser.flag("--json", "print one JSON object: loss, perplexity, tokens")
    add_part_option(parser)
    return parser
