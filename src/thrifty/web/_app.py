"""The web application: the API, the page, and the response when the database cannot be read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.staticfiles import StaticFiles

from thrifty.core import StoreError
from thrifty.store import Views

from ._api import router
from .server._responses import Cache, PollThrottle, ResponseService
from .server._security import SecurityMiddleware


STATIC = Path(__file__).with_name("static")
THREADS = 4
"""Maximum number of concurrent database queries: readers wait rather than slow a study down."""


def application(views: Views, *, token: str | None, only_here: bool, cache: Cache) -> FastAPI:
    """Return the dashboard of a database; ``cache`` decides how often responses are made again."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        views.close()

    app = FastAPI(
        title="thrifty dashboard",
        version=version("thrifty"),
        description="Read-only views of studies. Answers carry an ETag; "
        "X-Revision is that of the moment they were made. X-Ask-Again, with a revision, says in "
        "how many seconds to ask again.",
        docs_url=None,  # those pages load external scripts
        redoc_url=None,
        lifespan=living,
    )
    app.state.desk = ResponseService(views, cache, PollThrottle())
    app.include_router(router)

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_exception_handler(StoreError, _unreadable)
    app.add_exception_handler(SQLAlchemyError, _unreadable)
    app.add_middleware(SecurityMiddleware, token=token, only_here=only_here)
    return app


async def _unreadable(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    said = str(error) if isinstance(error, StoreError) else type(error).__name__
    return JSONResponse({"detail": f"the database cannot be read now: {said}"}, 503)
