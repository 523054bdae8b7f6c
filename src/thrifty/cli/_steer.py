"""The commands ``stop``, ``note``, ``tag`` and ``acts``: steering a study that may be running."""

from __future__ import annotations

from datetime import datetime

import click

from thrifty.agents import act_document, acts_document
from thrifty.core import plain_text
from thrifty.store import Store
from thrifty.store._acts import Act, ActKind
from thrifty.store._steering import ask

from ._options import complete_study, json_option, print_document, say, storage_option


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
    """Show what was asked of study NAME, by whom and when, and what came of it."""
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
    """Write down what is asked, and print it as a document if that is wanted."""
    with Store.open(storage, create=False) as store:
        act = ask(store, name, kind, trial=trial, text=text)
    if as_json:
        print_document(act_document(name, act))
    return act


def _line(act: Act) -> str:
    """Return an act in one line: when, who, what, and what came of it."""
    when = datetime.fromtimestamp(act.at).astimezone().strftime("%Y-%m-%d %H:%M")
    where = "" if act.trial is None or act.kind == "stop trial" else f" trial {act.trial}"
    what = f"stop trial {act.trial}" if act.kind == "stop trial" else act.kind + where
    said = f": {plain_text(act.text)}" if act.text else ""
    came = "queued" if act.is_queued else act.answer
    return f"{when}  {plain_text(act.who)}  {what}{said}" + (
        f"  ({plain_text(came)})" if came else ""
    )
