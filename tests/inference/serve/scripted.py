"""The application over an engine whose samples are written in advance, without a model."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from moefold.config.sections.data import DataConfig
from moefold.data.tokenizer import ByteTokenizer, Tokenizer
from moefold.inference.engine.engine import NewToken
from moefold.inference.engine.requests import PromptScore, Request
from moefold.inference.serve.app import CompletionServer
from moefold.inference.serve.grammar import JsonGrammars

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""


@dataclass
class ScriptedLoop:
    """Answers each sample with the next of some texts, over and over."""

    texts: Sequence[str] = ("answer",)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def submit(self, requests: Sequence[Request], deliver: Callable[[NewToken], None]) -> list[int]:
        texts = itertools.cycle(self.texts)
        first = len(self.requests)
        for number, request in enumerate(requests, first):
            ids = [int(token) for token in self.tokenizer.encode(next(texts))]
            end = self.tokenizer.separator_id
            for position, token in enumerate([*ids, end, *ids * request.max_tokens][: request.max_tokens]):
                is_end = token in request.eos_ids
                reason: Any = "eos" if is_end else "length" if position + 1 == request.max_tokens else None
                best = [(65 + i, -0.5 - i) for i in range(request.num_alternatives)]
                scores: tuple[PromptScore, ...] = ()
                if request.prompt_alternatives is not None and not position:
                    others = tuple((97 + i, -0.25 - i) for i in range(request.prompt_alternatives))
                    scores = tuple(PromptScore(-1.0 * i, others) for i in range(1, len(request.prompt)))
                deliver(NewToken(number, token, -0.125, reason, tuple(best), scores))
                if reason is not None:
                    break
        self.requests += requests
        return list(range(first, first + len(requests)))

    def cancel(self, numbers: Sequence[int]) -> None:
        self.cancelled += numbers


def scripted(
    *texts: str, template: str = "", tokenizer: Tokenizer | None = None, log: Any = None, **options: Any
) -> tuple[CompletionServer, ScriptedLoop]:
    """An application and its engine."""
    tokenizer = tokenizer or ByteTokenizer()
    loop = ScriptedLoop(texts or ("answer",), tokenizer)
    data = DataConfig(kind="text", tokenizer="bytes")
    model = SimpleNamespace(vocab_size=tokenizer.vocab_size)
    source = SimpleNamespace(model=model, eos_ids=frozenset(), uses_hf_text_start=False, data=data, want=None)
    settings = {
        "host": "127.0.0.1",
        "max_concurrent": 32,
        "max_body_kib": 64,
        "api_key": "",
        "reasoning": False,
    } | options
    job: Any = SimpleNamespace(
        options=SimpleNamespace(tokenizer="", chat_template=template, **settings),
        source=source,
        name="run",
        max_length=4000,
    )
    engine: Any = loop
    return CompletionServer(job, tokenizer, engine, JsonGrammars(tokenizer, tokenizer.vocab_size), log), loop


def send(server: CompletionServer, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """The status and the text of the answer to a request; one without a body is GET."""
    content = b"" if body is None else json.dumps(body).encode()
    given = {"host": "localhost", "content-type": "application/json"} | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET" if body is None else "POST",
        "path": path,
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    statuses: list[int] = []
    parts: list[bytes] = []
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def note(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        parts.append(message.get("body", b""))

    asyncio.run(asyncio.wait_for(server.app()(scope, receive, note), 60))
    return statuses[0], b"".join(parts).decode()


def answered(server: CompletionServer, path: str, body: Any) -> Any:
    """The JSON of an answer without an error."""
    status, text = send(server, path, body)
    assert status == 200, text
    return json.loads(text)


def streamed(server: CompletionServer, path: str, body: Any) -> list[Any]:
    """The events of a stream."""
    status, text = send(server, path, body | {"stream": True})
    assert status == 200, text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
