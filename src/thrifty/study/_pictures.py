"""What a study shows of itself: importance and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import MissingExtraError
from thrifty.plan import ForestStage
from thrifty.space import Space

from ._goals import Goals, Mode
from ._importance import Level, Method, importance
from ._ledger import Ledger
from ._results import Savings, TrialResult
from ._unique_epochs import unique_epochs


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pictures:
    """The part of ``Study`` that only looks; what it looks at is declared here and there in ``Study``."""

    space: Space
    goals: Goals
    seed: int

    if TYPE_CHECKING:

        @property
        def metric(self) -> str: ...
        @property
        def mode(self) -> Mode: ...
        @property
        def trials(self) -> list[TrialResult]: ...
        @property
        def best_trials(self) -> list[TrialResult]: ...
        @property
        def savings(self) -> Savings: ...
        def forest(self) -> list[ForestStage]: ...
        def _books(self) -> Ledger: ...

    def importance(
        self, *, method: Method = "fanova", level: Level = "hyperparameter"
    ) -> dict[str, float]:
        """The share of each hyper-parameter in what makes trials differ in the metric, the most important first.

        Trials are compared at the largest epoch that enough of them have reached. ``method="fanova"`` explains the metric
        over the whole space, ``"ped-anova"`` what the best tenth of the trials have in common (through Optuna). With
        ``level="coordinate"`` every domain inside a schedule or a choice is counted for itself.

        Raises:
            UsageError: too few trials have reported; an unknown ``method`` or ``level``.
            MissingExtraError: scikit-learn or Optuna is not installed.
        """
        return importance(
            self.trials,
            self.space,
            metric=self.metric,
            mode=self.mode,
            method=method,
            level=level,
            seed=self.seed,
        )

    def plot_learning_curves(self) -> Figure:
        """The metric of every trial over epochs (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().learning_curves(
            self.trials, metric=self.metric, mode=self.mode
        )
        return figure

    def plot_forest(self) -> Figure:
        """The stage forest: what was trained once, and how many trials share it (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().stage_forest(
            self.forest(), metric=self.metric, saved_epochs=self.savings.epochs
        )
        return figure

    def plot_history(self) -> Figure:
        """The best value so far over the epochs trained, those that trials share counted once (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().history(
            self.trials,
            metric=self.metric,
            mode=self.mode,
            unique_epochs=unique_epochs(self._books()),
        )
        return figure

    def plot_importance(
        self, *, method: Method = "fanova", level: Level = "hyperparameter"
    ) -> Figure:
        """What ``importance`` says as bars (matplotlib).

        Raises:
            UsageError: too few trials have reported; an unknown ``method`` or ``level``.
            MissingExtraError: matplotlib, scikit-learn or Optuna is not installed.
        """
        shares = self.importance(method=method, level=level)
        figure: Figure = _plots().importance(shares, metric=self.metric)
        return figure

    def plot_parallel(self, names: Sequence[str] | None = None) -> Figure:
        """A line for each trial through an axis for each coordinate (or those named), coloured by the metric (matplotlib).

        Raises:
            UsageError: no trial has reported yet, or an unknown name.
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().parallel_coordinates(
            self.trials, self.space, metric=self.metric, mode=self.mode, names=names
        )
        return figure

    def plot_slice(self, names: Sequence[str] | None = None) -> Figure:
        """The metric over each coordinate (or those named) by itself (matplotlib).

        Raises:
            UsageError: no trial has reported yet, or an unknown name.
            MissingExtraError: matplotlib is not installed.
        """
        figure: Figure = _plots().slice_plot(
            self.trials, self.space, metric=self.metric, mode=self.mode, names=names
        )
        return figure

    def plot_contour(self, names: Sequence[str] | None = None) -> Figure:
        """The metric over the first two of the named coordinates that can be shown together (matplotlib).

        Without names they are taken by their importance.

        Raises:
            UsageError: too few trials have reported, an unknown name, or no two that can be shown.
            MissingExtraError: matplotlib or scikit-learn is not installed.
        """
        ranked = list(self.importance(level="coordinate")) if names is None else names
        figure: Figure = _plots().contour(
            self.trials, self.space, metric=self.metric, mode=self.mode, names=ranked
        )
        return figure

    def plot_pareto(self) -> Figure:
        """All trials by their objectives, the Pareto front emphasised (matplotlib).

        Raises:
            UsageError: there is only one objective.
            ThriftyError: no trial has reported yet, all have failed, or none is feasible.
            MissingExtraError: matplotlib is not installed.
        """
        front = [trial.number for trial in self.best_trials]
        figure: Figure = _plots().pareto_front(
            self.trials, metrics=self.goals.metrics, modes=self.goals.modes, front=front
        )
        return figure


def _plots() -> Any:
    try:
        import_module("matplotlib")
    except ImportError:
        raise MissingExtraError("matplotlib", extra="plots") from None
    return import_module("thrifty.study._plots")
