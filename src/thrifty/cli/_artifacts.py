"""The command ``thrifty artifacts``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import click

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents.documents import ArtifactDocument
from thrifty.core import Artifact, ThriftyError, UsageError, plain_text
from thrifty.core._trial_log import check_artifact_name
from thrifty.store import Store
from thrifty.store._plan_files import ArtifactFiles

from ._options import complete_study, json_option, print_document, say, storage_option


_CHUNK = 2**20


@click.command("artifacts")
@click.argument("name", shell_complete=complete_study)
@click.option("--trial", "number", type=int, help="Only the artefacts of this trial.")
@click.option(
    "--save",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Copy the files to DIR/TRIAL/NAME.",
    metavar="DIR",
)
@click.option("--checkpoints", help="Folder of the files (default: beside the database).")
@storage_option
@json_option
def artifacts_command(
    *,
    name: str,
    number: int | None,
    folder: Path | None,
    checkpoints: str | None,
    storage: str,
    as_json: bool,
) -> None:
    """Show the files that trials of study NAME have logged, or save copies of them.

    Trials that share an epoch share what was logged in it. The content of each file is compared
    with its digest before it is saved. Files with other content are not overwritten. If a file
    cannot be saved, such as a damaged one, the others are, and the exit code is 2.
    """
    with Store.open(storage, checkpoints=checkpoints, create=False) as store:
        info = store.studies.get(name)
        found = store.studies.artifacts(info.id)
        if number is not None:
            if number not in {trial.number for trial in store.studies.load(info.id).trials}:
                raise UsageError(f"study {name!r} has no trial {number}")
            found = {number: found.get(number, {})}
        files = ArtifactFiles(store.checkpoints, folder=store.plans.get(info.plan).identity)
        errors: list[ThriftyError] = []
        listed = [
            _listed(files, each, trial=trial, folder=folder, errors=errors)
            for trial, own in found.items()
            for each in own.values()
        ]
    if as_json:
        print_document({"schema_version": SCHEMA_VERSION, "study": info.name, "artifacts": listed})
        if errors:
            raise click.exceptions.Exit(2)  # the document has the errors
        return
    for row in listed:
        say(_line(row))
    if not listed:
        say("no artefacts")
    if errors:
        raise _all_of(errors, [row for row in listed if row["save_error"]])


_NAMED = 5
"""Most files that were not saved and are named in the message; ``--json`` names all."""


def _all_of(errors: Sequence[ThriftyError], rows: Sequence[ArtifactDocument]) -> ThriftyError:
    """Return one error, of the kind of the first, that names what was not saved."""
    lines = [f"trial {row['trial']}: {row['save_error']}" for row in rows[:_NAMED]]
    if len(rows) > _NAMED:
        lines.append(f"and {len(rows) - _NAMED:,} more")
    what = "1 artefact was" if len(rows) == 1 else f"{len(rows):,} artefacts were"
    return type(errors[0])("\n".join([f"{what} not saved:", *lines]))


def _line(row: ArtifactDocument) -> str:
    note = f"  not stored: {plain_text(row['error'])}" if row["error"] else ""
    note += "  not saved" if row["save_error"] else ""
    place = "" if row["saved"] is None else f"  saved to {plain_text(row['saved'])}"
    return f"trial {row['trial']}: {plain_text(row['name'])}  {row['num_bytes']:,} B{note}{place}"


def _listed(
    files: ArtifactFiles,
    artifact: Artifact,
    *,
    trial: int,
    folder: Path | None,
    errors: list[ThriftyError],
) -> ArtifactDocument:
    """Save an artefact if that is asked, and return its row; an error is added to ``errors``."""
    saved, save_error = None, ""
    if folder is not None and artifact.is_stored:
        try:
            saved = str(_save(files, artifact, folder / str(trial)))
        except ThriftyError as error:
            save_error = str(error)
            errors.append(error)
    return _document(artifact, trial=trial, saved=saved, save_error=save_error)


def _document(
    artifact: Artifact, *, trial: int, saved: str | None, save_error: str
) -> ArtifactDocument:
    return {
        "trial": trial,
        "name": artifact.name,
        "digest": artifact.digest,
        "num_bytes": artifact.num_bytes,
        "error": artifact.error,
        "saved": saved,
        "save_error": save_error,
    }


def _save(files: ArtifactFiles, artifact: Artifact, folder: Path) -> Path:
    """Write a copy of an artefact into a folder.

    Raises:
        TaskError: Its name in the database is none that thrifty writes, such as a path.
        CheckpointError: The file is missing or damaged.
        UsageError: There is another file of this name, or it cannot be written.
    """
    check_artifact_name(artifact.name, call="thrifty artifacts --save")
    target = folder / artifact.name
    with files.open(artifact) as content:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if target.exists():
                if _has_content(target, content):
                    return target
                raise UsageError(
                    f"{target} exists already, with other content; name another folder with --save"
                )
            # under another name first, so that a full disk leaves no half of a file
            part = target.with_name(f".{artifact.digest}.part")
            try:
                with part.open("wb") as out:
                    shutil.copyfileobj(content, out)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write {target}: {error.strerror}; name another folder with --save"
            ) from error
    return target


def _has_content(file: Path, content: IO[bytes]) -> bool:
    """Return whether a file has the bytes of an open one."""
    with file.open("rb") as own:
        while True:
            one, other = own.read(_CHUNK), content.read(_CHUNK)
            if one != other:
                return False
            if not one:
                return True
