"""Dispatchers for tests, by kind."""

from dataclasses import asdict
from typing import Any

from moefold.comm.groups import MoEGroups
from moefold.config.base.part_registry import find_part
from moefold.config.groups.dispatcher import DispatchSizes
from moefold.model.moe.dispatch import Dispatcher
from moefold.parallel.expert_parallel import build_dispatcher
from moefold.parts.dispatcher.leastloaded.module import RebalanceRule


def make_dispatcher(
    kind: str, groups: MoEGroups, num_experts: int, rule: RebalanceRule | None = None, *, fp8_dispatch: bool = False
) -> Dispatcher[Any]:
    """Build a dispatcher without buffers. The rule is for `leastloaded`."""
    settings = asdict(rule) if rule is not None and kind == "leastloaded" else {}
    sizes = DispatchSizes(num_experts=num_experts, max_rows=0, width=0, item_bytes=0, fp8_dispatch=fp8_dispatch)
    return build_dispatcher(find_part("dispatcher", kind)(**settings), groups, sizes)
