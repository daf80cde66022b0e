"""Ahead-of-time compilation of recorded kernel launches for an architecture that this machine need not have.

A launch goes through Triton's own launch path as a warm-up, so that its specialisation of arguments (divisible by 16,
equal to 1) is the same as in a launch on a GPU. Registers and spills come from the machine code, tensor-core
instructions and asynchronous copies from the PTX.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.cuda_trace import Launch

MAX_SHARED_BYTES = 232_448
"""Shared memory of a block on sm_90 and sm_100 at most: 227 KiB (CUDA C++ Programming Guide, Compute Capabilities)."""
LOW_PRECISION_DOT = re.compile(r"tt\.dot [^\n]*: tensor<[\dx]+x(?:bf16|f16|f8\w+)> \*")
MMA = (
    ("wgmma", re.compile(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.\w+\.(\w+)")),
    ("tcgen05", re.compile(r"tcgen05\.mma\.cta_group::\d\.kind::(\w+)")),
    ("mma.sync", re.compile(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\.\w+\.\w+\.\w+\.(\w+)")),
)
"""Tensor-core instructions of PTX: name, pattern."""
ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x(\w+)")
BULK_COPY = re.compile(r"cp\.async\.bulk\.tensor")
POINTER_ALIGNMENT = ["tt.divisibility", 16]


@dataclass(frozen=True)
class KernelResources:
    """Resources that a compiled kernel uses.

    Attributes:
        registers: of a thread.
        spill_bytes: local memory of a thread.
        shared_bytes: shared memory of a block.
        mma: tensor-core instructions with their shape and operand type.
        copies: asynchronous copies from global to shared memory: "16" for cp.async of 16 bytes, "tma" for bulk copies.
        needs_mma: True if the kernel multiplies matrices in a type of the tensor cores; float32 is exact instead.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    mma: tuple[str, ...]
    copies: tuple[str, ...]
    needs_mma: bool

    @property
    def uses_tensor_cores(self) -> bool:
        """Return whether there are instructions of sm_90 or sm_100 for matrix products; mma.sync is of sm_80."""
        return any(name.startswith(("wgmma", "tcgen05")) for name in self.mma)


class AbsentGPU:
    """Driver of Triton that answers the questions of a launch about a GPU that is not there.

    Args:
        capability: compute capability, times 10.
    """

    class utils:  # noqa: N801 - the name that Triton asks for
        """Device properties."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            """Return the limits of a multiprocessor."""
            return {
                "max_shared_mem": MAX_SHARED_BYTES,
                "multiprocessor_count": 132,
                "max_num_regs": 65536,
                "warpSize": 32,
            }

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """Return the architecture to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return a device that exists."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return an index of its own for each capability: Triton keeps the compiled kernels of a device."""
        return self.capability

    def get_current_stream(self, device: int = 0) -> int:
        """Return the default stream."""
        return 0


@contextmanager
def _absent_gpu(capability: int) -> Iterator[None]:
    from triton.runtime import driver

    with mock.patch.object(driver, "_active", AbsentGPU(capability)):
        yield


def compiled_launches(launches: Iterable[Launch], capability: int) -> Iterator[tuple[Launch, Any]]:
    """Compile each launch for a compute capability (90, 100), or find it in Triton's cache, and yield both."""
    from triton.runtime.jit import JITFunction

    with _absent_gpu(capability):
        for launch in launches:
            yield (
                launch,
                JITFunction.run(launch.kernel, *launch.args, grid=launch.grid, warmup=True, **launch.options),
            )


def compile_launches(launches: Iterable[Launch], capability: int) -> dict[str, KernelResources]:
    """Compile each launch for a compute capability (90, 100) and return its resources by `launch_name`."""
    resources: dict[str, KernelResources] = {}
    for launch, compiled in compiled_launches(launches, capability):
        name = launch_name(launch, compiled)
        if name not in resources:
            resources[name] = _resources(compiled)
    return resources


def launch_name(launch: Launch, compiled: Any) -> str:
    """Return a name of a compilation of Triton: kernel, tensor types, constants, warps, stages, special numbers.

    Numbers divisible by 16 and aligned tensors are the rule and not named.
    """
    source = compiled.src
    names = list(source.signature)
    constants = {names[index]: value for (index,), value in source.constants.items()}
    is_aligned = {names[index] for (index,), attrs in source.attrs.items() if POINTER_ALIGNMENT in attrs}
    types = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
    tensors = [kind[1:] + ("" if name in is_aligned else "!") for name, kind in types.items() if kind[0] == "*"]
    words = [f"{kernel_name(launch)}({','.join(tensors)})"]
    words += [_constant_word(name, value) for name, value in constants.items() if value is not False]
    words += [
        name if kind == "i32" else f"{name}:{kind}"
        for name, kind in types.items()
        if kind[0] != "*" and kind not in ("fp32", "fp64") and (name not in is_aligned or kind != "i32")
    ]
    return " ".join([*words, f"warps={compiled.metadata.num_warps}", f"stages={compiled.metadata.num_stages}"])


def kernel_name(launch: Launch) -> str:
    """Return file and name of a launched kernel."""
    return f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"


def _constant_word(name: str, value: Any) -> str:
    return name if value is True else f"{name}={value}"


def _resources(compiled: Any) -> KernelResources:
    usage = _resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    copies = {str(int(width, 16)) for width in ASYNC_COPY.findall(ptx)}
    if BULK_COPY.search(ptx):
        copies.add("tma")
    return KernelResources(
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        mma=tuple(sorted({f"{name} {_joined(match)}" for name, pattern in MMA for match in pattern.findall(ptx)})),
        copies=tuple(sorted(copies)),
        needs_mma=LOW_PRECISION_DOT.search(compiled.asm["ttir"]) is not None,
    )


def _joined(match: str | tuple[str, ...]) -> str:
    return match if isinstance(match, str) else " ".join(match)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return registers (REG), stack and local memory (STACK, LOCAL) of the one function of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
