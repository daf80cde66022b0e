"""`moefold generate`: generate text from prompts."""

import argparse
import re
import sys
from functools import partial

from moefold.cli.command_parser import CommandParser, add_part_option, report_on_local_rank0
from moefold.cli.inference_options import add_generation_options, add_inference_options, read_options
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.message_text import closest_match

EPILOG = """MODEL is a checkpoint (RUN_DIR/checkpoints/step-000100), a folder of checkpoints or a run folder, of which
the newest complete one is taken, RUN_DIR/best, the one with the lowest held-out loss, or a Hugging Face folder.
Without a PROMPT, standard input is the prompt, without its last newline. A single prompt streams to standard output
with its continuation; several are continued together and printed when all are done. With --chat each prompt is a
message to a model that was fine-tuned on conversations: it is rendered with the chat template, and the answer ends with
the assistant's turn. Arguments of the form parallel.KEY=N are the mapping: tp, pp, ep, etp, world_size (by default as
many ranks as the others need). Any other argument is a prompt; a prompt that looks like the mapping can come on
standard input.

examples:
  moefold generate runs/quickstart "The for statement" --max-tokens 200 --temperature 0.8 --top-p 0.95
  moefold generate runs/sft "What is a stack?" --chat --temperature 0
  echo "def main():" | moefold generate runs/quickstart parallel.tp=2 parallel.ep=2 --temperature 0
"""

_OVERRIDE = re.compile(r"([a-z]+)\.[a-z_.]+=\S+")


def run(argv: list[str]) -> int:
    """Run `moefold generate` and return the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    with report_on_local_rank0() as rank_env:
        from moefold.inference.jobs import GenerateOptions, GenerationRequest, prepare_generation
        from moefold.inference.sampling import SamplingParams

        prompts = tuple(word for word in arguments.words if not is_override(word))
        request = GenerationRequest(
            model=arguments.model,
            read_prompts=lambda: prompts or (_read_prompt(rank_env),),
            max_tokens=arguments.max_tokens,
            sampling=read_options(SamplingParams, arguments),
            overrides=tuple(word for word in arguments.words if is_override(word)),
            options=read_options(GenerateOptions, arguments),
        )
        job = prepare_generation(request, rank_env)
        # torch takes seconds to import: without a GPU, every error above is reported without it.
        from moefold.inference.worker import generate_worker
        from moefold.launch.ranks import run_ranks

        main = partial(generate_worker, job, as_json=arguments.json, echoes=not arguments.no_echo)
        return run_ranks(main, job.cfg.parallel.world_size, job.device_type, rank_env)


def is_override(word: str) -> bool:
    """Return whether a word is a setting, valid or not, and not a prompt."""
    match = _OVERRIDE.fullmatch(word)
    # A misspelt `parallel.` is a setting as well.
    return match is not None and (match[1] == "moe" or closest_match(match[1], ("parallel",), cutoff=0.75) is not None)


def _read_prompt(rank_env: RankEnv | None) -> str:
    """Read the prompt from standard input. A launcher is refused: its ranks do not share standard input."""
    if rank_env is not None:
        raise ConfigError("a prompt is missing: ranks of a launcher share no standard input; give it as an argument")
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError('a prompt is missing: moefold generate MODEL "the beginning of a text", or on standard input')
    try:
        # Decode as UTF-8 in every locale: the C locale would pass undecodable bytes through.
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt on standard input is not text in UTF-8 ({error.reason}, byte {error.start}); convert it first"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "moefold generate",
        "Continue a text, token by token. Starts the ranks itself on one machine; joins them under\ntorchrun or srun.",
        EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint, run folder or Hugging Face folder")
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="text to continue; parallel.KEY=N sets the mapping")
    parser.option("--max-tokens", 128, "N", "most new tokens per prompt (128)")
    parser.option("--temperature", 1.0, "T", "divides the logits; 0: greedy decoding (1)")
    parser.option("--top-k", 0, "K", "sample from the K likeliest; 0: from all (0)")
    parser.option("--top-p", 1.0, "P", "sample from the likeliest that reach probability P (1)")
    parser.option(
        "--min-p",
        0.0,
        "P",
        "sample from tokens at least P times as likely as the likeliest, before --top-k and --top-p (0)",
    )
    parser.option("--seed", 0, None, "seed of the sampled tokens (0)")
    parser.flag("--chat", "prompts are messages, put into the model's chat template")
    parser.option("--chat-template", "", "FILE", "template for --chat instead of the model's")
    parser.option("--system", "", "TEXT", "with --chat: system message before each prompt")
    parser.option("--want", "", "REWARD", "with --chat: reward to ask for, not align.method.want; none: for none")
    parser.flag("--no-echo", "print the continuation without its prompt")
    parser.flag("--ignore-eos", "continue after an end-of-text token")
    parser.option("--tokenizer", "", "PATH", "bytes or a tokenizer.json, not the model's")
    parser.option(
        "--cache-gib",
        0.0,
        "G",
        "GiB of the KV cache of a rank; fewer prompts run at once; 0: for all, up to 64 a data-parallel rank (0)",
    )
    add_generation_options(parser)
    add_inference_options(parser)
    parser.flag("--json", "print one JSON object per prompt: prompt, text, tokens, end")
    add_part_option(parser)
    return parser
