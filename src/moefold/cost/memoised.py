"""Methods that are cached by the values that they read from their arguments."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def memoised(key: Callable[..., Hashable]) -> Callable[[Method], Method]:
    """Cache a method for as long as its object lives.

    Args:
        key: function of the arguments of the method, `self` first: the values that its result depends on.
    """

    def decorate(method: Method) -> Method:
        name = f"_{method.__name__}_by_key"

        @wraps(method)
        def cached(self: Any, *args: Any) -> Any:
            known = self.__dict__.get(name)
            if known is None:
                known = self.__dict__[name] = {}
            wanted = key(self, *args)
            try:
                return known[wanted]
            except KeyError:
                found = known[wanted] = method(self, *args)
                return found

        return cached  # type: ignore[return-value]

    return decorate


def all_arguments(self: object, *args: Hashable) -> Hashable:
    """Return the key of a method that is cached by all of its arguments."""
    return args
