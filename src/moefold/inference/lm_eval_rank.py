"""What each rank of `moefold lm-eval` runs."""

import sys
import traceback
from collections.abc import Callable
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from moefold.errors import ConfigError
from moefold.inference.lm_eval_model import MoefoldLM
from moefold.inference.lm_eval_settings import LmSettings
from moefold.inference.opening import open_model
from moefold.inference.scoring import CommandedModel
from moefold.inference.text import open_tokenizer
from moefold.launch.departure import leave
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.ranks import joined


def lm_eval_rank(settings: LmSettings, words: list[str], place: Place, device_type: str) -> int:
    """Join the job; the first rank runs lm-eval on the model, the others follow.

    The model is opened when lm-eval asks for it, so that its words are answered before weights are read.
    """
    with FailingRank(place, lambda: False), joined(place, device_type) as device:
        opened: list[CommandedModel] = []

        def open_here() -> CommandedModel:
            source, cfg = settings.resolve(place.world_size)
            opened.append(CommandedModel(open_model(source, cfg, device, open_tokenizer(source, settings.tokenizer))))
            return opened[0]

        if place.rank:
            open_here().follow()
            return 0
        status = run_harness(words, open_here)
        if opened:
            opened[0].dismiss()
        elif place.world_size > 1:
            # The others still wait for this rank to open its part.
            leave(status)
    return status


def run_harness(words: list[str], open_here: Callable[[], CommandedModel] | None) -> int:
    """Run lm-eval's own command line; `moefold` names the model that is opened here.

    Raises:
        ConfigError: lm-eval refuses its words, or what a task needs is not there.
    """
    if open_here is not None:
        make = open_here

        class OpenLM(MoefoldLM):
            """The model of this command."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__(make(), **arguments)

        register_model("moefold")(OpenLM)
    before = sys.argv
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError | BrokenPipeError) or _passed_through_us(error):
            raise
        ways_out = "`moefold lm-eval ls tasks` lists its tasks, `moefold lm-eval run --help` its options"
        raise ConfigError(f"lm-eval: {str(error).rstrip('.')}; {ways_out}") from error
    finally:
        sys.argv = before
    return 0


def _passed_through_us(error: BaseException) -> bool:
    """Whether an error came from code of ours that lm-eval called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(str(frame.f_globals.get("__name__")).startswith("moefold.") for frame in frames[1:])
