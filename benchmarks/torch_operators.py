"""Private names of torch for tracers: operators and their arguments, process groups, runs of the autograd engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist


def operator_name(op: Any) -> str:
    """Return the name of an operator without its namespace and overload, such as `mm`."""
    name: str = op._schema.name.split("::")[1]
    return name


def operator_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by the names of its schema, without defaults."""
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def process_group_size(args: Sequence[Any]) -> int:
    """Return the size of the process group among the arguments of an operator of `torch.ops.c10d`."""
    return int(_process_group(args).size())


def process_group_rank(args: Sequence[Any]) -> int:
    """Return this process's rank in the process group among the arguments of an operator of `torch.ops.c10d`."""
    return int(_process_group(args).rank())


def _process_group(args: Sequence[Any]) -> dist.ProcessGroup:
    group = next(arg for arg in args if hasattr(arg, "_type") and "ProcessGroup" in str(arg._type()))
    return torch.distributed.ProcessGroup.unbox(group)


@contextmanager
def around_backward(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Wrap each run of the autograd engine in a reusable context, while this context is active."""
    run = torch.autograd._engine_run_backward

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with context:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_inside
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run
