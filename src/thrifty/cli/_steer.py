"""Commands that change stored studies, such as stop, branch, extend, delete and gc."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from thrifty.agents import (
    act_document,
    acts_document,
    branch_document,
    deleted_document,
    enqueued_document,
    extension_document,
    gc_document,
    restore_document,
)
from thrifty.core import UsageError, plain_text, size_text
from thrifty.space._coordinates import read_config
from thrifty.store import Store
from thrifty.store._acts import Act, ActKind
from thrifty.store._address import shell_command
from thrifty.store._reports import trials_text
from thrifty.store._steering_requests import ask, is_run, this_user
from thrifty.store._trash import KEPT_S, Deleted
from thrifty.study import Study

from ._options import (
    Pair,
    complete_study,
    json_option,
    parsed_json,
    print_document,
    say,
    storage_option,
    trust_option,
)
from ._train import format_value, load_stored_study


trial_option = click.option(
    "--trial", type=int, help="Number of the trial that it is about (default: the whole study)."
)


# -- acts that the driver applies --------------------------------------------------------


@click.command("stop")
@click.argument("name", shell_complete=complete_study)
@trial_option
@storage_option
@json_option
def stop_command(*, name: str, trial: int | None, storage: str, as_json: bool) -> None:
    """Stop study NAME, or one of its trials, in the process that runs it.

    The study stops as by Ctrl-C: running epochs are finished and kept, and ``thrifty resume`` goes
    on. If no process runs it, the next run stops before it trains; ``thrifty resume NAME`` takes
    that back. With --trial, that trial stops for good at the end of its epoch, and the others go
    on.
    """
    kind: ActKind = "stop" if trial is None else "stop trial"
    _asked(name, kind, trial=trial, text="", storage=storage, as_json=as_json)
    if not as_json:
        what = "the study" if trial is None else f"trial {trial}"
        then = "stops before it trains" if trial is None else "does so before it trains"
        say(f"asked to stop {what}; {_when(name, storage, then, is_undone=trial is None)}")


@click.command("pause")
@click.argument("name", shell_complete=complete_study)
@storage_option
@json_option
def pause_command(*, name: str, storage: str, as_json: bool) -> None:
    """Let the process that runs study NAME wait, until ``thrifty resume NAME``.

    It finishes its running epochs, keeps their states, and begins no others. Its workers stay, with
    their memory; ``thrifty stop`` frees that. If no process runs the study, the next one waits
    before it trains.
    """
    _asked(name, "pause", trial=None, text="", storage=storage, as_json=as_json)
    if not as_json:
        say(f"asked to pause the study; {_when(name, storage, 'waits before it trains')}")


@click.command("note")
@click.argument("name", shell_complete=complete_study)
@click.argument("text")
@trial_option
@storage_option
@json_option
def note_command(*, name: str, text: str, trial: int | None, storage: str, as_json: bool) -> None:
    """Keep the note TEXT about study NAME, or about one of its trials."""
    _asked(name, "note", trial=trial, text=text, storage=storage, as_json=as_json)
    if not as_json:
        say("noted")


@click.command("tag")
@click.argument("name", shell_complete=complete_study)
@click.argument("tag")
@trial_option
@click.option("--remove", is_flag=True, help="Remove the tag.")
@storage_option
@json_option
def tag_command(
    *, name: str, tag: str, trial: int | None, remove: bool, storage: str, as_json: bool
) -> None:
    """Give study NAME, or one of its trials, the tag TAG."""
    kind: ActKind = "untag" if remove else "tag"
    _asked(name, kind, trial=trial, text=tag, storage=storage, as_json=as_json)
    if not as_json:
        say("removed" if remove else "tagged")


@click.command("acts")
@click.argument("name", shell_complete=complete_study)
@storage_option
@json_option
def acts_command(*, name: str, storage: str, as_json: bool) -> None:
    """Show the requests to study NAME: who made them, when, and their results."""
    with Store.open(storage, create=False) as store:
        if as_json:
            print_document(acts_document(store, name))
            return
        acts = store.acts.of(store.studies.get(name).id)
    if not acts:
        say(f"nothing was asked of {plain_text(name)}")
    for act in acts:
        say(_line(act))


def _when(name: str, storage: str, then: str, *, is_undone: bool = True) -> str:
    """Return in words when a request will be applied.

    Args:
        name: The study.
        storage: The database.
        then: What the next run does if no process runs the study now.
        is_undone: Whether ``thrifty resume`` takes the request back.
    """
    with Store.open(storage, create=False) as store:
        if is_run(store.studies.summary(name).state):
            return "the process that runs it does so at the end of an epoch"
    text = f"no process runs it, so the next run {then}"
    if not is_undone:
        return text
    command = shell_command("resume", name=name, url=storage)
    return f"{text}; take this back, and train, with: {plain_text(command)}"


def _asked(
    name: str, kind: ActKind, *, trial: int | None, text: str, storage: str, as_json: bool
) -> None:
    """Record a request, and print it as a document with ``--json``."""
    with Store.open(storage, create=False) as store:
        act = ask(store, name, kind, trial=trial, text=text)
    if as_json:
        print_document(act_document(name, act))


def _line(act: Act) -> str:
    """Return an act in one line: time, user, request and result."""
    when = datetime.fromtimestamp(act.at).astimezone().strftime("%Y-%m-%d %H:%M")
    where = "" if act.trial is None or act.kind == "stop trial" else f" trial {act.trial}"
    what = f"stop trial {act.trial}" if act.kind == "stop trial" else act.kind + where
    text = f"max_epochs={act.text}" if act.kind == "lengthen" else act.text
    said = f": {plain_text(text)}" if text else ""
    came = "queued" if act.is_queued else act.answer
    return f"{when}  {plain_text(act.who)}  {what}{said}" + (
        f"  ({plain_text(came)})" if came else ""
    )


# -- branches ----------------------------------------------------------------------------


@click.command("branch")
@click.argument("name", shell_complete=complete_study)
@click.option("--trial", type=int, required=True, help="Number of the trial to branch off.")
@click.option("--after", type=int, required=True, help="Epochs that both have in common.")
@click.option(
    "--scale",
    type=Pair(whole=False),
    multiple=True,
    help="Multiply a hyper-parameter from there on, such as lr=0.3; repeat for more.",
)
@click.option(
    "--change",
    type=Pair(whole=False),
    multiple=True,
    help="Give a hyper-parameter another value, or a schedule as JSON, from there on.",
)
@storage_option
@trust_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def branch_command(  # noqa: PLR0913 (one argument for each option)
    *,
    name: str,
    trial: int,
    after: int,
    scale: tuple[tuple[str, Any], ...],
    change: tuple[tuple[str, Any], ...],
    storage: str,
    trust_file: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Enqueue a branch of a trial of study NAME, after showing what it costs.

    The branch is the trial up to an epoch, which is not trained again, and goes on differently from
    there. The next run of the study trains it. With --json and without --yes, nothing is enqueued.
    """
    study = load_stored_study(name, storage=storage, trust_file=trust_file)
    with _as_typed({
        "after=": "--after ",
        "scale of ": "--scale of ",
        "scale={...}": "--scale NAME=NUMBER",
        "change={...}": "--change NAME=VALUE",
    }):
        branch = study.branch(
            trial,
            after=after,
            scale=_once(scale, "--scale"),
            change=read_config(_once(change, "--change")),
        )
    if not as_json:
        say(branch)
        if not yes:
            click.confirm("enqueue it?", abort=True)
    num_acts = len(study.acts)
    if yes or not as_json:
        study.enqueue_trial(branch)
    if as_json:
        print_document(branch_document(study, branch, enqueued=yes))
        return
    command = shlex.join(["thrifty", "resume", name, "--storage", storage])
    say(f"{_enqueued(study, num_acts)}; train it with: {plain_text(command)}")


@click.command("enqueue")
@click.argument("name", shell_complete=complete_study)
@click.option(
    "--config",
    "given",
    required=True,
    help='The configuration as JSON, such as {"lr": 0.1}; what it leaves out is drawn.',
)
@storage_option
@trust_option
@json_option
def enqueue_command(
    *, name: str, given: str, storage: str, trust_file: bool, as_json: bool
) -> None:
    """Enqueue a configuration that study NAME tries next.

    The process that runs the study trains it to the end, or the next run does. Give the values as
    ``thrifty best --json`` prints them.
    """
    config = read_config(parsed_json(given, "--config"))
    study = load_stored_study(name, storage=storage, trust_file=trust_file)
    num_acts = len(study.acts)
    study.enqueue_trial(config)
    (whole,) = study.enqueued
    found = enqueued_document(study, whole)
    if as_json:
        print_document(found)
        return
    text = ", ".join(f"{key}={format_value(value)}" for key, value in whole.items())
    command = shlex.join(["thrifty", "resume", name, "--storage", storage])
    known = study.unit.text(found["known_epochs"])
    say(
        f"{_enqueued(study, num_acts)}: {plain_text(text)}; {known} known; "
        f"train it with: {plain_text(command)}"
    )


def _enqueued(study: Study, num_acts: int) -> str:
    """Return whether something was enqueued now, when the study has more acts than before."""
    return "enqueued" if len(study.acts) > num_acts else "enqueued before, and not again"


@click.command("extend")
@click.argument("name", shell_complete=complete_study)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    required=True,
    help="How many epochs the study is to train a trial (its new max_epochs).",
)
@storage_option
@trust_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def extend_command(
    *, name: str, epochs: int, storage: str, trust_file: bool, yes: bool, as_json: bool
) -> None:
    """Let study NAME train its trials for longer, after showing what that costs.

    Trials that have ended go on from their kept states with the next ``thrifty resume NAME``. A
    study whose schedules depend on max_epochs, or whose rungs would be others, is refused. While a
    process runs the study, this is queued, and that process goes on with it once it has trained.
    With --json and without --yes, nothing is written.
    """
    study = load_stored_study(name, storage=storage, trust_file=trust_file)
    with _as_typed({"max_epochs=": "--epochs "}):
        found = study.extension(max_epochs=epochs)
    if not as_json:
        say(found)
        if not yes:
            click.confirm("extend it?", abort=True)
    if yes or not as_json:
        found = study.extend(max_epochs=epochs)
    if as_json:
        print_document(extension_document(study, found, extended=yes and not found.is_queued))
        return
    mend = f"(in the file that defines it, write max_epochs={epochs}, too)"
    if found.is_queued:
        say(
            "queued: the process that runs the study goes on with it once it has trained, or the "
            f"next run does; see: thrifty acts\n{mend}"
        )
        return
    command = shlex.join(["thrifty", "resume", name, "--storage", storage])
    say(f"extended; train it with: {plain_text(command)}\n{mend}")


@contextmanager
def _as_typed(words: Mapping[str, str]) -> Iterator[None]:
    """Let an error name the options that the user has typed, not the arguments of a method."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        for argument, option in words.items():
            text = text.replace(argument, option)
        raise type(error)(text) from None


def _once(pairs: tuple[tuple[str, Any], ...], option: str) -> dict[str, Any]:
    """Return pairs as a dict.

    Raises:
        UsageError: A name is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"{option} has {plain_text(name)} twice; give it once")
        found[name] = value
    return found


_DAY_S = 86_400.0


# -- deleting ----------------------------------------------------------------------------


@click.command("delete")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def delete_command(*, name: str, storage: str, yes: bool, as_json: bool) -> None:
    """Delete study NAME and its trials; ``thrifty restore`` brings them back.

    You can use the name again at once. What the study trained stays in the database: a study of the
    same task and seed does not train it again. A study that a process runs is not deleted.
    ``thrifty gc`` removes it for good, after a month.
    """
    if as_json and not yes:
        raise UsageError("--json asks no questions; add --yes to delete the study")
    with Store.open(storage, create=False) as store:
        summary = store.studies.summary(name)
        if not yes:
            num_trials = sum(summary.num_trials.values())
            shown = f"{plain_text(name)} with its {trials_text(num_trials)}"
            click.confirm(f"delete study {shown}?", abort=True)
        deleted = store.trash.put(store.studies.get(name), who=this_user())
    if as_json:
        print_document(deleted_document(deleted))
        return
    command = shlex.join(["thrifty", "restore", "--storage", storage, "--", name])
    say(f"deleted study {plain_text(name)}; undo it with: {plain_text(command)}")


@click.command("restore")
@click.argument("name", required=False)
@click.option("--as", "new_name", metavar="NEW", help="Another name for the study.")
@storage_option
@json_option
def restore_command(*, name: str | None, new_name: str | None, storage: str, as_json: bool) -> None:
    """Restore the deleted study NAME; without NAME, list those that can be restored.

    Of several studies of this name, the one that was deleted last comes back.
    """
    if name is None and new_name is not None:
        raise UsageError("--as needs the NAME of the study to restore")
    if new_name is not None and not new_name.strip():
        raise UsageError(f"--as is {new_name!r}; give the study a name such as 'digits'")
    with Store.open(storage, create=False) as store:
        restored = None
        if name is not None:
            restored = store.trash.restore(store.trash.find(name), name=new_name)
        found = store.trash.list()
    if as_json:
        print_document(restore_document(restored, found))
    elif restored is not None:
        say(f"restored study {plain_text(restored)}")
    elif not found:
        say("no deleted study can be restored")
    else:
        _say_all(found)


@click.command("gc")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0.0),
    default=KEPT_S / _DAY_S,
    show_default=True,
    help="Days since its deletion, after which a study can no longer be restored.",
)
@click.option("--checkpoints", help="Folder of the states (default: beside the database).")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@storage_option
@json_option
def gc_command(
    *, older_than: float, checkpoints: str | None, dry_run: bool, storage: str, as_json: bool
) -> None:
    """Free disk space: remove old deleted studies and unused checkpoints.

    A state stays if a trial of any study came through it, or of a deleted one that can be restored.
    Losses and metrics stay in any case, so what is known is not trained again. Studies that a
    process trains are left alone.
    """
    if not math.isfinite(older_than):
        raise UsageError(f"--older-than is {older_than}; give a number of days")
    with Store.open(storage, checkpoints=checkpoints, create=False) as store:
        found = store.collect_garbage(older_than_s=older_than * _DAY_S, dry_run=dry_run)
    if as_json:
        print_document(gc_document(found, dry_run=dry_run))
        return
    _say_all(found.studies)
    would = "would remove" if dry_run else "removed"
    say(
        f"{would} {len(found.studies):,} deleted studies and {found.num_states:,} states: "
        f"{size_text(found.num_bytes)}"
    )
    if found.num_elsewhere:
        say(
            f"{found.num_elsewhere:,} more states are needed by no study, but lie in another "
            "folder; name it with --checkpoints"
        )
    if found.num_busy:
        say(f"left alone, as a process trains there: {found.num_busy:,} plans")


def _say_all(studies: Sequence[Deleted]) -> None:
    for each in studies:
        when = datetime.fromtimestamp(each.at).astimezone().strftime("%Y-%m-%d %H:%M")
        trials = trials_text(each.num_trials)
        say(f"{when}  {plain_text(each.who)}  {plain_text(each.name)} ({trials})")
