"""Graphs of a CPU: a tape of operators, which a replay runs again on the same memory, as a CUDA graph does.

Python runs only when the tape is recorded. So a number of the host does not change, a tensor stays where it was, and
a result that is read before a replay or after the next one is wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.cuda_trace import WAITING_METHODS
from benchmarks.torch_operators import around_backward
from moefold.comm.private_torch import TorchDispatchMode, storage_key, tree_leaves, tree_map_only
from moefold.parallel.cuda_graphs import Replay, T

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Tape(TorchDispatchMode):
    """Dispatch mode that records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._created: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        _refuse_shapes_of_data(func, args)
        self._save_written(func, args, kwargs)
        out = func(*args, **kwargs)
        inputs = {storage_key(x.untyped_storage()) for x in _tensors((args, kwargs))}
        written = [x for x in _tensors(out) if storage_key(x.untyped_storage()) not in inputs]
        self._created |= {storage_key(x.untyped_storage()): x for x in written}
        if name not in ALLOCATIONS and not func.is_view and torch.Tag.inplace_view not in func.tags:
            # Aliases: an operator may change the shape of a tensor later.
            args, kwargs, written = tree_map_only(Tensor, _alias, (args, kwargs, written))
            self._calls.append((func, args, kwargs, written))
        return out

    def _save_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Save the values of memory from outside of the tape that an operator writes."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(given):
                key = storage_key(tensor.untyped_storage())
                if key not in self._created and key not in self._before:
                    whole = _whole(tensor)
                    self._before[key] = whole, whole.clone()

    def undo(self) -> None:
        """Undo the writes of the recording, as a capture executes nothing: its results are undefined."""
        for whole, values in self._before.values():
            whole.copy_(values)
        for tensor in self._created.values():
            if tensor.is_floating_point():
                _whole(tensor).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again, on the same memory."""
        for func, args, kwargs, written in self._calls:
            results = _tensors(func(*args, **kwargs))
            for static, value in zip(written, results if written else [], strict=True):
                static.copy_(value)


def _refuse_shapes_of_data(func: Any, args: Any) -> None:
    """Refuse operators whose results a GPU must wait for: numbers for the host, and shapes that depend on values."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        waits = any(index.dtype == torch.bool for index in _tensors(args[1]))
    else:
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
    assert not waits, f"{func}: the host waits for its result while a graph is recorded"


class _NoHostReads(TorchFunctionMode):
    """Function mode that refuses to copy to the host, which is an error while a CUDA graph is captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITING_METHODS, f"the host reads by {func.__name__} while a graph is recorded"
        return func(*args, **(kwargs or {}))


class TapeRecorder:
    """`GraphRecorder` on a CPU."""

    def run(self, function: Callable[[], object]) -> None:
        """Run a function."""
        function()

    def record(self, function: Callable[[], T]) -> tuple[T, Replay]:
        """Record the operators of a function."""
        with _NoHostReads() as mode, around_backward(mode), _Tape() as tape:
            result = function()
        with torch.no_grad():
            tape.undo()
        return result, tape.replay


class CountedRecorders:
    """Makes tape recorders, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> TapeRecorder:
        """Make a recorder."""
        self.count += 1
        return TapeRecorder()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, as a tensor unknown to autograd."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def _alias(tensor: Tensor) -> Tensor:
    """Return the same values at the same address, as a tensor unknown to autograd."""
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
