"""State of a program's callbacks in checkpoints: saved, resumed, missing, left over, and refused by name."""

import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import moefold
from moefold.checkpoint.checkpoint_dir import read_meta, step_path
from moefold.checkpoint.save_load import Record, RunStates
from moefold.config.faults import FaultsConfig
from moefold.config.schema import Config
from moefold.errors import ConfigError
from moefold.train.data_loader import Position
from moefold.train.worker import ProgramParts
from tests.train.test_trainer import recipe

LEFT_OVER = "the checkpoint has the state of callbacks.Losses, which this program does not add"
NEW = "the checkpoint has no state of callbacks.Losses, which starts as the program built it"


class Losses(moefold.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

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
    """Returns a state that is no JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"files": [Path("a")]}


class SavesAlone(moefold.Callback):
    """Saves a state and does not load it."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def _train(cfg: Config, callbacks: Sequence[moefold.Callback]) -> tuple[list[Any], str]:
    """Train; return what the callbacks have kept, and the log of the first rank."""
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


def test_callbacks_of_one_name_and_half_a_state_are_refused_before_ranks_start():
    with pytest.raises(ConfigError, match="two callbacks have their state under the name 'Losses'; give one a state_n"):
        ProgramParts(callbacks=[Losses(), OtherLosses()])
    with pytest.raises(ConfigError, match="the callback SavesAlone overrides one of state_dict and load_state_dict"):
        ProgramParts(callbacks=[SavesAlone()])


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
    assert states.state_dict(has_records=False) == {name: saved[name] for name in "abc"}
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


def test_a_position_keeps_the_samples_that_it_skips_through_a_rollback():
    position = Position(step=4, samples=20, skipped=[(8, 12)])
    saved = json.loads(json.dumps(position.state_dict()))
    position.skipped.append((12, 17))
    position.step = 7
    position.load_state_dict(saved)
    assert (position.step, position.skipped_ranges) == (4, (range(8, 12), range(12, 17)))
    assert json.loads(json.dumps(position.state_dict()))["skipped"] == [[8, 12], [12, 17]]
    # Samples of other data: what this run skips of its own stays.
    other = Position(samples=20, skipped=[(0, 4)])
    other.restarts_data = True
    other.load_state_dict(saved)
    assert (other.step, other.samples, other.skipped) == (4, 0, [(0, 4)])
    assert "restarts_data" not in other.state_dict()
