"""The command ``thrifty status``."""

from __future__ import annotations

import click

from thrifty.core import plain_text
from thrifty.store import Store, StudySummary, redact_url

from ._options import say, storage_option


_GONE = " (its process is gone; run it again to go on)"


@click.command("status")
@storage_option
@click.option("--name", help="Only this study.")
def command(*, storage: str, name: str | None) -> None:
    """Show the studies in a database, also while they run."""
    with Store.open(storage, create=False) as store:
        summaries = [store.studies.summary(name)] if name else store.studies.list()
    if not summaries:
        say(f"{redact_url(storage)} has no studies yet")
    for s in summaries:
        counts = ", ".join(
            f"{count:,} {plain_text(state)}" for state, count in _states(s).items()
        )
        say(plain_text(s.name), bold=True, nl=False)
        say(f"  {plain_text(s.state)}{_GONE if s.state == 'interrupted' else ''}")
        say(f"  trials      {sum(s.num_trials.values()):,} ({counts or 'none'})")
        if s.best_value is not None:
            say(f"  best        {s.best_value:.6g} (trial {s.best_trial})")
        say(
            f"  epochs      {s.trial_epochs:,} asked for, {s.plan_epochs:,} trained in its plan"
        )
        say(f"  training    {s.seconds:,.1f} s")


def _states(summary: StudySummary) -> dict[str, int]:
    """Return counts by the states of ``Study.trials``: a waiting trial is done or paused."""
    counts = {**summary.num_trials, "done": summary.num_done}
    counts["paused"] = counts.pop("waiting", 0) - summary.num_done
    return {state: count for state, count in sorted(counts.items()) if count}
