"""Token dispatchers: the only place of the MoE maths that communicates."""

from moefold.moe.dispatch.base import Dispatcher, RoutingMap
from moefold.moe.dispatch.factory import make_dispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.dispatch.scope import ShardedMicroBatch

__all__ = ["RoutingMap", "Dispatcher", "ShardedMicroBatch", "LocalDispatcher", "make_dispatcher"]
