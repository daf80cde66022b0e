"""A setting is refused where no part reads it, and accepted elsewhere."""

import pytest

from moefold.errors import ConfigError
from moefold.recipe import load_config


def assert_read(word: str, idle: list[str], active: list[str]) -> None:
    """Check that a setting is refused after some words, with the way out, and accepted after others."""
    with pytest.raises(ConfigError) as error:
        load_config(None, [*idle, word])
    key = word.split("=")[0]
    assert str(error.value).startswith(f"{key}=")
    assert " has no effect: " in str(error.value)
    assert str(error.value).endswith(f"or leave {key.partition('.')[2]} out")
    assert "leave it out" not in str(error.value)
    assert "leave them out" not in str(error.value)
    load_config(None, [*active, word])
