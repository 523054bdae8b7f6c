"""The routes: parameters within limits, answers from the cache, nothing that writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from thrifty.store import COLUMNS, Order, StudyView, TrialFilter, Views, sortable

from . import (
    _charts as charts,
    _forest as forests,
    _models as models,
    _studies as studies,
    _trials as trials,
)
from ._cache import Cache, etag
from ._pace import Pace


LARGEST = 2**31 - 1
StudyId = Annotated[int, Path(ge=1, le=LARGEST, description="number of a study")]
TrialNumber = Annotated[int, Path(ge=0, le=LARGEST, description="number of a trial")]
State = Literal["running", "done", "paused", "stopped", "failed"]
Moment = Annotated[
    float | None, Query(ge=0, le=1e12, allow_inf_nan=False, description="seconds since 1970")
]
Bound = Annotated[float | None, Query(allow_inf_nan=False)]


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


def routes(views: Views, cache: Cache) -> APIRouter:
    """All of the API."""
    router = APIRouter(prefix="/api", responses=_RESPONSES)
    desk = Desk(views, cache, Pace())
    _about_studies(router, desk)
    _about_charts(router, desk)
    _about_trials(router, desk)
    return router


def _about_studies(router: APIRouter, desk: Desk) -> None:
    @router.get("/revision", response_model=models.Revision)
    def revision(request: Request) -> Response:
        """Changes whenever something is written."""
        return desk.revision(request)

    @router.get("/studies", response_model=models.StudyList)
    def study_list(request: Request) -> Response:
        """All studies."""
        return desk.answer(request, ("studies",), lambda: studies.study_list(desk.views))

    @router.get("/studies/{study}/revision", response_model=models.Revision, responses=_NONE)
    def study_revision(request: Request, study: StudyId) -> Response:
        """Changes whenever something is written about a study."""
        return desk.revision(request, study)

    @router.get("/studies/{study}", response_model=models.StudyDetail, responses=_NONE)
    def study_detail(request: Request, study: StudyId) -> Response:
        """One study: what it is, and how it stands."""
        view = desk.study(study)
        return desk.answer(
            request, ("detail",), lambda: studies.detail(desk.views, view), study=study
        )

    @router.get("/studies/{study}/history", response_model=models.History, responses=_NONE)
    def history(
        request: Request, study: StudyId, limit: Annotated[int, Query(ge=1, le=10_000)] = 2000
    ) -> Response:
        """Values of trials, and the best so far."""
        view = desk.study(study)
        return desk.answer(
            request,
            ("history", limit),
            lambda: studies.history(desk.views, view, limit=limit),
            study=study,
        )


def _about_charts(router: APIRouter, desk: Desk) -> None:
    @router.get("/studies/{study}/curves", response_model=models.Curves, responses=_NONE)
    def curves(  # noqa: PLR0917 (the query's parameters)
        request: Request,
        study: StudyId,
        metric: Annotated[str | None, Query(max_length=200)] = None,
        best: Annotated[int, Query(ge=0, le=200)] = 50,
        others: Annotated[int, Query(ge=0, le=1000)] = 200,
    ) -> Response:
        """Learning curves of the best trials and some others."""
        view = desk.study(study)
        return desk.answer(
            request,
            ("curves", metric, best, others),
            lambda: charts.curves(desk.views, view, metric=metric, best=best, others=others),
            study=study,
        )

    @router.get("/studies/{study}/parallel", response_model=models.Parallel, responses=_NONE)
    def parallel(
        request: Request, study: StudyId, limit: Annotated[int, Query(ge=1, le=5000)] = 2000
    ) -> Response:
        """Trials through their coordinates to the metric."""
        view = desk.study(study)
        return desk.answer(
            request,
            ("parallel", limit),
            lambda: charts.parallel(desk.views, view, limit=limit),
            study=study,
        )

    @router.get(
        "/studies/{study}/importance", response_model=models.Importance, responses=_NONE
    )
    def importance(request: Request, study: StudyId) -> Response:
        """Which hyper-parameters matter."""
        view = desk.study(study)
        return desk.answer(
            request, ("importance",), lambda: charts.importance(desk.views, view), study=study
        )

    @router.get("/studies/{study}/forest", response_model=models.Forest, responses=_NONE)
    def forest(
        request: Request, study: StudyId, limit: Annotated[int, Query(ge=1, le=10_000)] = 1500
    ) -> Response:
        """The stage forest."""
        view = desk.study(study)
        return desk.answer(
            request,
            ("forest", limit),
            lambda: forests.draw(_forest(desk, view), metric=view.metrics[0], limit=limit),
            study=study,
        )

    @router.get("/studies/{study}/workers", response_model=models.Workers, responses=_NONE)
    def workers(  # noqa: PLR0917
        request: Request,
        study: StudyId,
        since: Moment = None,
        until: Moment = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 2000,
    ) -> Response:
        """Stages on workers over time."""
        view = desk.study(study)
        return desk.answer(
            request,
            ("workers", since, until, limit),
            lambda: charts.workers(desk.views, view, since=since, until=until, limit=limit),
            study=study,
        )


def _about_trials(router: APIRouter, desk: Desk) -> None:
    @router.get("/studies/{study}/trials", response_model=models.Trials, responses=_NONE)
    def table(  # noqa: PLR0913, PLR0917 (the query's parameters)
        request: Request,
        study: StudyId,
        state: Annotated[list[State] | None, Query(max_length=5)] = None,
        text: Annotated[str, Query(max_length=200)] = "",
        low: Bound = None,
        high: Bound = None,
        sort: Annotated[
            str, Query(max_length=200, description="a column or param:NAME")
        ] = "number",
        order: Order = "asc",
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> Response:
        """A page of the table of trials."""
        view = desk.study(study)
        known = {*COLUMNS, *(f"param:{name}" for name in view.spec.get("space", {}))}
        if sort not in known or not sortable(sort):
            raise _unsortable(sort)
        which = TrialFilter(
            states=tuple(sorted(state or ())),
            max_epochs=studies.max_epochs(view),
            text=text,
            low=low,
            high=high,
        )
        return desk.answer(
            request,
            ("trials", which, sort, order, offset, limit),
            lambda: trials.table(
                desk.views, view, which, sort=sort, order=order, offset=offset, limit=limit
            ),
            study=study,
        )

    @router.get(
        "/studies/{study}/trials/{number}", response_model=models.Trial, responses=_NONE
    )
    def trial(request: Request, study: StudyId, number: TrialNumber) -> Response:
        """One trial."""
        view = desk.study(study)

        def make() -> models.Trial:
            row = desk.views.trials.get(study, number)
            if row is None:
                raise HTTPException(404, f"study {view.name!r} has no trial {number}")
            return trials.trial(desk.views, view, row, forest=_forest(desk, view))

        return desk.answer(request, ("trial", number), make, study=study)


def _forest(desk: Desk, view: StudyView) -> forests.StageForest:
    """Drawn, and asked by the pages of trials: made once for both."""
    kept = desk.cache.get(
        ("forest", view.id),
        stamp=desk.stamp(view.id),
        make=lambda: charts.forest(desk.views, view),
    )
    found: forests.StageForest = kept.value
    return found


def _unsortable(sort: str) -> RequestValidationError:
    message = "not a column, and not param: with a hyper-parameter of the study"
    found = {"type": "value_error", "loc": ("query", "sort"), "msg": message, "input": sort}
    return RequestValidationError([found])


def _body(answer: BaseModel) -> tuple[bytes, str]:
    body = answer.model_dump_json().encode()
    return body, etag(body)


_RESPONSES: dict[int | str, dict[str, Any]] = {
    304: {"description": "Not modified since the ETag given in If-None-Match"},
    401: {"model": models.Problem, "description": "The token is missing or wrong"},
    503: {"model": models.Problem, "description": "The database cannot be read now"},
}
_NONE: dict[int | str, dict[str, Any]] = {
    404: {"model": models.Problem, "description": "There is no such study or trial"}
}
