"""What each rank of `moefold lm-eval` runs."""

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
    """Join the job; the first rank runs lm-eval on the model, the others follow.

    The model is opened when lm-eval asks for it, so that its words are answered before weights are read.
    """
    with RankErrorHandler(rank_env, lambda: False), init_distributed(rank_env, device_type) as device:
        opened: list[ServedModel] = []

        def open_here() -> ServedModel:
            source, cfg = settings.resolve(rank_env.world_size)
            opened.append(ServedModel(load_model(source, cfg, device, open_tokenizer(source, settings.tokenizer))))
            return opened[0]

        if rank_env.rank:
            open_here().serve()
            return 0
        status = run_harness(argv, open_here)
        if opened:
            opened[0].shutdown()
        elif rank_env.world_size > 1:
            # The others still wait for this rank to open its part.
            hard_exit(status)
    return status


def run_harness(argv: list[str], load_here: Callable[[], ServedModel] | None) -> int:
    """Run lm-eval's own command line; `moefold` names the model that is opened here.

    Raises:
        ConfigError: lm-eval refuses its words, or what a task needs is not there.
    """
    if load_here is not None:
        make = load_here

        class OpenLM(MoefoldLM):
            """The model of this command."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__(make(), **arguments)

        register_model("moefold")(OpenLM)
    before = sys.argv
    sys.argv = ["lm_eval", *argv]
    try:
        cli_evaluate()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError | BrokenPipeError) or _was_raised_in_moefold(error):
            raise
        ways_out = "`moefold lm-eval ls tasks` lists its tasks, `moefold lm-eval run --help` its options"
        raise ConfigError(f"lm-eval: {str(error).rstrip('.')}; {ways_out}") from error
    finally:
        sys.argv = before
    return 0


def _was_raised_in_moefold(error: BaseException) -> bool:
    """Whether an error came from code of ours that lm-eval called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__")).startswith("moefold.") for frame in frames[1:])
