"""The command ``branch``: a trial that goes on differently from some epoch on."""

from __future__ import annotations

import shlex
from typing import Any

import click

from thrifty.agents import branch_document, read_config
from thrifty.core import UsageError, plain_text

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
