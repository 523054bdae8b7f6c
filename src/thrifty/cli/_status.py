"""The commands ``status``, ``best``, ``logs``, ``explain`` and ``artifacts``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

import click

from thrifty.agents import (
    SCHEMA_VERSION,
    best_document,
    explain_document,
    logs_document,
    status_document,
)
from thrifty.agents._store_documents import (
    best_certainty,
    best_of,
    comparison,
    failures_of,
    last_values,
    stopped_in_training,
    worker_documents,
)
from thrifty.agents.documents import ArtifactDocument, WorkerDocument
from thrifty.core import Artifact, ThriftyError, UsageError, plain_text, size_text
from thrifty.core._files import replacing
from thrifty.core._trial_log import check_artifact_name
from thrifty.store import FailureGroup, Store, StudySummary, redact_url
from thrifty.store._address import shell_command
from thrifty.store._epoch_times import attribute_text, interval, standard_deviation, stored_unit
from thrifty.store._plan_files import ArtifactFiles
from thrifty.store._reports import failure_lines, no_such_trial, trials_by_state, trials_text

from ._options import complete_study, json_option, print_document, say, storage_option


_ATTRIBUTE_CHARS = 400
"""Most characters of an attribute that are shown; the middle of a longer one is cut."""
_ADVICE = {
    "interrupted": " (its process is gone; run it again to go on)",
    "stopped": " (run it again to go on)",
}
"""What to do with a study in a state, as text after the state."""


@click.command("status")
@storage_option
@click.argument("study", required=False, shell_complete=complete_study)
@click.option("--name", help="The same as STUDY.")
@click.option("--traceback", is_flag=True, help="Show the traceback of each error.")
@json_option
def status_command(
    *, storage: str, study: str | None, name: str | None, traceback: bool, as_json: bool
) -> None:
    """Show the studies in a database, or one STUDY, also while they run.

    The best trial is the one whose metric is best at the epoch that it has reached. Trials that are
    not finished count. Failed trials and those that break a constraint do not.

    Of one STUDY, it also shows the workers that trained for its task, and what was measured of
    their devices.
    """
    if study is not None and name is not None and study != name:
        raise UsageError(f"status got the studies {study!r} and {name!r}; name one")
    name = study if name is None else name
    with Store.open(storage, create=False) as store:
        if as_json:
            print_document(status_document(store, url=storage, name=name, traceback=traceback))
            return
        summaries = store.studies.list() if name is None else [store.studies.summary(name)]
        failures = {s.name: failures_of(store, s) for s in summaries}
        cut_short = {s.name: stopped_in_training(store, s) for s in summaries}
        workers = [] if name is None else worker_documents(store, name)
    if not summaries:
        say(f"{redact_url(storage)} has no studies yet")
    for s in summaries:
        _say_study(s, failures[s.name], cut_short[s.name], url=storage, traceback=traceback)
    for line in _worker_lines(workers):
        say(f"  worker      {plain_text(line)}")


def _say_study(
    s: StudySummary,
    failures: Sequence[FailureGroup],
    cut_short: Sequence[int],
    *,
    url: str,
    traceback: bool,
) -> None:
    """Print what is known of a study.

    Args:
        s: The study.
        failures: Its errors.
        cut_short: The last epoch of each trial whose training was stopped, in ascending order.
        url: The database.
        traceback: Whether to show tracebacks.
    """
    num_trials = sum(s.num_trials.values())
    states = trials_by_state(s.num_trials, num_done=s.num_done, study_state=s.state)
    parts = [f"{count:,} {plain_text(state)}" for state, count in states.items()]
    if cut_short:
        low, high = cut_short[0], cut_short[-1]
        where = s.unit.place(low) if low == high else s.unit.places(low, high)
        parts.append(f"{len(cut_short):,} stopped in training, at {where}")
    counts = ", ".join(parts)
    say(plain_text(s.name), bold=True, nl=False)
    say(f"  {plain_text(s.state)}{_ADVICE.get(s.state, '')}")
    say(f"  trials      {num_trials:,} ({counts or 'none'})")
    if s.best_value is not None:
        where = f"trial {s.best_trial} after {s.unit.text(s.best_epochs or 0)}"
        where += f", mean of {s.num_seeds} seeds" * (s.num_seeds > 1)
        say(f"  best        {s.best_value:.6g} ({where})")
    elif s.num_infeasible:
        say("  best        none, because no trial keeps the constraints")
    elif s.num_trials.get("failed"):
        say("  best        none, because all trials that ended have failed")
    for line in failure_lines(failures):
        say(f"  errors      {plain_text(line)}")
    for title, line in (*_what_was_trained(s), *_what_remains(s, url=url)):
        say(f"  {title:10}  {plain_text(line)}")
    if traceback:
        for group in failures:
            say(f"trial {group.trials[0]}: {group.traceback or group.message}".rstrip())
    elif any(group.traceback for group in failures):
        say("  --traceback shows where these errors come from")


def _what_was_trained(s: StudySummary) -> Iterator[tuple[str, str]]:
    """Yield what the study's own runs have trained, and all studies of its task if that is more."""
    count = s.unit.count
    trained, seconds = f"{count(s.trained_epochs):,} trained", f"{s.seconds:,.1f} s"
    if s.plan_epochs > s.trained_epochs:
        trained += f", {count(s.plan_epochs):,} by all studies of its task"
        seconds += f", {s.plan_seconds:,.1f} s by all studies of its task"
    note = "" if s.unit.is_epochs else f" ({s.unit.definition})"
    yield s.unit.name, f"{count(s.trial_epochs):,} requested, {trained}{note}"
    yield "training", seconds


def _what_remains(s: StudySummary, *, url: str) -> Iterator[tuple[str, str]]:
    """Yield what a study was asked for and has not trained, and the command that goes on."""
    left, unit = s.remaining, s.unit
    is_waiting = bool(left.num_enqueued or left.requested_max_epochs)
    if s.state != "done" and left.num_trials and left.max_epochs is not None:
        have = "has" if left.num_trials == 1 else "have"
        raised = "" if left.raised_from is None else f", raised from {unit.count(left.raised_from)}"
        most = f"at most {unit.text(left.most_epochs)}"
        goal = f"{have} not reached {unit.text(left.max_epochs)}{raised}"
        yield "remaining", f"{most}: {trials_text(left.num_trials)} {goal}"
    if left.num_enqueued:
        what = "configuration" if left.num_enqueued == 1 else "configurations"
        yield "queued", f"{left.num_enqueued:,} {what} to try"
    if left.requested_max_epochs is not None:
        yield "queued", f"train each trial for {unit.text(left.requested_max_epochs)}"
    goes_on = s.state in _ADVICE or (s.state == "done" and is_waiting)
    if s.state == "paused" or (goes_on and left.file):
        yield "to go on", shell_command("resume", name=s.name, url=url)
    elif goes_on:
        yield "to go on", "run the study again"


_SHOWN_WORKERS = 16
"""Most workers that ``thrifty status`` lists; ``--json`` has all."""


def _worker_lines(workers: Sequence[WorkerDocument]) -> Iterator[str]:
    """Yield what is known of each worker."""
    for each in workers[:_SHOWN_WORKERS]:
        peak, seconds = each["peak_bytes"], each["seconds"]
        memory = "not measured" if peak is None else size_text(peak)
        share = f" ({each['busy_s'] / seconds:.0%})" if seconds else ""
        yield (
            f"{each['worker']}, device {each['device'] or 'not recorded'}: "
            f"busy {each['busy_s']:,.1f} s of {seconds:,.1f} s{share}, peak memory {memory}"
        )
    if len(workers) > _SHOWN_WORKERS:
        yield f"and {len(workers) - _SHOWN_WORKERS:,} more; --json lists them"


@click.command("best")
@click.argument("name", shell_complete=complete_study)
@storage_option
@json_option
def best_command(*, name: str, storage: str, as_json: bool) -> None:
    """Show the best trial of study NAME, or its Pareto front if it has several objectives.

    Trials are compared by their metric at the epoch that each has reached. Trials that are not
    finished count. Failed trials and those that break a constraint do not.

    With several seeds, values are means, and the certainty is the probability that the trial has
    the best true mean of these trials.
    """
    with Store.open(storage, create=False) as store:
        if as_json:
            print_document(best_document(store, name))
            return
        info = store.studies.get(name)
        trials = store.studies.load(info.id).trials
        seeds = last_values(store, info)
        attributes = store.studies.user_attrs(info.id)
        artifacts = store.studies.artifacts(info.id)
    best = best_of(info, trials)
    sure = best_certainty(info, trials, best=best, seeds=seeds)
    unit = stored_unit(info.spec)
    for trial in best:
        values: Mapping[str, float | None] = trial.objectives or {"": trial.value}
        said = ", ".join(
            f"{plain_text(metric)} {value:.6g}".strip() for metric, value in values.items()
        )
        say(f"trial {trial.number}: {said} after {unit.text(trial.reached)}")
        for line in _of_seeds(seeds.get(trial.number), certainty=sure):
            say(f"  {line}")
        for key, value in trial.config.items():
            say(f"  {plain_text(key)} = {plain_text(value)}")
        for key, value in attributes.get(trial.number, {}).items():
            text = plain_text(attribute_text(value), limit=_ATTRIBUTE_CHARS)
            say(f"  attribute {plain_text(key)} = {text}")
        for each in artifacts.get(trial.number, {}).values():
            note = f", not stored: {plain_text(each.error)}" if each.error else ""
            say(f"  artifact {plain_text(each.name)} ({each.num_bytes:,} B{note})")


def _of_seeds(values: Sequence[float] | None, *, certainty: float | None = None) -> Iterator[str]:
    """Yield what is known of the mean over several seeds; nothing for one seed."""
    if not values:
        return
    low, high = interval(values)
    yield (
        f"mean of {len(values)} seeds, sd {standard_deviation(values):.3g}, "
        f"95 % interval {low:.6g} to {high:.6g}"
    )
    if certainty is not None:
        yield f"the best trial with a probability of {certainty:.0%}"


@click.command("logs")
@click.argument("name", shell_complete=complete_study)
@click.option("--trial", type=int, required=True, help="Number of the trial.")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    help="How many of the last lines to print (default: all kept lines).",
)
@storage_option
@json_option
def logs_command(*, name: str, trial: int, last: int | None, storage: str, as_json: bool) -> None:
    """Show the lines that the code of a trial of study NAME has logged with ``logging``.

    A line that was logged in a shared epoch is a line of all trials that share it, and one of a
    fused pack is a line of all trials in the pack. Only the last lines are kept.
    """
    with Store.open(storage, create=False) as store:
        found = logs_document(store, name, trial, last=last)
    if as_json:
        print_document(found)
        return
    for each in found["lines"]:
        when = datetime.fromtimestamp(each["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        said = plain_text(each["text"], lines=True)
        where = f"{plain_text(each['level'])} {plain_text(each['logger'])}"
        say(f"epoch {each['epoch']}  {when}  {where}: {said}")
    if not found["lines"]:
        say("no log lines")


@click.command("explain")
@click.argument("name", shell_complete=complete_study)
@click.argument("other", required=False, shell_complete=complete_study)
@storage_option
@json_option
def explain_command(*, name: str, other: str | None, storage: str, as_json: bool) -> None:
    """Explain why studies NAME and OTHER do or do not share training.

    Without OTHER, NAME is compared with the study of the database whose task is most similar.
    """
    with Store.open(storage, create=False) as store:
        if as_json:
            print_document(explain_document(store, name, other))
            return
        found = comparison(store, name, other)
    for line in found.lines():
        say(line)


_CHUNK = 2**20


@click.command("artifacts")
@click.argument("name", shell_complete=complete_study)
@click.option("--trial", "number", type=int, help="Only the artifacts of this trial.")
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
            known = {trial.number for trial in store.studies.load(info.id).trials}
            if number not in known:
                raise UsageError(no_such_trial(name, number, num_trials=len(known)))
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
        say("no artifacts")
    if errors:
        raise _all_of(errors, [row for row in listed if row["save_error"]])


_NAMED = 5
"""Most files that were not saved and are named in the message; ``--json`` names all."""


def _all_of(errors: Sequence[ThriftyError], rows: Sequence[ArtifactDocument]) -> ThriftyError:
    """Return one error, of the kind of the first, that names what was not saved."""
    lines = [f"trial {row['trial']}: {row['save_error']}" for row in rows[:_NAMED]]
    if len(rows) > _NAMED:
        lines.append(f"and {len(rows) - _NAMED:,} more")
    what = "1 artifact was" if len(rows) == 1 else f"{len(rows):,} artifacts were"
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
    """Save an artifact if that is asked, and return its row; an error is added to ``errors``."""
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
    """Write a copy of an artifact into a folder.

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
            with replacing(target) as new, new.open("wb") as out:
                shutil.copyfileobj(content, out)
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
