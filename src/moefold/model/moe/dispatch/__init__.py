"""Token dispatchers: the communication of expert parallelism."""

from moefold.model.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.model.moe.dispatch.local import LocalDispatcher
from moefold.model.moe.token_group import ShardedMicroBatch

__all__ = ["RoutingMap", "Dispatcher", "ShardedMicroBatch", "LocalDispatcher"]
