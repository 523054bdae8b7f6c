"""The commands ``delete``, ``restore`` and ``gc``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from datetime import datetime

import click

from thrifty.agents import deleted_document, gc_document, restore_document
from thrifty.core import UsageError, plain_text
from thrifty.store import Store
from thrifty.store._steering_requests import this_user
from thrifty.store._trash import KEPT_S, Deleted

from ._options import complete_study, json_option, print_document, say, storage_option


_DAY_S = 86_400.0


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
            shown = f"{plain_text(name)} with its {num_trials:,} trials"
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
        f"{found.num_bytes / 1e6:,.1f} MB"
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
        say(f"{when}  {plain_text(each.who)}  {plain_text(each.name)} ({each.num_trials:,} trials)")
