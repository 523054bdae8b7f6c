"""Steering a study: stop it or a trial, note, tag, branch, and list all requests."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

import click

from thrifty.agents import act_document, acts_document, branch_document, read_config
from thrifty.core import UsageError, plain_text
from thrifty.store import Store
from thrifty.store._acts import Act, ActKind
from thrifty.store._steering_requests import ask

from ._options import (
    Pair,
    complete_study,
    json_option,
    print_document,
    say,
    storage_option,
    trust_option,
)
from ._train import load_stored_study


trial_option = click.option(
    "--trial", type=int, help="Number of the trial that it is about (default: the whole study)."
)


@click.command("stop")
@click.argument("name", shell_complete=complete_study)
@trial_option
@storage_option
@json_option
def stop_command(*, name: str, trial: int | None, storage: str, as_json: bool) -> None:
    """Stop study NAME, or one of its trials, in the process that runs it.

    The study stops as by Ctrl-C: running epochs are finished and kept, and ``thrifty resume`` goes
    on. With --trial, that trial stops for good at the end of its epoch, and the others go on.
    """
    kind: ActKind = "stop" if trial is None else "stop trial"
    act = _asked(name, kind, trial=trial, text="", storage=storage, as_json=as_json)
    if not as_json:
        what = "the study" if trial is None else f"trial {trial}"
        say(f"asked to stop {what}; {_WAITS if act.is_queued else 'done'}")


@click.command("pause")
@click.argument("name", shell_complete=complete_study)
@storage_option
@json_option
def pause_command(*, name: str, storage: str, as_json: bool) -> None:
    """Let the process that runs study NAME wait, until ``thrifty resume NAME``.

    It finishes its running epochs, keeps their states, and begins no others. Its workers stay, with
    their memory; ``thrifty stop`` frees that.
    """
    _asked(name, "pause", trial=None, text="", storage=storage, as_json=as_json)
    if not as_json:
        say(f"asked to pause the study; {_WAITS}")


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


_WAITS = "the process that runs it does so at the end of an epoch"


def _asked(
    name: str, kind: ActKind, *, trial: int | None, text: str, storage: str, as_json: bool
) -> Act:
    """Record a request, and print it as a document with ``--json``."""
    with Store.open(storage, create=False) as store:
        act = ask(store, name, kind, trial=trial, text=text)
    if as_json:
        print_document(act_document(name, act))
    return act


def _line(act: Act) -> str:
    """Return an act in one line: time, user, request and result."""
    when = datetime.fromtimestamp(act.at).astimezone().strftime("%Y-%m-%d %H:%M")
    where = "" if act.trial is None or act.kind == "stop trial" else f" trial {act.trial}"
    what = f"stop trial {act.trial}" if act.kind == "stop trial" else act.kind + where
    said = f": {plain_text(act.text)}" if act.text else ""
    came = "queued" if act.is_queued else act.answer
    return f"{when}  {plain_text(act.who)}  {what}{said}" + (
        f"  ({plain_text(came)})" if came else ""
    )


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
    branch = study.branch(
        trial,
        epoch=after,
        scale=_once(scale, "--scale"),
        change=read_config(_once(change, "--change")),
    )
    if not as_json:
        say(branch)
        if not yes:
            click.confirm("enqueue it?", abort=True)
    if yes or not as_json:
        study.enqueue_trial(branch)
    if as_json:
        print_document(branch_document(study, branch, enqueued=yes))
        return
    command = shlex.join(["thrifty", "resume", name, "--storage", storage])
    say(f"enqueued; train it with: {plain_text(command)}")


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
