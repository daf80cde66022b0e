"""HTTP application of the server: completions and chat completions of the OpenAI API, streamed or whole."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moefold.data.tokenizer import Tokenizer
from moefold.errors import ConfigError
from moefold.host.http_protocol import make_server
from moefold.host.listen import LOOPBACK_HOSTS, LOOPBACK_NAMES, listen, url_of
from moefold.host.rank_env import RankEnv
from moefold.inference.engine.engine import GenerationEngine
from moefold.inference.engine.requests import NewToken, Request
from moefold.inference.load import joined_job, load_model, report_decoding
from moefold.inference.sampling import SamplingParams
from moefold.inference.serve.access import CONTENT_TYPE, AccessLog, KeyCheck, Observer, ServerMetrics
from moefold.inference.serve.codec import EncodedRequest, PromptEncoder, SampleText
from moefold.inference.serve.engine_loop import EngineLoop
from moefold.inference.serve.grammar import JsonGrammars
from moefold.inference.serve.job import OOM_HINT, ServeJob
from moefold.inference.serve.openai_requests import ApiRequest, ChoiceText, ResponseBuilder, parse_request, usage_of
from moefold.inference.serve.request_fields import ApiError, ApiKind
from moefold.inference.text import open_tokenizer
from moefold.terminal import print_escaped

PATHS = ("GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions", "GET /health", "GET /metrics")
DISCONNECT_POLL_S = 0.5
"""Interval of checking that the client of a whole response is still connected."""


class CompletionServer:
    """Server that answers requests with the samples of an engine loop, which runs on another thread."""

    def __init__(
        self,
        job: ServeJob,
        tokenizer: Tokenizer,
        loop: EngineLoop,
        grammars: JsonGrammars,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._loop = loop
        self._log = log
        self._encoder = PromptEncoder(job, tokenizer, grammars)
        self.metrics = ServerMetrics()

    def app(self) -> Starlette:
        """Return the application. On the loopback interface it only accepts requests for this machine's names."""
        # Otherwise a web page whose name resolves to the loopback address would have the same origin.
        allowed_hosts = list(LOOPBACK_HOSTS) if self._job.options.host in LOOPBACK_NAMES else ["*"]
        key = self._job.options.api_key
        paths = frozenset(path.partition(" ")[2] for path in PATHS)
        return Starlette(
            middleware=[
                Middleware(Observer, metrics=self.metrics, log=self._log, paths=paths),
                Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts),
                *([Middleware(KeyCheck, key=key)] if key else []),
            ],
            exception_handlers={404: _unknown_path, 405: _unknown_path},
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics_text),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._endpoint("completion"), methods=["POST"]),
                Route("/v1/chat/completions", self._endpoint("chat"), methods=["POST"]),
            ],
        )

    async def _health(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "samples": self.metrics.num_open})

    async def _metrics_text(self, http: HttpRequest) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, http: HttpRequest) -> Response:
        if (name := http.path_params["name"]) != self._job.name:
            return _error(ApiError(f"model {name!r} does not exist; this server has {self._job.name!r}", 404, "model"))
        return JSONResponse(self._description)

    @property
    def _description(self) -> dict[str, Any]:
        model = {"id": self._job.name, "object": "model", "created": 0, "owned_by": "moefold"}
        return model | {"max_model_len": self._job.max_length}

    def _endpoint(self, kind: ApiKind) -> Callable[[HttpRequest], Awaitable[Any]]:
        async def answer(http: HttpRequest) -> Response | _EventStream:
            with ExitStack() as stack:
                try:
                    request = parse_request(await self._read_body(http), kind, self._job.name)
                    stack.enter_context(self._counted(request))
                    run = await self._start(http, request)
                    stack.callback(run.note_tokens)
                    if request.streams:
                        return _EventStream(self._events(run), stack.pop_all())
                    return JSONResponse(await self._whole(run))
                except ApiError as error:
                    return _error(error)

        return answer

    @contextmanager
    def _counted(self, request: ApiRequest) -> Iterator[None]:
        """Count the samples of a request as open inside this context, before they are created. Refuse too many."""
        num_samples = request.num_prompts * request.num_samples
        max_samples = self._job.options.max_concurrent
        if num_samples > max_samples:
            # Not 429, because clients would retry.
            raise ApiError(
                f"the request has {num_samples} samples, and this server takes at most {max_samples}; ask for fewer"
            )
        num_open = self.metrics.num_open
        if num_open + num_samples > max_samples:
            raise ApiError(
                f"{num_open} samples run or wait, the request has {num_samples}, and this server takes at most "
                f"{max_samples}; try again later, or ask for fewer",
                429,
            )
        self.metrics.num_open += num_samples
        try:
            yield
        finally:
            self.metrics.num_open -= num_samples

    async def _read_body(self, http: HttpRequest) -> bytes:
        """Read the body up to the limit. It must be declared as JSON.

        A web page of another origin cannot send that header without a preflight request, which is never allowed.
        """
        if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError("the body must be JSON, with the header Content-Type: application/json", 415)
        limit = self._job.options.max_body_kib * 1024
        body = bytearray()
        try:
            async for chunk in http.stream():
                body += chunk
                if len(body) > limit:
                    raise ApiError(f"the body has more than {self._job.options.max_body_kib} KiB", 413)
        except ClientDisconnect:
            raise _client_gone() from None
        return bytes(body)

    async def _start(self, http: HttpRequest, request: ApiRequest) -> "_Run":
        """Return a request with its samples for the engine."""
        start = time.perf_counter()
        try:
            encoded = await self._encoder.encode(request)
        except ConfigError as error:
            raise ApiError(str(error)) from error
        samples = []
        for i, prompt in enumerate(encoded.prompts):
            room = self._job.max_length - len(prompt)
            max_tokens = room if request.max_tokens is None else request.max_tokens
            if max_tokens > room or room < 1:
                raise ApiError(
                    f"the prompt has {len(prompt)} tokens, and with max_tokens={request.max_tokens or 1} it is longer "
                    f"than {self._job.max_length}, the most that this server takes; shorten one of them",
                    param="max_tokens",
                )
            min_tokens = request.rules.min_tokens
            if min_tokens > max_tokens:
                raise ApiError(f"min_tokens={min_tokens} must be at most max_tokens={max_tokens}", param="min_tokens")
            samples += [self._sample(encoded, prompt, i, j, max_tokens) for j in range(request.num_samples)]
        texts = [SampleText(self._tokenizer, self._encoder.table, encoded) for _ in samples]
        return _Run(http, request, samples, texts, self.metrics, start)

    def _sample(self, encoded: EncodedRequest, prompt: tuple[int, ...], i: int, j: int, max_tokens: int) -> Request:
        request = encoded.request
        num_alternatives = min(request.num_alternatives, self._job.source.model.vocab_size)
        return Request(
            prompt=prompt,
            prompt_number=i,
            sample_number=j,
            # The pass that draws the next token also scores a prompt without completion.
            max_tokens=max(1, max_tokens),
            eos_ids=encoded.eos_ids,
            sampling=request.sampling,
            num_alternatives=num_alternatives,
            rules=encoded.rules,
            prompt_alternatives=num_alternatives if request.echoes and request.has_log_probs else None,
        )

    @asynccontextmanager
    async def _running(self, samples: Sequence[Request]) -> AsyncIterator[asyncio.Queue[tuple[int, NewToken]]]:
        """Run samples inside this context, and yield a queue of (index of the sample, new token)."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, NewToken]] = asyncio.Queue()
        index_of: dict[int, int] = {}

        def deliver(new: NewToken) -> None:
            loop.call_soon_threadsafe(lambda: arrived.put_nowait((index_of[new.request_id], new)))

        request_ids = self._loop.submit(samples, deliver)
        # This precedes the look-up of a delivered token, which happens on this thread after the next await.
        index_of.update({request_id: i for i, request_id in enumerate(request_ids)})
        try:
            yield arrived
        finally:
            self._loop.cancel(request_ids)

    async def _parts(self, run: "_Run") -> AsyncGenerator[tuple[int, ChoiceText], None]:
        """Yield (index of the choice, part) of all samples as they arrive."""
        texts = run.texts
        async with self._running(run.samples) as arrived:
            while not all(text.is_finished for text in texts):
                index, new = await arrived.get()
                text = texts[index]
                if text.is_finished:
                    # A token after a stop string, drawn before the sample was cancelled.
                    continue
                run.note_first_token()
                if run.request.echoes and not text.num_tokens:
                    yield index, text.echo(run.samples[index].prompt, new)
                if run.request.max_tokens == 0:
                    text.is_finished = True
                    yield index, ChoiceText(finish_reason="length")
                    continue
                delta = text.push(new)
                if delta.finish_reason is not None and new.finish_reason is None:
                    self._loop.cancel([new.request_id])
                if delta.text or delta.reasoning or delta.tokens or delta.calls or delta.finish_reason is not None:
                    yield index, delta

    async def _events(self, run: "_Run") -> AsyncGenerator[str, None]:
        """Yield the server-sent events of a stream."""
        builder = ResponseBuilder(run.request, self._job.name)
        if run.request.kind == "chat":
            for index in range(len(run.samples)):
                yield _event(builder.chunk([builder.first_delta(index)]))
        async with aclosing(self._parts(run)) as deltas:
            async for index, delta in deltas:
                yield _event(builder.chunk([builder.choice(index, delta, is_delta=True)]))
        if run.request.includes_usage:
            yield _event(builder.chunk([], usage_of(run.num_prompt_tokens, run.num_new_tokens)))
        yield "data: [DONE]\n\n"

    async def _whole(self, run: "_Run") -> dict[str, Any]:
        """Return the response with all choices. Cancel the samples if the client disconnects."""
        builder = ResponseBuilder(run.request, self._job.name)
        collected: list[list[ChoiceText]] = [[] for _ in run.samples]

        async def collect() -> None:
            async with aclosing(self._parts(run)) as deltas:
                async for index, delta in deltas:
                    collected[index].append(delta)

        task = asyncio.ensure_future(collect())
        try:
            while not task.done():
                await asyncio.wait([task], timeout=DISCONNECT_POLL_S)
                if not task.done() and await run.http.is_disconnected():
                    raise _client_gone()
        finally:
            task.cancel()
        task.result()
        choices = []
        for index, sample in enumerate(run.chosen_samples()):
            deltas = collected[sample]
            choice_text = ChoiceText(
                text="".join(delta.text for delta in deltas),
                reasoning="".join(delta.reasoning for delta in deltas),
                tokens=[token for delta in deltas for token in delta.tokens],
                calls=[call for delta in deltas for call in delta.calls],
                finish_reason=deltas[-1].finish_reason,
            )
            choices.append(builder.choice(index, choice_text, is_delta=False))
        return builder.whole(choices, usage_of(run.num_prompt_tokens, run.num_new_tokens))


class _Run:
    """Request that the engine is answering, with the time when reading began, from `time.perf_counter`."""

    def __init__(
        self,
        http: HttpRequest,
        request: ApiRequest,
        samples: Sequence[Request],
        texts: Sequence[SampleText],
        metrics: ServerMetrics,
        start: float,
    ) -> None:
        self.http = http
        self.request = request
        self.samples = samples
        self.texts = texts
        self._metrics = metrics
        self._start: float | None = start
        self.num_prompt_tokens = sum(len(sample.prompt) for sample in samples[:: request.num_samples])
        """Number of tokens of all prompts. Each prompt is counted once."""

    @property
    def num_new_tokens(self) -> int:
        """New tokens of all samples so far."""
        return sum(text.num_tokens for text in self.texts)

    def chosen_samples(self) -> list[int]:
        """Return the samples of the answer, grouped by prompt. If some are dropped, the likeliest come first."""
        num_samples = self.request.num_samples
        best: list[int] = []
        for first in range(0, len(self.texts), num_samples):
            group = list(range(first, first + num_samples))
            if self.request.num_choices < num_samples:
                group.sort(key=lambda index: -self.texts[index].mean_log_prob)
            best += group[: self.request.num_choices]
        return best

    def note_first_token(self) -> None:
        """Record the time to the first token, once."""
        if self._start is not None:
            self._metrics.add_first_token(time.perf_counter() - self._start)
            self._start = None

    def note_tokens(self) -> None:
        """Record the numbers of tokens, once, after the answer."""
        self._metrics.add_tokens(self.num_prompt_tokens, self.num_new_tokens)
        self.http.scope["moefold.tokens"] = f" {self.num_prompt_tokens}+{self.num_new_tokens} tokens"


class _EventStream:
    """Response of server-sent events.

    The events end with the response, and the stack is closed with it, even if the client disconnects or no event was
    read.
    """

    def __init__(self, events: AsyncGenerator[str, None], stack: ExitStack) -> None:
        self._events = events
        self._held = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                await StreamingResponse(self._events, media_type="text/event-stream")(scope, receive, send)
            finally:
                await self._events.aclose()


async def _unknown_path(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{http.method} {http.url.path}"
    return _error(ApiError(f"{path} is not a path of this server; it has {', '.join(PATHS)}", error.status_code))


def _error(error: ApiError) -> Response:
    return JSONResponse(error.as_dict(), error.status)


def _client_gone() -> ApiError:
    return ApiError("the client has gone", 499)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def serve_worker(job: ServeJob, rank_env: RankEnv, device_type: str) -> int:
    """Join the job, and serve until the process is interrupted. Return the exit status."""
    with joined_job(rank_env, device_type, OOM_HINT) as device:
        # A port in use is reported before the weights are read.
        listener = listen(job.options.host, job.options.port) if rank_env.rank == 0 else None
        log_name = job.options.access_log if rank_env.rank == 0 else ""
        log = AccessLog(log_name).write if log_name else None
        tokenizer = open_tokenizer(job.source, job.options.tokenizer)
        loaded = load_model(job.source, job.cfg, device, tokenizer)
        report_decoding(loaded, job.cfg.run)
        engine = GenerationEngine(loaded.model, job.settings, SamplingParams())
        grammars = JsonGrammars(tokenizer, job.source.model.vocab_size)
        with engine.open(job.num_pages, grammars.start) as generation:
            loop = EngineLoop(generation, loaded.model.groups)
            if listener is not None:
                url = url_of(listener)
                _start_http(CompletionServer(job, tokenizer, loop, grammars, log), loop, listener)
                print_escaped(f"moefold: {job.name} at {url}/v1", flush=True)
            loop.run()
    return 0


def _start_http(server: CompletionServer, loop: EngineLoop, listener: socket.socket) -> None:
    """Serve HTTP on a thread. The engine loop ends with the thread."""
    http, sockets = make_server(server.app(), listener)

    def run() -> None:
        try:
            http.run(sockets=sockets)
        finally:
            loop.stop()

    threading.Thread(target=run, name="http", daemon=True).start()
