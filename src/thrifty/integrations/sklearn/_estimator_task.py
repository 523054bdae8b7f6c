"""A scikit-learn estimator trained one epoch at a time, on all folds of a cross-validation.

Also: search spaces of scikit-learn, and estimators as text."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
import sklearn
import torch
from sklearn.base import clone, is_classifier
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics._scorer import _BaseScorer, _MultimetricScorer, _PassthroughScorer
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.metaestimators import _safe_split
from sklearn.utils.validation import check_is_fitted

from thrifty.core import CheckpointError, SpaceError, UsageError
from thrifty.integrations._adapters import Describe, described
from thrifty.pack import HyperParameters, Trainable
from thrifty.space import Choice, Condition, Domain, Float, Int, Schedule, Space

from ._estimator_state import EstimatorState, classes_in


PARTIAL_FIT = "partial_fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Definition of an epoch: a ``partial_fit`` pass, or a warm start with ``per_epoch`` more.

    ``total`` says whether the parameter counts from the beginning (trees) or from the last call of
    ``fit`` (iterations).
    """

    name: str
    per_epoch: int
    total: bool

    @classmethod
    def of(cls, estimator: Any, *, name: str, per_epoch: int) -> Resource:
        """Return the definition of an epoch for an estimator.

        ``"auto"`` takes the first that works of ``partial_fit``, ``n_estimators`` and ``max_iter``.

        Raises:
            UsageError: The estimator supports neither ``partial_fit`` nor warm start, or not the
                given resource.

        >>> from sklearn.ensemble import RandomForestClassifier
        >>> Resource.of(RandomForestClassifier(), name="auto", per_epoch=5)
        Resource(name='n_estimators', per_epoch=5, total=True)
        """
        learner, _ = last_step(estimator)
        params = learner.get_params(deep=False)
        grows = [n for n in ("n_estimators", "max_iter") if n in params and "warm_start" in params]
        if isinstance(per_epoch, bool) or not isinstance(per_epoch, int) or per_epoch < 1:
            raise UsageError(
                f"resource_per_epoch is {per_epoch!r}; it must be a whole number, 1 or more"
            )
        if name == "auto":
            name = PARTIAL_FIT if hasattr(learner, PARTIAL_FIT) else next(iter(grows), "auto")
        known = hasattr(learner, name) if name == PARTIAL_FIT else name in params
        if not known or (name != PARTIAL_FIT and "warm_start" not in params):
            raise UsageError(
                f"{type(learner).__name__} cannot be trained an epoch at a time"
                f"{'' if name == 'auto' else f' by {name!r}'}; it needs partial_fit, or warm_start "
                "with a parameter "
                "that says how far (n_estimators, max_iter, or the one that resource names)"
            )
        boosting = HistGradientBoostingClassifier | HistGradientBoostingRegressor
        # Solvers count iterations anew in each call of fit.
        total = name != "max_iter" or isinstance(learner, boosting)
        return cls(name=name, per_epoch=per_epoch, total=total)

    def start(self, learner: Any) -> None:
        """Prepare a fresh learner."""
        if self.name != PARTIAL_FIT:
            learner.set_params(warm_start=True)

    def train(self, learner: Any, fit: Callable[..., Any]) -> None:
        """Prepare a learner for its next epoch, and train it by calling ``fit``."""
        if self.name != PARTIAL_FIT:
            done = learner.get_params(deep=False)[self.name] if _is_fitted(learner) else 0
            learner.set_params(**{self.name: (done if self.total else 0) + self.per_epoch})
        with warnings.catch_warnings():
            # Ignore the warning: an epoch of a solver normally ends before convergence.
            warnings.simplefilter("ignore", ConvergenceWarning)
            fit()


def _is_fitted(learner: Any) -> bool:
    try:
        check_is_fitted(learner)
    except NotFittedError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Training data: features, targets, and other per-sample arguments of ``fit``."""

    X: Any
    y: Any
    params: Mapping[str, Any]

    def take(self, estimator: Any, rows: Any, *, train: Any = None) -> Samples:
        """Return some of the rows.

        Args:
            estimator: The estimator that uses them.
            rows: The rows to return.
            train: Rows of the training set, if ``rows`` are not the training set.
        """
        X, y = _safe_split(estimator, self.X, self.y, rows, train)
        params = {
            name: _safe_indexing(value, rows) if _is_of_samples(value, self.X) else value
            for name, value in self.params.items()
        }
        return Samples(X=X, y=y, params=params)


@dataclass(slots=True, kw_only=True)
class Fold:
    """An estimator in training on one fold.

    It consists of the user's estimator, its preprocessing steps, its learner, the preprocessed
    data, and the test data as they were given.
    """

    estimator: Any
    preparation: Any
    learner: Any
    train: Samples
    test: Samples | None
    given_test: Samples | None

    def whole(self) -> Any:
        """Return the user's estimator, fitted, including any preprocessing steps."""
        if self.preparation is None:
            return self.learner
        name, _ = self.estimator.steps[-1]
        self.estimator.steps = [*self.preparation.steps, (name, self.learner)]
        return self.estimator


class EstimatorTask(Trainable):
    """Trains one configuration of an estimator on every fold; a metric is the mean over the folds.

    The metrics are ``score`` (or the names of several scorers) and those of each fold:
    ``split0_score``, ... After training, ``folds`` holds the folds of the last trial.
    """

    def __init__(
        self,
        estimator: Any,
        samples: Samples,
        *,
        space: ParamSpace,
        splits: Sequence[tuple[Any, Any]],
        scorer: Callable[..., Any] | None,
        resource: Resource,
    ) -> None:
        self.estimator = estimator
        self._samples = samples
        self.space = space
        self._splits = splits
        self._scorer = scorer
        self.resource = resource
        self._codec = EstimatorState(
            classes_in(estimator, *(o for options in space.objects.values() for o in options))
        )
        self._identity: dict[str, str] | None = None
        self.folds: list[Fold] = []
        """Folds of this trial."""

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the estimator, the data, the folds, the scorer and the budget."""
        samples = self._samples
        return {
            "estimator": self.estimator,
            "data": (samples.X, samples.y, dict(samples.params)),
            "splits": list(self._splits),
            "scorer": self._scorer,
            "resource": repr(self.resource),
            "objects": dict(self.space.objects),
        }

    def _legacy_identity(self) -> Mapping[str, str]:
        samples = self._samples
        if self._identity is None:
            self._identity = {
                "class": "thrifty.integrations.ThriftySearchCV",
                "estimator": described(self.estimator, otherwise=by_content),
                "data": joblib.hash((samples.X, samples.y, dict(samples.params))),
                "splits": joblib.hash(list(self._splits)),
                "scorer": described(self._scorer, otherwise=by_content),
                "resource": repr(self.resource),
                "objects": described(dict(self.space.objects), otherwise=by_content),
                "scikit-learn": sklearn.__version__,
            }
        return self._identity

    def on_everything(self) -> EstimatorTask:
        """Return the same task for all samples at once, without a score."""
        rows = np.arange(_num_rows(self._samples.X) or 0)
        return EstimatorTask(
            self.estimator,
            self._samples,
            space=self.space,
            splits=[(rows, None)],
            scorer=None,
            resource=self.resource,
        )

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Fit the preprocessing steps and make a fresh learner, for each fold."""
        values = self.space.values(hp)
        self.folds = [self._fold(values, train, test) for train, test in self._splits]

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Train one epoch on each fold, with the hyper-parameters of that epoch."""
        _, prefix = last_step(self.estimator)
        # Skip objects: they were set once, and may be fitted by now.
        values = {
            name.removeprefix(prefix): value
            for name, value in hp.items()
            if name.startswith(prefix) and name not in self.space.objects
        }
        for fold in self.folds:
            fold.learner.set_params(**values)
            self.resource.train(fold.learner, lambda fold=fold: self._fit(fold, prefix))

    def evaluate(self) -> Mapping[str, float]:
        """Return the scores of each fold and their means."""
        metrics: dict[str, float] = {}
        by_name: dict[str, list[float]] = {}
        for number, fold in enumerate(self.folds):
            for name, score in self._scores(fold).items():
                metrics[f"split{number}_{name}"] = score
                by_name.setdefault(name, []).append(score)
        return {name: float(np.mean(scores)) for name, scores in by_name.items()} | metrics

    def state(self) -> Any:
        """Return the learners; ``setup`` fits the preprocessing again, with the same result."""
        return {"learners": self._codec.write([fold.learner for fold in self.folds])}

    def load_state(self, state: Any) -> None:
        """Restore the learners that ``state`` returned.

        Raises:
            CheckpointError: The state belongs to something else, or an earlier version pickled it.
        """
        kept = state["learners"]
        if isinstance(kept, torch.Tensor):
            raise CheckpointError(
                "an earlier version of thrifty has kept these estimators by pickle, which is not "
                "read any more"
            )
        learners = self._codec.read(kept)
        for fold, learner in zip(self.folds, learners, strict=True):
            fold.learner = learner

    def _fold(self, values: Mapping[str, Any], train: Any, test: Any) -> Fold:
        fresh = {name: clone(value, safe=False) for name, value in values.items()}
        whole = clone(self.estimator).set_params(**fresh)
        learner, _ = last_step(whole)
        self.resource.start(learner)
        samples = self._samples.take(whole, train)
        given = held_out = None if test is None else self._samples.take(whole, test, train=train)
        preparation = whole[:-1] if isinstance(whole, Pipeline) and len(whole) > 1 else None
        if preparation is not None:
            X = preparation.fit_transform(samples.X, samples.y)
            samples = Samples(X=X, y=samples.y, params=samples.params)
            if held_out is not None:
                X = preparation.transform(held_out.X)
                held_out = Samples(X=X, y=held_out.y, params=held_out.params)
        return Fold(
            estimator=whole,
            preparation=preparation,
            learner=learner,
            train=samples,
            test=held_out,
            given_test=given,
        )

    def _fit(self, fold: Fold, prefix: str) -> None:
        samples = fold.train
        options = {name.removeprefix(prefix): value for name, value in samples.params.items()}
        targets = () if samples.y is None else (samples.y,)
        if self.resource.name != PARTIAL_FIT:
            fold.learner.fit(samples.X, *targets, **options)
            return
        fit = fold.learner.partial_fit
        if is_classifier(fold.learner) and "classes" in inspect.signature(fit).parameters:
            # A fold or a batch need not contain all classes.
            options["classes"] = _classes(fold.learner, self._samples.y)
        fit(samples.X, *targets, **options)

    def _scores(self, fold: Fold) -> dict[str, float]:
        if fold.test is None or self._scorer is None:
            return {}
        test, estimator = fold.test, fold.learner
        if not _needs_predictions_only(self._scorer):  # it may read features, or steps
            assert fold.given_test is not None
            test, estimator = fold.given_test, fold.whole()
        targets = () if test.y is None else (test.y,)
        scores = self._scorer(estimator, test.X, *targets)
        if not isinstance(scores, Mapping):
            scores = {"score": scores}
        return {name: float(score) for name, score in scores.items()}


def _needs_predictions_only(scorer: Any) -> bool:
    """Return whether a scorer gives a learner and prepared features what it gives a pipeline."""
    parts = scorer._scorers.values() if isinstance(scorer, _MultimetricScorer) else [scorer]
    return all(isinstance(each, _BaseScorer | _PassthroughScorer) for each in parts)


def last_step(estimator: Any) -> tuple[Any, str]:
    """Return the learner and the prefix of its parameters.

    The learner is the estimator itself, or the last step of a pipeline.
    """
    if isinstance(estimator, Pipeline):
        name, learner = estimator.steps[-1]
        return learner, f"{name}__"
    return estimator, ""


def _classes(learner: Any, y: Any) -> Any:
    if isinstance(learner, MultiOutputClassifier):
        return [np.unique(column) for column in np.asarray(y).T]
    return np.unique(np.asarray(y))


def _is_of_samples(value: Any, X: Any) -> bool:
    return _num_rows(value) is not None and _num_rows(value) == _num_rows(X)


def _num_rows(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return shape[0] if len(shape) else None
    return len(value) if isinstance(value, list | tuple) else None


# -- search spaces of scikit-learn -----------------------------------------------------------------


def by_content(value: Any, describe: Describe) -> str:
    """Describe estimators by class and parameters, other objects by a digest of their content.

    Different objects never have the same description.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from thrifty.integrations._adapters import described
    >>> described(LogisticRegression(), otherwise=by_content) == described(
    ...     LogisticRegression(C=1.0), otherwise=by_content
    ... )
    True
    """
    kind = describe(type(value))
    if hasattr(value, "get_params"):
        return f"{kind}({describe(value.get_params(deep=False))})"
    try:
        return f"{kind}:{joblib.hash(value)}"
    except (pickle.PicklingError, AttributeError, TypeError):
        return f"{value!r} at {id(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpace:
    """A search space, and the objects that its positions refer to.

    ``objects`` maps each hyper-parameter whose options are not plain values (estimators, functions)
    to these options. The space contains their positions.
    """

    space: Space
    objects: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, distributions: object) -> ParamSpace:
        """Return the search space of ``param_distributions``.

        Values may be domains, schedules, lists, SciPy distributions or fixed values.

        Raises:
            SpaceError: It is not a dictionary, or a value is none of these.

        >>> from scipy.stats import loguniform
        >>> ParamSpace.of({"alpha": loguniform(1e-5, 1e-1), "loss": ["hinge", "log_loss"]}).space
        Space(alpha=Float(low=1e-05, high=0.1, log=True, step=None, conditions=()),
        loss=Choice(options=('hinge', 'log_loss'), conditions=()))
        """
        if not isinstance(distributions, Mapping) or not all(
            isinstance(n, str) for n in distributions
        ):
            raise SpaceError(
                f"param_distributions is {distributions!r}; give a dictionary from a parameter's "
                "name to what it may be"
            )
        objects: dict[str, tuple[Any, ...]] = {}
        params: dict[str, Any] = {}
        for name, value in distributions.items():
            params[name] = _template(name, value)
            if params[name] is None and value is not None:
                objects[name] = tuple(value)
                params[name] = Choice(range(len(objects[name])))
        return cls(space=Space(**params), objects=objects)

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration as ``set_params`` takes it."""
        return {
            name: self.objects[name][value] if name in self.objects else value
            for name, value in config.items()
        }


@dataclass(frozen=True, slots=True, repr=False)
class Distributed(Domain):
    """Values drawn from a SciPy distribution, or from any object with ``rvs(random_state=)``."""

    distribution: Any
    conditions: tuple[Condition, ...] = ()

    def sample(self, rng: np.random.Generator) -> Any:
        """Draw one value."""
        # All distributions that scikit-learn accepts take its own kind of random stream.
        stream = check_random_state(int(rng.integers(2**32)))
        return _item(self.distribution.rvs(random_state=stream))

    def levels(self, num: int) -> tuple[Any, ...]:
        """Return at most ``num`` values: the midpoints of equally likely parts."""
        if not hasattr(self.distribution, "ppf"):
            raise SpaceError(f"{self!r} has no quantiles to make a grid of; give a list of values")
        middles = (np.arange(num) + 0.5) / num
        return tuple(dict.fromkeys(_item(self.distribution.ppf(q)) for q in middles))

    def size(self) -> float:
        """Return infinity, because the number of values is unknown."""
        return math.inf

    def when(self, **parents: Any) -> Distributed:
        """Return the same domain, active only when other hyper-parameters have these values."""
        conditions = Float(0, 1).when(**parents).conditions
        return dataclasses.replace(self, conditions=(*self.conditions, *conditions))

    def __repr__(self) -> str:
        frozen = self.distribution
        if hasattr(frozen, "dist"):
            arguments = [*map(repr, frozen.args), *(f"{k}={v!r}" for k, v in frozen.kwds.items())]
            return f"{frozen.dist.name}({', '.join(arguments)})"
        # An address in memory would make it a different study in each process.
        return described(frozen, otherwise=by_content)


def _template(name: str, value: Any) -> Any:
    """Return the entry in the space; None for options that must be stored in ``objects``."""
    if hasattr(value, "rvs"):
        return _domain(value)
    if isinstance(value, np.ndarray) or (hasattr(value, "tolist") and hasattr(value, "iloc")):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Choice(list(value)) if all(map(_is_plain, value)) else None
    if _is_plain(value):
        return value
    raise SpaceError(
        f"param_distributions[{name!r}] is {value!r}; give a list of values, a distribution with "
        "rvs, a domain such as "
        "thrifty.Float(1e-5, 1e-1, log=True), or a schedule"
    )


def _domain(distribution: Any) -> Domain:
    """Return the equivalent domain where there is one, because samplers can use it best.

    An equivalent domain has the same values with the same probabilities.
    """
    name = getattr(getattr(distribution, "dist", None), "name", "")
    if name in ("uniform", "loguniform", "reciprocal", "randint"):
        low, high = (_item(end) for end in distribution.support())
        _, loc, _ = distribution.dist._parse_args(*distribution.args, **distribution.kwds)
        if name == "randint":
            return Int(int(low), int(high))
        if name == "uniform":
            return Float(low, high)
        if not loc:
            return Float(low, high, log=True)
    return Distributed(distribution)


def _is_plain(value: Any) -> bool:
    """Return whether the space can hold the value and returns it unchanged."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float | np.floating):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str | np.generic | Domain | Schedule)


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value
