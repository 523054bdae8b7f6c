"""The web application: the API's routes, the page, access control and security headers."""

from __future__ import annotations

import ipaddress
import json
import pathlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Literal
from urllib.parse import parse_qs

import anyio.to_thread
from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, MutableHeaders
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thrifty.core import StoreError
from thrifty.store import COLUMNS, CheckpointFolder, Order, StudyView, TrialFilter, Views, sortable
from thrifty.store._steering_requests import is_run

from ._responses import (
    ALWAYS,
    LARGEST,
    NONE,
    AboutStudy,
    Cache,
    PollThrottle,
    Responding,
    ResponseService,
    TrialNumber,
    router as artifacts_router,
)
from ._steering_routes import Steering, router as acts_router, trash_router
from .views import (
    _charts as charts,
    _layouts as forests,
    _models as models,
    _study_views as studies,
)


State = Literal["running", "done", "paused", "stopped", "failed"]
Moment = Annotated[
    float | None, Field(ge=0, le=1e12, allow_inf_nan=False, description="seconds since 1970")
]
Bound = Annotated[float | None, Field(allow_inf_nan=False)]
router = APIRouter(prefix="/api", responses=ALWAYS)
"""All routes of the API. They use the application's ``state.service``."""

_study = APIRouter(prefix="/studies/{study}", responses=NONE)


class CurvesQuery(BaseModel):
    """Selection of learning curves."""

    metric: Annotated[str | None, Field(max_length=200)] = None
    best: Annotated[int, Field(ge=0, le=200)] = 50
    others: Annotated[int, Field(ge=0, le=1000)] = 200


class WorkersQuery(BaseModel):
    """Selection of stages."""

    since: Moment = None
    until: Moment = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 2000


class TrialsQuery(BaseModel):
    """Selection and order of trials."""

    state: Annotated[list[State] | None, Field(max_length=5)] = None
    text: Annotated[str, Field(max_length=200)] = ""
    low: Bound = None
    high: Bound = None
    sort: Annotated[str, Field(max_length=200, description="a column or param:NAME")] = "number"
    order: Order = "asc"
    offset: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    limit: Annotated[int, Field(ge=1, le=500)] = 50


@router.get("/revision", response_model=models.Revision)
def revision(request: Request, service: Responding) -> Response:
    """Return a revision that changes whenever something is written."""
    return service.revision(request)


@router.get("/studies", response_model=models.StudyList)
def study_list(request: Request, service: Responding) -> Response:
    """Return all studies."""
    return service.answer(request, ("studies",), lambda: studies.study_list(service.views))


@_study.get("/revision", response_model=models.Revision)
def study_revision(asked: AboutStudy) -> Response:
    """Return a revision that changes whenever something is written about a study."""
    return asked.service.revision(asked.request, asked.study)


@_study.get("", response_model=models.StudyDetail)
def study_detail(asked: AboutStudy) -> Response:
    """Return one study: its definition and its current status."""
    return asked.answer(("detail",), studies.detail)


@_study.get("/history", response_model=models.History)
def history(asked: AboutStudy, limit: Annotated[int, Query(ge=1, le=10_000)] = 2000) -> Response:
    """Return the values of trials and the best so far."""
    return asked.answer(
        ("history", limit), lambda views, view: studies.history(views, view, limit=limit)
    )


@_study.get("/curves", response_model=models.Curves)
def curves(asked: AboutStudy, query: Annotated[CurvesQuery, Query()]) -> Response:
    """Return the learning curves of the best trials and some others."""
    options = dict(query)
    return asked.answer(
        ("curves", *options.values()), lambda views, view: charts.curves(views, view, **options)
    )


@_study.get("/parallel", response_model=models.Parallel)
def parallel(asked: AboutStudy, limit: Annotated[int, Query(ge=1, le=5000)] = 2000) -> Response:
    """Return trials with their coordinates and their metric."""
    return asked.answer(
        ("parallel", limit), lambda views, view: charts.parallel(views, view, limit=limit)
    )


@_study.get("/pareto", response_model=models.Pareto)
def pareto(asked: AboutStudy, limit: Annotated[int, Query(ge=1, le=5000)] = 2000) -> Response:
    """Return trials by their objectives, and the Pareto front."""
    return asked.answer(
        ("pareto", limit), lambda views, view: charts.pareto(views, view, limit=limit)
    )


@_study.get("/importance", response_model=models.Importance)
def importance(asked: AboutStudy) -> Response:
    """Return the importance of the hyper-parameters."""
    return asked.answer(("importance",), charts.importance)


@_study.get("/forest", response_model=models.Forest)
def forest(asked: AboutStudy, limit: Annotated[int, Query(ge=1, le=10_000)] = 1500) -> Response:
    """Return the stage forest."""
    return asked.answer(
        ("forest", limit),
        lambda _, view: forests.draw(
            _forest(asked.service, view),
            metric=view.metrics[0],
            limit=limit,
            unit=studies.unit_of(view),
        ),
    )


@_study.get("/workers", response_model=models.Workers)
def workers(asked: AboutStudy, query: Annotated[WorkersQuery, Query()]) -> Response:
    """Return the stages on workers over time."""
    options = dict(query)
    return asked.answer(
        ("workers", *options.values()), lambda views, view: charts.workers(views, view, **options)
    )


@_study.get("/trials", response_model=models.Trials)
def table(asked: AboutStudy, query: Annotated[TrialsQuery, Query()]) -> Response:
    """Return a page of the table of trials."""
    view = asked.service.study(asked.study)
    sort, order, offset, limit = query.sort, query.order, query.offset, query.limit
    known = {*COLUMNS, *(f"param:{name}" for name in view.spec.get("space", {}))}
    if sort not in known or not sortable(sort):
        raise _unsortable(sort)
    which = TrialFilter(
        states=tuple(sorted(query.state or ())),
        max_epochs=studies.max_epochs(view),
        is_run=is_run(view.state),
        text=query.text,
        low=query.low,
        high=query.high,
    )
    return asked.answer(
        ("trials", which, sort, order, offset, limit),
        lambda views, view: studies.table(
            views, view, which, sort=sort, order=order, offset=offset, limit=limit
        ),
    )


@_study.get("/trials/{number}", response_model=models.Trial)
def trial(asked: AboutStudy, number: TrialNumber) -> Response:
    """Return one trial."""

    def make(views: Views, view: StudyView) -> models.Trial:
        row = views.trials.get(view.id, number)
        if row is None:
            raise HTTPException(404, f"study {view.name!r} has no trial {number}")
        return studies.trial(views, view, row, forest=_forest(asked.service, view))

    return asked.answer(("trial", number), make)


router.include_router(_study)


def _forest(service: ResponseService, view: StudyView) -> forests.StageForest:
    """Return the stage forest, cached for both the drawing and the pages of trials."""
    kept = service.cache.get(
        ("forest", view.id),
        stamp=service.stamp(view.id),
        make=lambda: charts.forest(service.views, view),
    )
    found: forests.StageForest = kept.value
    return found


def _unsortable(sort: str) -> RequestValidationError:
    message = "not a column, and not param: with a hyper-parameter of the study"
    found = {"type": "value_error", "loc": ("query", "sort"), "msg": message, "input": sort}
    return RequestValidationError([found])


STATIC = pathlib.Path(__file__).with_name("static")
THREADS = 4
"""Maximum number of concurrent database queries: readers wait rather than slow a study down."""


def application(
    views: Views,
    *,
    token: str | None,
    local_only: bool,
    cache: Cache,
    steering: Steering | None = None,
    checkpoints: Callable[[], CheckpointFolder],
) -> FastAPI:
    """Return the dashboard of a database.

    Args:
        views: The database, which is only read.
        token: Token that clients need; None: none. Acts need one.
        local_only: Whether to answer only requests for localhost.
        cache: Decides how often responses are made again.
        steering: Writes acts; None: the dashboard only shows.
        checkpoints: Opens the checkpoint folder, which has the artifacts.
    """
    assert steering is None or token is not None

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        views.close()

    app = FastAPI(
        title="thrifty dashboard",
        version=version("thrifty"),
        description="Views of studies, and acts on them if that is allowed. Answers carry an ETag; "
        "X-Revision is that of the moment they were made. X-Ask-Again, with a revision, says in "
        "how many seconds to ask again.",
        docs_url=None,  # those pages load external scripts
        redoc_url=None,
        lifespan=living,
    )
    app.state.service = ResponseService(views, cache, PollThrottle())
    app.state.steering = steering
    app.state.checkpoints = checkpoints
    app.include_router(router)
    app.include_router(artifacts_router)
    app.include_router(acts_router)
    app.include_router(trash_router)

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(StoreError, _unreadable)
    app.add_exception_handler(SQLAlchemyError, _unreadable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_middleware(SecurityMiddleware, token=token, local_only=local_only)
    return app


async def _unreadable(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    said = str(error) if isinstance(error, StoreError) else type(error).__name__
    return JSONResponse({"detail": f"the database cannot be read now: {said}"}, 503)


async def _invalid(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Say what is wrong with a request, without repeating what it has sent."""
    assert isinstance(error, RequestValidationError)
    found = [{key: each[key] for key in ("loc", "msg", "type")} for each in error.errors()]
    # Escaped: what was sent may not even be text.
    return Response(json.dumps({"detail": found}), 422, media_type="application/json")


LARGEST_BODY = 16_384
"""Bytes of a request: the longest note, each character of it escaped."""

POLICY = "; ".join((
    "default-src 'self'",
    "img-src 'self' data:",
    "object-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
))
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecurityMiddleware:
    """Middleware that checks the Host header and the token, and sets the headers of every response.

    ``local_only`` rejects every Host except this machine's own names. Thus a foreign page whose
    name was rebound to the loopback address (DNS rebinding) can read nothing. With a ``token``, a
    first request to ``/?token=...`` sets a cookie, and programs send the token as a bearer token.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, local_only: bool) -> None:
        self._app = app
        self._token = token
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                # A download has a stricter policy of its own.
                own.update({name: HEADERS[name] for name in HEADERS if name not in own})
            await send(message)

        headers = Headers(scope=scope)
        if self._local_only and not is_here(_host(headers.get("host", ""))):
            await _refuse(with_headers, 400, "this dashboard answers to localhost only")
        elif refused := _too_large(headers):
            await _refuse(with_headers, *refused)
        elif self._token is None or self._known(scope, headers):
            await self._app(scope, receive, with_headers)
        elif self._introduced(scope):
            await _let_in(with_headers, _cookie_name(scope), self._token)
        else:
            said = (
                "the token is missing or wrong; open the address that `thrifty dashboard` printed"
            )
            await _refuse(with_headers, 401, said, headers=[(b"www-authenticate", b"Bearer")])

    def _known(self, scope: Scope, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._same(given.strip()):
            return True
        # Parse by hand: another program's invalid cookie on this host must not hide ours.
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(n == _cookie_name(scope) and self._same(value) for n, _, value in pairs)

    def _introduced(self, scope: Scope) -> bool:
        if scope["path"] != "/" or scope["method"] not in ("GET", "HEAD"):
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8)
        return any(self._same(given) for given in query.get("token", ()))

    def _same(self, given: str) -> bool:
        assert self._token is not None
        # Compare bytes, because compare_digest accepts only ASCII in strings.
        return secrets.compare_digest(given.encode(), self._token.encode())


def is_here(host: str) -> bool:
    """Return whether a name or an address is this machine's loopback.

    >>> [is_here(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "evil.example")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(header: str) -> str:
    """Return a Host header without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _cookie_name(scope: Scope) -> str:
    # Cookies do not distinguish ports, and several dashboards may run on this host.
    server = scope.get("server") or ("", 0)
    return f"thrifty_{server[1]}"


async def _let_in(send: Send, name: str, token: str) -> None:
    cookie = f"{name}={token}; HttpOnly; SameSite=Strict; Path=/"
    await _answer(
        send,
        303,
        body=b"",
        headers=[(b"location", b"./"), (b"set-cookie", cookie.encode("latin-1"))],
    )


def _too_large(headers: Headers) -> tuple[int, str] | None:
    """Return the status and the reason to refuse a request whose body is too large to be read."""
    if "transfer-encoding" in headers:
        return 411, "say the length of what you send"
    length = headers.get("content-length", "0")
    if length.isdecimal() and len(length) < 19 and int(length) <= LARGEST_BODY:
        return None
    return 413, f"no request needs more than {LARGEST_BODY:,} bytes"


async def _refuse(
    send: Send, status: int, detail: str, *, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps({"detail": detail}).encode()
    kind = (b"content-type", b"application/json")
    await _answer(send, status, body=body, headers=[kind, *headers])


async def _answer(
    send: Send, status: int, *, body: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    length = (b"content-length", str(len(body)).encode())
    caching = (b"cache-control", b"no-store")
    await send({
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, length, caching],
    })
    await send({"type": "http.response.body", "body": body})
