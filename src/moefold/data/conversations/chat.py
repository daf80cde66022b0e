"""Chat templates for supervised fine-tuning.

`ChatTemplate` renders a conversation to text and finds the assistant's turns. A template is a Jinja program of a
tokenizer. It runs in a subprocess with limited memory and time, in Jinja's sandbox, without files, imports or
attributes of Python objects. Its date is fixed, so that the text of a conversation is reproducible.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moefold.config.sections.data import DataConfig
from moefold.data.conversations.conversation_format import check_roles, join_parts
from moefold.data.conversations.reward_prompt import RewardPrompt
from moefold.data.hf_tokenizer.tokenizer_folder import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    JsonTokenizer,
    read_template,
    read_tokenizer_folder,
)
from moefold.data.input_paths import CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, existing_path
from moefold.data.limited_process import LimitedProcess, ProcessEndedError
from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError
from moefold.message_text import Setting

_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Resource limits of a template."""

    cpu_s: float = 30.0
    """CPU time to compile the template, and for one conversation.

    Templates take milliseconds, but a conversation of 1,000 turns is rendered about 2,000 times, which takes seconds.
    """
    memory_bytes: int = 1 << 30
    """Address space of the process, including 30 MB for the interpreter."""
    most_characters: int = 1 << 26
    """Longest text of a rendered conversation. It equals the longest line of an input in bytes."""


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

_RENDERING_VERSION = 3
"""Version of the search for turns in a conversation, whose results are part of cached tokens."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = Mapping[str, Any]
_TEXT_PROBE = "\u2460\n\u2461"
_LIST_PROBE = [{"type": "text", "text": "\u2460"}, {"type": "text", "text": "\u2461"}]
"""Content that is a list of texts."""
_END_PROBE = "answer"
"""Answer of the conversation whose end shows how a template ends a turn."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to render."""

    messages: Sequence[Message]
    """The turns, each with a `role` and a `content`, in normal form (`parse_messages`)."""
    tools: Any
    """Descriptions of tools, for templates that support them. None means there are no tools."""
    location: str
    """FILE:LINE of the conversation, for messages."""
    targets: tuple[int, ...] | None = None
    """Indices of the messages to train on. None means all messages of the assistant."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    responses: tuple[range, ...]
    """Character ranges of the turns to train on, including their end marks, in order."""
    prompts: tuple[str, ...] = ()
    """The text that inference continues for each of these turns."""
    is_marked: bool = False
    """True if the template marks the assistant's output itself. If not, the prompts determine its beginning."""
    altered_turn: int = 0
    """1-based number of a turn that the template writes incompletely because others follow. 0: none."""


class ChatTemplate:
    """Renders conversations and finds the assistant's turns in them.

    If a template has `{% generation %}` marks (as in transformers), they delimit the turns. In other templates, a turn
    is the text after the common prefix of the conversation and the prompt before the turn, without whitespace after the
    turn's end mark.
    """

    def __init__(
        self,
        source: str,
        *,
        location: str,
        special_tokens: Mapping[str, str],
        tool_source: str = "",
        limits: TemplateLimits | None = None,
    ) -> None:
        """Compile a template. Raises ConfigError if a source is not a Jinja template.

        Args:
            special_tokens: texts of `bos_token` and similar tokens of the tokenizer.
            tool_source: the program for conversations with tools. Empty means the same program.
        """
        self.source = source
        self.location = location
        sources = (source, *([tool_source] if tool_source else []))
        date = [CHAT_DATE.isoformat()] if any("strftime_now" in source for source in sources) else []
        fields = [_RENDERING_VERSION, *sources, sorted(special_tokens.items()), *date]
        self.identity = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        self.reward_prompt: RewardPrompt | None = None
        """Reward that `render_prompt` writes into the turn before the answer."""
        self._tool_source = tool_source or source
        self._list_roles: dict[tuple[str, bool], bool] = {}
        marks = (f"\0{uuid.uuid4().hex}\0", f"\0{uuid.uuid4().hex}\0")
        self._limits = limits or TemplateLimits()
        self._start_request = {
            "do": "start",
            # The only program, or the programs for conversations without and with tools, and whether each has marks.
            "sources": [(source, bool(_GENERATION.search(source))) for source in sources],
            "special_tokens": dict(special_tokens),
            "marks": marks,
            "date": CHAT_DATE.isoformat(),
            "most_characters": self._limits.most_characters,
        }
        self._process = self._start_process()

    def _start_process(self) -> LimitedProcess:
        limit = self._limits.memory_bytes
        process = LimitedProcess(_WORKER, memory_bytes=limit, hard_bytes=limit)
        if (reason := self._ask(process, self._start_request).get("refused")) is not None:
            raise ConfigError(f"the chat template of {self.location} is not a Jinja template ({reason}); fix it")
        return process

    def _answers(self, requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request in order. A failed one has the reason as `refused`.

        Requests after a refused request are sent only if the caller wants their answers: each may cost the full CPU
        limit.
        """
        for request in requests:
            if not self._process.is_usable:
                self._process = self._start_process()
            yield self._ask(self._process, {"do": "render"} | request)

    def _ask(self, process: LimitedProcess, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._limits
        # A character takes at most 6 bytes of JSON, such as \\u001f.
        longest = 6 * limits.most_characters + (1 << 20)
        try:
            return process.ask(
                request, memory_bytes=limits.memory_bytes, cpu_s=limits.cpu_s, limit=longest, does="renders"
            )[0]
        except ProcessEndedError as error:
            return {"refused": str(error)}

    def render(self, messages: Sequence[Message], tools: Any, location: str) -> RenderedChat:
        """Render a conversation at FILE:LINE, with descriptions of tools or None.

        Raises:
            ConfigError: the template refuses the conversation, or the place of a turn in it cannot be found.
        """
        (rendered,) = self.render_all([ChatRequest(messages, tools, location)])
        if isinstance(rendered, ConfigError):
            raise rendered
        return rendered

    def render_all(self, conversations: Sequence[ChatRequest]) -> Iterator[RenderedChat | ConfigError]:
        """Render conversations in batches, and return the error for a conversation that cannot be rendered."""
        requests = []
        for conversation in conversations:
            messages = self._join_parts(conversation.messages, conversation.tools)
            assistant = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            targets = assistant if conversation.targets is None else list(conversation.targets)
            requests.append({"messages": messages, "tools": conversation.tools, "prompts": None, "targets": targets})
        for answer, conversation in zip(self._answers(requests), conversations, strict=True):
            yield self._to_rendered_chat(answer, conversation.location)

    def check_roles(self, conversation: ChatRequest) -> None:
        """Raise ConfigError if a message has a role that chat templates in general and this template do not know."""
        source = self.source_for(conversation.tools)
        check_roles([dict(message) for message in conversation.messages], source, conversation.location)

    def source_for(self, tools: Any) -> str:
        """Return the source of the template that writes conversations with these tools, or None for none."""
        return self.source if tools is None else self._tool_source

    def render_prompt(
        self,
        messages: Sequence[Message],
        location: str,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that a model continues.

        Args:
            location: description of the conversation, for messages.
            add_generation_prompt: whether a new assistant turn begins after the last one, which otherwise stays open.
            variables: other variables of the template, such as `enable_thinking`.

        Raises:
            ConfigError: the template refuses the conversation, or does not write the content of an open turn verbatim.
        """
        if self.reward_prompt is not None:
            messages = self.reward_prompt.fill_message(messages, len(messages) - (1 if add_generation_prompt else 2))
        messages = self._join_parts(messages, tools)
        request = {
            "messages": messages,
            "tools": None if tools is None else list(tools),
            "prompts": add_generation_prompt,
            "targets": [],
            "variables": dict(variables or {}),
        }
        (answer,) = self._answers([request])
        rendered = self._to_rendered_chat(answer, location)
        if isinstance(rendered, ConfigError):
            raise rendered
        text = rendered.text
        if add_generation_prompt:
            return text
        content = str(messages[-1]["content"])
        # Most templates strip the content.
        for form in (content, content.lstrip(), content.rstrip(), content.strip()):
            if form and (start := text.rfind(form)) >= 0:
                return text[: start + len(form)]
        raise ConfigError(
            f"{location}: the chat template of {self.location} does not write the last turn verbatim, so it cannot "
            "be continued; set another template"
        )

    def _join_parts(self, messages: Sequence[Message], tools: Any) -> list[dict[str, Any]]:
        copies = [dict(message) for message in messages]
        return join_parts(copies, self.source_for(tools), lambda role: self._reads_lists(role, tools is not None))

    def _reads_lists(self, role: str, has_tools: bool) -> bool:
        """Return whether the template writes the texts of a list in a message of a role, and not the list itself."""
        key = (role, has_tools)
        if key not in self._list_roles:
            lists, joined = (self._render_probe(role, content, has_tools) for content in (_LIST_PROBE, _TEXT_PROBE))
            marks = [text.count("type") + text.count("{") for text in (lists, joined)]
            self._list_roles[key] = all(item["text"] in lists for item in _LIST_PROBE) and marks[0] == marks[1]
        return self._list_roles[key]

    def _render_probe(self, role: str, content: Any, has_tools: bool) -> str:
        """Render a short conversation with a content for a role, or return "" if the template refuses it."""
        turns: dict[str, Any] = {"user": "question", "assistant": "answer"}
        turns = {role: content, **turns} if role in ("system", "developer") else {**turns, role: content}
        messages = [{"role": name, "content": text} for name, text in turns.items()]
        request = {"messages": messages, "tools": [] if has_tools else None, "prompts": False, "targets": []}
        (answer,) = self._answers([request])
        return str(answer.get("text", ""))

    def _to_rendered_chat(self, answer: Mapping[str, Any], location: str) -> RenderedChat | ConfigError:
        if "moved" in answer:
            return ConfigError(
                f"{location}: the chat template of {self.location} renders turn {answer['moved']} differently when "
                "others follow, so its position cannot be found; put {% generation %} and {% endgeneration %} "
                f"around the assistant's output, in a template of your own: {Setting('data.chat_template')}=FILE"
            )
        if "refused" in answer:
            return ConfigError(
                f"{location}: the chat template of {self.location} refuses the conversation ({answer['refused']}); fix "
                f"the conversation, remove it, or set {Setting('data.chat_template')}"
            )
        text: str = answer["text"]
        return RenderedChat(
            text,
            tuple(range(start, stop) for start, stop in answer["spans"]),
            tuple(text[:prompt] if isinstance(prompt, int) else prompt for prompt in answer["prompts"]),
            answer["is_marked"],
            answer["altered"],
        )


def load_chat_template(data: DataConfig, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Return the template of a recipe: `data.chat_template`, else the tokenizer's, else ChatML for bytes.

    The tokenizer is read if it is None. Raises ConfigError if there is no template, or it cannot be read.
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
        known_names = ", ".join(map(repr, sorted(folder.templates)))
        raise ConfigError(
            f"{Setting('data.tokenizer', data.tokenizer)} has no chat template: neither {CHAT_TEMPLATE_FILE} nor a "
            f"chat_template in {TOKENIZER_CONFIG_FILE} is in {folder.file.parent}"
            + (f", only templates named {known_names}" if known_names else "")
            + f"; set {Setting('data.chat_template')} to a file with one"
        )
    return ChatTemplate(
        source,
        location=str(folder.template_file),
        special_tokens=special_tokens,
        tool_source=folder.templates.get(TOOL_TEMPLATE, ""),
    )


def end_of_turn_marker(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[frozenset[int], str]:
    """Return the end of the assistant's turn: a single token, or else a stop string of several tokens.

    Returns:
        (end-of-turn ids, stop string), both empty if the template has no end-of-turn marker.

    Raises:
        ConfigError: the template refuses a conversation of a question and an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _END_PROBE}]
    rendered = template.render(messages, None, "a question and an answer")
    response = rendered.text[rendered.responses[-1].start : rendered.responses[-1].stop] if rendered.responses else ""
    marker = response.rpartition(_END_PROBE)[2].strip()
    ids = tokenizer.encode(marker).tolist() if marker else []
    return (frozenset(ids), "") if len(ids) == 1 else (frozenset(), marker)
