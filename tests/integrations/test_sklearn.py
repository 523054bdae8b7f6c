from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import sparse, stats
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.cluster import MiniBatchKMeans
from sklearn.datasets import load_diabetes, load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier, SGDRegressor
from sklearn.metrics import accuracy_score, make_scorer
from sklearn.model_selection import GroupKFold, KFold, StratifiedShuffleSplit, cross_val_score
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tests.depth import draws
from thrifty.core import SpaceError, UsageError
from thrifty.integrations import ThriftySearchCV
from thrifty.integrations.sklearn._estimator_task import Distributed, ParamSpace, Resource
from thrifty.run import Local, train_alone
from thrifty.search import ASHA, GridSearch, RandomSearch, SuccessiveHalving
from thrifty.space import Choice, Float, Int, Space, Step, Timeline


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


X, Y = load_iris(return_X_y=True)
SGD = SGDClassifier(random_state=0)


def search(estimator=SGD, params=None, **options):
    given = {"cv": 0.3, "algorithm": GridSearch(max_epochs=2), **options}
    if given.get("max_epochs"):
        del given["algorithm"]
    return ThriftySearchCV(estimator, params or {"alpha": [1e-4, 1e-2]}, **given)


# -- as scikit-learn wants it ------------------------------------------------------------------


@pytest.mark.sample(10)
@parametrize_with_checks(
    [
        ThriftySearchCV(
            SGDClassifier(random_state=0),
            {"alpha": [1e-4, 1e-2]},
            max_epochs=2,
            cv=2,
            error_score="raise",
        ),
        ThriftySearchCV(
            SGDRegressor(random_state=0),
            {"alpha": [1e-4, 1e-2]},
            max_epochs=2,
            cv=2,
            error_score="raise",
        ),
    ][: draws(1, 2)]
)
def test_it_is_an_estimator(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in check_estimator
        check(estimator)


# -- what is found -----------------------------------------------------------------------------


def by_hand(estimator, epochs, *, train, test, seed=0):
    """Train in a plain loop, the slow reference."""
    for _ in range(epochs):
        estimator.partial_fit(X[train], Y[train], classes=np.unique(Y))
    return estimator.score(X[test], Y[test])


def test_scores_are_those_of_a_plain_loop():
    folds = list(KFold(3, shuffle=True, random_state=1).split(X))
    found = search(cv=folds, algorithm=GridSearch(max_epochs=4)).fit(X, Y)
    for row, alpha in enumerate([1e-4, 1e-2]):
        scores = [by_hand(clone(SGD).set_params(alpha=alpha), 4, train=a, test=b) for a, b in folds]
        for split, score in enumerate(scores):
            assert found.cv_results_[f"split{split}_test_score"][row] == score
        assert found.cv_results_["mean_test_score"][row] == pytest.approx(np.mean(scores))
        assert found.cv_results_["std_test_score"][row] == pytest.approx(np.std(scores))
    assert found.n_splits_ == 3
    assert found.best_score_ == max(found.cv_results_["mean_test_score"])
    assert found.cv_results_["rank_test_score"][found.best_index_] == 1
    assert found.best_params_ == found.cv_results_["params"][found.best_index_]


def test_the_best_is_trained_again_on_all_data():
    found = search(algorithm=GridSearch(max_epochs=3)).fit(X, Y)
    twin = clone(SGD).set_params(**found.best_params_)
    for _ in range(found.best_epochs_):
        twin.partial_fit(X, Y, classes=np.unique(Y))
    assert np.array_equal(twin.coef_, found.best_estimator_.coef_)
    assert np.array_equal(found.predict(X), twin.predict(X))
    assert found.score(X, Y) == twin.score(X, Y)
    assert found.classes_.tolist() == [0, 1, 2]
    assert found.n_features_in_ == 4


SCHEDULES = {
    "learning_rate": "constant",
    "eta0": Choice([Step(0.1, [2]), Step(0.1, [3]), Step(0.1, [2, 4]), 0.1]),
    "alpha": [1e-4, 1e-2],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("estimator", "executor"),
    [
        (SGD, None),
        (SGDClassifier(), None),
        (SGDClassifier(), Local(workers=1, devices=("cpu",), pack_size=3)),
        (SGDClassifier(), Local(workers=2, devices=("cpu",), threads=1)),
    ],
    ids=["own seed", "ours", "packed", "processes"],
)
def test_sharing_never_changes_the_answer(estimator, executor):
    found = search(estimator, SCHEDULES, algorithm=GridSearch(max_epochs=6), executor=executor).fit(
        X, Y
    )
    study = found.study_
    assert study.savings.unique_epochs < study.savings.trial_epochs
    for trial in study.trials:
        _, metrics = train_alone(study.task, Timeline(trial.config, epochs=6), seed=0, epochs=6)
        assert [m["score"] for m in metrics] == list(trial.curve)


def test_a_schedule_is_followed():
    found = search(
        params={**SCHEDULES, "eta0": Step(0.1, [2]), "alpha": 1e-4},
        algorithm=GridSearch(max_epochs=3),
    ).fit(X, Y)
    twin = clone(SGD).set_params(learning_rate="constant", alpha=1e-4)
    for eta0 in (0.1, 0.1, 0.1 * 0.1):
        twin.set_params(eta0=eta0).partial_fit(X, Y, classes=np.unique(Y))
    assert np.array_equal(twin.coef_, found.best_estimator_.coef_)


WARM = [
    (
        RandomForestClassifier(random_state=0), {"max_depth": [1, 3]}, "n_estimators",
        lambda m: len(m.estimators_)
    ),
    (
        HistGradientBoostingClassifier(random_state=0), {"learning_rate": [0.1, 0.2]}, "max_iter",
        lambda m: m.n_iter_
    ),
    (
        GradientBoostingRegressor(random_state=0), {"max_depth": [1, 2]}, "n_estimators",
        lambda m: m.n_estimators_
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("estimator", "params", "name", "size"), WARM, ids=[type(w[0]).__name__ for w in WARM]
)
def test_warm_start_adds_so_much_in_each_epoch(estimator, params, name, size):
    found = search(estimator, params, resource_per_epoch=3).fit(X, Y)
    assert size(found.best_estimator_) == 6
    whole = clone(estimator).set_params(**found.best_params_, **{name: 6}).fit(X, Y)
    assert np.allclose(whole.predict(X), found.predict(X))
    assert not estimator.get_params().get("warm_start"), "what the user has is not changed"


def test_a_branch_of_a_warm_start_is_the_same_as_alone():
    rates = Choice([Step(0.3, [2]), Step(0.3, [3]), 0.3])
    found = search(
        GradientBoostingRegressor(random_state=0, subsample=0.5), {"learning_rate": rates},
        algorithm=GridSearch(max_epochs=4)
    ).fit(X, Y)  # fmt: skip
    assert found.study_.savings.unique_epochs == 4 + 2 + 1
    for trial in found.study_.trials:
        _, metrics = train_alone(
            found.study_.task, Timeline(trial.config, epochs=4), seed=0, epochs=4
        )
        assert [m["score"] for m in metrics] == list(trial.curve)


def test_a_solver_goes_on_from_where_it_was():
    with warnings.catch_warnings(record=True) as seen:
        found = search(
            LogisticRegression(),
            {"C": [1.0]},
            algorithm=GridSearch(max_epochs=3),
            resource_per_epoch=5,
        ).fit(X, Y)
    assert not seen, "an epoch need not converge"
    twin = LogisticRegression(warm_start=True, max_iter=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            twin.fit(X, Y)
    assert np.array_equal(twin.coef_, found.best_estimator_.coef_)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("estimator", "params", "data"),
    [
        (MLPClassifier((4,), random_state=0), {"alpha": [1e-4, 1e-1]}, (X, Y)),
        (MultinomialNB(), {"alpha": [0.1, 1.0]}, (X, Y)),
        (MultiOutputClassifier(SGD), {"estimator__alpha": [1e-4, 1e-1]}, (X, np.c_[Y, Y > 0])),
        (MiniBatchKMeans(3, random_state=0, n_init=1), {"n_clusters": [2, 3]}, (X,)),
        (SGDRegressor(random_state=0), {"alpha": [1e-4, 1e-1]}, load_diabetes(return_X_y=True)),
        (SGD, {"alpha": [1e-4, 1e-1]}, (X, np.array(["a", "b", "c"])[Y])),
        (SGD, {"alpha": [1e-4, 1e-1]}, (sparse.csr_array(X), Y)),
        (SGD, {"alpha": [1e-4, 1e-1]}, (X.tolist(), Y.tolist())),
        (
            make_pipeline(StandardScaler(), RandomForestClassifier(random_state=0)),
            {"randomforestclassifier__max_depth": [1, 3]},
            (X, Y),
        ),
    ],
)
def test_estimators_of_all_kinds(estimator, params, data):
    found = search(estimator, params).fit(*data)
    assert np.isfinite(found.best_score_)
    assert len(found.predict(data[0])) == len(data[-1])


def test_a_pipeline_is_fitted_on_the_training_folds_only():
    pipe = make_pipeline(StandardScaler(), PCA(random_state=0), SGD)
    params = {
        "pca__n_components": [1, 3],
        "sgdclassifier__eta0": [Step(0.1, [2]), 0.1],
        "sgdclassifier__learning_rate": "constant",
    }
    folds = list(KFold(2, shuffle=True, random_state=0).split(X))
    found = search(pipe, params, cv=folds, algorithm=GridSearch(max_epochs=3)).fit(X, Y)
    train, test = folds[0]
    for row, config in enumerate(found.cv_results_["params"]):
        if not isinstance(config["sgdclassifier__eta0"], Step):
            head = make_pipeline(
                StandardScaler(), PCA(config["pca__n_components"], random_state=0)
            ).fit(X[train])
            twin = clone(SGD).set_params(learning_rate="constant", eta0=0.1)
            for _ in range(3):
                twin.partial_fit(head.transform(X[train]), Y[train], classes=[0, 1, 2])
            assert (
                twin.score(head.transform(X[test]), Y[test])
                == found.cv_results_["split0_test_score"][row]
            )
    assert found.predict(X).shape == Y.shape
    assert isinstance(found.best_estimator_[0], StandardScaler)
    assert found.n_features_in_ == 4


def test_options_may_be_estimators_and_anything_else():
    pipe = make_pipeline(StandardScaler(), SGD)
    params = {
        "standardscaler": [StandardScaler(), MinMaxScaler(), "passthrough"],
        "sgdclassifier__alpha": [1e-4],
    }
    found = search(pipe, params).fit(X, Y)
    assert [type(p["standardscaler"]) for p in found.cv_results_["params"]] == [
        StandardScaler,
        MinMaxScaler,
        str,
    ]
    assert len(set(found.cv_results_["mean_test_score"])) > 1
    assert not hasattr(params["standardscaler"][0], "mean_"), "what the user has is not changed"


def test_an_option_of_what_learns_is_set_once():
    options = [SGDClassifier(random_state=0, alpha=alpha) for alpha in (1e-4, 10.0)]
    found = search(MultiOutputClassifier(SGD), {"estimator": options}).fit(X, np.c_[Y, Y > 0])
    assert found.best_params_["estimator"] is options[0]
    assert found.best_estimator_.estimators_[0].alpha == 1e-4


def test_data_frames_keep_their_names():
    frame, y = load_iris(return_X_y=True, as_frame=True)
    found = search().fit(frame, y)
    assert found.feature_names_in_.tolist() == list(frame.columns)
    assert found.predict(frame).shape == y.shape


def test_several_scorers():
    found = search(scoring=["accuracy", "f1_macro"], refit="f1_macro", cv=2).fit(X, Y)
    table = found.cv_results_
    assert {"mean_test_accuracy", "split1_test_f1_macro", "rank_test_f1_macro"} <= set(table)
    assert found.best_score_ == max(table["mean_test_f1_macro"])
    assert found.score(X, Y) != accuracy_score(Y, found.predict(X))
    with pytest.raises(UsageError, match="name the scorer that decides"):
        search(scoring=["accuracy", "f1_macro"]).fit(X, Y)


def test_a_scorer_of_ones_own():
    found = search(scoring=lambda estimator, X, y: -float(estimator.alpha)).fit(X, Y)
    assert found.best_params_ == {"alpha": 1e-4}
    assert found.best_score_ == -1e-4


def test_sample_weights_are_split_as_the_data_are():
    weights = np.where(Y == 2, 1e-9, 1.0)
    found = search().fit(X, Y, sample_weight=weights)
    twin = clone(SGD).set_params(**found.best_params_)
    for _ in range(2):
        twin.partial_fit(X, Y, classes=[0, 1, 2], sample_weight=weights)
    assert np.array_equal(twin.coef_, found.best_estimator_.coef_)


def test_groups_are_kept_together():
    groups = np.arange(len(Y)) % 5
    found = search(cv=GroupKFold(5)).fit(X, Y, groups=groups)
    assert found.n_splits_ == 5


def test_a_fold_knows_all_classes_even_those_it_has_not():
    found = search(cv=KFold(3), scoring=lambda estimator, X, y: len(estimator.classes_)).fit(X, Y)
    assert found.best_score_ == 3.0


def test_a_share_is_held_out_once():
    (train, test) = next(iter(StratifiedShuffleSplit(1, test_size=0.4, random_state=0).split(X, Y)))
    found = search(cv=0.4, params={"alpha": [1e-4]}).fit(X, Y)
    assert found.cv_results_["split0_test_score"][0] == by_hand(
        clone(SGD), 2, train=train, test=test
    )
    for cv in (0.0, 1.0, 1.5):
        with pytest.raises(UsageError, match="between 0 and 1"):
            search(cv=cv).fit(X, Y)


def test_hyperband_is_what_one_gets():
    found = search(params={"alpha": stats.loguniform(1e-6, 1e-1)}, max_epochs=9).fit(X, Y)
    epochs = found.cv_results_["n_epochs"]
    assert len(epochs) == 17
    assert sorted(set(epochs)) == [1, 3, 9]
    assert found.best_epochs_ == epochs[found.best_index_]


def test_without_refit_there_is_nothing_to_predict_with():
    found = search(refit=False).fit(X, Y)
    assert found.best_params_ in ({"alpha": 1e-4}, {"alpha": 1e-2})
    assert not hasattr(found, "predict")
    with pytest.raises(AttributeError, match="refit=False"):
        found.score(X, Y)


def test_only_what_the_estimator_can_is_there():
    assert not hasattr(search(), "predict_proba"), "the hinge loss has none"
    log = search(SGDClassifier(loss="log_loss", random_state=0)).fit(X, Y)
    assert np.allclose(np.exp(log.predict_log_proba(X)), log.predict_proba(X))
    assert log.decision_function(X).shape == (150, 3)
    assert not hasattr(log, "transform")
    assert search(MiniBatchKMeans(2, n_init=1, random_state=0), {"n_clusters": [2]}).fit(
        X
    ).transform(X).shape == (150, 2)
    with pytest.raises(NotFittedError):
        search().predict(X)


def test_a_search_within_a_cross_validation():
    assert cross_val_score(search(), X, Y, cv=2).mean() > 0.5


def test_a_pickled_search_predicts_and_leaves_the_data_behind():
    found = search().fit(X, Y)
    again = pickle.loads(pickle.dumps(found))
    assert np.array_equal(again.predict(X), found.predict(X))
    assert not hasattr(again, "study_")
    assert hasattr(found, "study_")


# -- kept in a database ------------------------------------------------------------------------


def test_a_search_in_a_database_goes_on(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    first = search(storage=url).fit(X, Y)
    assert search(storage=url).fit(X, Y).study_.name == first.study_.name
    assert search(storage=url).fit(X, Y).study_.trials[0].curve == first.study_.trials[0].curve
    assert search(storage=url).fit(X + 1, Y).study_.name != first.study_.name
    other = search(SGDClassifier(random_state=1), storage=url).fit(X, Y)
    assert other.study_.name != first.study_.name
    assert search(storage=url, name="mine").fit(X, Y).study_.name == "mine"


def test_functions_that_differ_are_different_searches():
    def scorer(sign):
        return lambda estimator, X, y: sign * estimator.alpha

    names = [
        search(scoring=s).fit(X, Y).study_.name
        for s in (scorer(1), scorer(-1), make_scorer(accuracy_score))
    ]
    assert len(set(names)) == 3


def test_without_a_database_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    search().fit(X, Y)
    assert not list(tmp_path.iterdir())


def test_observers_hear_of_it():
    class Heard:
        def __init__(self):
            self.num = 0

        def on_event(self, *event):
            self.num += 1

    heard = Heard()
    search(observers=[heard]).fit(X, Y)
    assert heard.num > 0


# -- what goes wrong ---------------------------------------------------------------------------


class Fragile(ClassifierMixin, BaseEstimator):
    """Classifier that works unless it is told to fail."""

    def __init__(self, fault="", bias=0):
        self.fault = fault
        self.bias = bias

    def partial_fit(self, X, y, classes=None):
        self.seen_ = getattr(self, "seen_", 0) + 1
        if self.fault and self.seen_ >= 2:
            raise ZeroDivisionError(self.fault)
        self.classes_ = classes
        return self

    fit = partial_fit

    def predict(self, X):
        return np.full(len(X), self.classes_[self.bias])


def test_a_configuration_that_fails_has_the_error_score():
    given = search(Fragile(), {"fault": ["", "oops", None]}, error_score=-1.0)
    with pytest.warns(
        FitFailedWarning, match=r"(?s)1 of 3 configurations failed.*ZeroDivisionError: oops"
    ):
        found = given.fit(X, Y)
    assert found.cv_results_["mean_test_score"].tolist()[1] == -1.0
    assert found.cv_results_["rank_test_score"].tolist() == [1, 3, 1]
    assert found.best_index_ == 0


def test_a_failed_configuration_without_a_score_is_last():
    with pytest.warns(FitFailedWarning):
        found = search(
            Fragile(), {"fault": ["oops", ""]}, scoring=lambda estimator, X, y: -5.0
        ).fit(X, Y)
    assert np.isnan(found.cv_results_["mean_test_score"][0])
    assert found.cv_results_["rank_test_score"].tolist() == [2, 1]


def test_a_configuration_that_fails_later_has_no_score_either():
    algorithm = SuccessiveHalving(max_epochs=3, num_trials=3, min_epochs=1)
    given = search(Fragile(), {"fault": ["oops"], "bias": [0, 1, 2]}, algorithm=algorithm)
    with pytest.warns(FitFailedWarning, match="1 of 3"):
        found = given.fit(X, Y)
    assert sorted(found.cv_results_["state"]) == ["failed", "stopped", "stopped"]
    failed = np.isnan(found.cv_results_["mean_test_score"])
    assert found.cv_results_["state"][failed].tolist() == ["failed"]


def test_errors_are_the_estimators_own():
    with pytest.raises(ZeroDivisionError, match="oops"):
        search(Fragile(), {"fault": ["", "oops"]}, error_score="raise").fit(X, Y)
    with pytest.raises(ZeroDivisionError, match="oops"):
        search(Fragile(), {"fault": ["oops", "oops too"]}).fit(X, Y)
    with pytest.raises(ValueError, match="Invalid parameter 'alhpa'"):
        search(params={"alhpa": [1.0]}).fit(X, Y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": Ridge()},
            "Ridge cannot be trained an epoch at a time; it needs partial_fit",
        ),
        (
            {"resource": "max_depth"},
            "SGDClassifier cannot be trained an epoch at a time by 'max_depth'",
        ),
        ({"estimator": Ridge(), "resource": "partial_fit"}, "by 'partial_fit'"),
        ({"resource_per_epoch": 0}, "resource_per_epoch is 0"),
        (
            {"resource": "max_iter", "params": {"max_iter": [1, 2]}},
            "'max_iter' is what epochs raise",
        ),
        ({"random_state": None}, "random_state is None"),
        ({"algorithm": ASHA(max_epochs=4, num_trials=2), "cv": 2}, None),
        ({"n_jobs": 2, "executor": Local(workers=1)}, "n_jobs and executor"),
        ({"params": 3}, "param_distributions is 3"),
        ({"params": {"alpha": object()}}, r"param_distributions\['alpha'\] is"),
    ],
)
def test_what_cannot_work_is_said_at_once(options, message):
    given = search(**options)
    if message is None:
        given.max_epochs = 9
        message = "max_epochs is 9, but ASHA"
    with pytest.raises(UsageError, match=message):
        given.fit(X, Y)


def test_only_the_last_step_may_follow_a_schedule():
    pipe = make_pipeline(PCA(), SGD)
    with pytest.raises(UsageError, match="'pca__n_components' has a schedule"):
        search(pipe, {"pca__n_components": Step(3, [1])}).fit(X, Y)


def test_resources_are_found():
    assert Resource.of(SGD, name="auto", per_epoch=1).name == "partial_fit"
    assert Resource.of(SGD, name="max_iter", per_epoch=1) == Resource(
        name="max_iter", per_epoch=1, total=False
    )
    assert Resource.of(
        make_pipeline(PCA(), RandomForestClassifier()), name="auto", per_epoch=2
    ).total


# -- spaces ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "domain"),
    [
        (stats.uniform(1, 2), Float(1.0, 3.0)),
        (stats.loguniform(1e-3, 1e-1), Float(1e-3, 1e-1, log=True)),
        (stats.randint(2, 5), Int(2, 4)),
        (stats.randint(2, 5, loc=3), Int(5, 7)),
        ([1, 2], Choice([1, 2])),
        ((1, 2), Choice([1, 2])),
        (range(3), Choice([0, 1, 2])),
        (np.array([0.5, 1.5]), Choice([0.5, 1.5])),
        ([(4,), (4, 4)], Choice([(4,), (4, 4)])),
        (Float(0, 1), Float(0, 1)),
        ("hinge", "hinge"),
        (None, None),
        ([None, True], Choice([None, True])),
    ],
)
def test_what_users_write_is_a_domain(given, domain):
    found = ParamSpace.of({"a": given})
    assert found.space["a"] == domain
    assert not found.objects


def test_what_no_space_can_hold_stands_beside_it():
    options = [np.nan, [1, 2], SGD]
    found = ParamSpace.of({"a": options})
    assert found.space["a"] == Choice([0, 1, 2])
    assert [found.values({"a": i})["a"] for i in range(3)] == options


@pytest.mark.parametrize("options", [[1.0, np.nan], [np.inf, 1.0], [1, (2, np.nan)]])
def test_numbers_that_are_not_finite_stand_beside_it_too(options):
    found = ParamSpace.of({"a": options})
    assert found.space["a"] == Choice([0, 1])
    assert found.values({"a": 1})["a"] is options[1]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_other_distributions_are_drawn_from_as_they_are(seed):
    domain = ParamSpace.of({"a": stats.norm(3, scale=2)}).space["a"]
    assert repr(domain) == "norm(3, scale=2)"
    draw = domain.sample(np.random.default_rng(seed))
    assert isinstance(draw, float)
    assert draw == domain.sample(np.random.default_rng(seed))
    assert domain.levels(1) == (3.0,)
    assert domain.size() == np.inf


def test_draws_of_a_distribution_are_its_own():
    # This is no Float: the logarithm of the part above 5 is uniform.
    shifted = ParamSpace.of({"a": stats.loguniform(1, 10, loc=5)}).space["a"]
    rng = np.random.default_rng(0)
    draws = [shifted.sample(rng) for _ in range(300)]
    assert stats.kstest(draws, stats.loguniform(1, 10, loc=5).cdf).pvalue > 1e-3


def test_conditions_on_a_distribution():
    space = Space(a=Choice([1, 2]), b=Distributed(stats.norm()).when(a=1))
    rng = np.random.default_rng(0)
    for config in (space.sample(rng) for _ in range(20)):
        assert ("b" in config) == (config["a"] == 1)


def test_a_distribution_without_quantiles_has_no_grid():
    class Dice:
        def rvs(self, random_state=None):
            return random_state.randint(1, 7)

    domain = ParamSpace.of({"a": Dice()}).space["a"]
    assert {domain.sample(np.random.default_rng(i)) for i in range(50)} == set(range(1, 7))
    with pytest.raises(SpaceError, match="no quantiles"):
        domain.levels(3)


def test_a_search_by_a_distribution_is_found_again(tmp_path):
    options = {
        "params": {"alpha": stats.expon(scale=1e-3)},
        "algorithm": RandomSearch(max_epochs=1, num_trials=2),
        "storage": f"sqlite:///{tmp_path}/s.db",
    }
    first, second = (search(**options).fit(X, Y).study_ for _ in range(2))
    assert (first.name, first.trials[0].config) == (second.name, second.trials[0].config)


def by_the_first_feature(estimator, X, y):
    """Weigh by a feature as the user knows it, and read a step."""
    assert estimator.named_steps["standardscaler"].mean_.shape == (4,)
    return accuracy_score(y, estimator.predict(X), sample_weight=X[:, 0])


def test_a_scorer_of_the_user_s_gets_the_whole_pipeline_and_the_data_as_they_are():
    pipe = make_pipeline(StandardScaler(), SGD)
    folds = list(KFold(2, shuffle=True, random_state=0).split(X))
    params = {"sgdclassifier__alpha": [SGD.alpha]}
    found = search(pipe, params, scoring=by_the_first_feature, cv=folds).fit(X, Y)
    train, test = folds[0]
    head = StandardScaler().fit(X[train])
    twin = clone(SGD)
    for _ in range(found.cv_results_["n_epochs"][0]):
        twin.partial_fit(head.transform(X[train]), Y[train], classes=[0, 1, 2])
    wanted = accuracy_score(
        Y[test], twin.predict(head.transform(X[test])), sample_weight=X[test, 0]
    )
    assert found.cv_results_["split0_test_score"][0] == pytest.approx(wanted)


def test_a_function_that_chooses_is_refused():
    with pytest.raises(UsageError, match="takes no function for refit"):
        search(refit=lambda table: 1).fit(X, Y)


def test_series_of_pandas_are_no_state(caplog):
    """Pandas keeps what it has computed from an index."""
    frame, y = load_iris(return_X_y=True, as_frame=True)
    search(cv=3).fit(frame, y)
    assert not caplog.messages


def test_a_forest_grows_in_each_comparison(recwarn):
    """An epoch that is trained again adds as many trees as the first time."""
    search(RandomForestClassifier(random_state=0), {"max_depth": [2, 4]}, n_jobs=1).fit(X, Y)
    assert not [each for each in recwarn if "does not fit new trees" in str(each.message)]
    forest = RandomForestClassifier(random_state=0)
    resource = Resource.of(forest, name="auto", per_epoch=3)
    resource.start(forest)
    for num in (3, 6, 9):
        resource.train(forest, lambda: forest.fit(X, Y))
        assert len(forest.estimators_) == num
