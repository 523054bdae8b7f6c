"""Importance, scaling laws and plots of a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import require
from thrifty.plan import ForestStage
from thrifty.space import Space, TimeUnit

from ._forecast import unique_epochs
from ._goals import Goals, Mode
from ._importance import Importance, Level, Method, importance
from ._ledger import Ledger
from ._results import Savings, TrialResult
from ._scaling_law import Form, ScalingLaw, Size, fit_scaling_law


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PlotMixin:
    """The read-only part of ``Study``: importance, scaling laws and plots.

    The attributes that it needs are declared here and defined in ``Study``.
    """

    goals: Goals
    seed: int

    if TYPE_CHECKING:

        @property
        def space(self) -> Space: ...
        @property
        def unit(self) -> TimeUnit: ...
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
        def _current_ledger(self) -> Ledger: ...

    def importance(
        self, *, method: Method = "fanova", level: Level = "hyperparameter"
    ) -> Importance:
        """Return each hyper-parameter's share in the differences between trials, largest first.

        The result is a dictionary whose values sum to one. Its ``basis`` says which trials were
        compared at which epoch: the largest that enough trials have reached. Trials of all states
        but ``"failed"`` are compared, and at least 8 are needed.

        ``method="fanova"`` explains the metric over the whole space; ``"ped-anova"`` explains what
        the best tenth of the trials have in common (through Optuna). With ``level="coordinate"``,
        every domain inside a schedule or a choice counts separately.

        Raises:
            UsageError: Too few trials have reported, or ``method`` or ``level`` is unknown.
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

    def fit_scaling_law(
        self,
        *,
        form: Form = "chinchilla",
        size: Size | None = None,
        where: Callable[[TrialResult], bool] | None = None,
        average: str = "",
        best_only: bool = True,
        level: float = 0.95,
        num_bootstraps: int = 200,
    ) -> ScalingLaw:
        """Fit how the metric falls with the horizon, by trials at the ends of their horizons.

        ``form="chinchilla"`` is ``E + B / D^b`` for horizons ``D``, and ``E + A / N^a + B / D^b``
        with a model ``size`` ``N``. ``form="broken"`` is a power law whose slope changes once. The
        fit minimises the sum of Huber losses of log residuals from many starts. Intervals come from
        fits to resampled points.

        Args:
            form: ``"chinchilla"`` or ``"broken"``.
            size: The hyper-parameter that is the size of the model, or a function of a trial's
                configuration that returns it, such as the number of parameters.
            where: A function that is given a trial and returns True to use it. By default, all
                trials that are done are used.
            average: ``"ema"`` or ``"swa"`` to fit the trunk's averages instead of the cooldowns.
            best_only: Whether only the best trial of each horizon and size counts.
            level: The probability that intervals have.
            num_bootstraps: The number of resampled fits.

        Raises:
            UsageError: There are too few points, the metric is maximised or not above 0, or an
                option is invalid.
            MissingExtraError: SciPy is not installed.

        References:
            Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022.
            Caballero et al., "Broken Neural Scaling Laws", ICLR 2023.
        """
        return fit_scaling_law(
            self.trials,
            metric=self.metric,
            mode=self.mode,
            form=form,
            size=size,
            where=where,
            average=average,
            best_only=best_only,
            level=level,
            num_bootstraps=num_bootstraps,
            seed=self.seed,
        )

    def plot_scaling_law(self, law: ScalingLaw | None = None) -> Figure:
        """Plot a scaling law with its points and intervals, up to four times the last horizon.

        ``law`` is one that ``fit_scaling_law`` returned (default: that of its defaults).

        Raises:
            UsageError: There are too few points for a law.
            MissingExtraError: matplotlib or SciPy is not installed.
        """
        found = self.fit_scaling_law() if law is None else law
        return _draw("scaling_law", found, self.trials)

    def plot_learning_curves(self) -> Figure:
        """Plot the metric of every trial over epochs (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return _draw("learning_curves", self.trials, metric=self.metric, mode=self.mode)

    def plot_forest(self) -> Figure:
        """Plot the stage forest: each stage once, and how many trials share it (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return _draw(
            "stage_forest",
            self.forest(),
            metric=self.metric,
            saved_epochs=self.savings.epochs,
            unit=self.unit,
        )

    def plot_history(self) -> Figure:
        """Plot the best value so far over epochs trained, shared ones counted once (matplotlib).

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return _draw(
            "history",
            self.trials,
            metric=self.metric,
            mode=self.mode,
            unique_epochs=unique_epochs(self._current_ledger()),
            unit=self.unit,
        )

    def plot_importance(
        self, *, method: Method = "fanova", level: Level = "hyperparameter"
    ) -> Figure:
        """Plot the shares of ``importance`` as bars (matplotlib).

        Raises:
            UsageError: Too few trials have reported, or ``method`` or ``level`` is unknown.
            MissingExtraError: matplotlib, scikit-learn or Optuna is not installed.
        """
        shares = self.importance(method=method, level=level)
        return _draw(
            "importance", shares, metric=self.metric, basis=shares.basis, one_value=shares.one_value
        )

    def plot_parallel(self, names: Sequence[str] | None = None) -> Figure:
        """Plot each trial as a line through an axis per coordinate (matplotlib).

        ``names`` selects the coordinates (default: all). The metric gives the colour of a line.

        Raises:
            UsageError: No trial has reported yet, or a name is unknown.
            MissingExtraError: matplotlib is not installed.
        """
        return _draw(
            "parallel_coordinates",
            self.trials,
            self.space,
            metric=self.metric,
            mode=self.mode,
            names=names,
        )

    def plot_slice(self, names: Sequence[str] | None = None) -> Figure:
        """Plot the metric over each single coordinate (matplotlib).

        ``names`` selects the coordinates (default: all).

        Raises:
            UsageError: No trial has reported yet, or a name is unknown.
            MissingExtraError: matplotlib is not installed.
        """
        return _draw(
            "slice_plot", self.trials, self.space, metric=self.metric, mode=self.mode, names=names
        )

    def plot_contour(self, names: Sequence[str] | None = None) -> Figure:
        """Plot the metric over two coordinates (matplotlib).

        They are the first two of ``names`` that can be shown together (default: in order of their
        importance).

        Raises:
            UsageError: Too few trials have reported, a name is unknown, or no two coordinates can
                be shown together.
            MissingExtraError: matplotlib or scikit-learn is not installed.
        """
        ranked = list(self.importance(level="coordinate")) if names is None else names
        return _draw(
            "contour", self.trials, self.space, metric=self.metric, mode=self.mode, names=ranked
        )

    def plot_pareto(self) -> Figure:
        """Plot all trials by their objectives, with the Pareto front emphasised (matplotlib).

        Raises:
            UsageError: There is only one objective.
            ThriftyError: No trial has reported yet, all have failed, or none is feasible.
            MissingExtraError: matplotlib is not installed.
        """
        front = [trial.number for trial in self.best_trials]
        return _draw(
            "pareto_front",
            self.trials,
            metrics=self.goals.metrics,
            modes=self.goals.modes,
            front=front,
        )


def _draw(plot: str, *args: Any, **options: Any) -> Figure:
    """Return a plot of ``thrifty.study.plots``, which is imported when the first is drawn."""
    require("matplotlib", extra="plots")
    figure: Figure = getattr(import_module("thrifty.study.plots"), plot)(*args, **options)
    return figure
