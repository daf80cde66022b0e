"""Chat templates and conversation formats for supervised fine-tuning.

`ChatTemplate` renders a conversation to text and finds the assistant's turns in it. A template is a Jinja program that
comes with a tokenizer; it runs in a subprocess with limited memory and time, in Jinja's sandbox, without files, imports
or attributes of Python objects, and with a fixed date, so the text of a conversation is reproducible.
`parse_conversation` reads the four common JSON formats of fine-tuning data.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from moefold.config.schema import DataConfig
from moefold.config.suggestions import closest_match
from moefold.data.file_formats import JsonlRecord, column_text, reject_surrogates, unknown_column_message
from moefold.data.input_paths import existing_path
from moefold.data.reward_prompt import RewardPrompt
from moefold.data.template_process import TemplateLimits, TemplateProcess, TemplateProgram
from moefold.data.tokenizer import JsonTokenizer, Tokenizer
from moefold.data.tokenizer_folder import (
    DEFAULT_TEMPLATE,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    read_template,
    read_tokenizer_folder,
)
from moefold.errors import ConfigError

BYTES_TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content or "" }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
"""ChatML, for the tokenizer "bytes", which has no special tokens: the marks are plain text."""

CHAT_DATE = datetime(2024, 7, 26)
"""Date written by a template's `strftime_now`: the date that Llama's templates use without a clock."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = Mapping[str, Any]
_END_PROBE = "answer"
"""Answer of the conversation whose end shows how a template ends a turn."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    responses: tuple[range, ...]
    """Character ranges of the assistant turns including their end marks, in order."""


class ChatTemplate:
    """Renders conversations and finds the assistant's turns in them.

    The `{% generation %}` marks of a template (as in transformers) delimit the turns, if it has them. In other
    templates, a turn is the difference between the conversation up to the turn and the conversation before it with the
    generation prompt; whitespace after the turn's end mark is not part of it.
    """

    def __init__(
        self,
        source: str,
        *,
        location: str,
        special_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: the Jinja program.
            location: origin of the template, for messages.
            special_tokens: `bos_token` and the like, as the tokenizer spells them.
            limits: resource limits; None for the defaults of `TemplateLimits`.

        Raises:
            ConfigError: it is not a Jinja template.
        """
        self.source = source
        date = [CHAT_DATE.isoformat()] if "strftime_now" in source else []
        self.identity = hashlib.sha256(json.dumps([source, sorted(special_tokens.items()), *date]).encode()).hexdigest()
        self.reward_prompt: RewardPrompt | None = None
        """Reward that `render_prompt` writes into the turn before the answer."""
        self._location = location
        marks = (f"\0{uuid.uuid4().hex}\0", f"\0{uuid.uuid4().hex}\0")
        has_marks = bool(_GENERATION.search(source))
        program = TemplateProgram(source, dict(special_tokens), marks, has_marks, CHAT_DATE.isoformat())
        self._process = TemplateProcess(program, limits or TemplateLimits(), location)

    def render(self, messages: Sequence[Message], tools: Any, location: str) -> RenderedChat:
        """Render a conversation.

        Args:
            messages: the turns, each with a `role` and a `content`.
            tools: descriptions of tools, for templates that support them; None for none.
            location: FILE:LINE of the conversation, for messages.

        Raises:
            ConfigError: the template refuses the conversation, or renders an earlier turn differently once others
                follow.
        """
        (rendered,) = self.render_all([(messages, tools, location)])
        return rendered

    def render_all(self, conversations: Sequence[tuple[Sequence[Message], Any, str]]) -> Iterator[RenderedChat]:
        """Render conversations, each given as the arguments of `render`, in batches.

        Raises:
            ConfigError: see `render`; for the first conversation that cannot be rendered.
        """
        requests = [
            {"messages": list(messages), "tools": tools, "prompts": None} for messages, tools, _ in conversations
        ]
        for answer, (_, _, place) in zip(self._process.process_requests(requests), conversations, strict=True):
            if "moved" in answer:
                raise ConfigError(
                    f"{place}: the chat template of {self._location} renders turn {answer['moved']} differently when "
                    "others follow, so its position cannot be found; put {% generation %} and {% endgeneration %} "
                    "around the assistant's output, in a template of your own: data.chat_template=FILE"
                )
            yield self._to_rendered_chat(answer, place)

    def render_prompt(self, messages: Sequence[Message], location: str, *, add_generation_prompt: bool) -> str:
        """Return the prompt that a model continues.

        Args:
            messages: the turns, each with a `role` and a `content`.
            location: description of the conversation, for messages.
            add_generation_prompt: whether a new assistant turn begins after the last one; if not, the last turn stays
                open.

        Raises:
            ConfigError: the template refuses the conversation, or does not write the content of an open turn verbatim.
        """
        if self.reward_prompt is not None:
            messages = self.reward_prompt.fill_message(messages, len(messages) - (1 if add_generation_prompt else 2))
        request = {"messages": list(messages), "tools": None, "prompts": add_generation_prompt}
        (answer,) = self._process.process_requests([request])
        text = self._to_rendered_chat(answer, location).text
        if add_generation_prompt:
            return text
        content = str(messages[-1]["content"])
        # Most templates strip the content.
        for form in (content, content.lstrip(), content.rstrip(), content.strip()):
            if form and (start := text.rfind(form)) >= 0:
                return text[: start + len(form)]
        raise ConfigError(
            f"{location}: the chat template of {self._location} does not write the last turn verbatim, so it cannot "
            "be continued; set another template"
        )

    def _to_rendered_chat(self, answer: Mapping[str, Any], location: str) -> RenderedChat:
        if "refused" in answer:
            raise ConfigError(
                f"{location}: the chat template of {self._location} refuses the conversation ({answer['refused']}); "
                "fix the conversation, remove it, or set data.chat_template"
            )
        return RenderedChat(answer["text"], tuple(range(start, stop) for start, stop in answer["spans"]))


def load_chat_template(data: DataConfig, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Return the template of a recipe: `data.chat_template`, else the tokenizer's, else ChatML for bytes.

    The tokenizer's templates are those that its folder declares (`read_tokenizer_folder`).

    Args:
        data: the recipe's section.
        tokenizer: the tokenizer that data.tokenizer names; None: it is read.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    folder = None
    if isinstance(tokenizer, JsonTokenizer):
        folder = tokenizer.folder
    elif data.tokenizer != "bytes":
        folder = read_tokenizer_folder(existing_path("data.tokenizer", data.tokenizer))
    special_tokens = {} if folder is None else folder.special_tokens
    if data.chat_template:
        file = existing_path("data.chat_template", data.chat_template)
        return ChatTemplate(read_template(file), location=str(file), special_tokens=special_tokens)
    if folder is None:
        return ChatTemplate(BYTES_TEMPLATE, location="bytes", special_tokens={})
    source = folder.templates.get(DEFAULT_TEMPLATE)
    if source is None:
        others = ", ".join(map(repr, sorted(folder.templates)))
        raise ConfigError(
            f"data.tokenizer={data.tokenizer!r} has no chat template: neither {TEMPLATE_FILE} nor a chat_template "
            f"in {SETTINGS_FILE} is in {folder.file.parent}"
            + (f", only templates named {others}" if others else "")
            + "; set data.chat_template to a file with one"
        )
    return ChatTemplate(source, location=str(folder.template_file), special_tokens=special_tokens)


def end_of_turn_marker(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """Return the end of the assistant's turn: a single token, or else a stop string of several tokens.

    Returns:
        (end-of-turn ids, stop string); both empty if the template has no end-of-turn marker.

    Raises:
        ConfigError: the template rejects a conversation of a question and an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _END_PROBE}]
    rendered = template.render(messages, None, "a question and an answer")
    response = rendered.text[rendered.responses[-1].start : rendered.responses[-1].stop] if rendered.responses else ""
    marker = response.rpartition(_END_PROBE)[2].strip()
    ids = tokenizer.encode(marker).tolist() if marker else []
    return (frozenset(ids), "") if len(ids) == 1 else (frozenset(), marker)


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


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the tools available in it."""

    messages: tuple[dict[str, Any], ...]
    tools: Any


def parse_conversation(record: JsonlRecord) -> Conversation:
    """Parse a record in one of four formats, detected by its fields, in this order.

    {"messages": [{"role", "content"}, ...], "tools": ...}; ShareGPT: {"conversations": [{"from", "value"}, ...]},
    optionally with "system"; Alpaca: {"instruction", "input", "output"}, a nonempty input is appended to the
    instruction; {"prompt", "response"} (or "completion"). Other fields are ignored; those of a message are passed to
    the template.

    Raises:
        ConfigError: the record has none of these formats, or a message has no role or no text; the message has its
            line.
    """
    fields = record.fields
    place = record.location
    if "messages" in fields:
        return Conversation(parse_messages(fields["messages"], place), fields.get("tools"))
    if "conversations" in fields:
        return Conversation(_parse_sharegpt(fields, place), fields.get("tools"))
    if "instruction" in fields and "prompt" not in fields:
        return Conversation(_parse_alpaca(fields, place), None)
    if "prompt" not in fields:
        guess = closest_match("messages", fields) or closest_match("prompt", fields)
        hint = f"its {guess!r} has another name" if guess else unknown_column_message("messages", fields)
        raise ConfigError(
            f'{place} is not a conversation ({hint}); give it "messages", "conversations", "instruction" '
            'and "output", or "prompt" and "response"'
        )
    answer = next((name for name in ANSWER_FIELDS if name in fields), ANSWER_FIELDS[0])
    turns = (("user", "prompt"), ("assistant", answer))
    return Conversation(
        tuple({"role": role, "content": column_text(fields, name, place)} for role, name in turns), None
    )


def _parse_sharegpt(fields: dict[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of a ShareGPT record; turns with "role" and "content" are accepted, too."""
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{location}: "conversations" must be a list of at least one turn; fix it or remove the line')
    messages: list[dict[str, Any]] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": column_text(fields, "system", location)})
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
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": text})
    return parse_messages(messages, location)


def _parse_alpaca(fields: dict[str, Any], location: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of an Alpaca record: a nonempty "input" follows the instruction after an empty line."""
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


def parse_messages(messages: object, location: str) -> tuple[dict[str, Any], ...]:
    """Check a list of messages and return it.

    Raises:
        ConfigError: it is no list, or a message has no role or no text; the message has the location.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(f'{location}: "messages" must be a list of at least one message; fix it or remove the line')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ConfigError(f"{location}: message {number} must be an object with a role and a content; fix it")
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
