"""Cases of the parity tests: recipes of the features; few run in `make test` and all in `make parity`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from moefold.config.schema import Config
from tests.verify.covering import Levels
from tests.verify.recipes import few_samples, tiny, write_split_rows

Settings = dict[str, Any]
"""Keyword arguments of `tests.verify.recipes.tiny`."""

BATCH_8 = {"global_batch_size": 8}
BATCH_16 = {"global_batch_size": 16}
AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
PIPELINE_AXES = ({"tp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2})
"""Options that the ranks of a pipeline stage share."""
SPLIT_SCHEDULES = (("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2))
"""Schedules that split the backward pass, with their virtual stages."""


@dataclass(frozen=True)
class Case:
    """A recipe of one feature."""

    feature: str
    settings: Settings
    is_slow: bool = False
    steps: int = 2

    def config(self, folder: Path) -> Config:
        """Return the recipe. Its schedule file and its offloads to disk lie in the folder.

        In a case, `schedule_csv` holds the rank of each stage instead of a path.
        """
        settings = dict(self.settings)
        if settings.get("schedule") == "csv":
            path = folder / "rows.csv"
            settings["schedule_csv"] = write_split_rows(path, settings["schedule_csv"], _num_micro_batches(settings))
        if "ssd" in settings.get("train", {}).values():
            settings["train"] = settings["train"] | {"offload_dir": str(folder)}
        return tiny(**settings)

    def param(self) -> Any:
        """Return the case as a parameter of a test."""
        mapping = {key: value for key, value in self.settings.items() if not isinstance(value, dict)}
        label = "-".join(f"{key}{value}" for key, value in mapping.items() if str(value) != "1")
        name = self.feature.replace(" ", "-")
        return pytest.param(self, id=f"{name}-{label}", marks=pytest.mark.slow if self.is_slow else ())


def cases(feature: str, fast: Iterable[Settings], slow: Iterable[Settings] = (), steps: int = 2) -> list[Case]:
    """Return the cases of a feature: the cases of `make test`, then the cases of `make parity`."""
    return [
        *(Case(feature, _two_micro_batches(settings), is_slow=False, steps=steps) for settings in fast),
        *(Case(feature, _two_micro_batches(settings), is_slow=True, steps=steps) for settings in slow),
    ]


def in_one_step(cases: Iterable[Case]) -> list[Case]:
    """Return cases whose fast ones take one step where they have two.

    The second step begins with updated weights, which the cases of mappings show, and the slow ones of each feature.
    """
    return [replace(case, steps=1) if case.steps == 2 and not case.is_slow else case for case in cases]


def _two_micro_batches(settings: Settings) -> Settings:
    """Return the settings with a batch of at most two micro-batches unless stages or micro-batches overlap.

    Two show that gradients are accumulated; a step takes as long as its micro-batches.
    """
    if settings.get("pp", 1) > 1 or settings.get("overlap_experts"):
        return settings
    train = settings.get("train", {})
    most = 2 * data_parallel(settings) * train.get("micro_batch_size", 1)
    return settings | {"train": train | {"global_batch_size": min(train.get("global_batch_size", 4), most)}}


def few(settings: Settings, most: int = 8) -> Settings:
    """Return the settings with the smallest global batch that exercises the mapping, unless they have one."""
    return settings | {"train": {"global_batch_size": few_samples(most, settings)} | settings.get("train", {})}


def data_parallel(settings: Settings) -> int:
    """Return the data-parallel degree of a mapping."""
    tp, cp, pp = (settings.get(axis, 1) for axis in ("tp", "cp", "pp"))
    return settings.get("world_size", 1) // (tp * cp * pp)


def _num_micro_batches(settings: Settings) -> int:
    train = settings.get("train", {})
    return train.get("global_batch_size", 4) // (train.get("micro_batch_size", 1) * data_parallel(settings))


def axes_of(settings: Settings) -> list[str]:
    """Return the axes of both views with a degree above 1."""
    degrees = {axis: settings.get(axis, 1) for axis in AXES}
    degrees["dp"] = data_parallel(settings)
    degrees["edp"] = settings.get("world_size", 1) // (degrees["pp"] * degrees["ep"] * degrees["etp"])
    return [axis for axis in AXES if degrees[axis] > 1]


def mapping_levels(settings: Settings) -> list[Levels]:
    """Return the pairs of axes that a mapping combines, and its kinds of context, dispatcher and zero."""
    axes = axes_of(settings)
    kinds = {"zero": "dp", "context": "cp", "dispatcher": "ep"}
    return [
        *combinations([(axis, True) for axis in axes], 2),
        *(((kind, settings[kind]),) for kind, axis in kinds.items() if axis in axes and kind in settings),
    ]
