"""The classes that the state of an estimator may contain."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator


HELPERS = frozenset({
    "sklearn._loss.link:HalfLogitLink",
    "sklearn._loss.link:IdentityLink",
    "sklearn._loss.link:Interval",
    "sklearn._loss.link:LogLink",
    "sklearn._loss.link:LogitLink",
    "sklearn._loss.link:MultinomialLogit",
    "sklearn._loss.loss:AbsoluteError",
    "sklearn._loss.loss:ExponentialLoss",
    "sklearn._loss.loss:HalfBinomialLoss",
    "sklearn._loss.loss:HalfGammaLoss",
    "sklearn._loss.loss:HalfMultinomialLoss",
    "sklearn._loss.loss:HalfPoissonLoss",
    "sklearn._loss.loss:HalfSquaredError",
    "sklearn._loss.loss:HalfTweedieLoss",
    "sklearn._loss.loss:HalfTweedieLossIdentity",
    "sklearn._loss.loss:HuberLoss",
    "sklearn._loss.loss:PinballLoss",
    "sklearn.cluster._birch:_CFNode",
    "sklearn.cluster._birch:_CFSubcluster",
    "sklearn.ensemble._hist_gradient_boosting.predictor:TreePredictor",
    "sklearn.neural_network._stochastic_optimizers:AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers:SGDOptimizer",
})
"""Classes of scikit-learn that are not estimators but parts of them."""

CALLED = frozenset({
    "sklearn._loss._loss:CyAbsoluteError",
    "sklearn._loss._loss:CyExponentialLoss",
    "sklearn._loss._loss:CyHalfBinomialLoss",
    "sklearn._loss._loss:CyHalfGammaLoss",
    "sklearn._loss._loss:CyHalfMultinomialLoss",
    "sklearn._loss._loss:CyHalfPoissonLoss",
    "sklearn._loss._loss:CyHalfSquaredError",
    "sklearn._loss._loss:CyHalfTweedieLoss",
    "sklearn._loss._loss:CyHalfTweedieLossIdentity",
    "sklearn._loss._loss:CyHuberLoss",
    "sklearn._loss._loss:CyPinballLoss",
    "sklearn.linear_model._sgd_fast:EpsilonInsensitive",
    "sklearn.linear_model._sgd_fast:Hinge",
    "sklearn.linear_model._sgd_fast:ModifiedHuber",
    "sklearn.linear_model._sgd_fast:SquaredEpsilonInsensitive",
    "sklearn.linear_model._sgd_fast:SquaredHinge",
    "sklearn.tree._tree:Tree",
})
"""Extension classes, which are constructed by a call with numbers and arrays."""

_SCALARS = frozenset({
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "str_",
})  # fmt: skip


class RefusedTypeError(TypeError):
    """A class that is not allowed in an estimator's state."""

    def __init__(self, kind: type | str) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"
        super().__init__(
            f"{name} is not made from a checkpoint: only arrays, plain values, the estimators of "
            "scikit-learn and what "
            "they are made of, and classes of your estimators' own packages"
        )


class KnownTypes:
    """Looks up allowed classes by their names.

    Allowed are the estimators of scikit-learn, ``HELPERS``, ``CALLED``, the classes of the
    estimators that are trained (``kinds``), and other classes of *their* packages, because the
    user's code has chosen those packages.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        # Look these up by name: a class typed at a prompt reaches a worker by value and cannot be
        # imported.
        self._own = {_name(kind): kind for kind in kinds}
        roots = {kind.__module__.partition(".")[0] for kind in self._own.values()}
        self._roots = roots - {"__main__", "builtins", "sklearn", "numpy", "scipy"}

    def name_of(self, kind: type) -> str:
        """Return the name by which ``find`` finds a class.

        Raises:
            RefusedTypeError: ``find`` does not find the class.
        """
        name = _name(kind)
        if self.find(name) is not kind:
            raise RefusedTypeError(kind)
        return name

    def find(self, name: str) -> Any:
        """Return the class of a name.

        Raises:
            RefusedTypeError: The class does not exist or is not allowed.
        """
        if name in self._own:
            return self._own[name]
        module, _, attribute = name.partition(":")
        root = module.partition(".")[0]
        if root != "sklearn" and root not in self._roots:
            raise RefusedTypeError(name)
        try:
            found = getattr(_module(module), attribute)
        except (ImportError, AttributeError, ValueError):
            raise RefusedTypeError(name) from None
        if not isinstance(found, type) or _name(found) != name:
            raise RefusedTypeError(name)  # a function, or a class defined elsewhere
        if root in self._roots or name in HELPERS or name in CALLED:
            return found
        if issubclass(found, BaseEstimator):
            return found
        raise RefusedTypeError(name)

    def name_of_value(self, kind: type) -> str:
        """Return the name of a class that is itself a value, such as ``dtype=np.float32``."""
        if kind.__module__ == "numpy" and kind.__name__ in _SCALARS:
            return f"numpy:{kind.__name__}"
        return self.name_of(kind)

    def value_of(self, name: str) -> Any:
        """Return the class that ``name_of_value`` named."""
        module, _, attribute = name.partition(":")
        if module == "numpy" and attribute in _SCALARS:
            return getattr(np, attribute)
        return self.find(name)


def check_native(name: str, arguments: Sequence[Any], state: Any) -> None:
    """Reject trees whose parts are inconsistent, because scikit-learn's C code does not check them.

    Args:
        name: Name of the class to construct.
        arguments: Arguments of its constructor.
        state: Attributes to set.

    Raises:
        ValueError: The parts are inconsistent.
    """
    if name == "sklearn.tree._tree:Tree":
        num_features, num_classes, num_outputs = arguments
        nodes = state["nodes"]
        if not (
            0 < num_outputs == len(num_classes)
            and state["node_count"] == len(nodes) == len(state["values"])
        ):
            raise ValueError("a tree of another size than it says")
        split = nodes["left_child"] != -1
        _check_ways(nodes, split, ("left_child", "right_child"))
        _check_range(nodes["feature"][split], num_features)
    elif name.endswith(":TreePredictor"):
        nodes = state["nodes"]
        split = nodes["is_leaf"] == 0
        _check_ways(nodes, split, ("left", "right"))
        _check_range(nodes["feature_idx"][split], None)
        sets = [state["binned_left_cat_bitsets"], state["raw_left_cat_bitsets"]]
        used = nodes["bitset_idx"][split & (nodes["is_categorical"] != 0)]
        _check_range(used, min(len(each) for each in sets))


def _check_ways(nodes: np.ndarray, split: np.ndarray, children: tuple[str, str]) -> None:
    at = np.flatnonzero(split)
    for name in children:
        child = nodes[name][split].astype(np.int64)
        # A child comes after its parent, so that every path ends.
        if np.any(child <= at) or np.any(child >= len(nodes)):
            raise ValueError("a tree whose nodes lead out of it")


def _check_range(numbers: np.ndarray, end: int | None) -> None:
    found = numbers.astype(np.int64)
    if np.any(found < 0) or (end is not None and np.any(found >= end)):
        raise ValueError("a tree that refers to features or categories that do not exist")


def _module(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
