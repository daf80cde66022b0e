"""Answers of torch.cuda for a device that is not there: an H100 whose streams order nothing."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.gpu_static.pretended_transfers import RECORDER

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 that is pretended",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    # Few, so that persistent kernels have more tiles than programs.
    multi_processor_count=3,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    warp_size=32,
)


class PretendedStream:
    """A stream in which everything has run already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0
        self.stream_id = 0
        self.device_index = 0
        self.device_type = 1

    def synchronize(self) -> None:
        RECORDER.wait()

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "PretendedEvent":
        return PretendedEvent()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "PretendedStream":
        return self

    def __exit__(self, *args: object) -> None:
        pass


class PretendedEvent:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        RECORDER.wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Nothing:
    """A context that does nothing, such as the context of a stream."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *args: object) -> None:
        pass


def _answer(value: Any) -> Any:
    return lambda *args, **options: value


DRIVER: dict[str, Any] = {
    "is_available": _answer(True),
    "is_initialized": _answer(True),
    "is_bf16_supported": _answer(True),
    "is_current_stream_capturing": _answer(False),
    "can_device_access_peer": _answer(True),
    "device_count": _answer(1),
    "current_device": _answer(0),
    "get_device_capability": _answer((9, 0)),
    "get_device_properties": _answer(PROPERTIES),
    "get_device_name": _answer(PROPERTIES.name),
    "get_sync_debug_mode": _answer(0),
    "mem_get_info": _answer((70 * 2**30, 80 * 2**30)),
    "memory_stats": lambda device=None: {},
    "current_stream": PretendedStream,
    "default_stream": PretendedStream,
    "synchronize": lambda device=None: RECORDER.wait(),
    "Stream": PretendedStream,
    "Event": PretendedEvent,
    "stream": Nothing,
    "device": Nothing,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
}
MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
SILENT = (
    "init", "_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats",
    "set_sync_debug_mode", "set_per_process_memory_fraction", "manual_seed", "manual_seed_all", "_sleep",
)  # fmt: skip
# Each name has a function of its own: torch's compiler keeps rules by function.
DRIVER |= {name: _answer(2**20) for name in MEMORY} | {name: _answer(None) for name in SILENT}
"""Replaced names of torch.cuda."""
