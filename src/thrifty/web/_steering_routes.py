"""Acts from the dashboard: opt-in, only for readers with the token, each with a code for one use.

A page of another site must not be able to act with a reader's cookie. So a request to act needs,
besides the token, the origin of the dashboard itself and a code that only its own pages can read.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from thrifty.core import (
    ScheduleError,
    SpaceError,
    StoreBusyError,
    StoreWriteError,
    StudyMismatchError,
    StudyNotFoundError,
    ThriftyError,
    UsageError,
    plain_text,
)
from thrifty.space import Config, Timeline, config_from_json, config_to_json
from thrifty.space._conditions import branched
from thrifty.space._coordinates import read_config, whole_config
from thrifty.space._space import space_from_json
from thrifty.store import Store, StudyView, Views
from thrifty.store._acts import Act
from thrifty.store._records import nodes_of_replicas
from thrifty.store._steering_requests import MAX_EPOCHS, ask, ask_longer, enqueue, this_user
from thrifty.store._trash import Deleted

from ._responses import ALWAYS, LARGEST, NONE, AboutStudy, Responding, Responses, TrialNumber
from .views import _models as models
from .views._layouts import texts
from .views._study_views import max_epochs


CODE_S = 3600.0
"""Seconds for which a page may use its code."""
MOST_CODES = 1000
"""Codes that may wait for their use; beyond it, the oldest one goes."""


class Codes:
    """Codes that pages get to act with: each for one study and one use.

    A deleted study has the negative of its number.

    >>> codes = Codes()
    >>> code = codes.issue(1)
    >>> codes.use(code, study=2), codes.use(code, study=1), codes.use(code, study=1)
    (False, True, False)
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waiting: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = Lock()

    def issue(self, study: int) -> str:
        """Return a new code for a study."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._waiting[code] = study, self._now()
            while len(self._waiting) > MOST_CODES:
                self._waiting.popitem(last=False)
        return code

    def use(self, code: str, *, study: int) -> bool:
        """Return whether a code is valid for a study; it is not valid again after that."""
        with self._lock:
            found = self._waiting.get(code)
            if found is None or found[0] != study:
                return False
            del self._waiting[code]
        return self._now() - found[1] <= CODE_S


class Steering:
    """What writes acts; the rest of the dashboard only reads.

    Args:
        url: The database.
    """

    def __init__(self, url: str) -> None:
        self.codes = Codes()
        self._url = url

    def act(self, view: StudyView, wanted: Wanted) -> Act:
        """Write an act down.

        Raises:
            HTTPException: It cannot be asked, or not be written.
        """
        with self._store() as store:
            return ask(store, view.name, wanted.kind, trial=wanted.trial, text=wanted.text)

    def lengthen(self, view: StudyView, wanted: WantedLength) -> Act:
        """Write a request for a longer ``max_epochs`` down.

        Raises:
            HTTPException: It is not more than the study has, or it cannot be written.
        """
        with self._store() as store:
            return ask_longer(store, view.name, max_epochs=wanted.max_epochs)

    def branch(self, view: StudyView, wanted: WantedBranch, config: Mapping[str, Any]) -> Act:
        """Enqueue a branch of a trial.

        Raises:
            HTTPException: It is enqueued already, or cannot be written.
        """
        with self._store() as store:
            how = f"= {wanted.value}" if wanted.factor is None else f"times {wanted.factor:g}"
            text = plain_text(f"after epoch {wanted.epoch}: {wanted.name} {how}")
            return enqueue(store, view.name, config, kind="branch", trial=wanted.trial, text=text)

    def enqueue(self, view: StudyView, config: Config, *, trial: int, text: str) -> Act:
        """Enqueue a configuration that was made from a trial.

        Raises:
            HTTPException: It is enqueued already, or cannot be written.
        """
        with self._store() as store:
            return enqueue(store, view.name, config, kind="enqueue", trial=trial, text=text)

    def delete(self, view: StudyView) -> Deleted:
        """Delete a study, so that it can be restored.

        Raises:
            HTTPException: A process runs it, or it cannot be written.
        """
        with self._store() as store:
            return store.trash.put(store.studies.get(view.name), who=this_user())

    def restore(self, number: int) -> str:
        """Restore a deleted study, and return its name.

        Raises:
            HTTPException: It is gone, its name is in use, or it cannot be written.
        """
        with self._store() as store:
            found = next((each for each in store.trash.list() if each.id == number), None)
            if found is None:
                raise HTTPException(404, f"there is no deleted study number {number}")
            return store.trash.restore(found)

    @contextmanager
    def _store(self) -> Iterator[Store]:
        try:
            with Store.open(self._url, create=False) as store:
                yield store
        except StudyNotFoundError as error:
            raise HTTPException(404, str(error)) from None
        except (UsageError, StoreBusyError, StudyMismatchError) as error:
            raise HTTPException(409, str(error)) from None
        except StoreWriteError as error:
            raise HTTPException(503, str(error)) from None


class Wanted(BaseModel):
    """What a page asks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["stop", "stop trial", "pause", "resume", "note", "tag", "untag"]
    trial: Annotated[int | None, Field(ge=0, le=LARGEST)] = None
    text: Annotated[str, Field(max_length=2000)] = ""
    code: Annotated[str, Field(max_length=100, description="from the last answer of acts")]


class WantedLength(BaseModel):
    """A longer training of all trials that a page asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_epochs: Annotated[
        int, Field(ge=1, le=MAX_EPOCHS, description="how many epochs to train a trial")
    ]
    code: Annotated[str, Field(max_length=100, description="from the study's code")]


REFUSED: Responses = {
    400: {"model": models.ErrorResponse, "description": "This is no JSON"},
    403: {"model": models.ErrorResponse, "description": "Not from a page of this dashboard"},
    409: {"model": models.ErrorResponse, "description": "This cannot be asked now"},
}

Epoch = Annotated[int, Field(ge=1, le=LARGEST, description="epochs that both have in common")]
Factor = Annotated[float | None, Field(allow_inf_nan=False, description="what it is multiplied by")]
Value = Annotated[
    str | None,
    Field(max_length=1000, description="its new value or schedule as JSON, in place of a factor"),
]
Name = Annotated[str, Field(max_length=200, description="a hyper-parameter of the trial")]


class WantedBranch(BaseModel):
    """A branch that a page asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trial: Annotated[int, Field(ge=0, le=LARGEST)]
    epoch: Epoch
    name: Name
    factor: Factor = None
    value: Value = None
    code: Annotated[str, Field(max_length=100)]


class WantedConfig(BaseModel):
    """A configuration that a page asks for, made from that of a trial."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trial: Annotated[int, Field(ge=0, le=LARGEST)]
    config: Annotated[dict[str, Any], Field(description="all hyper-parameters that vary")]
    code: Annotated[str, Field(max_length=100)]


class BranchQuery(BaseModel):
    """A branch whose cost is asked for."""

    epoch: Epoch
    name: Name
    factor: Factor = None
    value: Value = None


router = APIRouter(prefix="/api/studies/{study}", responses={**ALWAYS, **NONE})
"""Routes about acts. They use the application's ``state.steering``."""


@router.get("/acts", response_model=models.Acts)
def acts(asked: AboutStudy) -> Response:
    """Return the requests to the study."""

    def made(views: Views, view: StudyView) -> models.Acts:
        found = [models.Act.of(act) for act in views.studies.acts(view.id)]
        return models.Acts(acts=found, can_act=steering_of(asked.request) is not None)

    return asked.answer(("acts",), made)


@router.get("/code", response_model=models.Code, responses=REFUSED)
def code(asked: AboutStudy, response: Response) -> models.Code:
    """Return a code for one act on the study."""
    steering = allowed(asked.request)
    asked.service.study(asked.study)
    response.headers["Cache-Control"] = "no-store"
    return models.Code(code=steering.codes.issue(asked.study))


@router.post("/acts", status_code=201, response_model=models.Act, responses=REFUSED)
def act(asked: AboutStudy, wanted: Wanted) -> models.Act:
    """Ask something of the study; the process that runs it applies it."""
    steering, view = _allowed_once(asked, wanted.code)
    return models.Act.of(steering.act(view, wanted))


@router.post("/length", status_code=201, response_model=models.Act, responses=REFUSED)
def lengthen(asked: AboutStudy, wanted: WantedLength) -> models.Act:
    """Ask for longer trials; a run of the study applies it before or after it trains."""
    steering, view = _allowed_once(asked, wanted.code)
    return models.Act.of(steering.lengthen(view, wanted))


@router.get("/trials/{number}/branch", response_model=models.Branch, responses=REFUSED)
def branch_cost(
    asked: AboutStudy, number: TrialNumber, query: Annotated[BranchQuery, Query()]
) -> Response:
    """Return what a branch of a trial would cost; nothing is written."""

    def made(views: Views, view: StudyView) -> models.Branch:
        row, config = _branch(views, view, query, trial=number)
        return _branch_cost(views, view, row, config=config, epoch=query.epoch)

    about = ("branch", number, query.epoch, query.name, query.factor, query.value)
    return asked.answer(about, made)


@router.post("/branches", status_code=201, response_model=models.Act, responses=REFUSED)
def branch(asked: AboutStudy, wanted: WantedBranch) -> models.Act:
    """Enqueue a branch of a trial; the process that runs the study, or the next one, trains it."""
    steering = allowed(asked.request)
    view = asked.service.study(asked.study)
    _, config = _branch(asked.service.views, view, wanted, trial=wanted.trial)
    if not steering.codes.use(wanted.code, study=asked.study):
        raise HTTPException(403, OLD)
    return models.Act.of(steering.branch(view, wanted, config))


@router.post("/configurations", status_code=201, response_model=models.Act, responses=REFUSED)
def enqueue_config(asked: AboutStudy, wanted: WantedConfig) -> models.Act:
    """Enqueue a configuration; the process that runs the study, or the next one, trains it."""
    steering = allowed(asked.request)
    view = asked.service.study(asked.study)
    config, text = _changed_config(asked.service.views, view, wanted)
    if not steering.codes.use(wanted.code, study=asked.study):
        raise HTTPException(403, OLD)
    return models.Act.of(steering.enqueue(view, config, trial=wanted.trial, text=text))


OLD = "the page is old; reload it, and try again"


def _allowed_once(asked: AboutStudy, code: str) -> tuple[Steering, StudyView]:
    """Return what writes acts and the study, and use up the code of a request.

    Raises:
        HTTPException: The request may not act, or its code is not valid.
    """
    steering = allowed(asked.request)
    view = asked.service.study(asked.study)
    if not steering.codes.use(code, study=asked.study):
        raise HTTPException(403, OLD)
    return steering, view


def _branch(
    views: Views, view: StudyView, wanted: WantedBranch | BranchQuery, *, trial: int
) -> tuple[Any, dict[str, Any]]:
    """Return a trial's row, and the hyper-parameters of a branch of it.

    Raises:
        HTTPException: There is no such trial, or it cannot branch so.
    """
    row = views.trials.get(view.id, trial)
    if row is None:
        raise HTTPException(404, f"study {view.name!r} has no trial {trial}")
    try:
        return row, _branch_config(view, row, wanted)
    except (UsageError, ScheduleError, SpaceError, RecursionError) as error:
        raise HTTPException(409, plain_text(str(error), lines=True, limit=2000)) from None


def _changed_config(views: Views, view: StudyView, wanted: WantedConfig) -> tuple[Config, str]:
    """Return the configuration, which is one of the study's space, and how it differs.

    Raises:
        HTTPException: There is no such trial, or the configuration is not in the space.
    """
    row = views.trials.get(view.id, wanted.trial)
    if row is None:
        raise HTTPException(404, f"study {view.name!r} has no trial {wanted.trial}")
    try:
        if row.horizon is not None:
            raise UsageError(
                "the trials of a ladder end at horizons of their own; enqueue them in Python"
            )
        space = space_from_json(view.spec.get("space", {}))
        config = whole_config(space, read_config(wanted.config))
        Timeline(config, epochs=_horizon(view))
    except (ThriftyError, RecursionError) as error:
        raise HTTPException(409, plain_text(str(error), lines=True, limit=2000)) from None
    before, after = texts(row.config), texts(config_to_json(config))
    changed = [f"{name}={text}" for name, text in after.items() if before.get(name) != text]
    return config, ", ".join(changed)[:2000]


def steering_of(request: Request) -> Steering | None:
    """Return what writes acts; None if the dashboard only shows."""
    found: Steering | None = request.app.state.steering
    return found


def allowed(request: Request) -> Steering:
    """Return what writes acts, if the request comes from a page of this dashboard or a program.

    Raises:
        HTTPException: It does not, or the dashboard only shows.
    """
    steering = steering_of(request)
    if steering is None:
        raise HTTPException(403, "this dashboard is read-only; start it with --steer")
    headers = request.headers
    is_program = headers.get("authorization", "").lower().startswith("bearer ")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # browsers send the origin with every POST, and where a request comes from with every one
    is_own = origin == f"{request.url.scheme}://{headers.get('host', '')}" if origin else is_program
    if request.method == "GET" and origin is None:
        is_own = True
    if not is_own or site not in (None, "same-origin"):
        raise HTTPException(403, "the request's Origin is not this dashboard")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise HTTPException(403, "send the request as application/json")
    return steering


def _branch_config(view: StudyView, row: Any, wanted: WantedBranch | BranchQuery) -> dict[str, Any]:
    """Return the hyper-parameters of a branch.

    Raises:
        UsageError: The trial cannot branch there, has no such hyper-parameter, or neither a factor
            nor a value is given.
        ScheduleError: A factor or a value does not fit.
        SpaceError: A value is no schedule.
    """
    if row.horizon is not None:
        raise UsageError(
            "the trials of a ladder end at horizons of their own, so they cannot branch"
        )
    if (wanted.factor is None) == (wanted.value is None):
        raise UsageError("give a factor, or a new value")
    scale = {} if wanted.factor is None else {wanted.name: wanted.factor}
    change = {} if wanted.value is None else {wanted.name: _read_value(wanted.value)}
    return branched(
        config_from_json(row.config),
        epoch=wanted.epoch,
        horizon=_horizon(view),
        scale=scale,
        change=read_config(change),
    )


def _read_value(text: str) -> Any:
    """Return a value that a page has sent as JSON; NaN and infinity are none.

    Raises:
        UsageError: It is no JSON.
    """
    try:
        return json.loads(text, parse_constant=_refused)
    except ValueError:
        raise UsageError(
            f'the new value is {text!r}; write it as JSON, such as 0.01 or "adam"'
        ) from None


def _refused(text: str) -> None:
    raise ValueError(text)


def _branch_cost(
    views: Views, view: StudyView, row: Any, *, config: Mapping[str, Any], epoch: int
) -> models.Branch:
    """Return what a branch costs that has the first ``epoch`` epochs of a trial."""
    nodes = (row.node, *nodes_of_replicas(row.replicas))
    paths = views.plans.paths(view.plan, nodes)
    kept = views.plans.kept(view.plan, list(paths.origins))
    known = min(epoch, row.reached)
    owners = [paths.owners(node, known) for node in nodes]
    states = [e for e in range(1, known + 1) if all((owner[e], e) in kept for owner in owners)]
    last = max(states, default=0)
    return models.Branch(
        config=texts(config_to_json(config)),
        known_epochs=known,
        kept_epoch=last,
        epochs_again=known - last,
        epochs_to_train=len(nodes) * (_horizon(view) - last),
    )


def _horizon(view: StudyView) -> int:
    found = max_epochs(view)
    if found is None:
        raise UsageError("the study does not say how long its trials are, so they cannot branch")
    return found


class WantedDelete(BaseModel):
    """A study to delete: its name shows that its reader means this one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=2000, description="the name of the study")]
    code: Annotated[str, Field(max_length=100, description="from the study's code")]


class WantedRestore(BaseModel):
    """A deleted study to restore."""

    model_config = ConfigDict(extra="forbid", strict=True)

    code: Annotated[str, Field(max_length=100, description="from the deleted study's code")]


DeletedId = Annotated[int, Path(ge=1, le=LARGEST, description="number of a deleted study")]

trash_router = APIRouter(prefix="/api", responses={**ALWAYS, **NONE})
"""Routes about deleted studies. They use the application's ``state.steering``."""


@trash_router.post("/studies/{study}/delete", response_model=models.Deleted, responses=REFUSED)
def delete(asked: AboutStudy, wanted: WantedDelete) -> models.Deleted:
    """Delete a study that no process runs; it can be restored."""
    steering = allowed(asked.request)
    view = asked.service.study(asked.study)
    if not steering.codes.use(wanted.code, study=asked.study):
        raise HTTPException(403, OLD)
    if wanted.name != view.name:
        raise HTTPException(409, "this is not the name of the study")
    return models.Deleted.of(steering.delete(view))


@trash_router.get("/deleted", response_model=models.DeletedStudies)
def deleted(request: Request, service: Responding) -> Response:
    """Return the deleted studies that can be restored."""

    def made() -> models.DeletedStudies:
        found = [models.Deleted.of(each) for each in service.views.studies.deleted()]
        return models.DeletedStudies(studies=found, can_act=steering_of(request) is not None)

    return service.answer(request, ("deleted",), made)


@trash_router.get("/deleted/{number}/code", response_model=models.Code, responses=REFUSED)
def restore_code(request: Request, number: DeletedId, response: Response) -> models.Code:
    """Return a code to restore a deleted study, once."""
    steering = allowed(request)
    response.headers["Cache-Control"] = "no-store"
    return models.Code(code=steering.codes.issue(-number))


@trash_router.post("/deleted/{number}/restore", response_model=models.Restored, responses=REFUSED)
def restore(request: Request, number: DeletedId, wanted: WantedRestore) -> models.Restored:
    """Restore a deleted study."""
    steering = allowed(request)
    if not steering.codes.use(wanted.code, study=-number):
        raise HTTPException(403, OLD)
    return models.Restored(name=steering.restore(number))
