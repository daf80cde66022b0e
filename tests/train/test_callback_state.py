"""Test the state of callbacks in checkpoints: saved, resumed, missing, left over, and refused by name."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import moefold
from moefold.checkpoint.checkpoint_meta import read_meta
from moefold.checkpoint.find_checkpoint import step_path
from moefold.checkpoint.run_states import Record, RunStates
from moefold.comm.groups import ParallelGroups
from moefold.config.schema import Config
from moefold.config.sections.checkpoint import CheckpointConfig
from moefold.config.sections.faults import FaultsConfig
from moefold.errors import ConfigError
from moefold.train.callbacks.checkpointing import SaveHistory
from moefold.train.signals import StopSignals
from moefold.train.trainer import Trainer
from moefold.train.worker import ProgramHooks
from moefold.validate.config import check_config
from tests.train.tiny_runs import recipe

LEFT_OVER = "the checkpoint has the state of callbacks.Losses, which this program does not add"
NEW = "the checkpoint has no state of callbacks.Losses, which starts as the program built it"


class Losses(moefold.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]

    def after_step(self, run: Any, step: Any) -> None:
        self.losses.append(step.result.loss)


class OtherLosses(Losses):
    """Has its state under the name of `Losses`, in another form."""

    state_name = "Losses"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["values"]


class Path0(Losses):
    """Returns a state that is not JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"files": [Path("a")]}


class Grows(Losses):
    """Has a state too large for a checkpoint from the third step on."""

    def state_dict(self) -> dict[str, Any]:
        return {"text": "a" * (65 << 20 if len(self.losses) > 2 else 1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Returns(moefold.Callback):
    """Has a state as a test gives it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class NeedsStart(Returns):
    """Has a state once the run has started."""

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started}


class Refuses(Returns):
    """Refuses its state in its own words."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ConfigError("set a to 2")


class ListsCheckpoints(Losses):
    """Keeps the checkpoints that there are at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_end(self, run: Any, status: int) -> None:
        self.losses = sorted(path.name for path in self._folder.glob("checkpoints/step-*"))


class SavesAlone(moefold.Callback):
    """Saves a state and does not load it."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def _train(cfg: Config, callbacks: Sequence[moefold.Callback]) -> tuple[list[Any], str]:
    """Train; return the states of the callbacks, and the log of the first rank."""
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            moefold.train_in_process(cfg, callbacks=callbacks)
    except ConfigError as error:
        return [], str(error)
    return [callback.losses for callback in callbacks if isinstance(callback, Losses)], printed.getvalue()


def _cfg(run_dir: Path, steps: int, **parallel: Any) -> Config:
    return recipe(run_dir, steps, every=2, **parallel)


def _stored(run_dir: Path, step: int) -> Any:
    return read_meta(step_path(run_dir / "checkpoints", step)).state_of("callbacks.Losses")


@pytest.mark.parity
def test_a_resumed_callback_goes_on_after_the_step_of_the_checkpoint(pool, tmp_path):
    ((whole,), _), _ = pool.run(2, _train, _cfg(tmp_path / "whole", 4, world_size=2), [Losses()])
    pool.run(2, _train, _cfg(tmp_path / "parts", 2, world_size=2), [Losses()])
    of_ranks = pool.run(2, _train, _cfg(tmp_path / "parts", 4, world_size=2), [Losses()])
    assert [found for (found,), _ in of_ranks] == [whole, whole]
    assert len(whole) == 4
    assert _stored(tmp_path / "parts", 2) == {"losses": whole[:2]}
    assert "callbacks." not in of_ranks[0][1]
    # One rank goes on with the state of the first of two.
    ((found,), _), *_ = pool.run(1, _train, _cfg(tmp_path / "parts", 6), [Losses()])
    assert found[:4] == whole
    assert len(found) == 6


@pytest.mark.parity
def test_a_callback_goes_back_with_the_run(pool, tmp_path):
    cfg = _cfg(tmp_path / "run", 6, dtype="float64", train={"lr": 0.05})
    cfg = replace(cfg, faults=FaultsConfig(spike="rollback", spike_window=3, spike_factor=0.3, max_rollbacks=1000))
    (((kept,), printed),) = pool.run(1, _train, cfg, [Losses()])
    assert "rolled back" in printed or "rollback" in printed
    lines = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert kept == lines
    assert len(kept) == 6


@pytest.mark.parity
def test_a_state_without_a_callback_and_a_callback_without_a_state_are_said_once(pool, tmp_path):
    pool.run(1, _train, _cfg(tmp_path, 2), [Losses()])
    ((_, printed),) = pool.run(1, _train, _cfg(tmp_path, 4), [])
    assert printed.count(LEFT_OVER) == 1
    assert NEW not in printed
    assert _stored(tmp_path, 4) == {}
    (((kept,), printed),) = pool.run(1, _train, _cfg(tmp_path, 6), [Losses()])
    assert printed.count(NEW) == 1
    assert LEFT_OVER not in printed
    assert len(kept) == 2
    ((_, printed),) = pool.run(1, _train, _cfg(tmp_path, 8), [Losses()])
    assert "callbacks." not in printed


@pytest.mark.parity
def test_a_state_that_cannot_be_loaded_or_saved_is_refused_by_name(pool, tmp_path):
    pool.run(1, _train, _cfg(tmp_path, 2), [Losses()])
    ((_, refused),) = pool.run(1, _train, _cfg(tmp_path, 4), [OtherLosses()])
    assert refused == "the state of 'callbacks.Losses' in the checkpoint cannot be loaded: KeyError('values')"
    ((_, refused),) = pool.run(1, _train, _cfg(tmp_path / "new", 4), [Path0()])
    assert refused.startswith("the state callbacks.Path0.files[0] is of type PosixPath, and a checkpoint stores JSON")
    assert not (tmp_path / "new" / "metrics.jsonl").exists() or not (tmp_path / "new/metrics.jsonl").read_text()


@pytest.mark.parity
def test_a_state_that_no_one_could_read_again_replaces_no_checkpoint(pool, tmp_path):
    cfg = _cfg(tmp_path, 4)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, keep=1))
    ((_, refused),) = pool.run(1, _train, cfg, [Grows()])
    assert "moefold.json could not be read again: it has 68," in refused
    assert refused.endswith("bytes, and 67,108,864 can be read; the largest state is 'callbacks.Grows'")
    [saved] = (tmp_path / "checkpoints").glob("step-*")
    assert read_meta(saved).step == 2


@pytest.mark.parity
def test_the_last_checkpoint_is_there_when_a_callback_with_state_ends(pool, tmp_path):
    cfg = _cfg(tmp_path, 2)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, async_save=True))
    (((listed,), _),) = pool.run(1, _train, cfg, [ListsCheckpoints(tmp_path)])
    assert listed == ["step-000002"]


def _train_again_without_checkpoint(cfg: Config) -> tuple[int, int]:
    """Train twice from the start in one process, as after a loss of ranks; return the losses that are kept."""
    callback, history = Losses(), SaveHistory()
    counts = []
    for _ in range(2):
        groups = ParallelGroups.create(check_config(cfg), torch.device("cpu"))
        assert Trainer(cfg, groups, callbacks=[callback], history=history).run(StopSignals()) == 0
        counts.append(len(callback.losses))
    return counts[0], counts[1]


@pytest.mark.parity
def test_a_loss_before_the_first_checkpoint_leads_back_to_the_state_of_the_start(pool, tmp_path):
    cfg = replace(_cfg(tmp_path, 3), checkpoint=CheckpointConfig(every=0, at_end=False))
    assert pool.run(1, _train_again_without_checkpoint, cfg) == [(3, 3)]


def _nested(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(levels - 1):
        state = {"a": state}
    return state


def test_a_state_is_a_dict_of_bounded_depth():
    looped: list[Any] = []
    looped.append(looped)
    for state, message in {
        "a list": ([1, 2], r"^state_dict\(\) of 'callbacks.A' returned \[1, 2\], and must return a dict$"),
        "nothing": (None, "returned None, and must return a dict$"),
        "deep": (_nested(99), "^the state callbacks.A.a.a.*has more than 98 levels, or contains itself$"),
        "looped": ({"a": looped}, r"^the state callbacks.A.a\[0\]\[0\].* levels, or contains itself$"),
        "numbers as keys": ({"a": {1: 2}}, "^the state callbacks.A.a is of type dict"),
    }.values():
        with pytest.raises(ConfigError, match=message):
            RunStates().add("callbacks.A", Returns(state))
        states, callback = RunStates(), Returns({})
        states.add("callbacks.A", callback)
        callback.state = state
        with pytest.raises(ConfigError, match=message):
            states.state_dict()
    RunStates().add("callbacks.A", Returns(_nested(98)))


def test_a_callback_that_fails_is_named_and_its_own_words_are_kept():
    with pytest.raises(ConfigError, match=r"^state_dict\(\) of 'callbacks.A' fails before on_start: AttributeError\("):
        RunStates().add("callbacks.A", NeedsStart({}))
    states = RunStates()
    states.add("callbacks.A", Refuses({}))
    for load in (states.start, lambda: states.load({}, None)):
        with pytest.raises(ConfigError, match="^set a to 2$"):
            load()


def test_callbacks_of_one_name_and_half_a_state_are_refused_before_ranks_start():
    with pytest.raises(ConfigError, match="two callbacks have their state under the name 'Losses'; give one a state_n"):
        ProgramHooks(callbacks=[Losses(), OtherLosses()])
    with pytest.raises(ConfigError, match="the callback SavesAlone overrides one of state_dict and load_state_dict"):
        ProgramHooks(callbacks=[SavesAlone()])


class _Owner:
    """Notes when it is loaded."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "pair": (1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.log.append((self.name, state_dict))


def test_states_are_loaded_after_those_they_ask_for():
    log: list[Any] = []
    states = RunStates()
    states.add("a", _Owner("a", log), after=("c",))
    states.add("b", _Owner("b", log))
    states.add("c", _Owner("c", log), after=("b",))
    states.add("note", Record(lambda: {"said": True}))
    saved = states.state_dict()
    assert saved == {name: {"name": name, "pair": [1, 2]} for name in "abc"} | {"note": {"said": True}}
    assert states.restored_state_dict() == {name: saved[name] for name in "abc"}
    states.load({name: state for name, state in saved.items() if name != "b"}, None)
    assert log == [("b", {}), ("c", saved["c"]), ("a", saved["a"])]


def test_a_callback_that_the_checkpoint_of_a_rollback_lacks_is_as_it_was_built():
    states, callback = RunStates(), Losses()
    states.add("callbacks.Losses", callback)
    callback.losses.append(2.0)
    states.load({}, None)
    assert callback.losses == []
    saved = {"callbacks.Losses": {"losses": [1.0]}}
    for _ in range(2):
        states.load(saved, None)
        callback.losses.append(3.0)
    assert callback.losses == [1.0, 3.0]


def test_a_state_that_the_run_does_not_have_is_named():
    states = RunStates()
    states.add("weights", Returns({}))
    states.add("schedule", Record(dict))
    assert states.notices({}) == ("the checkpoint has no state of weights, which starts as in a new run",)
    assert states.notices({"weights": {}, "of_later": {}, "callbacks.A": {}}) == (
        "the checkpoint has the state of callbacks.A, which this program does not add: the next checkpoint lacks it",
        "the checkpoint has the state of of_later, which this run does not have: the next checkpoint lacks it",
    )
