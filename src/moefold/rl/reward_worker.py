"""Worker process of the reward pool: runs a user's reward function on JSON lines from standard input.

Started as `python -m moefold.rl.reward_worker FILE FUNCTION`. What the function prints goes to standard error.
"""

import importlib.util
import json
import os
import sys
import traceback
from typing import Any


def main(path: str, name: str) -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        function = _load(path, name)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        reply({"error": f"cannot be imported: {type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    reply({"ready": True})
    for line in sys.stdin:
        try:
            reply({"rewards": _call(function, json.loads(line))})
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            reply({"error": f"raised {type(error).__name__}: {error}", "traceback": traceback.format_exc()})


def _load(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location("moefold_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"it has no function {name!r}")
    return function


def _call(function: Any, arguments: dict[str, Any]) -> list[Any]:
    """Call the function, and convert numpy and torch numbers to Python's."""
    rewards = function(**arguments)
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    return [reward.item() if hasattr(reward, "item") else reward for reward in rewards]


if __name__ == "__main__":
    main(*sys.argv[1:])
