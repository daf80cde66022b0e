"""HTTP application of the board: the page, its static files, and read-only JSON. Needs starlette, not torch.

All answers except the static files come from untrusted files: they are JSON, or data that the page puts into text
nodes. No address names a path.
"""

import hmac
import json
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moefold.board.metric_table import WEIGHTS
from moefold.board.page import STATIC_FILES, page
from moefold.board.rollout_index import RolloutQuery
from moefold.board.run_list import MAX_OPEN, RunList
from moefold.board.run_reader import RunReader
from moefold.host.listen import LOOPBACK_HOSTS
from moefold.metrics.reader import MAX_STEP

MAX_POINTS = 20_000
MAX_LIMIT = 200
COOKIE = "moefold_board_{port}"
"""Name of the cookie with the token. Browsers send the cookies of a host to all its ports."""
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
"""Headers of every answer: external content is not run or requested, and texts are never interpreted as a page."""


def make_app(runs: RunList, *, token: str = "", is_loopback: bool = True) -> Starlette:
    """Return the application of some runs.

    Args:
        token: required token of requests. Empty means none.
        is_loopback: only accept requests for names of the loopback interface, so that a web page with another name that
            resolves to it gets no data.
    """
    routes = [Route("/", _index), *(Route(f"/static/{name}", partial(_static, name)) for name in STATIC_FILES)]
    routes.append(Route("/api/runs", partial(_runs, runs)))
    for name, answer in (
        ("series", _series),
        ("experts", lambda reader, query: reader.experts()),
        ("memory", lambda reader, query: reader.memory()),
        ("ranks", lambda reader, query: reader.ranks()),
        ("faults", lambda reader, query: reader.faults()),
        ("rollouts", _rollouts),
        ("recipe", lambda reader, query: reader.recipe()),
    ):
        routes.append(Route(f"/api/runs/{{key}}/{name}", partial(_answer_of_run, runs, answer)))
    return Starlette(
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_HOSTS) if is_loopback else ["*"]),
            *([Middleware(_TokenCheck, token=token)] if token else []),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4),
        ],
        routes=routes,
    )


def _json(content: Any) -> Response:
    """Return JSON in ASCII: texts of models may have lone surrogates, which UTF-8 cannot encode."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("ascii"), media_type="application/json")


class _Headers:
    """ASGI middleware that adds `HEADERS`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _TokenCheck:
    """ASGI middleware that refuses requests without the token.

    A browser sends it once in the address, then in a cookie that scripts cannot read. Programs send the header
    `Authorization: Bearer TOKEN`.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        cookie = COOKIE.format(port=request.url.port)
        response: Response
        if self._is_token(request.query_params.get("token", "")):
            # Then the address of the page contains no token, which a bookmark or a picture would show.
            response = RedirectResponse("./" if scope["path"] == "/" else scope["path"], status_code=303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif self._is_token(request.cookies.get(cookie, "")) or self._is_token(
            request.headers.get("authorization", "").removeprefix("Bearer ")
        ):
            await self._app(scope, receive, send)
        else:
            response = PlainTextResponse(
                "This board asks for a token: open the address that `moefold board` printed.\n", status_code=401
            )
            await response(scope, receive, send)

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode("utf-8", "surrogateescape"), self._token.encode())


def _index(request: Request) -> Response:
    return Response(page(), media_type="text/html")


def _static(name: str, request: Request) -> Response:
    return Response(files("moefold.board").joinpath("static", name).read_bytes(), media_type=STATIC_FILES[name])


def _runs(runs: RunList, request: Request) -> Response:
    wanted_keys = [key for key in request.query_params.get("want", "").split(",") if key]
    return _json(
        {
            "runs": runs.summaries(wanted_keys),
            "folders": [str(folder) for folder in runs.folders],
            "max_chosen": MAX_OPEN,
            "smoothing": WEIGHTS,
        }
    )


def _answer_of_run(runs: RunList, answer: Callable[[RunReader, Any], dict[str, Any]], request: Request) -> Response:
    reader = runs.reader(request.path_params["key"])
    if reader is None:
        raise HTTPException(404, "there is no such run")
    return _json(answer(reader, request.query_params))


def _series(reader: RunReader, query: Any) -> dict[str, Any]:
    return reader.series(
        _integer(query, "first", 0, MAX_STEP),
        _integer(query, "last", MAX_STEP, MAX_STEP),
        max(3, _integer(query, "points", 600, MAX_POINTS)),
        _weights(query),
    )


def _rollouts(reader: RunReader, query: Any) -> dict[str, Any]:
    return reader.rollouts(
        RolloutQuery(
            text=query.get("text", ""),
            step=_integer(query, "step", None, MAX_STEP),
            min_reward=_number(query, "min_reward"),
            max_reward=_number(query, "max_reward"),
            before=_integer(query, "before", None, MAX_STEP),
            limit=_integer(query, "limit", 20, MAX_LIMIT),
        )
    )


def _weights(query: Any) -> list[str]:
    weights = [weight for weight in query.get("smooth", "").split(",") if weight]
    if not set(weights) <= set(WEIGHTS):
        raise HTTPException(400, f"smooth must have weights out of {', '.join(WEIGHTS)}")
    return weights


def _integer(query: Any, name: str, default: Any, limit: int) -> Any:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= limit):
        raise HTTPException(400, f"{name} must be an integer in [0, {limit}]")
    return int(text)


def _number(query: Any, name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise HTTPException(400, f"{name} must be a number") from None
