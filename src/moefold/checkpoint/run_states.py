"""Registry of the objects of a run that have state: what a checkpoint saves, and the order in which it is loaded."""

from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from moefold.bounded_read import MAX_JSON_DEPTH
from moefold.checkpoint.checkpoint_meta import States
from moefold.errors import ConfigError
from moefold.message_text import format_list

CALLBACKS = "callbacks."
"""Prefix of the names of a program's callbacks."""
_STATE_DEPTH = MAX_JSON_DEPTH - 2
"""Maximum nesting of a state, which is at level 2 of `META_FILE`."""
_LOAD_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@runtime_checkable
class TensorState(Protocol):
    """Object whose state has tensors in addition to JSON values."""

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of the object's entries, by mapping-independent names."""

    def load_tensors(self, path: Path | None) -> None:
        """Load the object's entries of a checkpoint, after `load_state_dict`. None: a new run. It is collective."""


class Record:
    """State that describes a checkpoint and is not restored. `read` returns it."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def state_dict(self) -> dict[str, Any]:
        """Return the description that is read at the time of the save."""
        return self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore a saved description, because a resumed run computes its own."""


class RunStates:
    """Registry of the objects whose state a resumed run needs. Saver and loader iterate over it.

    The owner of an object adds it under a name. For a name that a checkpoint lacks, {} is loaded, the state of a new
    run. The callback of a program gets back its state at the time of its first `add`.

    Args:
        initial: states of callbacks at their first `add`, by name, in which `add` stores new ones. After a regroup,
            callbacks outlive the registry.
    """

    def __init__(self, initial: States | None = None) -> None:
        self._owners: dict[str, Stateful] = {}
        self._after: dict[str, tuple[str, ...]] = {}
        self._initial: States = {} if initial is None else initial

    def add(self, name: str, owner: Stateful, *, after: tuple[str, ...] = ()) -> None:
        """Register an object whose state is saved and loaded under a name.

        Args:
            after: names of the objects that must be loaded before it.

        Raises:
            ConfigError: the state of a callback cannot be saved, or it has no state before `on_start`.
        """
        assert name not in self._owners, name
        self._owners[name] = owner
        self._after[name] = after
        if name.startswith(CALLBACKS) and name not in self._initial:
            try:
                self._initial[name] = _state_of(owner, name)
            except ConfigError:
                raise
            except _LOAD_ERRORS as error:
                raise ConfigError(
                    f"state_dict() of {name!r} fails before on_start: {error!r}; let it work as soon as the callback "
                    "is built"
                ) from error

    def state_dict(self) -> States:
        """Return a copy of the states without tensors, by name.

        Raises:
            ConfigError: a callback does not return a dict of JSON values.
        """
        return {name: _state_of(owner, name) for name, owner in self._owners.items()}

    def restored_state_dict(self) -> States:
        """Return the states that a restored run must equal: without descriptions and callbacks of a program.

        A callback may return a different state at each call, such as the seconds since its start.
        """
        return {
            name: _state_of(owner, name)
            for name, owner in self._owners.items()
            if not (isinstance(owner, Record) or name.startswith(CALLBACKS))
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of all entries of a checkpoint."""
        return {name: tensor for owner in self._with_tensors() for name, tensor in owner.tensors().items()}

    def start(self) -> None:
        """Begin a new run, after the initial weights were loaded. It is collective.

        Raises:
            ConfigError: a callback cannot load its initial state.
        """
        for name in filter(self._initial.__contains__, self._owners):
            self._load_one(name, self._initial[name], "of the new callback")
        for owner in self._with_tensors():
            owner.load_tensors(None)

    def load(self, states: States, path: Path | None) -> None:
        """Restore all objects in the order that they require. It is collective.

        Args:
            path: the checkpoint, or None if the tensors are restored by other means.

        Raises:
            ConfigError: a state is malformed, or the checkpoint lacks a tensor.
        """
        for name in TopologicalSorter(self._after).static_order():
            self._load_one(name, states.get(name, self._initial.get(name, {})), "in the checkpoint")
            owner = self._owners[name]
            if path is not None and isinstance(owner, TensorState):
                owner.load_tensors(path)

    def _load_one(self, name: str, state: dict[str, Any], source: str) -> None:
        try:
            # A copy, because a snapshot in memory and the initial state may be loaded again.
            self._owners[name].load_state_dict(_plain(state, name))
        except ConfigError:
            raise
        except _LOAD_ERRORS as error:
            raise ConfigError(f"the state of {name!r} {source} cannot be loaded: {error!r}") from error

    def notices(self, states: States) -> tuple[str, ...]:
        """Return messages about states that only the checkpoint has, and states that only the run has."""
        unknown = states.keys() - self._owners.keys()
        missing = {name for name in self._owners if name not in states and not isinstance(self._owners[name], Record)}
        messages = {
            "the checkpoint has the state of {}, which this program does not add: the next checkpoint lacks it": {
                name for name in unknown if name.startswith(CALLBACKS)
            },
            "the checkpoint has the state of {}, which this run does not have: the next checkpoint lacks it": {
                name for name in unknown if not name.startswith(CALLBACKS)
            },
            "the checkpoint has no state of {}, which starts as the program built it": {
                name for name in missing if name.startswith(CALLBACKS)
            },
            "the checkpoint has no state of {}, which starts as in a new run": {
                name for name in missing if not name.startswith(CALLBACKS)
            },
        }
        return tuple(text.format(format_list(sorted(names))) for text, names in messages.items() if names)

    def _with_tensors(self) -> list[TensorState]:
        return [owner for owner in self._owners.values() if isinstance(owner, TensorState)]


def _state_of(owner: Stateful, name: str) -> dict[str, Any]:
    state = owner.state_dict()
    if not isinstance(state, Mapping):
        raise ConfigError(f"state_dict() of {name!r} returned {state!r:.60}, and must return a dict")
    return _plain(state, name)


def _plain(value: Any, where: str, levels: int = _STATE_DEPTH) -> Any:
    """Return a copy of JSON values of bounded depth."""
    if isinstance(value, Mapping | list | tuple) and not levels:
        raise ConfigError(f"the state {where:.80}... has more than {_STATE_DEPTH} levels, or contains itself")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner, f"{where}.{key}", levels - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{index}]", levels - 1) for index, inner in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"the state {where} is of type {type(value).__name__}, and a checkpoint stores JSON values: let state_dict() "
        "return numbers, texts, lists and tables with keys of text"
    )
