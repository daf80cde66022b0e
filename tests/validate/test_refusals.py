"""Recipes that cannot work are refused with a message that names the key, the value, the rule and a way out."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config
from tests.validate import mapping_refusals, model_refusals, recipe_refusals, rl_refusals

REFUSED = {
    **mapping_refusals.FOLDS,
    **mapping_refusals.MAPPINGS,
    **mapping_refusals.PIPELINES,
    **mapping_refusals.PLACEMENTS,
    **model_refusals.SIZES,
    **recipe_refusals.ROUTING,
    **recipe_refusals.TRAINING,
    **recipe_refusals.ADAPTERS,
    **recipe_refusals.DATA,
    **recipe_refusals.ALIGNMENT,
    **recipe_refusals.MEMORY,
    **rl_refusals.REINFORCEMENT,
}


def _check(settings: str) -> None:
    keys = [word if "." in word.split("=")[0] else f"parallel.{word}" for word in settings.split()]
    check_config(load_config(None, keys))


@pytest.mark.parametrize(("settings", "message"), REFUSED.items(), ids=list(REFUSED))
def test_refused(settings: str, message: str):
    with pytest.raises(ConfigError) as error:
        _check(settings)
    text = str(error.value)
    part = message.removeprefix("...").removesuffix("...")
    assert part in text
    assert text.startswith(part) or message.startswith("...")
    assert text.endswith(part) or message.endswith("...")
    assert "\n" not in text or text.startswith("2 settings cannot work")


@pytest.mark.parametrize("settings", [*mapping_refusals.ACCEPTED, *recipe_refusals.ACCEPTED])
def test_accepted(settings: str):
    _check(settings)
