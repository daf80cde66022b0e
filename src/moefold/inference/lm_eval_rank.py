"""What each rank of `moefold lm_eval` runs."""

import sys
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from moefold.inference.lm_eval_model import MoefoldLM
from moefold.inference.lm_eval_settings import LmSettings
from moefold.inference.opening import open_model
from moefold.inference.scoring import CommandedModel
from moefold.inference.text import open_tokenizer
from moefold.launch.failure import FailingRank
from moefold.launch.place import Place
from moefold.launch.ranks import joined


def lm_eval_rank(settings: LmSettings, words: list[str], place: Place, device_type: str) -> int:
    """Join the job and open the model; the first rank runs lm-eval on it, the others follow."""
    with FailingRank(place, lambda: False), joined(place, device_type) as device:
        source, cfg = settings.resolve(place.world_size)
        opened = open_model(source, cfg, device, open_tokenizer(source, settings.tokenizer))
        model = CommandedModel(opened)
        if place.rank:
            model.follow()
            return 0
        status = run_harness(words, model)
        model.dismiss()
    return status


def run_harness(words: list[str], model: CommandedModel | None) -> int:
    """Run lm-eval's own command line; `moefold` names the given model."""
    if model is not None:

        class OpenLM(MoefoldLM):
            """The model of this command, open already."""

            def __init__(self, **arguments: Any) -> None:
                super().__init__(model, **arguments)

        register_model("moefold")(OpenLM)
    before = sys.argv
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.argv = before
    return 0
