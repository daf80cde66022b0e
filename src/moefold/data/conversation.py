"""Conversations from JSON lines, in the two forms that fine-tuning data comes in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moefold.config.keys import nearest
from moefold.data.jsonl import Record, column_text, refuse_half_characters, unknown_column
from moefold.errors import ConfigError

ANSWERS = ("response", "completion")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and the tools that they may speak of."""

    messages: tuple[dict[str, Any], ...]
    tools: Any


def conversation_of(record: Record) -> Conversation:
    """Read {"messages": [{"role", "content"}, ...], "tools": ...} or {"prompt", "response"} ("completion" will do).

    Other fields are left alone, those of a message are given to the template.

    Raises:
        ConfigError: the fields of neither form are there, or a message has no role or no text; its line is named.
    """
    fields, place = record.fields, record.place
    if "messages" in fields:
        return Conversation(_messages(fields["messages"], place), fields.get("tools"))
    if "prompt" not in fields:
        guess = nearest("messages", fields) or nearest("prompt", fields)
        hint = f"its {guess!r} has another name" if guess else unknown_column("messages", fields)
        raise ConfigError(f'{place} is no conversation ({hint}); give it "messages", or "prompt" and "response"')
    answer = next((name for name in ANSWERS if name in fields), ANSWERS[0])
    turns = (("user", "prompt"), ("assistant", answer))
    return Conversation(
        tuple({"role": role, "content": column_text(fields, name, place)} for role, name in turns), None
    )


def _messages(messages: object, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f'{place}: "messages" must be a list of at least one message; mend it or take the line out')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: message {number} must be an object with a role and a content; mend it")
        if not isinstance(message.get("role"), str):
            raise ConfigError(
                f'{place}: message {number} has no role; give it "role": "system", "user", "assistant" or "tool"'
            )
        content = message.get("content")
        calls_tools = content is None and message.get("tool_calls")
        if not isinstance(content, str) and not calls_tools:
            raise ConfigError(f'{place}: message {number} has no text; give it "content": "..."')
        refuse_half_characters(message["role"] + (content or ""), f"{place}: message {number}")
    return tuple(messages)
