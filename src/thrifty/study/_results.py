"""Results of a study: trials and savings as values, and the HTML that shows them in notebooks.

The HTML is a list of facts or a table, without colours of its own. Its values come from the
``_repr_html_`` methods of ``Study``, ``Forecast``, ``Trials`` and ``TrialResult``. Every text is
escaped and cut here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch

from thrifty.core import Artifact, ThriftyError, plain_text
from thrifty.search import Trial
from thrifty.search._scores import certainty
from thrifty.space import TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store import failure_groups, nondominated
from thrifty.store._epoch_times import (
    EpochTimes,
    attribute_text,
    interval,
    mean_curve,
    standard_deviation,
)
from thrifty.store._reports import failure_lines
from thrifty.store._trial_table import TableRow, table_of

from ._goals import Goals
from ._ledger import Ledger, is_done
from ._sharing_reason import why_nothing_is_shared


TrialState = Literal["done", "running", "paused", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialResult:
    """The result of one trial.

    Attributes:
        number: The trial's number, in the order of proposals.
        config: The trial's hyper-parameters; schedules stay schedules.
        state: ``"done"`` (fully trained), ``"running"``, ``"paused"``, ``"stopped"`` or
            ``"failed"``. A trial that was in training when the study stopped is paused.
        epochs: The number of epochs that the trial has reached: those up to its latest report.
        value: The study's metric there (None before the first report). If there are several
            objectives, the first one.
        curve: The same metric after epochs 1, 2, ...
        error: Why the trial failed, with the traceback of the task's code.
        parent: The trial it branched off, and at which epoch.
        values: All objectives by name (empty before the first report).
        history: All metrics of the task after epochs 1, 2, ..., by name, also those that are no
            objective; ``metrics`` are the last ones.
        violation: By how much the trial breaks the study's constraints, each as a share of its
            limit. 0 if it keeps them all.
        num_seeds: The number of seeds that the trial was trained with. With several, ``value``,
            ``curve``, ``values``, ``metrics`` and ``history`` are means over the seeds.
        curves: The metric after epochs 1, 2, ... for each seed.
        sd: The standard deviation of the metric over the seeds at ``epochs`` (None: one seed).
        interval: A 95 % confidence interval of the mean over seeds (None: one seed). It does not
            allow for the selection of a best trial among many.
        certainty: The probability that the trial is the best of the study, for ``best_trial`` of a
            study with several seeds (None elsewhere).
        user_attrs: What the trial has set with ``set_user_attr`` up to ``epochs``, also in epochs
            that it shares with other trials; of each key, the last value. With several seeds, that
            of the first one.
        artifacts: Files that the trial has logged with ``log_artifact`` up to ``epochs``, by name,
            in the same way. ``Study.open_artifact`` opens them.
    """

    number: int
    config: Mapping[str, Any]
    state: TrialState
    epochs: int
    value: float | None
    curve: tuple[float, ...]
    error: str = ""
    parent: tuple[int, int] | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    violation: float = 0.0
    num_seeds: int = 1
    curves: tuple[tuple[float, ...], ...] = ()
    sd: float | None = None
    interval: tuple[float, float] | None = None
    certainty: float | None = None
    unit: TimeUnit = EPOCHS
    user_attrs: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    _load: Callable[..., torch.nn.Module] | None = field(default=None, compare=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics of the task at ``epochs``, by name; empty before the first report."""
        return self.history[-1] if self.history else {}

    def load_model(
        self, *, replica: int = 0, average: Literal["ema", "swa"] | None = None
    ) -> torch.nn.Module:
        """Return the trained model at ``epochs``, on the CPU, in evaluation mode.

        It is loaded from its checkpoint. If that is deleted or damaged, the model is trained again,
        with the same result.

        Args:
            replica: Which of the study's seeds, from 0.
            average: Which average of the weights to put into the model, for a task with
                ``thrifty.EMA`` or ``thrifty.SWA``: the model whose metrics begin with ``ema_`` or
                ``swa_``. None for the weights of the last step.

        Raises:
            UsageError: The study has no such seed, the task no such average, or the trial has not
                reported yet.
        """
        assert self._load is not None
        return self._load(replica=replica, average=average)

    def __repr__(self) -> str:
        """Return the same line as ``str`` does, so that a list of trials is readable."""
        return f"<{self}>"

    def __str__(self) -> str:
        """Return number, state, objectives and configuration in one line."""
        said = [f"trial {self.number}: {self.state} after {self.unit.short(self.epochs)}"]
        said += [f"{metric}={value_text(value)}" for metric, value in self.values.items()]
        config, notes = config_rows(self.config, source="trial.config")
        said += [f"{name}={shown}" for name, shown in config]
        return plain_text(", ".join([*said, *notes, *self.error.splitlines()[:1]]))

    def _repr_html_(self) -> str:
        """Return the result as a table for notebooks."""
        message, _, traceback = self.error.partition("\n")
        config, notes = config_rows(self.config, source="trial.config")
        rows: list[tuple[str, object]] = [("state", self.state), self.unit.fact(self.epochs)]
        if self.parent is not None:
            number, epoch = self.parent
            rows.append(("branched off", f"trial {number} at {self.unit.place(epoch)}"))
        rows += [(metric, value_text(value)) for metric, value in self.values.items()]
        if self.sd is not None and self.interval is not None:
            low, high = map(value_text, self.interval)
            rows.append((f"sd over {self.num_seeds} seeds", value_text(self.sd)))
            rows.append(("95 % interval of the mean", f"{low} to {high}"))
        if self.certainty is not None:
            rows.append(("probability of being the best", f"{self.certainty:.0%}"))
        if self.violation:
            rows.append(("violation", value_text(self.violation)))
        rows += config
        rows += attribute_rows(self.user_attrs)
        if len(self.user_attrs) > MAX_VALUES:
            num_left = len(self.user_attrs) - MAX_VALUES
            notes = [*notes, f"… and {num_left:,} more attributes: trial.user_attrs"]
        if message:
            rows.append(("error", message))
        shown = facts(f"Trial {self.number}", rows, notes=notes)
        return shown + details("Traceback", traceback) if traceback else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What sharing (and packing) saved.

    The time that an epoch in a pack would have taken alone is measured by the steps that verify the
    pack: it is the median of at least three of them times the number of steps, plus an evaluation.
    Its range is a 95 % confidence interval of the median (with fewer than six steps: the minimum
    and the maximum). The ends of a sum are sums of the ends, so the range does not become narrower
    with more epochs. If an epoch was not measured like this, the saved seconds are unknown.

    Attributes:
        trial_epochs: Epochs that the trials would have trained one by one.
        unique_epochs: Epochs that are left when equal prefixes are trained once.
        seconds_alone: Seconds that the trials would have taken one by one; None if not measured.
        seconds_shared: Seconds that are left of those when equal prefixes are trained once; None if
            not measured.
        seconds: Seconds that were really spent in training, including packing and checks.
        seconds_checks: The part of ``seconds`` that went into checks.
        seconds_shared_low: Low end of the range of ``seconds_shared``.
        seconds_shared_high: High end of this range.
        packed_epochs: Epochs that were trained in a pack with other trials.
        unmeasured_epochs: Packed epochs whose time alone was not measured.
        evaluated_epochs: Epochs that were not trained because another plan had kept their states:
            only their metrics were computed again. Their seconds are those of the evaluation.
        retrained_epochs: Epochs that had to be trained again because a state was not kept. They
            count in ``unique_epochs``, ``seconds_shared`` and ``seconds``, too.
        known_epochs: Unique epochs that other studies have trained. They and their seconds count in
            ``unique_epochs``, ``seconds_shared`` and ``seconds``, too.
        seconds_known: The part of ``seconds`` that other studies have spent.
        unreported_epochs: Epochs that this study has trained and that no trial has reported: those
            of a stage that was stopped, whose state is kept, or of a trial that failed. They and
            their seconds count nowhere else here.
        seconds_unreported: The seconds of these epochs, and of those that were only evaluated.
        why_unshared: Why no two trials share an epoch; empty if two do, or if there is one trial.
        unit: The unit in which the text counts epochs.
    """

    trial_epochs: int
    unique_epochs: int
    seconds_alone: float | None
    seconds_shared: float | None
    seconds: float
    seconds_checks: float = 0.0
    seconds_shared_low: float = 0.0
    seconds_shared_high: float = 0.0
    packed_epochs: int = 0
    unmeasured_epochs: int = 0
    evaluated_epochs: int = 0
    retrained_epochs: int = 0
    known_epochs: int = 0
    unreported_epochs: int = 0
    seconds_known: float = 0.0
    seconds_unreported: float = 0.0
    why_unshared: str = ""
    unit: TimeUnit = EPOCHS

    @property
    def epochs(self) -> int:
        """The number of epochs that trials of the study share, so that they are trained once."""
        return self.trial_epochs - self.unique_epochs

    @property
    def seconds_trained(self) -> float:
        """Seconds that the study's own runs have trained, as ``thrifty status`` shows them.

        Without what other studies have trained, and with what no trial has reported.
        """
        return self.seconds - self.seconds_known + self.seconds_unreported

    @property
    def shared_factor(self) -> float | None:
        """Factor by which sharing reduced the training time; None if not measured."""
        if self.seconds_alone is None or self.seconds_shared is None:
            return None
        return self.seconds_alone / self.seconds_shared if self.seconds_shared else 1.0

    @property
    def packed_factor(self) -> float | None:
        """Factor by which packing sped up the remaining training; None if not measured.

        Checks count as a part of joint training, so without any packing it is at most 1.
        """
        if self.seconds_shared is None:
            return None
        return self.seconds_shared / self.seconds if self.seconds else 1.0

    @property
    def packed_interval(self) -> tuple[float, float] | None:
        """Range of ``packed_factor``, from the range of the time alone; None if not measured."""
        if self.seconds_shared is None:
            return None
        if not self.seconds:
            return (1.0, 1.0)
        return self.seconds_shared_low / self.seconds, self.seconds_shared_high / self.seconds

    def __str__(self) -> str:
        notes = []
        count, name = self.unit.count, self.unit.name
        if self.retrained_epochs:
            notes.append(f" ({count(self.retrained_epochs):,} of them again)")
        if self.evaluated_epochs:
            notes.append(f", {count(self.evaluated_epochs):,} evaluated again")
        if self.known_epochs:
            notes.append(f", {count(self.known_epochs):,} known before,")
        again = "".join(notes)
        price, gain = self._price(), self._gain()
        # Epochs that another study has trained are saved, too.
        trained = self.unique_epochs - self.known_epochs
        return (
            f"{count(trained):,} {name} trained{again} for "
            f"{count(self.trial_epochs):,} trial-{name}: "
            f"{count(self.trial_epochs - trained):,} saved; "
            f"training {self.seconds:,.1f} s{price}{self._known()}{gain}{self._rest()}"
            f"{self.why_unshared and '; '}{self.why_unshared}"
        )

    def _rest(self) -> str:
        """Return the trained epochs that do not count as text, or "" if there are none."""
        if not self.unreported_epochs:
            return ""
        count, name = self.unit.count, self.unit.name
        return (
            f"; {count(self.unreported_epochs):,} {name} ({self.seconds_unreported:,.1f} s) "
            "trained besides, reported by no trial"
        )

    def _known(self) -> str:
        """Return how much of the time other studies have spent, or "" if that is nothing."""
        spent = f"{self.seconds_known:,.1f} s of it by other studies"
        return f", {spent}" if self.seconds_known else ""

    def _price(self) -> str:
        """Return the cost of checks as text, or an empty string if there were no checks."""
        if not self.seconds_checks:
            return ""
        share = self.seconds_checks / self.seconds if self.seconds else 0.0
        return f", {_short(self.seconds_checks)} s ({_short(100 * share)} %) of it for checks"

    def _gain(self) -> str:
        """Return the factors as text, or an empty string if they were not measured."""
        if self.seconds_alone is None or self.packed_interval is None:
            return ""
        is_less = round(self.seconds_alone, 1) > round(self.seconds, 1)
        low, high = self.packed_interval
        if self.packed_epochs and not round(low, 2) <= 1 <= round(high, 2):
            by_packing = f", {self.packed_factor:.2f}x by packing ({low:.2f} to {high:.2f})"
            by_sharing = self.shared_factor
        else:
            by_packing = ", packing made no measurable difference" if self.packed_epochs else ""
            # the factors and the two times should agree, also if times alone are not exact
            agree = is_less and self.seconds
            by_sharing = self.seconds_alone / self.seconds if agree else self.shared_factor
        factors = f"{by_sharing:.2f}x by sharing{by_packing}"
        if is_less:
            comma = "," if self.seconds_checks or self.seconds_known else ""
            return f"{comma} instead of {self.seconds_alone:,.1f} s ({factors})"
        return "" if factors == "1.00x by sharing" else f", {factors}"


def _short(value: float) -> str:
    """Format a number with one decimal, or with two digits if it is below 0.95.

    >>> _short(12.34), _short(0.012)
    ('12.3', '0.012')
    """
    return f"{value:,.1f}" if value >= 0.95 else f"{value:.2g}"


def state_of(trial: Trial, *, is_run: bool) -> TrialState:
    """Return a trial's state; a waiting trial is done or paused.

    Args:
        trial: The trial.
        is_run: Whether a process runs its study. If not, a trial in training is paused.
    """
    if trial.state == "running" and not is_run:
        return "paused"
    if trial.state != "waiting":
        return trial.state
    return "done" if is_done(trial) else "paused"


def trial_result(
    ledger: Ledger,
    number: int,
    *,
    load: Callable[..., torch.nn.Module],
    certainty: float | None = None,
) -> TrialResult:
    """Return the current result of a trial from the ledger."""
    trial, goals = ledger.history[number], ledger.goals
    replicas = ledger.replicas(number)
    metrics = mean_curve(replicas)
    curve = tuple(goals.value(m) for m in metrics)
    curves = tuple(tuple(goals.value(m) for m in each) for each in replicas)
    last = [each[-1] for each in curves if each]
    several = len(last) > 1
    _, message, traceback = ledger.errors.get(number, ("", "", ""))
    return TrialResult(
        unit=ledger.unit,
        number=number,
        config=trial.config,
        state=state_of(trial, is_run=ledger.is_run),
        epochs=trial.reached,
        value=curve[-1] if curve and math.isfinite(curve[-1]) else None,
        curve=curve,
        error=f"{message}\n{traceback}".strip(),
        parent=trial.parent,
        values=goals.values(metrics[-1]) if metrics else {},
        violation=trial.violation,
        num_seeds=len(replicas),
        curves=curves,
        sd=standard_deviation(last) if several else None,
        interval=interval(last) if several else None,
        certainty=certainty,
        user_attrs=ledger.user_attrs(number),
        artifacts=ledger.artifacts_of(number),
        history=tuple(metrics),
        _load=load,
    )


def candidates(ledger: Ledger, *, name: str) -> list[Trial]:
    """Return the feasible trials that have reported and have not failed.

    Raises:
        ThriftyError: There are none.
    """
    reported = [t for t in ledger.history if t.reached and t.state != "failed"]
    feasible = [t for t in reported if not t.violation]
    if feasible:
        return feasible
    if reported:
        raise ThriftyError(_none_feasible(ledger, reported, name=name))
    if not ledger.errors:
        raise ThriftyError(f"study {name!r} has no results yet; run it first")
    groups = failure_groups(ledger.errors)
    listed = "\n".join(failure_lines(groups))
    raise ThriftyError(
        f"study {name!r} has no results, because all trials that ended have failed:\n{listed}\n"
        f"{groups[0].traceback}".rstrip()
    )


def certainty_of(ledger: Ledger, number: int, *, seed: int) -> float:
    """Return the probability that a trial has the best true mean of all that may be the best."""
    found = _feasible(ledger)
    return certainty(
        [trial.number for trial in found].index(number),
        [trial.objectives[0] for trial in found],
        [trial.standard_errors[-1] for trial in found],
        seed=seed,
    )


def best_ones(ledger: Ledger) -> list[Trial]:
    """Return the best trial so far, or the Pareto front if there are several objectives."""
    if len(ledger.goals.metrics) > 1:
        feasible = _feasible(ledger)
        return [feasible[i] for i in nondominated([t.objectives for t in feasible])]
    best = ledger.best_trial
    return [] if best is None else [best]


def _feasible(ledger: Ledger) -> list[Trial]:
    return [t for t in ledger.history if t.reached and t.state != "failed" and not t.violation]


def _none_feasible(ledger: Ledger, reported: Sequence[Trial], *, name: str) -> str:
    nearest = min(reported, key=lambda t: (t.violation, t.number))
    metrics, goals = ledger.curve(nearest.number)[-1], ledger.goals
    broken = [
        f"{metric} is {metrics[metric]:g}, to be {bound.side.replace('_', ' ')} {bound.limit:g}"
        for metric, bound in goals.constraints
        if bound.excess(metrics[metric])
    ]
    return (
        f"no trial of study {name!r} is feasible; the nearest is trial {nearest.number} "
        f"({'; '.join(broken)}). "
        "Relax the constraints in a study of another name, or widen the space"
    )


def savings(ledger: Ledger) -> Savings:
    """Return what was saved so far."""
    seen: dict[tuple[int, int], EpochTimes] = {}
    alone: list[float | None] = []
    trial_epochs = 0
    for number in range(len(ledger.history)):
        for passed in ledger.places(number):
            trial_epochs += len(passed)
            for place in passed:
                times = seen[place] = ledger.epochs.times.get(place, EpochTimes())
                alone.append(times.alone)
    evaluated = len(seen.keys() & ledger.epochs.evaluated)
    again = [ledger.epochs.again[key] for key in ledger.epochs.again.keys() & seen.keys()]
    retrained = sum(num for num, _ in again)
    known = [place for place in seen if not _is_own(ledger, place)]
    unreported = {p for p in ledger.epochs.times.keys() - seen.keys() if _is_own(ledger, p)}
    spent = [*seen.values(), *(times for _, times in again)]
    is_unshared = trial_epochs and len(seen) == trial_epochs
    ends = [ledger.plan.nodes[nodes[0]].timeline for nodes in ledger.nodes_of]
    return Savings(
        unit=ledger.unit,
        why_unshared=why_nothing_is_shared(ends) if is_unshared else "",
        trial_epochs=trial_epochs,
        unique_epochs=len(seen) - evaluated + retrained,
        evaluated_epochs=evaluated,
        seconds_alone=_sum(alone),
        seconds_shared=_sum([times.alone for times in spent]),
        seconds=math.fsum(times.seconds for times in spent),
        seconds_checks=math.fsum(times.checks for times in spent),
        seconds_shared_low=math.fsum(times.alone_low for times in spent),
        seconds_shared_high=math.fsum(times.alone_high for times in spent),
        packed_epochs=sum(times.packed for times in spent),
        unmeasured_epochs=sum(times.alone is None for times in spent),
        retrained_epochs=retrained,
        unreported_epochs=len(unreported - ledger.epochs.evaluated)
        + sum(ledger.epochs.again.get(place, (0, None))[0] for place in unreported),
        seconds_unreported=math.fsum(_spent_s(ledger, place) for place in unreported),
        known_epochs=len(set(known) - ledger.epochs.evaluated),
        seconds_known=math.fsum(_spent_s(ledger, place) for place in known),
    )


def _is_own(ledger: Ledger, place: tuple[int, int]) -> bool:
    """Return whether the study itself has trained an epoch."""
    return ledger.epochs.origins.get(place, ledger.study_id) == ledger.study_id


def _spent_s(ledger: Ledger, place: tuple[int, int]) -> float:
    """Return the seconds that were spent on an epoch, each time that it was trained."""
    _, again = ledger.epochs.again.get(place, (0, EpochTimes()))
    return ledger.epochs.times[place].seconds + again.seconds


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a value is not known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def rows(trials: Sequence[TrialResult], goals: Goals) -> list[dict[str, Any]]:
    """Return a table of trials with one row each."""
    return table_of(
        [
            TableRow(
                number=t.number,
                state=t.state,
                epochs=t.epochs,
                value=t.value,
                sd=t.sd,
                objectives=t.values,
                violation=t.violation if t.values else None,
                metrics=t.metrics,
                error=t.error,
                config=t.config,
                user_attrs=t.user_attrs,
            )
            for t in trials
        ],
        objectives=goals.metrics,
        has_constraints=bool(goals.constraints),
        num_seeds=max((t.num_seeds for t in trials), default=1),
        unit=trials[0].unit if trials else EPOCHS,
    )


MAX_ROWS = 10
MAX_COLUMNS = 8
"""Hyper-parameters that a table of trials has a column for."""
MAX_VALUES = 20
"""Hyper-parameters that a list of facts names."""
MAX_CHARS = 400
"""Characters of a cell; the middle of a longer text is cut."""
_LEFT = ' style="text-align:left"'  # notebooks align cells to the right


def facts(title: str, rows: Iterable[tuple[str, object]], *, notes: Sequence[object] = ()) -> str:
    """Return a table with a name and a value in each row.

    >>> facts("Trial 3", [("state", "<done>")]).count("&lt;done&gt;")
    1
    """
    body = "".join(
        f'<tr><th scope="row"{_LEFT}>{_escaped(name)}</th><td{_LEFT}>{_escaped(value)}</td></tr>'
        for name, value in rows
    )
    return _block(title, f"<tbody>{body}</tbody>", notes=notes)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    notes: Sequence[object] = (),
) -> str:
    """Return a table with a row of column names; show at most ``MAX_ROWS`` rows."""
    head = "".join(f'<th scope="col"{_LEFT}>{_escaped(name)}</th>' for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td{_LEFT}>{_escaped(value)}</td>' for value in row)}</tr>"
        for row in islice(rows, MAX_ROWS)
    )
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return _block(title, content, notes=notes)


def lines(title: str, texts: Iterable[object]) -> str:
    """Return a title with a list of texts."""
    items = "".join(f"<li>{_escaped(text)}</li>" for text in texts)
    return f"<div><strong>{_escaped(title)}</strong><ul>{items}</ul></div>"


def details(title: str, text: str) -> str:
    """Return a long text, with its newlines, behind a title that unfolds it."""
    content = html.escape(plain_text(text, lines=True, limit=25 * MAX_CHARS))
    return f"<details><summary>{_escaped(title)}</summary><pre>{content}</pre></details>"


def value_text(value: Any) -> str:
    """Return a metric or the value of a hyper-parameter as text.

    >>> value_text(0.123456789), value_text(None), value_text("adam")
    ('0.123457', '-', 'adam')
    """
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else plain_text(value)


def config_rows(
    config: Mapping[str, Any], *, source: str
) -> tuple[list[tuple[str, object]], list[str]]:
    """Return the facts of a configuration, and a note if it has more than ``MAX_VALUES``."""
    shown = [(name, value_text(value)) for name, value in islice(config.items(), MAX_VALUES)]
    num_left = len(config) - len(shown)
    notes = [f"… and {num_left:,} more hyper-parameters: {source}"] if num_left else []
    return [*shown], notes


def attribute_rows(attributes: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return user attributes as facts, at most ``MAX_VALUES``.

    >>> attribute_rows({"classes": ["cat", "dog"]})
    [('attribute classes', '["cat", "dog"]')]
    """
    return [
        (f"attribute {key}", attribute_text(value))
        for key, value in islice(attributes.items(), MAX_VALUES)
    ]


def _block(title: str, content: str, *, notes: Sequence[object]) -> str:
    style = "text-align:left;color:inherit"
    caption = f'<caption style="{style}"><strong>{_escaped(title)}</strong></caption>'
    below = "".join(f"<p>{_escaped(note)}</p>" for note in notes)
    return f"<div><table>{caption}{content}</table>{below}</div>"


def _escaped(value: object) -> str:
    return html.escape(plain_text(value, limit=MAX_CHARS))
