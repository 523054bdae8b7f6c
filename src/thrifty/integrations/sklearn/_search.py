"""A scikit-learn search estimator that runs a study, and its table of results."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from thrifty.core import MissingExtraError, ThriftyError, UsageError, fingerprint
from thrifty.pack.identity import asking_legacy
from thrifty.run import ExecutorConfig, Local, train_alone
from thrifty.search import Algorithm, Hyperband
from thrifty.space import Timeline
from thrifty.study import Observer, Storage, Study


try:
    import joblib
    import numpy as np
    from scipy.stats import rankdata
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, is_classifier
    from sklearn.exceptions import FitFailedWarning
    from sklearn.metrics import check_scoring
    from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit, check_cv
    from sklearn.utils import get_tags, indexable
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import check_is_fitted
except ImportError:
    raise MissingExtraError("scikit-learn", extra="sklearn") from None

# Imported after the check above, because these modules need scikit-learn, too.
from ._estimator_task import EstimatorTask, ParamSpace, Resource, Samples, last_step


DEFAULT_EPOCHS = 27


def _best_has(name: str) -> Any:
    """Return a check of whether the best estimator, or else the given one, has a method."""

    def has(search: ThriftySearchCV) -> bool:
        search._check_refit()
        getattr(getattr(search, "best_estimator_", search.estimator), name)
        return True

    return has


class ThriftySearchCV(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc] # without types
    """Searches the hyper-parameters of a scikit-learn estimator.

    Each configuration is trained only as far as its results justify.
    It supports estimators with ``partial_fit`` (an epoch is one pass over the training data) or
    ``warm_start`` (an epoch adds a number of trees or iterations), alone or as the last step of a
    pipeline. Use it like ``RandomizedSearchCV``. If a hyper-parameter has a schedule,
    configurations that begin alike share their training until they diverge.

    Args:
        estimator: The estimator to tune; it is cloned and never changed.
        param_distributions: For each parameter a list, a SciPy distribution, a domain
            (``thrifty.Float``), a schedule or a fixed value.
        scoring: As in scikit-learn: a name, a callable, or several (then ``refit`` names the one
            that decides).
        max_epochs: Number of epochs of the best configurations (default: 27, or that of
            ``algorithm``).
        algorithm: The search algorithm (default: ``Hyperband(max_epochs=max_epochs)``).
        cv: As in scikit-learn: a number of folds, a splitter, an iterable, or None for five folds.
            Or a fraction between 0 and 1 to hold out once, which is the cheapest.
        refit: Whether to train the best configuration again, on all data.
        random_state: Seed of everything, equal for all configurations. An estimator with its own
            ``random_state`` keeps it.
        storage: Database for the study. ``fit`` with the same data resumes from it (default: not
            stored).
        name: Name of the study in the storage (default: derived from the estimator, the data and
            the search).
        resource: ``"partial_fit"``, or the parameter that warm start increases (default: what the
            estimator supports).
        resource_per_epoch: Increase of that parameter per epoch.
        n_jobs: Number of training processes; -1 for one per core.
        executor: Where to train, instead of ``n_jobs``.
        error_score: Score of a configuration that fails; or ``"raise"``.
        verbose: Whether to show the progress.
        observers: Observers of the study, such as loggers.

    Attributes:
        best_estimator_: The best configuration, trained again on all data for ``best_epochs_``
            epochs (with ``refit``).
        best_params_: Its parameters; schedules stay schedules.
        best_score_: Its mean score over the folds.
        best_index_: Its row in ``cv_results_``, and its number in ``study_``.
        best_epochs_: Number of epochs that it was trained.
        cv_results_: One row per configuration, as in scikit-learn, with ``n_epochs``. A
            configuration that was stopped early has its score at that time.
        study_: The study (not pickled with the search, because it holds the data).
        scorer_, n_splits_, multimetric_, refit_time_: As in scikit-learn.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import SGDClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> search = ThriftySearchCV(
    ...     SGDClassifier(random_state=0),
    ...     {"alpha": [1e-4, 1e-2], "loss": ["hinge", "log_loss"]},
    ...     max_epochs=3,
    ...     cv=0.3,
    ... )
    >>> search.fit(X, y).best_score_ > 0.6, search.predict(X[:2]).tolist()
    (True, [0, 0])
    """

    def __init__(  # noqa: PLR0913 (the arguments of a scikit-learn search and of a study)
        self,
        estimator: Any,
        param_distributions: Mapping[str, Any],
        *,
        scoring: Any = None,
        max_epochs: int | None = None,
        algorithm: Algorithm | None = None,
        cv: Any = None,
        refit: bool | str = True,
        random_state: int = 0,
        storage: Storage | str | None = None,
        name: str | None = None,
        resource: str = "auto",
        resource_per_epoch: int = 1,
        n_jobs: int | None = None,
        executor: ExecutorConfig | None = None,
        error_score: float | Literal["raise"] = np.nan,
        verbose: bool | int = 0,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.estimator = estimator
        self.param_distributions = param_distributions
        self.scoring = scoring
        self.max_epochs = max_epochs
        self.algorithm = algorithm
        self.cv = cv
        self.refit = refit
        self.random_state = random_state
        self.storage = storage
        self.name = name
        self.resource = resource
        self.resource_per_epoch = resource_per_epoch
        self.n_jobs = n_jobs
        self.executor = executor
        self.error_score = error_score
        self.verbose = verbose
        self.observers = observers

    # -- searching --------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, **params: Any) -> Self:
        """Run the search, and train the best configuration on all data.

        Ctrl-C ends the search and keeps the results so far.

        Args:
            X: Features.
            y: Targets.
            groups: Groups for the splitter.
            params: Further arguments of the estimator's ``fit``. Those with one entry per sample
                are split like the data. In a pipeline they go to the last step:
                ``clf__sample_weight``.

        Raises:
            UsageError: An argument or the estimator is invalid.
            ThriftyError: The search was stopped before it had any result.
            Exception: All configurations failed, or one failed with ``error_score="raise"``; this
                is its own error.
        """
        algorithm, executor = self._algorithm(), self._executor()
        if y is None and get_tags(self.estimator).target_tags.required:
            raise UsageError(
                f"{type(self.estimator).__name__} requires y to be passed, but the target y is None"
            )
        X, y = indexable(X, y)
        task = self._task(Samples(X=X, y=y, params=params), groups)
        self._check_space(task, algorithm)
        seed = int(self.random_state)
        with tempfile.TemporaryDirectory(prefix="thrifty-") as folder:
            # Without a storage, the study exists only during the fit.
            storage = (
                Storage(url="sqlite://", checkpoints=folder)
                if self.storage is None
                else self.storage
            )
            study = Study(
                task,
                task.space.space,
                algorithm=algorithm,
                metric=str(self.refit) if self.multimetric_ else "score",
                mode="max",  # scores of scikit-learn are better if they are larger
                storage=storage,
                name=self.name or _name(task, algorithm=algorithm, seed=seed),
                seed=seed,
            )
            study.run(executor=executor, progress=bool(self.verbose), observers=self.observers)
        self.study_ = study
        self._note_results(study, task)
        if self.refit:
            self._refit(task, study)
        return self

    def _algorithm(self) -> Algorithm:
        if isinstance(self.random_state, bool) or not isinstance(
            self.random_state, int | np.integer
        ):
            raise UsageError(
                f"random_state is {self.random_state!r}; it must be an integer, so that the search "
                "can be repeated"
            )
        if self.algorithm is None:
            return Hyperband(
                max_epochs=DEFAULT_EPOCHS if self.max_epochs is None else self.max_epochs
            )
        if self.max_epochs not in (None, self.algorithm.max_epochs):
            raise UsageError(
                f"max_epochs is {self.max_epochs}, but {self.algorithm!r} has its own; leave "
                "max_epochs out"
            )
        return self.algorithm

    def _executor(self) -> ExecutorConfig:
        if self.executor is None:
            workers = joblib.effective_n_jobs(self.n_jobs)
            return Local(workers=workers, devices=("cpu",), pack="solo", pack_size=1)
        if self.n_jobs is not None:
            raise UsageError("n_jobs and executor both say where to train; leave one of them out")
        return self.executor

    def _task(self, samples: Samples, groups: Any) -> EstimatorTask:
        resource = Resource.of(
            self.estimator, name=self.resource, per_epoch=self.resource_per_epoch
        )
        self.scorer_ = check_scoring(self.estimator, self.scoring)
        self.multimetric_ = isinstance(self.scoring, list | tuple | set | dict) or isinstance(
            self.refit, str
        )
        if callable(self.refit):
            raise UsageError(
                f"{type(self).__name__} takes no function for refit: trials are compared while "
                "they train, by one score; give refit=True, or False and choose from cv_results_"
            )
        if self.multimetric_ and not isinstance(self.refit, str):
            raise UsageError(
                f"scoring has several scorers and refit is {self.refit!r}; name the scorer that "
                "decides: refit='accuracy'"
            )
        splits = self._splits(samples, groups)
        self.n_splits_ = len(splits)
        return EstimatorTask(
            self.estimator,
            samples,
            space=ParamSpace.of(self.param_distributions),
            splits=splits,
            scorer=self.scorer_,
            resource=resource,
        )

    def _splits(self, samples: Samples, groups: Any) -> list[tuple[Any, Any]]:
        cv, classifier = self.cv, is_classifier(self.estimator)
        if isinstance(cv, float):
            if not 0.0 < cv < 1.0:
                raise UsageError(f"cv is {cv!r}; a share to hold out is between 0 and 1")
            stratified = classifier and type_of_target(samples.y) in ("binary", "multiclass")
            kind = StratifiedShuffleSplit if stratified else ShuffleSplit
            cv = kind(1, test_size=cv, random_state=self.random_state)
        return list(
            check_cv(cv, samples.y, classifier=classifier).split(samples.X, samples.y, groups)
        )

    def _check_space(self, task: EstimatorTask, algorithm: Algorithm) -> None:
        space = task.space.space
        learner, prefix = last_step(self.estimator)
        counted = f"{prefix}{task.resource.name}"
        if counted in space.names:
            raise UsageError(
                f"{counted!r} is what epochs raise, so it cannot be searched for; drop it from "
                "param_distributions, "
                "or name another resource"
            )
        for name in space.names:
            if (
                prefix
                and not name.startswith(prefix)
                and space.changes_over_time(name, max_epochs=algorithm.max_epochs)
            ):
                raise UsageError(
                    f"{name!r} has a schedule, but only {type(learner).__name__}, the last step, "
                    "is trained in epochs; "
                    "give it fixed values"
                )

    # -- results ----------------------------------------------------------------------

    def _note_results(self, study: Study, task: EstimatorTask) -> None:
        failed = [trial for trial in study.trials if trial.state == "failed"]
        reported = [trial for trial in study.trials if trial.epochs and trial.state != "failed"]
        if failed and (self.error_score == "raise" or not reported):
            self._raise_failure(study, task, failed[0].number)
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(study.trials)} configurations failed; their score is "
                f"{self.error_score}. "
                f"The first one, {failed[0].config}: {failed[0].error}",
                FitFailedWarning,
                stacklevel=3,
            )
        best = study.best_trial
        self.cv_results_ = results_table(
            study, task.space, num_splits=self.n_splits_, error_score=self.error_score
        )
        self.best_index_ = best.number
        self.best_params_ = task.space.values(best.config)
        self.best_score_ = best.value
        self.best_epochs_ = best.epochs

    def _raise_failure(self, study: Study, task: EstimatorTask, number: int) -> None:
        """Train a failed trial again, to raise its error itself: the study stores only the text."""
        trial = study.trials[number]
        timeline = Timeline(trial.config, epochs=study.algorithm.max_epochs)
        train_alone(task, timeline, seed=study.seed, epochs=study.algorithm.max_epochs)
        raise ThriftyError(f"configuration {trial.config} failed: {trial.error}")

    def _refit(self, task: EstimatorTask, study: Study) -> None:
        began = time.perf_counter()
        everything = task.on_everything()
        timeline = Timeline(study.best_trial.config, epochs=study.algorithm.max_epochs)
        backend, _ = train_alone(everything, timeline, seed=study.seed, epochs=self.best_epochs_)
        fitted = backend.trial.task
        assert isinstance(fitted, EstimatorTask)
        self.best_estimator_ = fitted.folds[0].whole()
        self.refit_time_ = time.perf_counter() - began
        if hasattr(self.best_estimator_, "feature_names_in_"):
            self.feature_names_in_ = self.best_estimator_.feature_names_in_

    # -- the best estimator -----------------------------------------------------------

    @available_if(_best_has("predict"))  # type: ignore[untyped-decorator]
    def predict(self, X: Any) -> Any:
        """Predict with the best estimator."""
        return self._best().predict(X)

    @available_if(_best_has("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Return the best estimator's class probabilities."""
        return self._best().predict_proba(X)

    @available_if(_best_has("predict_log_proba"))  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of the best estimator's class probabilities."""
        return self._best().predict_log_proba(X)

    @available_if(_best_has("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Any:
        """Return the best estimator's decision function."""
        return self._best().decision_function(X)

    @available_if(_best_has("transform"))  # type: ignore[untyped-decorator]
    def transform(self, X: Any) -> Any:
        """Transform the samples with the best estimator."""
        return self._best().transform(X)

    def score(self, X: Any, y: Any = None) -> float:
        """Score the best estimator with the search's scorer (of several, the one that decides)."""
        targets = () if y is None else (y,)
        score = self.scorer_(self._best(), X, *targets)
        return float(score[self.refit] if isinstance(score, Mapping) else score)

    @property
    def classes_(self) -> Any:
        """Classes of the best estimator, if it is a classifier."""
        return self._best().classes_

    @property
    def n_features_in_(self) -> int:
        """Number of features seen in ``fit``."""
        return int(self._best().n_features_in_)

    def _best(self) -> Any:
        self._check_refit()
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    def _check_refit(self) -> None:
        if not self.refit:
            # An AttributeError, so that hasattr returns False.
            raise AttributeError(
                f"this {type(self).__name__} has refit=False, so there is no best estimator; train "
                "one with best_params_"
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags = inner.classifier_tags
        tags.regressor_tags = inner.regressor_tags
        tags.target_tags = inner.target_tags
        tags.input_tags = inner.input_tags
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # The study holds the data. The results are kept.
        return {name: value for name, value in state.items() if name != "study_"}


def _name(task: EstimatorTask, *, algorithm: Algorithm, seed: int) -> str:
    """Return a name that is equal for equal searches."""
    learner, _ = last_step(task.estimator)
    with asking_legacy():  # keeps the names of existing studies
        identity = dict(task.identity())
    what = [identity, task.space.space.to_json(), repr(algorithm), seed]
    return f"{type(learner).__name__}-{fingerprint(what)[:12]}"


def results_table(
    study: Study, space: ParamSpace, *, num_splits: int, error_score: Any
) -> dict[str, Any]:
    """Return ``cv_results_``: columns by name, one row per trial."""
    trials = study.trials
    curves = [study._current_ledger().curve(trial.number) for trial in trials]
    params = [space.values(trial.config) for trial in trials]
    table: dict[str, Any] = {
        "params": params,
        "n_epochs": np.array([trial.epochs for trial in trials]),
        "state": np.array([trial.state for trial in trials]),
    }
    for name in space.space.names:
        table[f"param_{name}"] = _column(name, params)
    last = [
        curve[-1] if curve and trial.state != "failed" else {}
        for trial, curve in zip(trials, curves, strict=True)
    ]
    names = dict.fromkeys(n for metrics in last for n in metrics if not _is_of_split(n))
    for name in names:
        splits = np.array([
            [metrics.get(f"split{split}_{name}", error_score) for split in range(num_splits)]
            for metrics in last
        ])
        for split in range(num_splits):
            table[f"split{split}_test_{name}"] = splits[:, split]
        means = splits.mean(axis=1)
        table[f"mean_test_{name}"] = means
        table[f"std_test_{name}"] = splits.std(axis=1)
        # A configuration without a score ranks behind all others.
        behind = np.nan_to_num(means, nan=np.nanmin(means) - 1.0)
        table[f"rank_test_{name}"] = rankdata(-behind, method="min").astype(np.int32)
    return table


def _column(name: str, params: list[dict[str, Any]]) -> np.ma.MaskedArray[Any, Any]:
    """Return the values of a parameter, masked where a configuration does not have it."""
    column = np.ma.MaskedArray(np.empty(len(params), dtype=object), mask=True)
    for row, values in enumerate(params):
        if name in values:
            column[row] = values[name]
    return column


def _is_of_split(name: str) -> bool:
    return name.startswith("split") and name[5:].partition("_")[0].isdigit()
