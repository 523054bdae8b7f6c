"""What a person asks of a study: checked against what the database says, then written down."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thrifty.core import UsageError, plain_text
from thrifty.space import config_to_json

from ._acts import Act, ActKind, tags_of
from ._records import StudyInfo
from ._reports import no_such_trial
from ._store import Store


_WHOLE_STUDY = ("stop", "pause", "resume")


def ask(
    store: Store,
    name: str,
    kind: ActKind,
    *,
    trial: int | None = None,
    text: str = "",
    who: str | None = None,
) -> Act:
    """Record a request to a study.

    Args:
        store: The database.
        name: The study.
        kind: The kind of the request.
        trial: Number of the trial that it is about; None: the whole study.
        text: The note or the tag.
        who: Who asks (default: the user and the machine of this process).

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: The trial or the tag does not exist, the study is in a state that rules the act
            out, or the note is empty.
        StoreWriteError: The disk is full, or the place is read-only.
    """
    info, summary = store.studies.get(name), store.studies.summary(name)
    shown = plain_text(name)
    if trial is not None:
        num_trials = sum(summary.num_trials.values())
        if type(trial) is not int or not 0 <= trial < num_trials:
            raise UsageError(no_such_trial(name, trial, num_trials=num_trials))
    if kind in ("stop", "pause") and summary.state == "done":
        raise UsageError(f"study {shown!r} is done; only a study that has work left can {kind}")
    # What waits for a process counts as done.
    last = last_queued(store, info) or ("pause" if summary.state == "paused" else "")
    if kind == "pause" and last == "pause":
        raise UsageError(f"study {shown!r} is paused already; `thrifty resume` lets it go on")
    if kind == "resume" and last == "stop" and is_run(summary.state):
        raise UsageError(
            f"study {shown!r} is about to stop; wait until the process that runs it has ended, "
            "then run it again"
        )
    if kind == "resume" and last not in ("stop", "pause"):
        how = "" if summary.state in ("running", "done") else "; run it again to go on"
        raise UsageError(f"study {shown!r} is {summary.state}, not paused{how}")
    if kind == "stop trial" and summary.state == "done":
        raise UsageError(
            f"study {shown!r} is done; only trials of a study that has work left can be stopped"
        )
    if kind in ("note", "tag", "untag"):
        text = _checked(text, kind)
    if kind == "untag" and text not in tags_of(store.acts.of(info.id)).get(trial, []):
        raise UsageError(
            f"there is no tag {plain_text(text)!r} to remove; `thrifty acts` lists all tags"
        )
    return store.acts.add(info, kind, trial=trial, text=text, who=who or this_user())


def last_queued(store: Store, info: StudyInfo) -> str:
    """Return the last request about a whole study that waits for a process; empty without one.

    It is "stop", "pause" or "resume".
    """
    asked = [a.kind for a in store.acts.of(info.id) if a.is_queued and a.kind in _WHOLE_STUDY]
    return asked[-1] if asked else ""


def is_run(state: str) -> bool:
    """Return whether a process runs a study of this state, so that it reads what is queued."""
    return state in ("running", "paused")


MAX_EPOCHS = 1_000_000
"""The largest ``max_epochs`` that can be requested; a slip of the keyboard may be larger."""


def ask_longer(store: Store, name: str, *, max_epochs: int) -> Act:
    """Record a request to train the trials of a study for longer.

    The next ``Study.run`` applies it, or the one that is going on once it has trained.

    Args:
        store: The database.
        name: The study.
        max_epochs: How many epochs the study is to train a trial.

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: ``max_epochs`` is not a whole number from 1 to ``MAX_EPOCHS``, or not more than
            the study has.
        StoreWriteError: The disk is full, or the place is read-only.
    """
    info = store.studies.get(name)
    if type(max_epochs) is not int or not 1 <= max_epochs <= MAX_EPOCHS:
        raise UsageError(
            f"max_epochs must be a whole number from 1 to {MAX_EPOCHS:,}, got {max_epochs!r}"
        )
    check_longer(info, max_epochs)
    return store.acts.add(info, "lengthen", trial=None, text=str(max_epochs), who=this_user())


def check_longer(info: StudyInfo, max_epochs: int) -> None:
    """Check that a ``max_epochs`` is more than a study has.

    Raises:
        UsageError: It is not.
    """
    if max_epochs <= info.spec["max_epochs"]:
        raise UsageError(
            f"study {plain_text(info.name)!r} trains {info.spec['max_epochs']} epochs already, and "
            f"got max_epochs={max_epochs}; give a larger number"
        )


def enqueue(
    store: Store,
    name: str,
    config: Mapping[str, Any],
    *,
    kind: Literal["branch", "enqueue"],
    trial: int,
    text: str,
) -> Act:
    """Enqueue a configuration that was made from a trial, and write down who did.

    Args:
        store: The database.
        name: The study.
        config: The hyper-parameters, all of them.
        kind: Whether it is a branch of the trial.
        trial: The number of the trial.
        text: How it differs.

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: The same configuration is enqueued already.
        StoreWriteError: The disk is full, or the place is read-only.
    """
    info = store.studies.get(name)
    fresh = []

    def choose(known: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        texts = [config_to_json(each) for each in known]
        fresh.extend([] if config_to_json(config) in texts else [config])
        return fresh

    store.studies.enqueue(info, choose)
    if not fresh:
        raise UsageError(
            "this branch is enqueued already; change its factor or epoch"
            if kind == "branch"
            else "this configuration is enqueued already; change a value"
        )
    return store.acts.add(info, kind, trial=trial, text=text, who=this_user())


def this_user() -> str:
    """Return the user and the machine that acts are recorded with."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "someone"
    return f"{user}@{socket.gethostname()}"


def _checked(text: str, kind: ActKind) -> str:
    """Return a note or a tag without space around it.

    Raises:
        UsageError: It is empty, or a tag has several lines.
    """
    found = text.strip() if isinstance(text, str) else ""
    if not found:
        raise UsageError(f"a {kind.removeprefix('un')} needs a text, and got {text!r}")
    if kind != "note" and len(found.splitlines()) > 1:
        raise UsageError(f"a tag is a short text in one line, and not {text!r}")
    return found
