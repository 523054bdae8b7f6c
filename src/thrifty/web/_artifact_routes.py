"""The route that sends an artefact of a trial, as a download and never as a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Annotated
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Path, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from thrifty.core import CheckpointError
from thrifty.store._plan_files import ArtifactFiles

from ._responses import ALWAYS, NONE, AboutStudy, TrialNumber


router = APIRouter(prefix="/api/studies/{study}", responses={**ALWAYS, **NONE})

_CHUNK = 64 * 1024
_FILE = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "description": "The file, as it was logged",
}

Digest = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="digest of an artefact of the trial")
]


@router.get("/trials/{number}/artifacts/{digest}", response_class=Response, responses={200: _FILE})
def download(asked: AboutStudy, number: TrialNumber, digest: Digest) -> Response:
    """Return a file that the trial has logged; its content was compared with its digest."""
    views, view = asked.desk.views, asked.desk.study(asked.study)
    row = views.trials.get(view.id, number)
    if row is None:
        raise HTTPException(404, f"study {view.name!r} has no trial {number}")
    # Only what the database records for this trial is looked for: the path has no other part.
    own = views.plans.paths(view.plan, [row.node]).artifacts_of(row.node, row.reached)
    found = next((each for each in own.values() if each.digest == digest), None)
    if found is None:
        raise HTTPException(404, f"trial {number} has no artefact of this digest")
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
