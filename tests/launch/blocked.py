"""Hang inside the kernel, as a process does that reads from a network folder whose server is gone."""

import ctypes
import signal

_CLONE_VFORK = 0x4000
_STACK_BYTES = 2**16


def block(seconds: int) -> None:
    """Block this thread from all signals but SIGKILL: it waits for its child of a vfork, which sleeps."""
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + _STACK_BYTES) & ~15)
    # The child has memory of its own and runs no Python.
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    libc.clone(sleep, top, _CLONE_VFORK | signal.SIGCHLD, ctypes.c_void_p(seconds))
