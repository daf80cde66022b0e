"""Rows of fine-tuning data as conversations: the four common JSON formats, in normal form.

A message in normal form has a known role, a text or a list of texts, no null fields, and no weight: untrained messages
are listed by their numbers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moefold.data.sources.file_formats import JsonlRecord, column_text, refuse_surrogates, unknown_column_message
from moefold.errors import ConfigError
from moefold.message_text import closest_match

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. A template may use other roles, but only answers of the assistant are trained on."""

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
"""Chat template role of each speaker name of the ShareGPT format."""


REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in a message. Templates read the first name, gpt-oss's templates the second."""
_TESTS_NULL = re.compile(r"""content['"]?\]?\s*(is\s+(not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)
"""Test for null content in a template."""
_WEIGHT_FIELDS = ("weight", "train", "trainable", "training", "loss")
MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of a row that the text of its messages refers to, and that no template gets."""
_UNREAD_FIELDS = (*MEDIA_FIELDS, "functions")
_ROW_WEIGHTS = ("weight", "train", "trainable")
"""Names of weights that are read in messages only."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the tools available in it."""

    messages: tuple[dict[str, Any], ...]
    tools: Any = None
    untrained: frozenset[int] = frozenset()
    """Indices of the assistant's messages that are only part of the prompt."""


def parse_conversation(record: JsonlRecord) -> Conversation:
    """Parse a record in one of four formats, which are detected by their fields in this order.

    {"messages": [{"role", "content"}, ...], "tools": ...}. ShareGPT: {"conversations": [{"from", "value"}, ...]}.
    Alpaca: {"instruction", "input", "output"}, where a nonempty input is appended to the instruction. {"prompt",
    "response"} (or "completion"): two texts, or, as in TRL, two lists of messages. Only the completion is trained. In
    each format a text "system" precedes the messages. A field with a part of the conversation that no template gets,
    such as "images", is refused, and others are ignored. Other fields of a message are passed to the template.

    Raises:
        ConfigError: the record has none of these formats, or a message has no role or no text. The message has its
            line.
    """
    fields = record.fields
    conversation = replace(_parse_turns(fields, record.location), tools=parse_tools(record))
    return with_system(conversation, fields, record.location)


def with_system(conversation: Conversation, fields: dict[str, Any], location: str) -> Conversation:
    """Put the text "system" of a record before its messages, unless it has none or they begin with the same."""
    if not fields.get("system"):
        return conversation
    text = column_text(fields, "system", location)
    first = conversation.messages[0]
    if first["role"] in ("system", "developer"):
        if first.get("content") == text:
            return conversation
        raise ConfigError(f'{location} has a "system" and another system message; remove one')
    return Conversation(
        ({"role": "system", "content": text}, *conversation.messages),
        conversation.tools,
        frozenset(number + 1 for number in conversation.untrained),
    )


def _parse_turns(fields: dict[str, Any], place: str) -> Conversation:
    """Return the conversation of a record without "system" and "tools"."""
    refuse_unread(fields, place)
    if "messages" in fields:
        return parse_messages(fields["messages"], place)
    if "conversations" in fields:
        return _parse_sharegpt(fields, place)
    refuse_unread(fields, place, ("history",))
    if "instruction" in fields and "prompt" not in fields:
        refuse_unread(fields, place, ("context",))
        return Conversation(_parse_alpaca(fields, place))
    if "prompt" not in fields:
        guess = closest_match("messages", fields) or closest_match("prompt", fields)
        hint = f"its {guess!r} has another name" if guess else unknown_column_message("messages", fields)
        if "chosen" in fields and "rejected" in fields:
            hint = 'it is a pair, which data.kind="preference" reads'
        raise ConfigError(
            f'{place} is not a conversation ({hint}); give it "messages", "conversations", "instruction" '
            'and "output", or "prompt" and "response"'
        )
    answer = next((name for name in ANSWER_FIELDS if name in fields), ANSWER_FIELDS[0])
    if isinstance(fields["prompt"], list) or isinstance(fields.get(answer), list):
        return _parse_completion(fields, answer, place)
    turns = (("user", "prompt"), ("assistant", answer))
    return Conversation(tuple({"role": role, "content": column_text(fields, name, place)} for role, name in turns))


def _parse_completion(fields: dict[str, Any], answer: str, location: str) -> Conversation:
    """Return the conversation of two lists of messages: the prompt, which is not trained, and the completion."""
    lists = []
    for name in ("prompt", answer):
        if not isinstance(fields.get(name), list):
            raise ConfigError(
                f'{location}: one of "prompt" and "{answer}" is a list of messages, and the other is not; make them '
                "alike: two texts, or two lists"
            )
        lists.append(parse_messages(fields[name], f'{location}: "{name}"'))
    prompt, completion = lists
    refuse_repeated_prompt(prompt.messages, completion.messages, f'{location}: "{answer}"')
    size = len(prompt.messages)
    prompts = {i for i, message in enumerate(prompt.messages) if message["role"] == "assistant"}
    return Conversation(
        (*prompt.messages, *completion.messages),
        untrained=frozenset(prompts | {size + i for i in completion.untrained}),
    )


def refuse_unread(fields: dict[str, Any], location: str, names: Sequence[str] = _UNREAD_FIELDS) -> None:
    """Raise ConfigError if a record has one of these fields, whose content would be missing in its conversation."""
    if name := next((name for name in names if fields.get(name)), ""):
        raise ConfigError(
            f"{location} has {name!r}, which is not read, so that a part of the conversation would be missing; "
            "write it into the messages or tools, or remove it"
        )


def _read_number(text: str) -> float | None:
    """Return the number or boolean that a text spells, or None if it spells neither."""
    word = text.strip().lower()
    if word in ("true", "false"):
        return float(word == "true")
    try:
        return float(word)
    except ValueError:
        return None


def refuse_row_weight(fields: dict[str, Any], location: str, reward_column: str = "") -> None:
    """Raise ConfigError if a row has a weight other than 1, or is not to be trained: only messages have weights."""
    for name in _ROW_WEIGHTS:
        value = fields.get(name)
        number = _read_number(value) if isinstance(value, str) else value
        if isinstance(number, bool | int | float) and number != 1 and name != reward_column:
            raise ConfigError(
                f'{location} has "{name}": {value!r}, which is not read, so that the row would count like any other; '
                'put "weight": 0 into the answers that are not trained, or remove the row or the field'
            )


def refuse_repeated_prompt(
    prompt: Sequence[Mapping[str, Any]], completion: Sequence[Mapping[str, Any]], location: str
) -> None:
    """Raise ConfigError if a completion begins with all messages of its prompt, which would be there twice."""
    if list(completion[: len(prompt)]) == list(prompt):
        raise ConfigError(f'{location} begins with the messages of "prompt" again; remove them from one of the two')


def parse_tools(record: JsonlRecord) -> Any:
    """Return the list of tools of a record, which may be written as a JSON text, or None for none."""
    tools = record.fields.get("tools")
    location = record.location
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ConfigError(f'{location}: "tools" is a text that is not JSON ({error}); give a list') from None
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f'{location}: "tools" must be a list of descriptions of tools; fix it')
    # An empty list means no tools: templates test for null.
    return tools or None


def _parse_sharegpt(fields: dict[str, Any], location: str) -> Conversation:
    """Return the messages of a ShareGPT record. Turns with "role" and "content" are also accepted."""
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{location}: "conversations" must be a list of at least one turn; fix it or remove the line')
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise ConfigError(f'{location}: turn {number} must be an object with "from" and "value"; fix it')
        if "role" in turn and "from" not in turn:
            messages.append(turn)
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise ConfigError(
                f'{location}: turn {number} has "from": {speaker!r}; it must be one of {", ".join(SHAREGPT_ROLES)}'
            )
        text = column_text(turn, "value", f"{location}: turn {number}")
        others = {name: value for name, value in turn.items() if name not in ("from", "value")}
        messages.append({**others, "role": SHAREGPT_ROLES[speaker], "content": text})
    return parse_messages(messages, location)


def _parse_alpaca(fields: dict[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of an Alpaca record: a nonempty "input" follows the instruction after an empty line."""
    question = column_text(fields, "instruction", location)
    context = column_text(fields, "input", location) if fields.get("input") is not None else ""
    content = f"{question}\n\n{context}" if context else question
    answer = column_text(fields, "output", location)
    return ({"role": "user", "content": content}, {"role": "assistant", "content": answer})


def parse_messages(messages: object, location: str) -> Conversation:
    """Return a list of messages in normal form. Raises ConfigError if one has no role or no text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f'{location}: "messages" must be a list of at least one message; fix it or remove the line')
    parsed = []
    untrained = set()
    for number, message in enumerate(messages, 1):
        place = f"{location}: message {number}"
        if not isinstance(message, dict):
            raise ConfigError(f"{place} must be an object with a role and a content; fix it")
        role = message.get("role")
        if not isinstance(role, str):
            raise ConfigError(f'{place} has no role; give it "role": "system", "user", "assistant" or "tool"')
        refuse_surrogates(role, place)
        # APIs and tables write null for absent fields.
        message = {name: value for name, value in message.items() if value is not None}
        if not _parse_weight(message, place):
            untrained.add(number - 1)
        if (content := _parse_content(message, place)) is not None:
            message["content"] = content
        # The names that templates read, as in transformers.
        if (reasoning := next((message[name] for name in REASONING_FIELDS if name in message), None)) is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        parsed.append(message)
    return Conversation(tuple(parsed), untrained=frozenset(untrained))


def check_roles(messages: Sequence[dict[str, Any]], template: str, location: str) -> None:
    """Raise ConfigError if the source of a chat template does not name the roles of the messages.

    For other roles a template writes nothing, or no turn to train on. The messages are in normal form.
    """
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in ROLES and not any(quote + role + quote in template for quote in ("'", '"')):
            guess = SHAREGPT_ROLES.get(role) or closest_match(role, ROLES)
            hint = f"did you mean {guess!r}?" if guess else f"the roles are {', '.join(ROLES)}"
            raise ConfigError(
                f"{location}: message {number} has the role {role!r}, which the chat template does not name; {hint}"
            )


def _parse_weight(message: dict[str, Any], place: str) -> bool:
    """Remove the weights of a message, and return whether its answer is trained."""
    is_trained = True
    for name in _WEIGHT_FIELDS:
        if name not in message:
            continue
        value = message.pop(name)
        is_switch = value in (0, 1) if name == "weight" else isinstance(value, bool)
        if not is_switch:
            allowed = "0 or 1" if name == "weight" else "true or false"
            raise ConfigError(f'{place} has "{name}": {value!r}; it must be {allowed}')
        if value and message["role"] != "assistant" and name != "weight":
            raise ConfigError(
                f'{place} has "{name}": true and the role {message["role"]!r}; only the assistant\'s messages are '
                "trained: remove it"
            )
        is_trained &= bool(value)
    return is_trained


def _parse_content(message: dict[str, Any], place: str) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: a text, or a list of several texts, or None if it only calls tools."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, list):
        for item in content:
            kind = item.get("type") if isinstance(item, dict) else None
            if kind == "text" and isinstance(item.get("text"), str):
                refuse_surrogates(item["text"], place)
                continue
            its_kind = f"a part of type {kind!r}" if kind else "a part without a type"
            raise ConfigError(
                f'{place} has no text: its content has {its_kind}, and only {{"type": "text", "text": "..."}} is read; '
                "fix or remove it"
            )
        if len(content) == 1:
            return str(content[0]["text"])
        if content:
            return content
    if not isinstance(content, str):
        raise ConfigError(f'{place} has no text; give it "content": "..."')
    refuse_surrogates(content, place)
    return content


def join_parts(
    messages: Sequence[dict[str, Any]], template: str, reads_lists: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Return messages whose contents a template can write: a list of texts is kept if the template reads lists.

    Otherwise the texts are joined by line ends, like in vLLM. The content of a message that only calls tools is null if
    the template tests for null, else empty, so that "None" is not written. `reads_lists` is asked by the role.
    """
    absent = None if _TESTS_NULL.search(template) else ""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not reads_lists(str(message["role"])):
            message = {**message, "content": "\n".join(item["text"] for item in content)}
        elif content is None and message.get("tool_calls"):
            message = {**message, "content": absent}
        joined.append(message)
    return joined
