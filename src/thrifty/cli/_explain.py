"""The command ``thrifty explain NAME [OTHER]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from thrifty.core import UsageError
from thrifty.store import Store, StudyInfo
from thrifty.store._spec import is_legacy, likeness

from ._completion import complete_study
from ._options import say, storage_option


@click.command("explain")
@click.argument("name", shell_complete=complete_study)
@click.argument("other", required=False, shell_complete=complete_study)
@storage_option
def explain_command(*, name: str, other: str | None, storage: str) -> None:
    """Explain why studies NAME and OTHER do or do not share training.

    Without OTHER, NAME is compared with the study of the database whose task is most similar.
    """
    with Store.open(storage, create=False) as store:
        one = store.studies.get(name)
        found = [info for info in store.studies.made().values() if info.id != one.id]
        two = store.studies.get(other) if other is not None else _most_alike(one, found)
    for line in explained(one, two):
        say(line)


def explained(one: StudyInfo, two: StudyInfo) -> Iterator[str]:
    """Yield lines that say what two studies share, and if they do not share everything, why."""
    both = f"studies {one.name!r} and {two.name!r}"
    if one.plan == two.plan:
        yield f"{both} have one search plan: each epoch is trained once for both"
        return
    old = [info.name for info in (one, two) if is_legacy(info.spec)]
    if len(old) == 1:
        yield (
            f"{both} share nothing: {old[0]!r} was made by an older version of thrifty, which "
            "knew its task by other means"
        )
        return
    (training, metrics), (other_training, other_metrics) = map(_parts, (one.spec, two.spec))
    names = (one.name, two.name)
    reasons = [
        *_setting(one.spec, two.spec),
        *_differences(training, other_training, names),
    ]
    evaluated = _differences(metrics, other_metrics, names)
    if reasons:
        yield f"{both} share nothing:"
    elif evaluated:
        yield f"{both} train the same; kept states are evaluated again, for their metrics differ:"
    else:
        yield f"{both} are equal, but thrifty has changed between them: they share nothing"
    for reason in [*reasons, *evaluated]:
        yield f"  {reason}"


def _most_alike(one: StudyInfo, others: Sequence[StudyInfo]) -> StudyInfo:
    if not others:
        raise UsageError(
            f"the database has no other study than {one.name!r} to compare it with"
        )
    return max(others, key=lambda info: (likeness(one.spec, info.spec), info.id))


def _parts(spec: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return what a task trains and how it evaluates, by name.

    An older version stored both as one.
    """
    task = spec.get("task", {})
    return (task, {}) if is_legacy(spec) else (task["training"], task["evaluation"])


def _setting(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    if one.get("seed") != two.get("seed"):
        yield f"seed: {one.get('seed')} and {two.get('seed')}"


def _differences(
    one: Mapping[str, str], two: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    out = []
    for name in dict.fromkeys((*one, *two)):
        mine, theirs = one.get(name), two.get(name)
        if mine is None or theirs is None:
            out.append(f"{name}: only in {names[theirs is not None]!r}")
        elif mine != theirs and (mine.startswith("#") or theirs.startswith("#")):
            out.append(f"{name}: differs")
        elif mine != theirs:
            out.append(f"{name}: {mine} and {theirs}")
    return sorted(out)
