"""The command ``thrifty artifacts``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import IO

import click

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents._documents import ArtifactDocument
from thrifty.core import Artifact, UsageError, plain_text
from thrifty.core._trial_log import check_artifact_name
from thrifty.store import Store
from thrifty.store._artifact_files import ArtifactFiles

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
    with its digest before it is saved. Files with other content are not overwritten.
    """
    with Store.open(storage, checkpoints=checkpoints, create=False) as store:
        info = store.studies.get(name)
        found = store.studies.artifacts(info.id)
        if number is not None:
            if number not in {trial.number for trial in store.studies.load(info.id).trials}:
                raise UsageError(f"study {name!r} has no trial {number}")
            found = {number: found.get(number, {})}
        files = ArtifactFiles(store.checkpoints, folder=store.plans.get(info.plan).identity)
        listed: list[ArtifactDocument] = []
        for trial, own in found.items():
            for each in own.values():
                saved = None
                if folder is not None and each.is_stored:
                    saved = str(_save(files, each, folder / str(trial)))
                listed.append(_document(each, trial=trial, saved=saved))
    if as_json:
        print_document({"schema_version": SCHEMA_VERSION, "study": info.name, "artifacts": listed})
        return
    for row in listed:
        note = f"  not stored: {plain_text(row['error'])}" if row["error"] else ""
        place = "" if row["saved"] is None else f"  saved to {plain_text(row['saved'])}"
        say(f"trial {row['trial']}: {plain_text(row['name'])}  {row['num_bytes']:,} B{note}{place}")
    if not listed:
        say("no artefacts")


def _document(artifact: Artifact, *, trial: int, saved: str | None) -> ArtifactDocument:
    return {
        "trial": trial,
        "name": artifact.name,
        "digest": artifact.digest,
        "num_bytes": artifact.num_bytes,
        "error": artifact.error,
        "saved": saved,
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
