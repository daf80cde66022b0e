"""`moefold serve`: an HTTP endpoint with the OpenAI API."""

import argparse
import os
import signal
import sys
from dataclasses import replace
from functools import partial

from moefold.cli.command_parser import CommandParser, add_part_option, check_packages, report_on_local_rank0
from moefold.cli.inference_options import add_generation_options, add_inference_options, read_options
from moefold.errors import SIGNAL_STATUS

KEY_VARIABLE = "MOEFOLD_API_KEY"

EPILOG = """MODEL is a checkpoint, a run folder or a Hugging Face folder. Arguments of the form parallel.KEY=N are the
mapping. Requests join the samples that run. Without a key, other addresses than the loopback are for networks in which
everybody may use the server.

examples:
  moefold serve runs/quickstart
  moefold serve mixtral-hf parallel.tp=2 parallel.ep=2 --port 9000 --cache-gib 4
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def", "max_tokens": 20}'
"""


def run(argv: list[str]) -> int:
    """Run `moefold serve` and return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    with report_on_local_rank0() as rank_env:
        check_packages("serve", "starlette", "uvicorn")
        from moefold.inference.serve.job import ServeOptions, prepare_server

        options = read_options(ServeOptions, arguments)
        if not options.api_key:
            # Other users of the machine see the arguments of a command, but not its environment.
            options = replace(options, api_key=os.environ.get(KEY_VARIABLE, ""))
        job = prepare_server(arguments.model, arguments.overrides, options, rank_env)
        # torch takes seconds to import: without a GPU, every error above is reported without it.
        from moefold.inference.serve.app import serve_worker
        from moefold.launch.exit import hard_exit
        from moefold.launch.ranks import run_ranks

        try:
            return run_ranks(partial(serve_worker, job), job.cfg.parallel.world_size, job.device_type, rank_env)
        except KeyboardInterrupt:
            # Everything is closed. The end of the interpreter would free torch's modules for seconds on a busy machine.
            print("moefold: interrupted", file=sys.stderr)
            hard_exit(SIGNAL_STATUS + signal.SIGINT)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold serve",
        "Serve a model over HTTP: /v1/completions, /v1/chat/completions and /v1/models of the OpenAI API,\n"
        "with continuous batching. Starts the ranks itself on one machine; joins them under torchrun or srun.",
        EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("overrides", nargs="*", metavar="parallel.KEY=N", help="the mapping")
    parser.option("--host", "127.0.0.1", None, "name or address to listen on (127.0.0.1)")
    parser.option("--port", 8000, None, "port; 0: any that is free (8000)")
    parser.option("--name", "", None, "name of the model in the API (the name of its folder)")
    parser.option("--slots", 64, "N", "samples decoded at once a dp rank (64)")
    parser.option("--cache-gib", 1.0, "G", "GiB of the KV cache of a rank (1)")
    parser.option("--max-length", 0, "N", "most tokens of prompt and completion (the context)")
    parser.option("--max-concurrent", 256, "N", "most samples that run or wait (256)")
    parser.option("--max-body-kib", 1024, "N", "largest request, in KiB (1024)")
    parser.option("--api-key", "", "KEY", f"key that clients must send (of the environment: {KEY_VARIABLE})")
    parser.option("--access-log", "", "FILE", "file to add a line for each request to (-: standard error)")
    add_generation_options(parser)
    parser.option("--tokenizer", "", "PATH", "bytes or a tokenizer.json, not the model's")
    parser.option("--want", "", "REWARD", "reward that chats ask for, not align.method.want; none: for none")
    parser.option("--chat-template", "", "FILE", "chat template instead of the model's")
    parser.flag("--reasoning", "chats: text between <think> and </think> is reasoning_content")
    add_inference_options(parser)
    add_part_option(parser)
    return parser
