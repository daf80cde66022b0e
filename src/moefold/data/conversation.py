"""Conversations from JSON lines, in the four forms that fine-tuning data comes in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moefold.config.keys import closest_match
from moefold.data.jsonl import JsonlRecord, column_text, reject_surrogates, unknown_column_message
from moefold.errors import ConfigError

ANSWER_FIELDS = ("response", "completion")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""What ShareGPT rows call those who speak, and the role that a chat template knows."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and the tools that they may speak of."""

    messages: tuple[dict[str, Any], ...]
    tools: Any


def parse_conversation(record: JsonlRecord) -> Conversation:
    """Read a row of one of four forms, told apart by the fields that it has, in this order.

    {"messages": [{"role", "content"}, ...], "tools": ...}; ShareGPT: {"conversations": [{"from", "value"}, ...]}, with
    a "system" beside it or not; Alpaca: {"instruction", "input", "output"}, the input after the instruction if there is
    one; {"prompt", "response"} ("completion" will do). Other fields are left alone, those of a message are given to the
    template.

    Raises:
        ConfigError: the fields of no form are there, or a message has no role or no text; its line is named.
    """
    fields, place = record.fields, record.location
    if "messages" in fields:
        return Conversation(_parse_messages(fields["messages"], place), fields.get("tools"))
    if "conversations" in fields:
        return Conversation(_parse_sharegpt(fields, place), fields.get("tools"))
    if "instruction" in fields and "prompt" not in fields:
        return Conversation(_parse_alpaca(fields, place), None)
    if "prompt" not in fields:
        guess = closest_match("messages", fields) or closest_match("prompt", fields)
        hint = f"its {guess!r} has another name" if guess else unknown_column_message("messages", fields)
        raise ConfigError(
            f'{place} is no conversation ({hint}); give it "messages", "conversations", "instruction" '
            'and "output", or "prompt" and "response"'
        )
    answer = next((name for name in ANSWER_FIELDS if name in fields), ANSWER_FIELDS[0])
    turns = (("user", "prompt"), ("assistant", answer))
    return Conversation(
        tuple({"role": role, "content": column_text(fields, name, place)} for role, name in turns), None
    )


def _parse_sharegpt(fields: dict[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """The turns of {"conversations": [{"from", "value"}, ...]}; rows that call them role and content are read too."""
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ConfigError(
            f'{location}: "conversations" must be a list of at least one turn; mend it or take the line out'
        )
    messages: list[dict[str, Any]] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": column_text(fields, "system", location)})
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise ConfigError(f'{location}: turn {number} must be an object with "from" and "value"; mend it')
        if "role" in turn and "from" not in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise ConfigError(
                f'{location}: turn {number} has "from": {speaker!r}; it must be one of {", ".join(SHAREGPT_ROLES)}'
            )
        text = column_text(turn, "value", f"{location}: turn {number}")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": text})
    return _parse_messages(messages, location)


def _parse_alpaca(fields: dict[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """The turns of {"instruction", "input", "output"}: the input is optional, and follows after an empty line."""
    question = column_text(fields, "instruction", location)
    more = column_text(fields, "input", location) if fields.get("input") is not None else ""
    content = f"{question}\n\n{more}" if more else question
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": column_text(fields, "output", location)},
    ]
    if fields.get("system"):
        messages.insert(0, {"role": "system", "content": column_text(fields, "system", location)})
    return tuple(messages)


def _parse_messages(messages: object, location: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(
            f'{location}: "messages" must be a list of at least one message; mend it or take the line out'
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ConfigError(f"{location}: message {number} must be an object with a role and a content; mend it")
        if not isinstance(message.get("role"), str):
            raise ConfigError(
                f'{location}: message {number} has no role; give it "role": "system", "user", "assistant" or "tool"'
            )
        content = message.get("content")
        calls_tools = content is None and message.get("tool_calls")
        if not isinstance(content, str) and not calls_tools:
            raise ConfigError(f'{location}: message {number} has no text; give it "content": "..."')
        reject_surrogates(message["role"] + (content or ""), f"{location}: message {number}")
    return tuple(messages)
