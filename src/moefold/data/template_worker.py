"""Program of the subprocess that renders chat templates; imports only Jinja and the standard library.

A template comes with a tokenizer and is untrusted. Jinja's sandbox keeps it from files and Python objects, but not from
endless loops and texts: so it runs in a separate process, with limits on memory and on the CPU time of each
conversation.

Standard input: a line of JSON with the template and the limits, then batches: a line with the batch size, then one line
per conversation. Standard output: a line of JSON for the template and for each conversation. A batch is read completely
before it is answered, to avoid a deadlock of full pipes. It is run by `limited_worker.py`.
"""

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Answer = dict[str, Any]
Render = Callable[[Mapping[str, Any]], str]


class TemplateRenderError(Exception):
    """A template cannot render a conversation; the message is the reason."""


def main() -> None:
    """Answer requests until standard input ends."""
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer

    def answer(words: Answer) -> None:
        answers.write(json.dumps(words, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        answers.flush()

    start = json.loads(requests.readline())
    signal.setitimer(signal.ITIMER_PROF, start["cpu_s"])
    try:
        render = _compile(start["source"], start["marks"], datetime.fromisoformat(start["date"]))
    except TemplateRenderError as error:
        answer({"refused": str(error)})
        return
    answer({})
    while count := requests.readline():
        batch = [requests.readline() for _ in range(int(count))]
        for line in batch:
            # The timer's SIGPROF kills the process when the time is over.
            signal.setitimer(signal.ITIMER_PROF, start["cpu_s"])
            answer(_render_request(json.loads(line), render, start))


def _render_request(request: Mapping[str, Any], render: Render, settings: Mapping[str, Any]) -> Answer:
    """Return {text, spans}, {refused: reason} or {moved: turn}."""
    most_characters: int = settings["most_characters"]
    tokens: Mapping[str, str] = settings["special_tokens"]

    def write(messages: Sequence[Mapping[str, Any]], *, prompts: bool) -> str:
        values = {"messages": messages, "tools": request["tools"], "add_generation_prompt": prompts}
        text = render({**tokens, **values})
        if len(text) > most_characters:
            raise TemplateRenderError(f"it writes more than {most_characters:,} characters")
        return text

    messages = request["messages"]
    try:
        if request["prompts"] is not None:
            text, spans = _split_at_marks(write(messages, prompts=request["prompts"]), *settings["marks"])
            return {"text": text, "spans": spans}
        if settings["has_marks"]:
            text, spans = _split_at_marks(write(messages, prompts=False), *settings["marks"])
            return {"text": text, "spans": spans}
        text = write(messages, prompts=False)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = write(messages[:i], prompts=True)
            after = write(messages[: i + 1], prompts=False).rstrip()
            if not (text.startswith(after) and text.startswith(before)):
                return {"moved": i + 1}
            spans.append((min(len(before), len(after)), len(after)))
        return {"text": text, "spans": spans}
    except TemplateRenderError as error:
        return {"refused": str(error)}


def _split_at_marks(marked: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without its marks, and the character spans between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for part in marked.split(begin):
        inside, found, rest = part.partition(end)
        if found:
            spans.append((length, length + len(inside)))
        parts += [inside, rest]
        length += len(inside) + len(rest)
    return "".join(parts), spans


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

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

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
        # An untrusted template may fail in any way that an expression can.
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = str(error)
        except (RecursionError, MemoryError) as error:
            reason = "it recurses without end" if isinstance(error, RecursionError) else "it exceeds its memory limit"
        raise TemplateRenderError(reason)

    return render


if __name__ == "__main__":
    main()
