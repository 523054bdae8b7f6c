"""Answers to requests: made once for all readers, files as downloads, how often a page may ask."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import IO, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.background import BackgroundTask

from thrifty.core import CheckpointError
from thrifty.store import StudyView, Views
from thrifty.store._plan_files import ArtifactFiles

from .views import _models as models


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedValue:
    """A cached value with its revision, its time, and the seconds that it took to make.

    Attributes:
        value: The value.
        stamp: Revision from which it was made. If it was made from cached values of other
            revisions, it joins all of them, so it equals no revision.
        at: Time at which it was made.
        cost: Seconds that making it took.
    """

    value: Any
    stamp: str | None
    at: float
    cost: float


class Cache:
    """Caches values while their stamp is current, and for a short time after.

    Readers of a running study must not take its CPU time. A value is therefore made again after
    ``patience_s`` seconds at the earliest, and so rarely that making it takes at most ``share`` of
    the time, independent of the number of readers. Readers that ask while a value is being made
    wait for it.

    ``make`` may itself get values from the cache, and these may be older than ``stamp``. Then the
    new value is older than ``stamp`` too, so it is made again at a later request.

    >>> cache = Cache(patience_s=60)
    >>> [cache.get("a", stamp=s, make=lambda: f"made of {s}").value for s in "12"]
    ['made of 1', 'made of 1']
    """

    def __init__(
        self,
        *,
        patience_s: float = 2.0,
        share: float = 0.02,
        size: int = 128,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = patience_s
        self._share = share
        self._size = size
        self._now = now
        self._kept: OrderedDict[Hashable, CachedValue] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()
        self._thread = _Inputs()

    def get(self, key: Hashable, *, stamp: str | None, make: Callable[[], Any]) -> CachedValue:
        """Return the cached value of a key; call ``make`` if it is missing or too old.

        Without a stamp only the age counts.
        """
        found = self._get(key, stamp, make)
        if found.stamp is not None and self._thread.stamps:
            self._thread.stamps[-1].add(found.stamp)
        return found

    def _get(self, key: Hashable, stamp: str | None, make: Callable[[], Any]) -> CachedValue:
        with self._lock:
            found = self._fresh(key, stamp)
            if found is not None:
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                found = self._fresh(key, stamp)  # another thread may have made it
            if found is not None:
                return found
            return self._make(key, stamp=stamp, make=make)

    def _make(self, key: Hashable, *, stamp: str | None, make: Callable[[], Any]) -> CachedValue:
        began = self._now()
        inputs: set[str] = set()
        self._thread.stamps.append(inputs)
        try:
            value = make()
        except BaseException:
            with self._lock:
                if key not in self._kept:
                    self._making.pop(key, None)
            raise
        finally:
            self._thread.stamps.pop()
        ended = self._now()
        if stamp is not None and inputs - {stamp}:
            stamp = "+".join(sorted(inputs | {stamp}))
        made = CachedValue(value=value, stamp=stamp, at=ended, cost=ended - began)
        with self._lock:
            self._kept[key] = made
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._making.pop(self._kept.popitem(last=False)[0], None)
        return made

    def _fresh(self, key: Hashable, stamp: str | None) -> CachedValue | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        wait = max(self._patience, kept.cost / self._share) if self._patience else 0.0
        if (stamp is not None and kept.stamp == stamp) or self._now() - kept.at < wait:
            self._kept.move_to_end(key)
            return kept
        return None


class _Inputs(threading.local):
    """For each value that a thread is making now, the stamps of the cached values that it uses."""

    def __init__(self) -> None:
        self.stamps: list[set[str]] = []


def etag(body: bytes) -> str:
    """Return the ETag of a body: equal bodies have equal tags.

    >>> etag(b"a") == etag(b"a"), etag(b"a") == etag(b"b")
    (True, False)
    """
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'


class PollThrottle:
    """Staggers polling: each page is told when to poll again, no two within ``spacing_s``.

    A poll costs the server some milliseconds of CPU time that training may need. A single page
    polls again after ``least_s`` seconds; two hundred pages take turns.

    >>> pace = PollThrottle(least_s=2, spacing_s=0.5, now=lambda: 0.0)
    >>> [pace.again_s() for _ in range(3)]
    [2.0, 2.5, 3.0]
    """

    def __init__(
        self,
        *,
        least_s: float = 2.0,
        spacing_s: float = 0.1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._least = least_s
        self._spacing = spacing_s
        self._now = now
        self._last = -least_s
        self._lock = threading.Lock()

    def again_s(self) -> float:
        """Return in how many seconds the current client should poll again."""
        with self._lock:
            now = self._now()
            self._last = max(now + self._least, self._last + self._spacing)
            return self._last - now


Responses = dict[int | str, dict[str, Any]]

ALWAYS: Responses = {
    304: {"description": "Not modified since the ETag given in If-None-Match"},
    401: {"model": models.ErrorResponse, "description": "The token is missing or wrong"},
    503: {"model": models.ErrorResponse, "description": "The database cannot be read now"},
}
NONE: Responses = {
    404: {"model": models.ErrorResponse, "description": "There is no such study or trial"}
}
"""Error responses of all routes, and those of routes about one study or trial."""

LARGEST = 2**31 - 1
TrialNumber = Annotated[int, Path(ge=0, le=LARGEST, description="number of a trial")]
StudyId = Annotated[int, Path(ge=1, le=LARGEST, description="number of a study")]


@dataclass(frozen=True, slots=True)
class ResponseService:
    """Makes the responses of the API."""

    views: Views
    cache: Cache
    pace: PollThrottle

    def stamp(self, study: int | None = None) -> str:
        """Return the current revision.

        Raises:
            HTTPException: The study does not exist.
        """
        found = self.cache.get(
            ("stamp", study), stamp=None, make=lambda: self.views.studies.stamp(study)
        ).value
        if found is None:
            raise HTTPException(404, f"there is no study number {study}")
        return str(found)

    def study(self, study: int) -> StudyView:
        """Return the current view of the study.

        Raises:
            HTTPException: The study does not exist.
        """
        stamp = self.stamp(study)
        kept = self.cache.get(
            ("view", study), stamp=stamp, make=lambda: self.views.studies.get(study)
        )
        if kept.value is None:
            raise HTTPException(404, f"there is no study number {study}")
        view: StudyView = kept.value
        return view

    def answer(
        self,
        request: Request,
        key: tuple[Any, ...],
        make: Callable[[], BaseModel],
        *,
        study: int | None = None,
    ) -> Response:
        """Return a response, from the cache if unchanged; 304 if the client's copy is current."""
        kept = self.cache.get(
            ("answer", study, *key), stamp=self.stamp(study), make=lambda: _body(make())
        )
        return _response(request, *kept.value, stamp=str(kept.stamp))

    def revision(self, request: Request, study: int | None = None) -> Response:
        """Return the current revision, which open pages poll, and when to poll again."""
        stamp = self.stamp(study)
        response = _response(request, *_body(models.Revision(revision=stamp)), stamp=stamp)
        response.headers["X-Ask-Again"] = f"{self.pace.again_s():.3f}"
        return response


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """A request about a study, with the service that answers it."""

    service: ResponseService
    request: Request
    study: int

    def answer(
        self, key: tuple[Any, ...], make: Callable[[Views, StudyView], BaseModel]
    ) -> Response:
        """Make a response from the current study; see ``ResponseService.answer``.

        Raises:
            HTTPException: The study does not exist.
        """

        def made() -> BaseModel:
            return make(self.service.views, self.service.study(self.study))

        return self.service.answer(self.request, key, made, study=self.study)


# These are coroutines because FastAPI would run plain functions in a thread.
async def _service(request: Request) -> ResponseService:
    service: ResponseService = request.app.state.service
    return service


async def _about_a_study(request: Request, service: Responding, study: StudyId) -> StudyRequest:
    return StudyRequest(service, request, study)


Responding = Annotated[ResponseService, Depends(_service)]
AboutStudy = Annotated[StudyRequest, Depends(_about_a_study)]


def _response(request: Request, body: bytes, tag: str, *, stamp: str) -> Response:
    headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Revision": stamp}
    given = request.headers.get("if-none-match", "")
    if tag in (part.strip() for part in given.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _body(answer: BaseModel) -> tuple[bytes, str]:
    body = answer.model_dump_json().encode()
    return body, etag(body)


router = APIRouter(prefix="/api/studies/{study}", responses={**ALWAYS, **NONE})

_CHUNK = 64 * 1024
_FILE = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "description": "The file, as it was logged",
}

Digest = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="digest of an artifact of the trial")
]


@router.get("/trials/{number}/artifacts/{digest}", response_class=Response, responses={200: _FILE})
def download(asked: AboutStudy, number: TrialNumber, digest: Digest) -> Response:
    """Return a file that the trial has logged; its content was compared with its digest."""
    views, view = asked.service.views, asked.service.study(asked.study)
    row = views.trials.get(view.id, number)
    if row is None:
        raise HTTPException(404, f"study {view.name!r} has no trial {number}")
    # Only what the database records for this trial is looked for: the path has no other part.
    own = views.plans.paths(view.plan, [row.node]).artifacts_of(row.node, row.reached)
    found = next((each for each in own.values() if each.digest == digest), None)
    if found is None:
        raise HTTPException(404, f"trial {number} has no artifact of this digest")
    files = ArtifactFiles(
        asked.request.app.state.checkpoints(), folder=views.plans.identity(view.plan)
    )
    try:
        content = files.open(found)
    except CheckpointError as error:
        raise HTTPException(404, str(error)) from None
    return StreamingResponse(
        _chunks(content),
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name, safe='')}",
            "Content-Length": str(found.num_bytes),
            "Content-Security-Policy": "sandbox",
            "Cache-Control": "no-store",
        },
        background=BackgroundTask(content.close),
    )


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK):
        yield chunk
