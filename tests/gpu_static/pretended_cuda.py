"""A CUDA device that is not there: CPU tensors that say they are CUDA tensors, with which CUDA branches compute values.

Storages of tensors carry a mark. Inside `pretended_cuda()`, as on CUDA, an operator with marked and unmarked tensors
raises, a Triton kernel given a CPU tensor too, and `.numpy()` of a marked one. Triton kernels run in its interpreter,
attention kernels of libraries in float64 (`pretended_attention.py`).

This finds, and a trace on meta tensors (`benchmarks.cuda_trace`) cannot: tensors of two devices in one operator, wrong
values in CUDA branches. It cannot find: races, stream order, speed, the numerics of CUDA's libraries, calls that
a graph's capture forbids, NCCL.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.torch_operators import around_backward
from tests.gpu_static.pretended_attention import library_attention
from tests.gpu_static.pretended_driver import DRIVER
from tests.gpu_static.pretended_transfers import READS, RECORDER, is_pinned, pin

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
MARK = "pretends_cuda"
COPIES = {
    "copy_", "_to_copy", "_foreach_copy_", "set_", "lift_fresh", "detach", "alias", "_pin_memory", "resize_",
    "_copy_from", "copy",
}  # fmt: skip
"""Operators that may have tensors of both devices."""
IN_PLACE = {"copy_", "_foreach_copy_", "set_"}
"""Operators of `COPIES` that leave their result where it is."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators that take indices of the CPU for a CUDA tensor."""
INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
FUSED_OPTIMIZERS = {"_fused_adamw_", "_fused_adam_"}
"""Operators that take no CPU tensor, not even a tensor of a single number."""
COLLECTIVES = ("c10d", "_c10d_functional")


def is_pretended(x: Tensor) -> bool:
    """Return whether a tensor says that it is on the CUDA device."""
    try:
        return bool(getattr(x.untyped_storage(), MARK, False))
    except (NotImplementedError, RuntimeError):
        return False  # a tensor without a storage


def mark(x: Any, value: bool = True) -> Any:
    """Mark the storages of the tensors of a result."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            try:
                setattr(leaf.untyped_storage(), MARK, value)
            except (NotImplementedError, RuntimeError):
                continue  # a tensor without a storage
    return x


def _key(x: Tensor) -> int | None:
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_cuda(value: Any) -> bool:
    """Return whether an argument names the CUDA device."""
    name = value.type if isinstance(value, torch.device) else value if isinstance(value, str) else ""
    return name.partition(":")[0] == "cuda"


class _Place(threading.local):
    """The device on which operators of this thread put tensors that they make.

    Attributes:
        forced: the device of the running Python function, None if it names none.
        inherited: the device of the tensors of the running function, for operators without tensors inside it.
    """

    forced: ClassVar[bool | None] = None
    inherited: ClassVar[bool] = False


PLACE = _Place()


class _Operators(TorchDispatchMode):
    """Mode that refuses operators with tensors of two devices, and marks the results of operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        marks = [is_pretended(x) for x in inputs]
        forced = PLACE.forced
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            forced = True
        pins = bool(kwargs.get("pin_memory"))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        if any(marks) and not all(marks) and func.namespace not in COLLECTIVES and name not in COPIES:
            _refuse_mix(f"{func.namespace}::{name}", inputs, marks)
        if any(marks):
            _note_transfers(name, args, inputs, marks)
        out = func(*args, **kwargs)
        if pins:
            pin(out)
        if name in IN_PLACE:
            return out
        is_marked = forced if forced is not None else any(marks) if inputs else PLACE.inherited
        known = {_key(x) for x in inputs}
        mark([x for x in tree_leaves(out) if isinstance(x, Tensor) and _key(x) not in known], is_marked)
        return out


def _note_transfers(name: str, args: Any, inputs: list[Tensor], marks: list[bool]) -> None:
    """Note the reads and copies of an operator on tensors of the device."""
    if name in READS or (name in INDEXED and any(x.dtype == torch.bool for x in inputs[1:])):
        RECORDER.wait()
    if name in INDEXED and marks[0]:
        for x, is_marked in zip(inputs, marks, strict=True):
            if not is_marked and x.dim() > 0:
                RECORDER.to_device(x)
    if name == "copy_" and marks[0] != marks[1]:
        is_blocking = not (len(args) > 2 and args[2])
        if marks[0]:
            RECORDER.to_device(inputs[1])
        elif is_blocking or not is_pinned(inputs[0]):
            RECORDER.to_host(is_blocking=is_blocking)


def _refuse_mix(title: str, inputs: list[Tensor], marks: list[bool]) -> None:
    """Refuse an operator as CUDA does; a tensor of one number may be on the CPU, and so may an index."""
    name = title.split("::")[1]
    wrong = [x for x, is_marked in zip(inputs, marks, strict=True) if not is_marked]
    if name not in FUSED_OPTIMIZERS:
        wrong = [x for x in wrong if x.dim() > 0 and not x.is_meta]
    if name in INDEXED and marks[0]:
        wrong = [x for x in wrong if x.dtype not in INDEX_TYPES]
    if wrong:
        places = ", ".join(f"{'cuda' if m else 'cpu'} {tuple(x.shape)}" for x, m in zip(inputs, marks, strict=True))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {title} has {places}")


def _attribute(name: str) -> Any:
    """Return the function that a function mode is called with where an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def _product_of_wider_type(*matrices: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return mm or addmm with a result of another type, which a CPU has not."""
    *base, a, b = matrices
    assert a.dtype == b.dtype, "types of the factors"
    assert out_dtype in (torch.float32, a.dtype), "types that cuBLAS accumulates into"
    assert not base or base[0].dtype in (out_dtype, a.dtype), "types that cuBLAS adds"
    y = a.float() @ b.float()
    y = (y + base[0].float() if base else y).to(out_dtype)
    return y if out is None else out.copy_(y)


def _to_numpy(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if is_pretended(x):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    return function(x, *args, **kwargs)


def _to_list(x: Tensor) -> Any:
    if is_pretended(x):
        RECORDER.wait()
    return x.tolist()


class _Functions(TorchFunctionMode):
    """Mode that answers Python calls for marked tensors as for CUDA tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced: dict[Any, Callable[..., Any]] = {
            _attribute("device"): lambda x: CUDA if is_pretended(x) else x.device,
            _attribute("is_cuda"): is_pretended,
            _attribute("is_cpu"): lambda x: not is_pretended(x) and x.is_cpu,
            Tensor.get_device: lambda x: 0 if is_pretended(x) else -1,
            Tensor.pin_memory: lambda x: pin(mark(x.clone(), False)),
            Tensor.is_pinned: is_pinned,
            Tensor.tolist: _to_list,
            Tensor.numpy: partial(_to_numpy, Tensor.numpy),
            Tensor.__array__: partial(_to_numpy, Tensor.__array__),
            Tensor.to: self._to,
            Tensor.cpu: lambda x, **options: self._to(x, CPU, **options),
            Tensor.cuda: lambda x, device=None, **options: self._to(x, CUDA, **options),
            Tensor.type: self._to,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if replaced := self._replaced.get(func):
            return replaced(*args, **kwargs)
        if getattr(func, "__name__", "") == "record_stream":
            return None
        if func in (torch.mm, Tensor.mm, torch.addmm) and kwargs.get("out_dtype") is not None:
            return _product_of_wider_type(*args, **kwargs)
        pins = bool(kwargs.pop("pin_memory", None))
        out = self._placed(func, args, kwargs)
        return pin(out) if pins else out

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function on the CPU, and mark its result if it names the CUDA device or has marked tensors."""
        devices = [kwargs["device"]] if kwargs.get("device") is not None else []
        devices += [value for value in args if isinstance(value, torch.device)]
        forced = is_cuda(devices[-1]) if devices else None
        if forced:
            args = tuple(CPU if isinstance(value, torch.device) else value for value in args)
            kwargs |= {"device": CPU} if "device" in kwargs else {}
        if forced and func in (torch.tensor, torch.as_tensor):
            RECORDER.to_device(args[0])
        outer = (PLACE.forced, PLACE.inherited)
        PLACE.forced = outer[0] if forced is None else forced
        PLACE.inherited = any(is_pretended(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        try:
            out = func(*args, **kwargs)
        finally:
            PLACE.forced, PLACE.inherited = outer
        if forced is None:
            return out
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None:
            return mark(out, forced)
        mark([y for y in tree_leaves(out) if isinstance(y, Tensor) and _key(y) != _key(x)], forced)
        is_same = isinstance(out, Tensor) and _key(out) == _key(x)
        return mark(out.clone(), forced) if is_same and forced != is_pretended(x) else out

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return a copy of another type or on another device."""
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        dtype = kwargs.get("dtype")
        flags = []
        for value in (*args, *([kwargs["other"]] if "other" in kwargs else [])):
            if isinstance(value, Tensor):
                target, dtype = (CUDA if is_pretended(value) else value.device, value.dtype)
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, bool):
                flags.append(value)
            elif isinstance(value, int | str | torch.device):
                target = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        if target is not None and target.type == "meta":
            return x.to(target, dtype)
        to_cuda = is_pretended(x) if target is None else is_cuda(target)
        is_copied = bool(kwargs.get("copy")) or flags[1:] == [True] or to_cuda != is_pretended(x)
        if not is_copied and dtype in (None, x.dtype):
            return x
        if to_cuda != is_pretended(x):
            is_blocking = not (kwargs.get("non_blocking") or flags[:1] == [True])
            RECORDER.to_device(x) if to_cuda else RECORDER.to_host(is_blocking=is_blocking)
        outer = PLACE.forced
        PLACE.forced = to_cuda
        try:
            y = x.to(dtype or x.dtype, copy=True, memory_format=kwargs.get("memory_format", torch.preserve_format))
        finally:
            PLACE.forced = outer
        return mark(y, to_cuda)


@contextmanager
def modes() -> Iterator[None]:
    """Treat marked tensors of this thread as tensors of a CUDA device; inside `patches()`."""
    with _Operators(), _Functions():
        yield


@contextmanager
def patches() -> Iterator[None]:
    """Make torch find a CUDA device, and kernels and libraries take its marked tensors."""
    init = dist.init_process_group
    run_thread = threading.Thread.run

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        init("gloo" if "nccl" in str(backend) else backend, *args, **options)

    def run(thread: threading.Thread) -> None:
        with modes():
            run_thread(thread)

    # The compiler keeps the functions of torch that it finds at its first use: not the replaced ones.
    get_torch_obj_rule_map()
    host_generator = torch.Generator

    def generator(device: Any = "cpu") -> torch.Generator:
        return host_generator("cpu")

    def record_stream(x: Tensor, stream: Any) -> None:
        pass

    # Pack hooks of checkpoints run inside functions of torch, where the mode is off: without the device.
    checks = {"default": lambda x: {"shape": x.shape, "dtype": x.dtype}}
    with ExitStack() as stack:
        # The autograd engine is called by a function of torch, inside which the mode is off. Patched for all threads.
        stack.enter_context(around_backward(_Functions()))
        for name, value in DRIVER.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(dist, "init_process_group", init_process_group))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(mock.patch.object(torch, "Generator", generator))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        determinism = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(determinism, checks))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        stack.enter_context(_interpreted_kernels())
        stack.enter_context(library_attention(mark))
        yield


@contextmanager
def _interpreted_kernels() -> Iterator[None]:
    """Let Triton's interpreter take marked tensors and no others, without the modes, which its operators need not."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    from moefold.ops.triton import fc1, grouped_gemm

    launch = GridExecutor.__call__

    def checked(self: Any, *args: Any, **options: Any) -> Any:
        for x in (*args, *options.values()):
            if isinstance(x, Tensor) and x.numel() and not is_pretended(x):
                title = f"Pointer argument of {self.fn.__name__} cannot be accessed from Triton (cpu tensor?)"
                raise ValueError(f"{title}: {tuple(x.shape)}")
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return launch(self, *args, **options)

    def upcasts(x: Tensor) -> bool:
        return x.dtype == torch.bfloat16

    with (
        mock.patch.object(GridExecutor, "__call__", checked),
        # The interpreter multiplies no bfloat16 matrices.
        mock.patch.object(grouped_gemm, "upcasts", upcasts),
        mock.patch.object(fc1, "upcasts", upcasts),
    ):
        yield


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Run code of this process on a CUDA device that is not there."""
    with patches(), modes():
        yield
