"""`moefold lm-eval`: run lm-eval tasks on a model, on the number of ranks that the model needs."""

from functools import partial

from moefold.checkpoint.integrity import check_file_sizes
from moefold.cli.command_parser import CommandParser, check_packages, report_on_local_rank0
from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv, check_world_size
from moefold.inference.notices import report_notices
from moefold.terminal import print_escaped

USAGE = "moefold lm-eval --model_args path=MODEL[,tp=2,...] --tasks TASK [...]"
DESCRIPTION = """Run the tasks of lm-eval (the extra `eval`) on a checkpoint, a run folder or a Hugging Face
folder. All options come from lm_eval's own command line except --model, which is moefold. --model_args takes

  path=MODEL        the model
  tp, pp, ep, etp   the mapping (1); the ranks are started on this machine, or joined under torchrun or srun
  world_size        ranks in all (as many as the others need)
  dtype, device     as in `moefold eval` (auto)
  batch_size        texts at once (8)
  max_length        longest text in tokens (the trained sequence length, or the length in config.json)
  max_gen_toks      most new tokens where a task sets no limit (256)
  tokenizer         bytes or a tokenizer.json, not the model's
  chat_template     a file, not the model's template, for --apply_chat_template
  add_bos_token     true or false: texts begin with the BOS token (what the tokenizer declares, as --model hf does)
  part              FILE.py:CLASS of a part with which the model was trained, which is imported; with + between several
  want              with --apply_chat_template: reward to ask for, not align.method.want of the run; none: for none

In your own program, `import moefold.lm_eval` registers model="moefold" with lm_eval.simple_evaluate.

examples:
  moefold lm-eval --model_args path=runs/quickstart --tasks lambada_openai --limit 100
  moefold lm-eval --model_args path=mixtral-hf,tp=2,ep=2,dtype=bfloat16 --tasks hellaswag arc_easy
  moefold lm-eval ls tasks
"""


def run(argv: list[str]) -> int:
    """Run `moefold lm-eval` and return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print_escaped(_parser().format_help(), end="")
        return 0
    with report_on_local_rank0() as rank_env:
        return _run_tasks(argv, rank_env)


def _parser() -> CommandParser:
    """Build the parser that formats the help. lm_eval parses the arguments."""
    return CommandParser(usage=USAGE, description=DESCRIPTION, add_help=False)


def _run_tasks(argv: list[str], rank_env: RankEnv | None) -> int:
    from moefold.inference.lm_eval_settings import LmSettings, applies_chat_template, model_arguments

    check_packages("eval", "lm-eval")
    if argv[0] in ("ls", "validate") or {"-h", "--help"} & set(argv):
        from moefold.inference.lm_eval_model import run_harness

        return run_harness(argv, None)
    names = {word.partition("=")[0] for word in argv}
    if names & {"--model", "-M"}:
        raise ConfigError("--model is moefold here; leave it out, or use lm_eval for other models")
    if names & {"--config", "-C"}:
        raise ConfigError("--config is read by lm_eval alone; give --model_args and --tasks on the command line")
    settings = LmSettings.from_arguments(model_arguments(argv))
    source, cfg = settings.resolve(None if rank_env is None else rank_env.world_size)
    report_notices(source.notices, rank_env)
    if rank_env is not None:
        check_world_size(rank_env, cfg.parallel.world_size)

    from moefold.inference.text import open_tokenizer

    tokenizer = open_tokenizer(source, settings.tokenizer, reports=rank_env is None or rank_env.rank == 0)
    if applies_chat_template(argv):
        settings.load_chat_template(source, tokenizer)

    from moefold.cost.kv_cache import cache_sizes
    from moefold.launch.memory_check import check_inference, choose_device_type

    def cache_bytes(device_type: str) -> dict[str, int]:
        sizes = cache_sizes(cfg, device_type)
        num_bytes = sizes.total_bytes(-(-cfg.train.seq_len // sizes.page_positions), 1)
        return {f"the cache of one text of max_length={cfg.train.seq_len}": num_bytes}

    device_type = choose_device_type(cfg.run.device, cfg.parallel.world_size, rank_env)
    suggestion = "give a smaller --model_args max_length=, or shard the model with tp= and pp="
    check_inference(cfg, device_type, rank_env, extra_bytes=cache_bytes, suggestion=suggestion)
    if source.kind == "checkpoint":
        check_file_sizes(source.path)

    # torch and lm-eval take seconds to import: every error above is reported without them.
    from moefold.inference.lm_eval_model import lm_eval_worker
    from moefold.launch.ranks import run_ranks

    # lm-eval's default batch size is 1. The user's arguments come later and override ours.
    defaults = ["--model", "moefold", "--batch_size", str(settings.batch_size)]
    argv = ["run", *defaults, *(argv[1:] if argv[0] == "run" else argv)]
    return run_ranks(partial(lm_eval_worker, settings, argv), cfg.parallel.world_size, device_type, rank_env)
