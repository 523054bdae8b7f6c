"""Fitted estimators as plain data come back unchanged, and reading makes no other objects."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.cluster import Birch, MiniBatchKMeans
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
)
from sklearn.linear_model import Perceptron, PoissonRegressor, SGDClassifier, SGDRegressor
from sklearn.mixture import BayesianGaussianMixture
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neural_network import MLPClassifier

from tests.integrations.test_sklearn import SGD, Fragile, X, Y, search
from thrifty.core import CheckpointError, TaskError
from thrifty.integrations.sklearn import _estimator_types
from thrifty.integrations.sklearn._estimator_state import EstimatorState
from thrifty.pack import pack_state, unpack_state
from thrifty.run import state_from_arrays, state_to_arrays
from thrifty.search import SuccessiveHalving
from thrifty.store import Store


pytestmark = pytest.mark.slow


RANDOM = np.random.RandomState
FITTED = [
    SGDClassifier(random_state=RANDOM(0)).fit(X, Y),
    SGDRegressor(loss="huber", random_state=0).fit(X, Y),
    MLPClassifier((3,), random_state=0).partial_fit(X, Y, classes=[0, 1, 2]),
    MLPClassifier((3,), solver="sgd", random_state=0).partial_fit(X, Y, classes=[0, 1, 2]),
    RandomForestClassifier(3, random_state=RANDOM(0)).fit(X, Y),
    ExtraTreesRegressor(3, random_state=0).fit(X, Y),
    IsolationForest(n_estimators=3, random_state=0).fit(X),
    HistGradientBoostingClassifier(max_iter=3, random_state=0).fit(X, Y),
    HistGradientBoostingRegressor(
        max_iter=3, categorical_features=[0], max_features=0.5, random_state=0
    ).fit(X.astype(int), Y),
    GradientBoostingClassifier(n_estimators=3, random_state=0).fit(X, Y),
    GradientBoostingRegressor(n_estimators=3, random_state=0).fit(X, Y),
    BaggingClassifier(SGDClassifier(), n_estimators=2, random_state=0).fit(X, Y),
    MultinomialNB().fit(X, Y),
    PoissonRegressor(max_iter=1000).fit(X, Y),
    Perceptron(random_state=0).fit(X, Y),
    Birch(n_clusters=None).partial_fit(X),
    BayesianGaussianMixture(n_components=2, max_iter=1000, random_state=0).fit(X),
    MultiOutputClassifier(SGD).fit(X, np.c_[Y, Y > 0]),
    MiniBatchKMeans(2, n_init=1, random_state=0).fit(X),
    SGDClassifier(random_state=0).fit(X, Y).sparsify(),
    SGDClassifier(random_state=0).fit(X, np.array(["a", "b", "ü"], dtype=object)[Y]),
    Fragile().partial_fit(X, Y, classes=np.arange(3)),
]


def codec_of(*estimators):
    return EstimatorState([type(each) for each in estimators])


def kept(state):
    """Return a state as it comes back from a checkpoint."""
    packed = unpack_state(pack_state(state))
    return {**packed, "tree": json.loads(json.dumps(packed["tree"]))}


@pytest.mark.parametrize("estimator", FITTED, ids=lambda e: type(e).__name__)
def test_estimators_come_back_as_they_were(estimator):
    codec = codec_of(estimator)
    written = codec.write([estimator])
    (again,) = codec.read(kept(written))
    assert np.array_equal(again.predict(X), estimator.predict(X))
    assert again.get_params(deep=False).keys() == estimator.get_params(deep=False).keys()
    rewritten = codec.write([again])
    assert rewritten["tree"] == written["tree"]
    assert torch.equal(rewritten["data"], written["data"])


@pytest.mark.parametrize(
    "estimator",
    [e for e in FITTED if hasattr(e, "partial_fit") and type(e).__name__ != "Fragile"],
    ids=lambda e: type(e).__name__,
)
def test_estimators_go_on_as_if_nothing_had_happened(estimator):
    """A restored estimator trains on as if it had never been stored.

    Optimizers and streams of random numbers are part of the state, and shared objects stay shared.
    """
    codec = codec_of(estimator)
    ways = [codec.read(kept(codec.write([estimator])))[0], copy.deepcopy(estimator)]
    Y_ = np.c_[Y, Y > 0] if isinstance(estimator, MultiOutputClassifier) else Y
    if estimator is FITTED[-2]:
        Y_ = np.array(["a", "b", "ü"], dtype=object)[Y]
    if hasattr(estimator, "densify") and sparse.issparse(estimator.coef_):
        for way in ways:
            way.densify()
    for way in ways:
        way.partial_fit(X, Y_)
    states = [codec.write([way]) for way in ways]
    assert states[0]["tree"] == states[1]["tree"]
    assert torch.equal(states[0]["data"], states[1]["data"])


def test_what_is_one_thing_stays_one():
    network = MLPClassifier((3,), random_state=0).partial_fit(X, Y, classes=[0, 1, 2])
    network._optimizer.params = [*network.coefs_]
    (again,) = codec_of(network).read(kept(codec_of(network).write([network])))
    assert again._optimizer.params[0] is again.coefs_[0]


@pytest.mark.parametrize(
    "value",
    [
        1 + 2j, float("nan"), float("-inf"), b"bytes", slice(1, None, 2), range(3), np.float32,
        np.dtype("<f4"), np.int8(3), np.str_("text"), {1: 2, "a": (None, True)},
        frozenset({1}), {2},
        np.array([]), np.zeros((0, 3)), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3),
        np.array([("a", 1)], dtype=[("name", "U3"), ("number", "i2", (1,))]),
        np.array(["x", None], dtype=object),
        sparse.csc_array(np.eye(2)), np.random.SeedSequence(5), 2**70,
    ],
    ids=repr,
)  # fmt: skip
def test_values_come_back_as_they_were(value):
    estimator = SGDClassifier()
    estimator.extra_ = value
    codec = codec_of(estimator)
    (again,) = codec.read(kept(codec.write([estimator])))
    assert type(again.extra_) is type(value)
    assert codec.write([again])["tree"] == codec.write([estimator])["tree"]
    if isinstance(value, np.ndarray):
        assert again.extra_.flags.f_contiguous == value.flags.f_contiguous


@pytest.mark.parametrize("stream", ["MT19937", "PCG64", "Philox"])
def test_streams_go_on(stream):
    estimator = SGDClassifier()
    estimator.rng_ = np.random.Generator(getattr(np.random, stream)(3))
    estimator.rng_.random(5)
    (again,) = codec_of(estimator).read(kept(codec_of(estimator).write([estimator])))
    assert again.rng_.random() == estimator.rng_.random()
    assert again.rng_.spawn(1)[0].random() == estimator.rng_.spawn(1)[0].random()


def tampered(change):
    """Return a state of a classifier whose description has been tampered with."""
    codec = codec_of(SGD)
    state = codec.write([SGDClassifier()])
    nodes = json.loads(state["tree"])
    change(nodes)
    return codec, {**state, "tree": json.dumps(nodes)}


NAMES = [
    "os:system", "posix:system", "subprocess:Popen", "builtins:eval", "builtins:getattr",
    "joblib:load",
    "sklearn.datasets:fetch_openml", "numpy:memmap", "numpy:load", "this:s",
    "sklearn.base:warnings.os",
    "sklearn.datasets._base:Path", "sklearn.base:clone", "sklearn.utils._joblib:Parallel",
    "sklearn:os",
    "sklearn.tree._tree:DepthFirstTreeBuilder", "thrifty.integrations:ThriftySearchCV",
    "sklearn..os:x", ":", "",
    "__main__:x", "functools:partial", "operator:methodcaller",
    "sklearn.base:BaseEstimator.__init__",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["object", "called", "type"])
def test_names_lead_to_classes_of_estimators_only(name, kind):
    node = {
        "is": kind,
        "of": name,
        "number": 9,
        "state": {"is": "dict", "items": [], "number": 8},
        "arguments": ["true"],
    }
    codec, state = tampered(lambda nodes: nodes.append(node))
    with pytest.raises(CheckpointError, match="is not made from a checkpoint"):
        codec.read(state)
    assert "this" not in sys.modules, "nothing is imported for it"


def has_split(nodes):
    return nodes["left_child"] != -1


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["nodes"]["left_child"].__setitem__(0, 10**6),
        lambda state: state["nodes"]["right_child"].__setitem__(0, -5),
        lambda state: state["nodes"]["left_child"].__setitem__(0, 0),
        lambda state: state["nodes"]["feature"].__setitem__(0, 10**6),
        lambda state: state["nodes"]["feature"].__setitem__(0, -7),
        lambda state: state.update(node_count=10**6),
        lambda state: state.update(values=state["values"][:1]),
    ],
)
def test_trees_that_lead_out_of_themselves_are_refused(change, monkeypatch):
    """Tree nodes that point outside of their tree are refused.

    scikit-learn follows the nodes of a tree without a check of where they lead.
    """
    forest = RandomForestClassifier(1, random_state=0).fit(X, Y)
    real = _estimator_types.check_native

    def changed(name, arguments, state):
        if name.endswith(":Tree"):
            state["nodes"] = state["nodes"].copy()
            change(state)
        real(name, arguments, state)

    monkeypatch.setattr("thrifty.integrations.sklearn._estimator_state.check_native", changed)
    with pytest.raises(CheckpointError, match="a tree"):
        codec_of(forest).read(codec_of(forest).write([forest]))


@pytest.mark.parametrize(("field", "value"), [("left", 10**6), ("right", 0), ("feature_idx", -1)])
def test_boosted_trees_too(field, value, monkeypatch):
    boosted = HistGradientBoostingClassifier(max_iter=1, random_state=0).fit(X, Y)
    boosted._predictors[0][0].nodes[field][0] = value
    with pytest.raises(CheckpointError, match="a tree"):
        codec_of(boosted).read(codec_of(boosted).write([boosted]))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(format=1),
        lambda s: s.update(format="\x1b"),
        lambda s: s.pop("tree"),
        lambda s: s.update(tree="[" * 100_000),
        lambda s: s.update(tree="no json"),
        lambda s: s.update(tree="{}"),
        lambda s: s.update(tree='[{"is": "nothing"}]'),
        lambda s: s.update(tree='[{"is": "again", "number": 7}]'),
        lambda s: s.update(
            tree='[{"is": "array", "dtype": "O", "shape": [1], "order": "C", "begin": 0}]'
        ),
        lambda s: s.update(tree=(
            '[{"is": "array", "dtype": "f8", "shape": [1000000000000], "order": "C", '
            '"begin": 0}]'
        )),
        lambda s: s.update(
            tree='[{"is": "array", "dtype": "f8", "shape": [-1], "order": "C", "begin": 0}]'
        ),
        lambda s: s.update(
            tree='[{"is": "array", "dtype": "f8", "shape": [1], "order": "C", "begin": -8}]'
        ),
        lambda s: s.update(tree=(
            '[{"is": "generator", "state": {"is": "dict", "number": 1, "items": '
            '[["bit_generator", "default_rng"]]}, "seeds": null, "number": 0}]'
        )),
        lambda s: s.update(data=torch.zeros(0, dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(change):
    codec = codec_of(SGD)
    state = codec.write([FITTED[0]])
    change(state)
    with pytest.raises(CheckpointError, match="not the state of an estimator"):
        codec.read(state)


def test_a_state_of_another_version_is_refused():
    codec = codec_of(SGD)
    state = codec.write([FITTED[0]])
    state["tree"] = state["tree"].replace(__import__("sklearn").__version__, "0.0.1")
    with pytest.raises(CheckpointError, match="not the state of an estimator"):
        codec.read(state)


@pytest.mark.parametrize(
    "value",
    [
        (i for i in range(3)),
        print,
        np.sin,
        lambda: 1,
        OrderedDict(a=1),
        RANDOM,
        Path(),
        np.ma.array([1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_said(value):
    estimator = Fragile()
    estimator.lock_ = value
    with pytest.raises(TaskError, match="the state of Fragile cannot be kept"):
        codec_of(estimator).write([estimator])


def test_what_was_pickled_is_trained_again(tmp_path, caplog):
    """Pickled checkpoints of earlier versions count as lost: nothing in them is unpickled."""
    options = {"name": "old", "storage": f"sqlite:///{tmp_path}/old.db", "refit": False}
    algorithm = SuccessiveHalving(max_epochs=4, num_trials=4, eta=2)
    expected = search(algorithm=algorithm, **options).fit(X, Y).study_
    with Store.open(options["storage"]) as store, store._engine.begin() as connection:
        folder = store.checkpoints
        for ref in store.plans.load(1).checkpoints:
            state = state_from_arrays(*folder.read(ref))
            assert "learners" in unpack_state(state)
            old = pack_state({
                "learners": torch.frombuffer(bytearray(pickle.dumps([Runs()])), dtype=torch.uint8)
            })
            arrays, meta = state_to_arrays(old)
            new = folder.write(
                ref.path.partition("/")[0],
                node=ref.node,
                epoch=ref.epoch,
                tensors=arrays,
                meta=meta,
            )
            connection.exec_driver_sql(
                "UPDATE checkpoints SET digest = ?, num_bytes = ? WHERE node = ? AND epoch = ?",
                (new.digest, new.num_bytes, ref.node, ref.epoch),
            )
        connection.exec_driver_sql("DELETE FROM epochs WHERE epoch > 2")
        connection.exec_driver_sql("DELETE FROM checkpoints WHERE epoch > 2")
        connection.exec_driver_sql("DELETE FROM trials")
        connection.exec_driver_sql("DELETE FROM log")
        connection.exec_driver_sql("UPDATE studies SET state = 'stopped'")
    again = search(algorithm=algorithm, **options).fit(X, Y).study_
    assert [trial.curve for trial in again.trials] == [trial.curve for trial in expected.trials]
    assert "kept these estimators by pickle" in caplog.text
    assert not Runs.has_run


class Runs:
    """An object whose unpickling would run code."""

    has_run = False

    def __reduce__(self):
        return setattr, (Runs, "has_run", True)
