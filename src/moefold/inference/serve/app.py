"""HTTP application of the server: completions and chat completions of the OpenAI API, streamed or whole."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
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
from moefold.host.listen import LOOPBACK_HOSTS, LOOPBACK_NAMES
from moefold.inference.engine.requests import NewToken, Request
from moefold.inference.serve.codec import PromptEncoder, SampleText, TextPiece
from moefold.inference.serve.engine_loop import EngineLoop
from moefold.inference.serve.job import ServeJob
from moefold.inference.serve.protocol import (
    ApiError,
    ApiKind,
    ApiRequest,
    ResponseBuilder,
    parse_request,
    usage_of,
)

PATHS = ("GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions", "GET /health")
DISCONNECT_POLL_S = 0.5
"""Interval at which a whole response checks that its client is still there."""


class CompletionServer:
    """Answers requests with the samples of an engine loop.

    Args:
        job: the server.
        tokenizer: of the model.
        loop: runs on another thread.
    """

    def __init__(self, job: ServeJob, tokenizer: Tokenizer, loop: EngineLoop) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._loop = loop
        self._encoder = PromptEncoder(job, tokenizer)
        self._num_open = 0

    def app(self) -> Starlette:
        """Return the application; on the loopback interface it takes requests for this machine's names only."""
        # A web page whose name resolves to the loopback address would otherwise be of the same origin.
        allowed_hosts = list(LOOPBACK_HOSTS) if self._job.options.host in LOOPBACK_NAMES else ["*"]
        return Starlette(
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts)],
            exception_handlers={404: _unknown_path, 405: _unknown_path},
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._endpoint("completion"), methods=["POST"]),
                Route("/v1/chat/completions", self._endpoint("chat"), methods=["POST"]),
            ],
        )

    async def _health(self, http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "samples": self._num_open})

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

    def _endpoint(self, kind: ApiKind) -> Callable[[HttpRequest], Any]:
        async def answer(http: HttpRequest) -> Response | _EventStream:
            with ExitStack() as held:
                try:
                    request = parse_request(await self._read_body(http), kind, self._job.name)
                    held.enter_context(self._counted(request))
                    samples = await self._engine_requests(request)
                    if request.streams:
                        return _EventStream(self._events(request, samples), held.pop_all())
                    return JSONResponse(await self._whole(http, request, samples))
                except ApiError as error:
                    return _error(error)

        return answer

    @contextmanager
    def _counted(self, request: ApiRequest) -> Iterator[None]:
        """Count the samples of a request as open inside this context, before any of them is made.

        Raises:
            ApiError: they are more than this server takes.
        """
        num_samples = request.num_prompts * request.num_samples
        most = self._job.options.max_concurrent
        if num_samples > most:
            # Not 429, after which clients try again.
            raise ApiError(
                f"the request has {num_samples} samples, and this server takes at most {most}; ask for fewer"
            )
        if self._num_open + num_samples > most:
            raise ApiError(
                f"{self._num_open} samples run or wait, the request has {num_samples}, and this server takes at most "
                f"{most}; try again later, or ask for fewer",
                429,
            )
        self._num_open += num_samples
        try:
            yield
        finally:
            self._num_open -= num_samples

    async def _read_body(self, http: HttpRequest) -> bytes:
        """Read the body up to the limit.

        Raises:
            ApiError: it is larger, the client has gone, or it is not JSON by its header. A web page of another origin
                cannot send that header without asking first, which is never allowed.
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

    async def _engine_requests(self, request: ApiRequest) -> list[Request]:
        """Return the samples of a request for the engine.

        Raises:
            ApiError: a prompt cannot be tokenised, or does not fit.
        """
        try:
            prompts = await self._encoder.encode(request)
        except ConfigError as error:
            raise ApiError(str(error)) from error
        samples = []
        for i, prompt in enumerate(prompts):
            room = self._job.max_length - len(prompt)
            max_tokens = room if request.max_tokens is None else request.max_tokens
            if max_tokens > room or room < 1:
                raise ApiError(
                    f"the prompt has {len(prompt)} tokens, and with max_tokens={request.max_tokens or 1} it is longer "
                    f"than {self._job.max_length}, the most that this server takes; shorten one of them",
                    param="max_tokens",
                )
            for j in range(request.num_samples):
                samples.append(
                    Request(
                        prompt=prompt,
                        prompt_number=i,
                        sample_number=j,
                        max_tokens=max_tokens,
                        eos_ids=self._encoder.eos_ids(request),
                        sampling=request.sampling,
                        num_alternatives=min(request.num_alternatives, self._job.source.model.vocab_size),
                    )
                )
        return samples

    @asynccontextmanager
    async def _running(self, samples: Sequence[Request]) -> AsyncIterator[asyncio.Queue[tuple[int, NewToken]]]:
        """Run samples inside this context; yields a queue of (index of the sample, new token)."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, NewToken]] = asyncio.Queue()
        index_of: dict[int, int] = {}

        def deliver(new: NewToken) -> None:
            here.call_soon_threadsafe(lambda: arrived.put_nowait((index_of[new.number], new)))

        numbers = self._loop.submit(samples, deliver)
        # Before a delivered token is looked up: that happens on this thread, after the next await.
        index_of.update({number: i for i, number in enumerate(numbers)})
        try:
            yield arrived
        finally:
            self._loop.cancel(numbers)

    async def _pieces(
        self, request: ApiRequest, samples: Sequence[Request]
    ) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield (index of the choice, piece) of all samples as they come."""
        stops = (*request.stops, *self._encoder.stop_strings(request))
        texts = [SampleText(self._tokenizer, sample, stops) for sample in samples]
        async with self._running(samples) as arrived:
            while not all(text.is_finished for text in texts):
                index, new = await arrived.get()
                if texts[index].is_finished:
                    # A token after a stop string, drawn before the sample was cancelled.
                    continue
                piece = texts[index].push(new)
                if piece.finish_reason is not None and new.finish_reason is None:
                    self._loop.cancel([new.number])
                if piece.text or piece.tokens or piece.finish_reason is not None:
                    yield index, piece

    async def _events(self, request: ApiRequest, samples: Sequence[Request]) -> AsyncGenerator[str, None]:
        """Yield the server-sent events of a stream."""
        builder = ResponseBuilder(request, self._job.name)
        if request.kind == "chat":
            for index in range(len(samples)):
                yield _event(builder.chunk([builder.first_delta(index)]))
        num_new = 0
        async with aclosing(self._pieces(request, samples)) as pieces:
            async for index, piece in pieces:
                num_new += len(piece.tokens)
                choice = builder.choice(index, piece.text, piece.tokens, piece.finish_reason, is_delta=True)
                yield _event(builder.chunk([choice]))
        if request.includes_usage:
            yield _event(builder.chunk([], usage_of(_num_prompt_tokens(request, samples), num_new)))
        yield "data: [DONE]\n\n"

    async def _whole(self, http: HttpRequest, request: ApiRequest, samples: Sequence[Request]) -> dict[str, Any]:
        """Return the response with all choices; ends the samples if the client has gone."""
        builder = ResponseBuilder(request, self._job.name)
        collected: list[list[TextPiece]] = [[] for _ in samples]

        async def collect() -> None:
            async with aclosing(self._pieces(request, samples)) as pieces:
                async for index, piece in pieces:
                    collected[index].append(piece)

        task = asyncio.ensure_future(collect())
        try:
            while not task.done():
                await asyncio.wait([task], timeout=DISCONNECT_POLL_S)
                if not task.done() and await http.is_disconnected():
                    raise _client_gone()
        finally:
            task.cancel()
        task.result()
        choices = []
        for index, pieces in enumerate(collected):
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            choices.append(builder.choice(index, text, tokens, pieces[-1].finish_reason, is_delta=False))
        num_new = sum(len(piece.tokens) for pieces in collected for piece in pieces)
        return builder.whole(choices, usage_of(_num_prompt_tokens(request, samples), num_new))


class _EventStream:
    """Response of server-sent events.

    Args:
        events: ended with the response, also where the client has gone.
        held: closed with the response, even if no event was read.
    """

    def __init__(self, events: AsyncGenerator[str, None], held: ExitStack) -> None:
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
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


def _num_prompt_tokens(request: ApiRequest, samples: Sequence[Request]) -> int:
    """Return the tokens of all prompts, each counted once."""
    return sum(len(sample.prompt) for sample in samples[:: request.num_samples])


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"
