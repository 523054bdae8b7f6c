"""Gradients of a batch and of its parts: equal random draws for both, and their difference."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.hetero.training._learner import Reduction


_NOISE = 0.01
"""A gradient this much smaller than the largest one may consist of rounding errors only."""


class Pass(NamedTuple):
    """The result of one pass.

    Attributes:
        loss: Loss of its samples.
        weight: Weight of its samples in the mean.
        gradients: Gradients by parameter.
        values: Values that it left in buffers, attributes and closures, by name.
        eps: Machine epsilon of the coarsest precision in which anything was computed.
        draws: Text that describes its random draws; equal texts mean equal draws.
    """

    loss: float
    weight: float
    gradients: dict[str, Tensor]
    values: dict[str, Any]
    eps: float
    draws: str


class Comparison:
    """A comparison of a whole batch with its parts.

    Attributes:
        difference: Description of what differs; None if nothing does.
    """

    def __init__(
        self, passes: Sequence[Pass], sizes: Sequence[int], *, reduction: Reduction
    ) -> None:
        self.passes = passes
        self.sizes = sizes
        self.difference = self._difference(reduction)

    @property
    def draws(self) -> bool:
        """Whether the passes drew different random numbers, or may have."""
        return len({each.draws for each in self.passes}) > 1 or "?" in self.passes[0].draws

    @property
    def is_sum(self) -> bool:
        return self._difference("sum") is None

    @property
    def is_mean(self) -> bool:
        num, *parts = self.sizes
        return self._difference("mean", [size / num for size in parts]) is None

    def _difference(self, reduction: str, factors: Sequence[float] | None = None) -> str | None:
        whole, *parts = self.passes
        if not math.isfinite(whole.loss):
            return None  # training itself reports a loss that diverges
        if factors is None:
            total = sum(part.weight for part in parts)
            factors = [1.0 if reduction == "sum" else p.weight / (total or 1.0) for p in parts]
        counted = [(part, f) for part, f in zip(parts, factors, strict=True) if f]
        loss = sum(factor * part.loss for part, factor in counted)
        gradients = {
            name: sum((factor * part.gradients[name] for part, factor in counted), 0 * value)
            for name, value in whole.gradients.items()
        }
        sizes = {
            name: max((float(part.gradients[name].abs().max()) for part, _ in counted), default=0)
            for name, value in whole.gradients.items()
            if value.numel()
        }
        return largest_difference(whole, loss, gradients, eps=whole.eps, sizes=sizes)


def largest_difference(
    whole: Pass,
    loss: float,
    gradients: Mapping[str, Tensor],
    *,
    eps: float,
    sizes: Mapping[str, float] | None = None,
) -> str | None:
    """Describe the largest difference; return None if there is none beyond rounding.

    Half the digits of the precision have to agree. A tensor's difference is relative to its largest
    entry.
    """
    rough = math.sqrt(eps or torch.finfo(torch.float64).eps)
    if not math.isfinite(loss):
        return f"the loss is {whole.loss:.6g}, which differs ({loss})"
    if not math.isclose(loss, whole.loss, rel_tol=rough, abs_tol=rough * _NOISE):
        return f"the loss is {whole.loss:.6g}, which differs by {abs(loss - whole.loss):.3g}"
    largest = {
        name: max(float(value.abs().max()), (sizes or {}).get(name, 0.0))
        for name, value in whole.gradients.items()
        if value.numel() and value.isfinite().all()
    }
    overall = max(largest.values(), default=0.0)
    worst, said = 1.0, None
    for name, size in largest.items():
        gap = float((whole.gradients[name] - gradients[name]).abs().max())
        excess = gap / (rough * (size + _NOISE * overall)) if gap else 0.0
        if not excess <= worst:
            worst = excess if math.isfinite(excess) else math.inf
            said = f"the gradient of {name!r} differs by {gap / (size or 1.0):.2g} of its size"
    return said


def close(one: Any, other: Any, *, eps: float) -> bool:
    """Return whether two tensors or numbers agree to half the digits."""
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if one.shape != other.shape or one.is_complex() or other.is_complex():
        return torch.equal(one, other)
    rough = math.sqrt(eps or torch.finfo(torch.float64).eps)
    return torch.allclose(one.double(), other.double(), rtol=rough, atol=0, equal_nan=True)


class EqualDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills each random tensor with one number, drawn once for the whole tensor.

    A batch and its parts are then comparable: they draw equally often and get the same numbers.
    Dropout keeps all elements, ``randn`` gives one normal number for all elements, and ``randperm``
    gives the identity. Draws that depend on the values of a tensor (``torch.multinomial``) stay as
    they are.

    Attributes:
        unequal: Names of operations whose draws were not equalised.
        eps: Machine epsilon of the coarsest precision in which anything was computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unequal: set[str] = set()
        self.eps = 0.0

    def summary(self) -> str:
        """Return a text that is equal for passes that drew the same numbers.

        The text contains a question mark if equality cannot be determined.
        """
        # This reads the state and does not draw.
        state = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
        streams = hash((random.getstate(), bytes(state[1]), state[2]))
        return f"{streams}{'?' if self.unequal else ''}"

    def __torch_dispatch__(  # noqa: PLR0917 -- signature of torch
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            out = self._drawn(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel() > 1:
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return out

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        make = _MAKERS.get(name)
        # A check must not advance a generator that the user passed.
        given = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
        if make is not None:
            return make(func, args, given)
        if name.endswith("_") and isinstance(args[0], Tensor):
            return _in_place(func, args, given)
        if name.endswith("_like"):
            return _filled(func(args[0].new_empty(1), *args[1:], **given), args[0].shape, args[0])
        self.unequal.add(name)
        return func(*args, **kwargs)


def _filled(one: Tensor, shape: Any, like: Tensor | None = None) -> Tensor:
    out = one.reshape(()).expand(tuple(shape)).contiguous()
    return out if like is None else out.to(like.device)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fill a tensor in place, as ``uniform_``, ``normal_`` and similar operations do."""
    out: Tensor = args[0]
    if out.numel():
        out.copy_(func(out.new_empty(1), *args[1:], **kwargs).reshape(()).expand_as(out))
    return out


def _by_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw for operations with a ``size`` argument: ``rand``, ``randn``, ``randint``."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("size")
    size = args[at] if at < len(args) else kwargs["size"]
    if at < len(args):
        return _filled(func(*args[:at], [1], *args[at + 1 :], **kwargs), size)
    return _filled(func(*args, **{**kwargs, "size": [1]}), size)


def _bernoulli_(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Fill with the mean, so that ``bernoulli_(p).div_(p)`` is 1."""
    out, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    mean = p if out.is_floating_point() else p >= 0.5
    filled: Tensor = out.copy_(mean) if isinstance(mean, Tensor) else out.fill_(mean)
    return filled


def _bernoulli(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p")
    return args[0].clone() if p is None else torch.full_like(args[0], p)


def _native_dropout(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    x = args[0]
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw for ``torch.normal`` of a tensor of means, of standard deviations, or of a size."""
    mean, std = (*args, 1.0)[:2]
    like = next((each for each in (mean, std) if isinstance(each, Tensor)), None)
    if like is None:
        return _by_size(func, args, kwargs)
    return mean + std * like.new_empty(1).normal_()  # type: ignore[no-any-return]


def _randperm(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    options = {key: value for key, value in kwargs.items() if key in {"dtype", "device"}}
    return torch.arange(args[0], **options)


_MAKERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "rand": _by_size,
    "randn": _by_size,
    "randint": _by_size,
    "bernoulli_": _bernoulli_,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "normal": _normal,
    "randperm": _randperm,
}


# --- global streams of NumPy and Python

_OF_NUMPY = (
    "rand", "randn", "random", "random_sample", "randint", "uniform", "normal", "standard_normal",
    "beta", "binomial", "exponential", "gamma", "lognormal", "poisson", "choice", "permutation",
    "shuffle",
)  # fmt: skip
_OF_PYTHON = (
    "random", "uniform", "randint", "randrange", "gauss", "normalvariate", "betavariate", "choice",
    "choices", "sample", "shuffle",
)  # fmt: skip
_patching = threading.Lock()


@contextmanager
def equal_draws(seed: int) -> Iterator[EqualDraws]:
    """Give all samples the same draws from the global streams of torch, NumPy and Python.

    Functions of ``numpy.random`` and ``random`` are replaced for the calling thread. Each call
    draws afresh from the seed, and an array gets one number for all elements.
    """
    owner = threading.get_ident()
    with _patching:
        places = (
            (np.random, _OF_NUMPY, partial(np.random.RandomState, seed & 0xFFFFFFFF)),
            (random, _OF_PYTHON, partial(random.Random, seed)),
        )
        before = [
            (place, name, getattr(place, name)) for place, names, _ in places for name in names
        ]
        try:
            for place, names, stream in places:
                for name in names:
                    drawn = _one_for_all(getattr(place, name), name, stream, owner=owner)
                    setattr(place, name, drawn)
            with EqualDraws() as draws:
                yield draws
        finally:
            for place, name, function in before:
                setattr(place, name, function)


def _one_for_all(
    function: Callable[..., Any], name: str, stream: Callable[[], Any], *, owner: int
) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return function(*args, **kwargs)
        if name == "shuffle":
            return None
        if name == "permutation":
            return np.arange(args[0]) if isinstance(args[0], int) else np.array(args[0])
        out = getattr(stream(), name)(*args, **kwargs)
        if isinstance(out, np.ndarray) and out.size:
            out[...] = out.reshape(-1)[0]
        return out

    return drawn
