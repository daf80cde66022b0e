"""Worker of `moefold lm-eval`: the function that each rank runs."""

import sys
import traceback
from collections.abc import Callable
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from moefold.errors import ConfigError
from moefold.host.rank_env import RankEnv
from moefold.inference.lm_eval_model import MoefoldLM
from moefold.inference.lm_eval_settings import LmSettings
from moefold.inference.load import load_model
from moefold.inference.scoring import ServedModel
from moefold.inference.text import open_tokenizer
from moefold.launch.exit import hard_exit
from moefold.launch.failure import RankErrorHandler
from moefold.launch.ranks import init_distributed


def lm_eval_worker(settings: LmSettings, argv: list[str], rank_env: RankEnv, device_type: str) -> int:
    """Join the process group; run lm-eval on rank 0 and serve the model on the other ranks. Return the exit status.

    The model is loaded when lm-eval requests it, so that lm-eval reports wrong options before weights are read.
    """
    with RankErrorHandler(rank_env, lambda: False), init_distributed(rank_env, device_type) as device:
        loaded: list[ServedModel] = []

        def load_here() -> ServedModel:
            source, cfg = settings.resolve(rank_env.world_size)
            loaded.append(ServedModel(load_model(source, cfg, device, open_tokenizer(source, settings.tokenizer))))
            return loaded[0]

        if rank_env.rank:
            load_here().serve()
            return 0
        status = run_harness(argv, load_here)
        if loaded:
            loaded[0].shutdown()
        elif rank_env.world_size > 1:
            # The other ranks block in load_model, which is collective.
            hard_exit(status)
    return status


def run_harness(argv: list[str], load_here: Callable[[], ServedModel] | None) -> int:
    """Run lm-eval's command line, with the model "moefold" registered as the one that `load_here` loads.

    Raises:
        ConfigError: lm-eval rejects its options, or a task's requirements are missing.
    """
    if load_here is not None:
        load = load_here

        class OpenLM(MoefoldLM):
            """lm-eval model of this command."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__(load(), **arguments)

        register_model("moefold")(OpenLM)
    previous_argv = sys.argv
    sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError | BrokenPipeError) or _was_raised_in_moefold(error):
            raise
        hint = "`moefold lm-eval ls tasks` lists its tasks, `moefold lm-eval run --help` its options"
        raise ConfigError(f"lm-eval: {str(error).rstrip('.')}; {hint}") from error
    finally:
        sys.argv = previous_argv
    return 0


def _was_raised_in_moefold(error: BaseException) -> bool:
    """Return whether an error was raised in moefold code that lm-eval called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__")).startswith("moefold.") for frame in frames[1:])
