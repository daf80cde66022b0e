"""Trace of the CUDA code paths without a GPU: meta tensors that report a CUDA device, and counters of their calls.

The traced code is the code that a GPU would run: the same device checks, kernels and collectives. Operators and
collectives run on meta tensors, with torch's fake process group. Kernel launches are recorded but not run. Where the
host reads a number from the device, the trace records a wait and answers with a balanced routing.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import moefold
from benchmarks.sent_bytes import sent_bytes
from benchmarks.torch_operators import around_backward, operator_arguments, operator_name, process_group_size
from moefold.comm.private_torch import TorchDispatchMode, storage_key, tree_leaves
from moefold.cost.flops import keys_per_token
from moefold.model.moe.dispatch import Dispatcher

PACKAGE = f"{Path(moefold.__file__).parent}/"
"""Folder of moefold's sources; a checkout of the same name may hold others, such as the sources of an environment."""
CUDA = torch.device("cuda", 0)
"""The device that meta tensors report."""
META = torch.device("meta")
WAITING_METHODS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
}  # fmt: skip
"""Methods that copy to the host and wait for the device."""
FREE_OPS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "view",
    "alias", "lift_fresh", "record_stream", "set_", "resize_", "_reshape_alias",
}  # fmt: skip
"""Operators that launch nothing, besides views."""
FUSED_ATTENTION_OPS = ("_flash_attention", "_scaled_dot_product_cudnn_attention")
"""Operators of fused attention, forward and backward, by the beginning of their names."""
GATHERING_OPS = {"index_select", "index", "gather", "embedding"}
"""Operators that read as many elements of their first argument as the index selects, at most."""

SCATTERING_OPS = {"scatter_add_", "scatter_"}
"""Operators that read and write as many elements of their first argument as the index has."""


class Device(NamedTuple):
    """The properties of a GPU that the code asks for."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int


H200 = Device("NVIDIA H200", (9, 0), 132, 150_000_000_000)
B200 = Device("NVIDIA B200", (10, 0), 148, 190_000_000_000)


@dataclass(frozen=True)
class Event:
    """One operation that the traced code requested from the device or the host.

    Attributes:
        kind: "op" (operator of torch), "kernel" (launch of ours), "collective", "wait" (the host waits for the device),
            "copy" (between host and device, without a wait) or "host" (operator on the CPU).
        name: of the operator, kernel, collective or method.
        source: innermost line of moefold, as "model/moe/layer.py:120".
        moved_bytes: bytes read and written in device memory; for a collective: bytes sent.
        flops: of matrix products, attention included.
        contraction: length of the sums of a matrix product; 0 for others.
        width: columns of the result of a matrix product, the smaller side of a weight gradient; 0 for others.
        is_weight_gradient: True for a grouped product over the rows of each expert.
        is_float32: True for a matrix product of float32 operands.
        epilogue_bytes: part of `moved_bytes` that a matrix product writes beyond one value for each accumulator.
    """

    kind: str
    name: str
    source: str
    moved_bytes: float = 0.0
    flops: float = 0.0
    contraction: int = 0
    width: int = 0
    is_weight_gradient: bool = False
    is_float32: bool = False
    epilogue_bytes: float = 0.0


class GemmCost(NamedTuple):
    """FLOPs and shape of a matrix product, see `Event`; zeros for other operators."""

    flops: float = 0.0
    contraction: int = 0
    width: int = 0
    is_weight_gradient: bool = False
    is_float32: bool = False
    epilogue_bytes: float = 0.0


@dataclass
class Launch:
    """A recorded kernel launch."""

    kernel: Any
    args: tuple[Any, ...]
    grid: Any
    options: dict[str, Any]

    def argument(self, name: str) -> Any:
        """Return an argument by the name of the kernel's parameter."""
        names = self.kernel.arg_names
        return self.options[name] if name in self.options else self.args[names.index(name)]


@dataclass
class Trace:
    """Record of the operators, launches, collectives and host waits of the traced code.

    Attributes:
        num_rows: routed tokens of this rank, whose routing is balanced; the host reads them as a scalar.
        top_k: experts of a token.
        runs_all_candidates: run every candidate of the autotuner, as its measurements do.
        event_seconds: the autotuner takes the candidate whose events have the smallest sum; None: the first one.
    """

    num_rows: int = 0
    top_k: int = 1
    runs_all_candidates: bool = False
    event_seconds: Callable[[Event], float] | None = None
    events: list[Event] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    def host_values(self, x: Tensor) -> Tensor:
        """Return the values that the host reads from x: routed tokens, spread evenly over the last dimension."""
        share = self.num_rows // x.shape[-1] if x.dim() else self.num_rows
        return torch.full(x.shape, share if not x.is_floating_point() else 0, dtype=x.dtype, device="cpu")

    def seconds_of(self, candidate: Callable[[], object]) -> float:
        """Return the sum of `event_seconds` over the events of a candidate, which are not recorded."""
        assert self.event_seconds is not None, "nothing to estimate with"
        num_events = len(self.events)
        candidate()
        seconds = sum(self.event_seconds(event) for event in self.events[num_events:])
        del self.events[num_events:]
        return seconds

    def add(self, kind: str, name: str, **counts: Any) -> None:
        """Record an event at the current line of moefold."""
        self.events.append(Event(kind, name, _source(), **counts))


@contextmanager
def trace_cuda(trace: Trace, device: Device = H200) -> Iterator[Trace]:
    """Run code as on a CUDA device and record it. Its tensors must be on the meta device."""
    properties = SimpleNamespace(
        multi_processor_count=device.multiprocessors,
        total_memory=device.memory_bytes,
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
    )
    with ExitStack() as stack:
        for name, value in {
            "get_device_capability": lambda device=None: (properties.major, properties.minor),
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: _Stream(trace),
            "Stream": lambda *args, **options: _Stream(trace),
            "Event": lambda *args, **options: _Event(trace),
            "stream": _nothing,
            "synchronize": lambda device=None: trace.add("wait", "synchronize"),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", _Sends(trace)))
        stack.enter_context(_recorded_launches(trace))
        stack.enter_context(_balanced_all_to_all(trace))
        stack.enter_context(_Operators(trace))
        functions = stack.enter_context(_Functions(trace))
        # A function of torch calls the engine, and the mode is off inside it.
        stack.enter_context(around_backward(functions))
        yield trace


class _Functions(TorchFunctionMode):
    """Function mode that answers Python calls for meta tensors as for CUDA tensors."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self._replaced: dict[Any, Callable[..., Any]] = {
            _attribute_getter("device"): lambda x: CUDA if x.is_meta else x.device,
            _attribute_getter("is_cuda"): lambda x: x.is_meta,
            torch.Tensor.pin_memory: lambda x: x,
            F.scaled_dot_product_attention: self._attention,
            F.rms_norm: self._rms_norm,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        replaced = self._replaced.get(func)
        if replaced is not None:
            return replaced(*args, **kwargs)
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and x.is_meta and func in WAITING_METHODS:
            self.trace.add("wait", func.__name__, moved_bytes=_bytes(x))
            return func(self.trace.host_values(x), *args[1:], **kwargs)
        if func in (torch.tensor, torch.as_tensor) and x is None and _on_meta(kwargs.get("device")) == META:
            self.trace.add("wait", "copy to the device")
        target = _target(func, args, kwargs)
        if x is not None and x.is_meta and target is not None and target.type == "cpu":
            is_async = bool(kwargs.get("non_blocking"))
            self.trace.add("copy" if is_async else "wait", "copy to the host", moved_bytes=_bytes(x))
            return self.trace.host_values(x).to(kwargs.get("dtype", x.dtype))
        if x is not None and not x.is_meta and target is not None and target.type == "cuda":
            is_async = bool(kwargs.get("non_blocking"))
            self.trace.add("copy" if is_async else "wait", "copy to the device", moved_bytes=_bytes(x))
        kwargs.pop("pin_memory", None)
        return func(*(_on_meta(value) for value in args), **{name: _on_meta(value) for name, value in kwargs.items()})

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        y: Tensor = _FusedAttention.apply(q, k, v, attn_mask, bool(options.get("is_causal")), self.trace)
        return y

    def _rms_norm(self, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        y: Tensor = _FusedRMSNorm.apply(x, weight, self.trace)
        return y


class _FusedAttention(torch.autograd.Function):
    """SDPA as one kernel in each direction, which meta tensors would decompose."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, trace: Trace
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.trace = trace
        # A kernel with a mask skips nothing.
        ctx.pairs = q.numel() / q.shape[-1] * k.shape[-2] * (0.5 if is_causal else 1.0)
        ctx.mask_bytes = 0 if mask is None else _bytes(mask)
        y = q.new_empty(*q.shape[:-1], v.shape[-1])
        flops = attention_flops(ctx.pairs, q.shape[-1], v.shape[-1], is_backward=False)
        trace.add("op", "sdpa", moved_bytes=_bytes(q, k, v, y) + ctx.mask_bytes, flops=flops)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        moved = 2 * _bytes(q, k, v, grad) + ctx.mask_bytes
        flops = attention_flops(ctx.pairs, q.shape[-1], v.shape[-1], is_backward=True)
        ctx.trace.add("op", "sdpa backward", moved_bytes=moved, flops=flops)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm as one kernel in each direction, which meta tensors would decompose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trace: Trace) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.trace = trace
        trace.add("op", "rms_norm", moved_bytes=2 * _bytes(x))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.trace.add("op", "rms_norm backward", moved_bytes=3 * _bytes(x))
        return torch.empty_like(x), torch.empty_like(weight), None


class _Operators(TorchDispatchMode):
    """Dispatch mode that records operators and collectives."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = operator_name(func)
        if func.namespace == "c10d":
            self._collective(name, args)
            return out
        if func.is_view or name in FREE_OPS:
            return out
        # An output tensor is written, not read.
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        inputs = [leaf for leaf in tree_leaves((args, read)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        on_device = [x for x in (*inputs, *outputs) if x.is_meta]
        if not on_device:
            self.trace.add("host", name, moved_bytes=_bytes(*inputs, *outputs))
            return out
        moved = _bytes(*on_device)
        if name in GATHERING_OPS:
            moved -= max(0, _bytes(inputs[0]) - _bytes(*outputs))
        if name in SCATTERING_OPS:
            moved -= max(0, 2 * (_bytes(inputs[0]) - inputs[1].numel() * inputs[0].element_size()))
        is_attention = name.startswith(FUSED_ATTENTION_OPS)
        cost = _attention_cost(func, args, kwargs or {}) if is_attention else gemm_cost(name, inputs, outputs)
        self.trace.add("op", name, moved_bytes=moved, **cost._asdict())
        return out

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        size = process_group_size(args)
        self.trace.add("collective", name.strip("_"), moved_bytes=sent_bytes(name, args, size))


def gemm_cost(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> GemmCost:
    """Return the cost of a matrix product of torch; zeros for other operators."""
    if name in ("mm", "bmm", "_grouped_mm"):
        a, b = inputs[:2]
    elif name in ("addmm", "baddbmm"):
        a, b = inputs[1:3]
    else:
        return GemmCost()
    is_wgrad = name == "_grouped_mm" and a.dim() == 2 and b.dim() == 2
    # The rows of all experts together: each of them belongs to one expert's sum.
    flops = 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if name in ("bmm", "baddbmm") else 1)
    contraction = a.shape[-1] // (outputs[0].shape[0] if is_wgrad else 1)
    width = min(a.shape[-2], b.shape[-1]) if is_wgrad else b.shape[-1]
    return GemmCost(flops, contraction, width, is_wgrad, a.dtype == torch.float32)


def attention_flops(q_pairs: float, qk_dim: int, v_dim: int, *, is_backward: bool) -> float:
    """Return the FLOPs of fused attention over pairs of query and key, of all heads and samples.

    Forward: scores and their product with the values. Backward: scores again, and the gradients of the scores, of
    queries, keys and values.
    """
    return 2.0 * q_pairs * (3 * qk_dim + 2 * v_dim if is_backward else qk_dim + v_dim)


def _attention_cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GemmCost:
    """Return the cost of torch's fused attention.

    The flash operators take [B, S, heads, D], or [all tokens, heads, D] of many sequences; cuDNN's [B, heads, S, D].
    """
    bound = operator_arguments(func, args, kwargs)
    q, k, v = bound["query"], bound["key"], bound["value"]
    sequence_dim = 1 if "flash" in operator_name(func) else 2
    queries, keys = (bound["max_q"], bound["max_k"]) if q.dim() == 3 else (q.shape[sequence_dim], k.shape[sequence_dim])
    left = bound.get("window_size_left")
    window = 0 if left is None or left < 0 else left + 1
    is_masked = bool(bound.get("is_causal")) or window > 0
    mean_keys = keys_per_token(window, keys, causal=True) if is_masked else keys
    pairs = q.numel() / q.shape[-1] * min(mean_keys, keys)
    flops = attention_flops(pairs, q.shape[-1], v.shape[-1], is_backward="grad_out" in bound)
    return GemmCost(flops, q.shape[-1], queries)


class _Sends:
    """Records point-to-point messages, which torch's fake process group does not take on meta tensors."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __call__(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        """Record the sends."""
        sent = [op.tensor for op in operations if op.op is dist.isend]
        self.trace.add("collective", "send", moved_bytes=_bytes(*sent))
        return []


class _Stream:
    """A stream that orders nothing: a trace has one order."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def synchronize(self) -> None:
        self.trace.add("wait", "stream synchronize")

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Event":
        return _Event(self.trace)


class _Event:
    """An event that orders nothing; only the host's wait for it is recorded."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def synchronize(self) -> None:
        self.trace.add("wait", "event synchronize")

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


@contextmanager
def _nothing(*args: Any) -> Iterator[None]:
    yield


@contextmanager
def _recorded_launches(trace: Trace) -> Iterator[None]:
    """Record launches of Triton kernels instead of running them."""
    from triton.runtime.jit import JITFunction

    from moefold.ops import autotune

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        # Aliases: autograd copies a gradient that has another reference.
        args = tuple(value.detach() if isinstance(value, Tensor) else value for value in args)
        launch = Launch(kernel, args, grid, options)
        trace.launches.append(launch)
        trace.add("kernel", kernel.__name__, moved_bytes=launch_bytes(launch), **launch_cost(launch)._asdict())

    def choose(self: Any, key: Any, candidates: autotune.Candidates) -> str:
        first, *others = candidates
        if trace.event_seconds is not None:
            return min(candidates, key=lambda name: trace.seconds_of(candidates[name]))
        if trace.runs_all_candidates:
            for name in others:
                candidates[name]()
        return first

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(autotune.Autotuner, "choose", choose):
        yield


@contextmanager
def _balanced_all_to_all(trace: Trace) -> Iterator[None]:
    """Answer an all-to-all's read of its split sizes, which is a host wait, as a balanced routing does."""

    def balanced_counts(dispatcher: Any, counts: Tensor) -> Tensor:
        if not counts.is_meta:
            return counts
        trace.add("wait", "split sizes", moved_bytes=_bytes(counts))
        if counts.dim() == 4:
            # Routed tokens of each expert: [source etp, source ep, destination, experts there].
            return torch.full(counts.shape, trace.num_rows // (counts.shape[2] * counts.shape[3]))
        # Tokens that are sent once to a rank, and routed tokens: [source, destination, 2].
        size = len(counts)
        share = share_of_ranks_reached(trace.top_k, dispatcher.num_experts, size)
        tokens = round(trace.num_rows / trace.top_k * share)
        return torch.tensor([tokens, trace.num_rows // size]).expand(size, size, 2)

    with mock.patch.object(Dispatcher, "host_counts", balanced_counts):
        yield


def share_of_ranks_reached(top_k: int, num_experts: int, ep: int) -> float:
    """Return the mean share of ep ranks that hold any of the experts of a token, whose choices are uniform."""
    others = num_experts - num_experts // ep
    return 1.0 - comb(others, top_k) / comb(num_experts, top_k)


def launch_bytes(launch: Launch) -> int:
    """Return the bytes of the tensors of a launch, each counted once."""
    tensors = {storage_key(x.untyped_storage()): x for x in launch.args if isinstance(x, Tensor)}
    return _bytes(*tensors.values())


def launch_cost(launch: Launch) -> GemmCost:
    """Return the cost of a launch of our kernels with matrix products; zeros for other kernels."""
    cost = GEMM_KERNELS.get(launch.kernel.__name__)
    return cost(launch) if cost else GemmCost()


def _grouped_gemm_cost(launch: Launch) -> GemmCost:
    rows = len(launch.argument("y"))
    width = launch.argument("width")
    depth = launch.argument("depth") * (2 if launch.options.get("HAS_SECOND") else 1)
    return GemmCost(2.0 * rows * width * depth, depth, width, is_float32=launch.argument("x").dtype == torch.float32)


def _fc1_cost(launch: Launch) -> GemmCost:
    written = launch.argument("g_out" if launch.options["WRITES_FC1"] else "hidden_out")
    width = launch.argument("width")
    depth = launch.argument("depth")
    is_float32 = launch.argument("x").dtype == torch.float32
    writes_both = launch.options["WRITES_FC1"] and launch.options["WRITES_HIDDEN"]
    epilogue_bytes = _bytes(launch.argument("hidden_out")) if writes_both else 0
    flops = 2 * 2.0 * len(written) * width * depth
    return GemmCost(flops, depth, width, is_float32=is_float32, epilogue_bytes=epilogue_bytes)


def _weight_gradient_cost(launch: Launch) -> GemmCost:
    out = launch.argument("out")
    x = launch.argument("x")
    is_padded = "padded_rows" in launch.kernel.arg_names
    rows = launch.argument("padded_rows") if is_padded else min(len(x), len(launch.argument("grad")))
    flops = 2.0 * rows * out.shape[1] * out.shape[2]
    return GemmCost(flops, rows // len(out), min(out.shape[1:]), True, x.dtype == torch.float32)


GEMM_KERNELS: dict[str, Callable[[Launch], GemmCost]] = {
    "_grouped_gemm_kernel": _grouped_gemm_cost,
    "_scaled_gemm_kernel": _grouped_gemm_cost,
    "_fc1_kernel": _fc1_cost,
    "_weight_grad_kernel": _weight_gradient_cost,
    "_scaled_weight_grad_kernel": _weight_gradient_cost,
}
"""Cost of our kernels with matrix products."""


def _attribute_getter(name: str) -> Any:
    """Return the function that a function mode is called with where an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return META
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return META
    return value


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the target device of `Tensor.to`, or None if the call does not name a device."""
    if func is not torch.Tensor.to:
        return None
    other = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(other, Tensor):
        return CUDA if other.is_meta else other.device
    if isinstance(other, torch.device | str):
        return torch.device(other)
    return None


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _source() -> str:
    frame: Any = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.endswith("comm/private_torch.py"):
            return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
