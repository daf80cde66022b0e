"""Worker process of the reward pool: runs a user's reward function on JSON lines from standard input.

Started as `python -m moefold.rl.reward_worker FILE FUNCTION` in its own session. Output of the function goes to
standard error, and its standard input is empty. The worker ends with its parent process.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import threading
import traceback
from typing import Any


def main(path: str, name: str) -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), daemon=True).start()

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        function = _load(path, name)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        reply({"error": f"cannot be imported: {type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    reply({"ready": True})
    for line in requests:
        try:
            reply({"rewards": _call(function, json.loads(line))})
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            reply({"error": f"raised {type(error).__name__}: {error}", "traceback": traceback.format_exc()})


def _end_with_parent(pipe: int) -> None:
    """Kill this process, even during a call, and the processes that it has forked, once a pipe has no writer."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _load(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("moefold_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"it has no function {name!r}")
    return function


def _call(function: Any, arguments: dict[str, Any]) -> list[Any]:
    """Call the function, which may be a coroutine function, and convert numpy and torch numbers to Python's."""
    rewards = function(**arguments)
    if inspect.iscoroutine(rewards):
        rewards = asyncio.run(rewards)
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    return [reward.item() if hasattr(reward, "item") else reward for reward in rewards]


if __name__ == "__main__":
    main(*sys.argv[1:])
