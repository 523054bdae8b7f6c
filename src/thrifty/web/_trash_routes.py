"""Deleting and restoring studies from the dashboard, under the same conditions as other acts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ._responses import ALWAYS, LARGEST, NONE, AboutStudy, AtDesk
from ._steering_routes import OLD, REFUSED, allowed, steering_of
from .views import _models as models


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

router = APIRouter(prefix="/api", responses={**ALWAYS, **NONE})
"""Routes about deleted studies. They use the application's ``state.steering``."""


@router.post("/studies/{study}/delete", response_model=models.Deleted, responses=REFUSED)
def delete(asked: AboutStudy, wanted: WantedDelete) -> models.Deleted:
    """Delete a study that no process runs; it can be restored."""
    steering = allowed(asked.request)
    view = asked.desk.study(asked.study)
    if not steering.codes.use(wanted.code, study=asked.study):
        raise HTTPException(403, OLD)
    if wanted.name != view.name:
        raise HTTPException(409, "this is not the name of the study")
    return models.Deleted.of(steering.delete(view))


@router.get("/deleted", response_model=models.DeletedStudies)
def deleted(request: Request, desk: AtDesk) -> Response:
    """Return the deleted studies that can be restored."""

    def made() -> models.DeletedStudies:
        found = [models.Deleted.of(each) for each in desk.views.studies.deleted()]
        return models.DeletedStudies(studies=found, can_act=steering_of(request) is not None)

    return desk.answer(request, ("deleted",), made)


@router.get("/deleted/{number}/code", response_model=models.Code, responses=REFUSED)
def code(request: Request, number: DeletedId, response: Response) -> models.Code:
    """Return a code to restore a deleted study, once."""
    steering = allowed(request)
    response.headers["Cache-Control"] = "no-store"
    return models.Code(code=steering.codes.issue(-number))


@router.post("/deleted/{number}/restore", response_model=models.Restored, responses=REFUSED)
def restore(request: Request, number: DeletedId, wanted: WantedRestore) -> models.Restored:
    """Restore a deleted study."""
    steering = allowed(request)
    if not steering.codes.use(wanted.code, study=-number):
        raise HTTPException(403, OLD)
    return models.Restored(name=steering.restore(number))
