import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config
from moefold.validate.config import check_config

CASES = [
    (
        ["faults.nonfinite=rollback"],
        "faults.nonfinite='rollback' needs checkpoints to go back to, and checkpoint.every=500 saves none before "
        "the end of the run, run.steps=100; set checkpoint.every below 100, or faults.nonfinite='skip'",
    ),
    (
        ["faults.spike=rollback"],
        "faults.spike='rollback' needs checkpoints to go back to, and checkpoint.every=500 saves none before "
        "the end of the run, run.steps=100; set checkpoint.every below 100, or faults.spike='skip'",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), CASES, ids=["+".join(words) for words, _ in CASES])
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(None, overrides))
    assert str(error.value) == message


@pytest.mark.parametrize("wish", ["nonfinite", "spike"])
def test_a_rollback_with_checkpoints_is_accepted(wish):
    check_config(load_config(None, [f"faults.{wish}=rollback", "checkpoint.every=5"]))
