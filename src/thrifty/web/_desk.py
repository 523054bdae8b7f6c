"""Where answers come from: the database, through the cache, with what browsers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request, Response
from pydantic import BaseModel

from thrifty.store import StudyView, Views

from . import _models as models
from ._cache import Cache, etag
from ._pace import Pace


LARGEST = 2**31 - 1
StudyId = Annotated[int, Path(ge=1, le=LARGEST, description="number of a study")]


@dataclass(frozen=True, slots=True)
class Desk:
    """Where answers come from."""

    views: Views
    cache: Cache
    pace: Pace

    def stamp(self, study: int | None = None) -> str:
        """The present revision.

        Raises:
            HTTPException: there is no such study.
        """
        found = self.cache.get(
            ("stamp", study), stamp=None, make=lambda: self.views.studies.stamp(study)
        ).value
        if found is None:
            raise HTTPException(404, f"there is no study number {study}")
        return str(found)

    def study(self, study: int) -> StudyView:
        """The study as it stands.

        Raises:
            HTTPException: there is no such study.
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
        """An answer as it was sent last, where nothing has changed since; 304 if the reader has it."""
        kept = self.cache.get(
            ("answer", study, *key), stamp=self.stamp(study), make=lambda: _body(make())
        )
        body, tag = kept.value
        headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Revision": str(kept.stamp)}
        given = request.headers.get("if-none-match", "")
        if tag in (part.strip() for part in given.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    def revision(self, request: Request, study: int | None = None) -> Response:
        """The present revision, which open pages ask for in a loop, and when to ask again."""
        stamp = self.stamp(study)
        response = self.answer(
            request, ("revision",), lambda: models.Revision(revision=stamp), study=study
        )
        response.headers["X-Ask-Again"] = f"{self.pace.again_s():.3f}"
        return response


@dataclass(frozen=True, slots=True)
class Question:
    """A request about a study, and the desk that answers it."""

    desk: Desk
    request: Request
    study: int

    def answer(
        self, key: tuple[Any, ...], make: Callable[[Views, StudyView], BaseModel]
    ) -> Response:
        """What is made from the study as it stands, as ``Desk.answer`` sends it.

        Raises:
            HTTPException: there is no such study.
        """
        view = self.desk.study(self.study)
        return self.desk.answer(
            self.request, key, lambda: make(self.desk.views, view), study=self.study
        )


# not plain functions: those would wait for a thread
async def _at_the_desk(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


async def _about_a_study(request: Request, desk: AtDesk, study: StudyId) -> Question:
    return Question(desk, request, study)


AtDesk = Annotated[Desk, Depends(_at_the_desk)]
AboutStudy = Annotated[Question, Depends(_about_a_study)]


def _body(answer: BaseModel) -> tuple[bytes, str]:
    body = answer.model_dump_json().encode()
    return body, etag(body)
