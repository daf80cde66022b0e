"""Program of the subprocess that renders chat templates.

It imports only Jinja and the standard library. A template of a tokenizer is untrusted. Jinja's sandbox prevents access
to files and Python objects, but not endless loops and texts. The template therefore runs in a separate process, with
limits on memory and on the CPU time of each conversation. `limited_worker.py` runs it. The first request compiles the
template, and all others render conversations.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Answer = dict[str, Any]
Message = dict[str, Any]
Render = Callable[[Mapping[str, Any]], str]
_PROBE = "\ue000\ue001\ue002"
"""Content for finding the place of a turn. Conversations do not contain it, and templates do not strip it."""


class TemplateRenderError(Exception):
    """A template cannot render a conversation. The message is the reason."""


class TemplateWorker:
    """A template that answers requests."""

    def start(self, request: Mapping[str, Any], payload: bytes) -> tuple[Answer, bytes]:
        """Compile the template."""
        del payload
        self._settings = request
        date = datetime.fromisoformat(request["date"])
        self._programs = [(_compile(text, request["marks"], date), has_marks) for text, has_marks in request["sources"]]
        return {}, b""

    def render(self, request: Mapping[str, Any], payload: bytes) -> tuple[Answer, bytes]:
        """Return {text, spans, prompts, is_marked, altered}, or {moved: turn}."""
        del payload
        messages: list[Message] = request["messages"]
        render, has_marks = self._programs[0 if request["tools"] is None else -1]
        conversation = _Conversation(messages, request, render, self._settings)
        if request["prompts"] is not None:
            text, _ = conversation.write(len(messages), prompts=request["prompts"])
            return {"text": text, "spans": [], "prompts": [], "is_marked": has_marks, "altered": 0}, b""
        render_turns = conversation.marked_turns if has_marks else conversation.unmarked_turns
        try:
            return {**render_turns(request["targets"]), "is_marked": has_marks}, b""
        except TurnMovedError as error:
            return {"moved": error.turn}, b""


class TurnMovedError(Exception):
    """The place of a turn in a conversation cannot be found."""

    def __init__(self, turn: int) -> None:
        super().__init__(turn)
        self.turn = turn
        """1-based number of the message."""


class _Conversation:
    def __init__(
        self, messages: Sequence[Message], request: Mapping[str, Any], render: Render, settings: Mapping[str, Any]
    ) -> None:
        self._messages = messages
        self._tools = request["tools"]
        self._variables: Mapping[str, Any] = request.get("variables", {})
        self._render = render
        self._settings = settings

    def write(
        self, count: int, *, prompts: bool, messages: Sequence[Message] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first messages, and the character spans between the marks of the template.

        `prompts` adds the generation prompt, and `messages` replace the messages of the conversation.
        """
        values = {
            "messages": (self._messages if messages is None else messages)[:count],
            "tools": self._tools,
            "add_generation_prompt": prompts,
        }
        # transformers defines the documents of a template too, and templates test for that.
        text = self._render({**self._settings["special_tokens"], "documents": None, **self._variables, **values})
        if len(text) > (limit := self._settings["most_characters"]):
            raise TemplateRenderError(f"it writes more than {limit:,} characters")
        return _split_at_marks(text, *self._settings["marks"])

    def marked_turns(self, targets: Sequence[int]) -> Answer:
        """Return the text, the marked spans of turns, and the prompts that the template writes before them."""
        text, spans = self.write(len(self._messages), prompts=False)
        assistant = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        if list(targets) != assistant:
            turns = []
            for i in targets:
                counts = [len(self.write(i + step, prompts=False)[1]) if i + step else 0 for step in (0, 1)]
                if not counts[0] < counts[1] <= len(spans):
                    raise TurnMovedError(i + 1)
                turns += spans[counts[0] : counts[1]]
            spans = turns
        prompts: list[int | str] = []
        for i in targets:
            # Some templates refuse a conversation that ends before an answer. The marks are correct anyway.
            with contextlib.suppress(TemplateRenderError):
                prompts.append(_as_prefix(self.write(i, prompts=True)[0], text))
        return {"text": text, "spans": spans, "prompts": prompts, "altered": 0}

    def unmarked_turns(self, targets: Sequence[int]) -> Answer:
        """Return the text, the spans of turns, and the prompts before them."""
        text, _ = self.write(len(self._messages), prompts=False)
        spans: list[tuple[int, int]] = []
        prompts: list[int | str] = []
        altered = 0
        for i in targets:
            before = self.write(i, prompts=True)[0]
            after = self.write(i + 1, prompts=False)[0].rstrip()
            begins = text.startswith(before)
            if text.startswith(after) and begins:
                spans.append((min(len(before), len(after)), len(after)))
            elif text.startswith(after) and text.startswith(head := self.write(i, prompts=False)[0] if i else ""):
                # The generation prompt may differ from the start of a finished turn, such as by an opening <think>.
                spans.append((min(max(len(head), _common_length(text, before)), len(after)), len(after)))
            else:
                span, is_whole = self._find_turn(i, text)
                spans.append((min(len(before), span[1]) if begins else span[0], span[1]))
                altered = altered or (0 if is_whole else i + 1)
            prompts.append(_as_prefix(before, text))
        return {"text": text, "spans": spans, "prompts": prompts, "altered": altered}

    def _find_turn(self, i: int, text: str) -> tuple[tuple[int, int], bool]:
        """Find a turn that the template changes when others follow, by replacing its content.

        Returns:
            The span of the content and its end mark, and whether the content is complete.
        """
        content = self._messages[i].get("content")
        if not isinstance(content, str) or not content.strip():
            raise TurnMovedError(i + 1)
        probed = [*self._messages]
        probed[i] = {**probed[i], "content": _PROBE}
        rendered, probe, tail = self.write(len(probed), prompts=False, messages=probed)[0].partition(_PROBE)
        end = self.write(i + 1, prompts=False, messages=probed)[0].rstrip().partition(_PROBE)[2]
        start = _common_length(text, rendered)
        stop = len(text) - len(tail)
        if not probe or not text.endswith(tail) or not start <= stop:
            raise TurnMovedError(i + 1)
        is_whole = content.strip() in text[start:stop]
        return (start, stop + _common_length(tail, end)), is_whole


def _as_prefix(prompt: str, text: str) -> int | str:
    """Return a prompt, as a length if it is a prefix of the text."""
    return len(prompt) if text.startswith(prompt) else prompt


def _common_length(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))


def _split_at_marks(marked: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without its marks, and the character spans between them."""
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for block in marked.split(begin):
        inside, mark, tail = block.partition(end)
        if mark:
            spans.append((length, length + len(inside)))
        blocks += [inside, tail]
        length += len(inside) + len(tail)
    return "".join(blocks), spans


def _compile(source: str, marks: Sequence[str], date: datetime) -> Render:
    class GenerationTag(Extension):
        """`{% generation %} ... {% endgeneration %}` around the assistant's output."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": date.strftime}
    try:
        template = environment.from_string(source)
    except (TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        is_deep = isinstance(error, RecursionError | MemoryError)
        raise TemplateRenderError("it is nested too deep" if is_deep else str(error)) from error

    def render(values: Mapping[str, Any]) -> str:
        try:
            return template.render(**values)
        # An untrusted template may raise any exception.
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = str(error)
        except (RecursionError, MemoryError) as error:
            reason = "it recurses without end" if isinstance(error, RecursionError) else "it exceeds its memory limit"
        raise TemplateRenderError(reason)

    return render


if __name__ == "__main__":
    globals()["serve"](TemplateWorker())
