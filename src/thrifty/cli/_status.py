"""``thrifty status``."""

from __future__ import annotations

import click

from thrifty.store import Store, StudySummary, redact_url

from ._options import storage_option


_GONE = " (its process is gone; run it again to go on)"


@click.command("status")
@storage_option
@click.option("--name", help="Only this study.")
def command(*, storage: str, name: str | None) -> None:
    """Show the studies in a database, also while they run."""
    with Store.open(storage, create=False) as store:
        summaries = [store.studies.summary(name)] if name else store.studies.list()
    if not summaries:
        click.echo(f"{redact_url(storage)} has no studies yet")
    for s in summaries:
        counts = ", ".join(f"{count:,} {state}" for state, count in _states(s).items())
        click.secho(f"{s.name}", bold=True, nl=False)
        click.echo(f"  {s.state}{_GONE if s.state == 'interrupted' else ''}")
        click.echo(f"  trials      {sum(s.num_trials.values()):,} ({counts or 'none'})")
        if s.best_value is not None:
            click.echo(f"  best        {s.best_value:.6g} (trial {s.best_trial})")
        click.echo(
            f"  epochs      {s.trial_epochs:,} asked for, {s.plan_epochs:,} trained in its plan"
        )
        click.echo(f"  training    {s.seconds:,.1f} s")


def _states(summary: StudySummary) -> dict[str, int]:
    """In the words of ``Study.trials``: a trial that waits is done, or paused."""
    counts = {**summary.num_trials, "done": summary.num_done}
    counts["paused"] = counts.pop("waiting", 0) - summary.num_done
    return {state: count for state, count in sorted(counts.items()) if count}
