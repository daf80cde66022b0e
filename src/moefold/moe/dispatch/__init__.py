"""Token dispatchers: the only place of the MoE maths that communicates."""

from moefold.moe.dispatch.base import Assignment, Dispatcher
from moefold.moe.dispatch.factory import make_dispatcher
from moefold.moe.dispatch.local import LocalDispatcher
from moefold.moe.dispatch.scope import GroupScope

__all__ = ["Assignment", "Dispatcher", "GroupScope", "LocalDispatcher", "make_dispatcher"]
