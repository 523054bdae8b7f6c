"""Fitted scikit-learn estimators as bytes, and back without running code that is not theirs."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from thrifty.core import TaskError


PROTOCOL = 4

_BUILTINS = frozenset({
    "bool", "bytearray", "complex", "dict", "float", "frozenset", "int", "list", "object", "range", "set", "slice", "str", "tuple",
})  # fmt: skip
_BUILDERS: Mapping[str, frozenset[str]] = {
    "builtins": _BUILTINS,
    "collections": frozenset({"OrderedDict", "defaultdict", "deque"}),
    "copyreg": frozenset({"_reconstructor"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy.random._mt19937": frozenset({"MT19937"}),
    "numpy.random._pcg64": frozenset({"PCG64"}),
    "numpy.random.bit_generator": frozenset({"SeedSequence", "__pyx_unpickle_SeedSequence"}),
    "numpy.random._pickle": frozenset({
        "__bit_generator_ctor",
        "__generator_ctor",
        "__randomstate_ctor",
    }),
}
"""What is needed to put together arrays, random streams and containers; each of them does no more than that."""
_SCALARS = frozenset({"bool", "bool_", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "str_"})  # fmt: skip
_PACKAGES = ("sklearn", "scipy.sparse", "scipy.interpolate")


class EstimatorBytes:
    """Writes fitted estimators as bytes, and reads them: ``kinds`` are the classes that they are made of.

    Reading makes arrays, containers, and instances of classes from scikit-learn and the packages of ``kinds``. No function is
    called but those that put NumPy's own objects together, and nothing else is imported.

    >>> from sklearn.linear_model import SGDClassifier
    >>> codec = EstimatorBytes([SGDClassifier])
    >>> codec.read(codec.write([SGDClassifier(alpha=0.5)]))[0].alpha
    0.5
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        # by name, so that classes that were typed at a prompt, and reach a worker by value, are found
        self._own = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in kinds}
        roots = {kind.__module__.split(".")[0] for kind in self._own.values()}
        self._packages = (*_PACKAGES, *sorted(roots - {"__main__", "builtins", "sklearn"}))

    def write(self, estimators: list[Any]) -> bytes:
        """The bytes of fitted estimators.

        Raises:
            TaskError: something in them cannot be kept, or would not be read again.
        """
        buffer = io.BytesIO()
        try:
            _Writer(buffer, self._own).dump(estimators)
        except Exception as error:
            raise TaskError(
                f"the state of {_names(estimators)} cannot be kept: {type(error).__name__}: {error}"
            ) from error
        return buffer.getvalue()

    def read(self, data: bytes) -> list[Any]:
        """The estimators that ``write`` took.

        Raises:
            TaskError: these are bytes of something else.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error"
                )  # another version's estimators are no state to go on from
                estimators = _Reader(io.BytesIO(data), self._own, self._packages).load()
        except Exception as error:
            raise TaskError(f"not the state of an estimator: {error}") from error
        if not isinstance(estimators, list):
            raise TaskError(f"not the state of an estimator: a {type(estimators).__name__}")
        return estimators


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, own: Mapping[str, type]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._names = {kind: name for name, kind in own.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(obj) if isinstance(obj, type) else None


class _Reader(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, own: Mapping[str, type], packages: tuple[str, ...]
    ) -> None:
        super().__init__(file)
        self._own = own
        self._packages = packages

    def persistent_load(self, pid: Any) -> type:
        try:
            return self._own[pid]
        except (KeyError, TypeError):
            raise pickle.UnpicklingError(f"{pid!r} is no class of the estimator") from None

    def find_class(self, module: str, name: str) -> Any:
        if name in _BUILDERS.get(module, ()) or (module == "numpy" and name in _SCALARS):
            return super().find_class(module, name)
        # a dot would lead from a class to whatever hangs on its module
        if "." not in name and self._is_theirs(module):
            found = super().find_class(module, name)
            # classes of Cython modules are made by a function of their own
            if name.startswith("__pyx_unpickle_") or self._is_class(found):
                return found
        raise pickle.UnpicklingError(
            f"it holds {module}.{name}, which is not made from a checkpoint: only arrays and classes of "
            f"{', '.join(self._packages)}"
        )

    def _is_class(self, found: Any) -> bool:
        return isinstance(found, type) and self._is_theirs(found.__module__)

    def _is_theirs(self, module: str) -> bool:
        return any(
            module == package or module.startswith(f"{package}.") for package in self._packages
        )


def _names(estimators: list[Any]) -> str:
    return ", ".join(sorted({type(estimator).__name__ for estimator in estimators}))
