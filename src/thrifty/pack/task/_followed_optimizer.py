"""The torch optimizers of one model, kept up to date while hyper-parameters change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch

from thrifty.core import TaskError
from thrifty.pack._state import borrowed_streams

from ._optimizer import (
    Clipping,
    Optimizer,
    Optimizers,
    ParameterGroup,
    is_number,
    names_in,
    resolved,
)
from ._task import MISSING, HyperParameters, is_same_value, values_of


Method = Callable[[HyperParameters], Optimizer]
Options = tuple[tuple[Mapping[str, Any], ...], Clipping]
"""The options of each param group, and the limits of gradients, at one step."""

NOT_SAVED = frozenset({
    "params", "param_names", "foreach", "fused", "capturable", "differentiable",
})  # fmt: skip
"""Entries of param groups that name parameters, or say how this device computes a step."""
PROBE = 2.0**-10
"""The value that replaces an option of 0 to find its ratio; a power of two keeps that exact."""


class FollowedOptimizer:
    """A torch optimizer that follows a specification, or a method that returns one.

    An option of a param group is set only when the value that the specification gives it changes.
    A factory may have built a group with a value other than the given one, such as ten times the
    learning rate. That ratio is kept.

    Args:
        source: The specification, or a method that takes the hyper-parameters and returns one.
            The method is called again whenever a value that it reads has changed.
        parameters: The parameters that are trained, by name.
        values: The hyper-parameters to build with.

    Attributes:
        torch: The torch optimizer.
        groups: The param groups of the specification; a factory may have made others.
        read_when_built: Hyper-parameters that a method's result read only while it was built.
        clipping: The current limits of gradients.
        parameters: The parameters that it trains.

    Raises:
        TaskError: The optimizer cannot be built for this model.
    """

    def __init__(
        self,
        source: Optimizer | Method,
        parameters: Mapping[str, torch.nn.Parameter],
        values: Mapping[str, Any],
    ) -> None:
        self._source = source
        self._parameters = dict(parameters)
        self.parameters = tuple(self._parameters.values())
        self._names: set[str] = set()
        hp = HyperParameters(values)
        self._spec = self._call(hp)
        read = set(hp.names_read)
        self._read = values_of(hp, read)
        self._matches = self._spec.match(self._parameters.items())
        self.groups = self._spec.partition(
            self._parameters.items(), join=isinstance(source, Optimizer)
        )
        groups, self.clipping = self.options(values)
        if self._spec.groups:
            self.torch = self._spec.make_groups(self._parameters, self.groups, values)
        else:
            self.torch = self._spec.make(list(self._parameters.values()), values)
        self.read_when_built = frozenset(hp.names_read - read)
        self._check_made()
        self._given = [dict(groups[number]) for number in self._numbers]
        self._built: list[dict[str, tuple[Any, Any]]] = [
            {option: (value, group.get(option)) for option, value in given.items()}
            for given, group in zip(self._given, self.torch.param_groups, strict=True)
        ]
        self._values = values
        self._relations: dict[tuple[int, str], Callable[[Any], Any]] = {}

    @property
    def spec(self) -> Optimizer:
        """The specification for the last values."""
        return self._spec

    @property
    def names(self) -> frozenset[str]:
        """The hyper-parameters that the optimizer follows."""
        return frozenset(self._names)

    @property
    def partition(self) -> tuple[tuple[str, ...], ...]:
        """The parameter names of each param group of the specification."""
        return tuple(group.names for group in self.groups)

    # -- values --------------------------------------------------------------------------

    def options(self, values: Mapping[str, Any]) -> Options:
        """Return the options of each param group, and the limits of gradients, for some values.

        Raises:
            TaskError: The optimizer method returns another kind of optimizer than at first.
        """
        if any(
            not is_same_value(values.get(name, MISSING), value)
            for name, value in self._read.items()
        ):
            hp = HyperParameters(values)
            spec = self._call(hp)
            self.groups = self._regrouped(spec)
            self._spec, self._read = spec, values_of(hp, hp.names_read)
        return (
            tuple(resolved(group.options, values) for group in self.groups),
            self._spec.clipping(values),
        )

    def follow(self, values: Mapping[str, Any]) -> None:
        """Bring the torch optimizer up to date. Raises as ``options`` and ``apply`` do."""
        self.apply(self.options(values))

    def apply(self, options: Options) -> None:
        """Set the options that have changed.

        Raises:
            TaskError: A factory has built an option with no ratio to the value it was given.
        """
        groups, self.clipping = options
        for place, (number, group) in enumerate(
            zip(self._numbers, self.torch.param_groups, strict=True)
        ):
            given = self._given[place]
            for option, value in groups[number].items():
                if not _same(given.get(option), value):
                    group[option] = self._related(place, option)(value)
                    given[option] = value

    def forget(self) -> None:
        """Make the next ``follow`` set every followed option, after other code changed them."""
        for given, number in zip(self._given, self._numbers, strict=True):
            for option, value in self.groups[number].options.items():
                if self._read or any(names_in([value])):
                    given.pop(option, None)

    def check(self, moving: Iterable[str]) -> None:
        """Check that every group can follow the given hyper-parameters.

        Raises:
            TaskError: A factory has built an option with no ratio to the value it was given.
        """
        names = set(moving)
        for place, number in enumerate(self._numbers):
            for option, value in self.groups[number].options.items():
                if names & set(names_in([value])):
                    self._related(place, option)

    def _call(self, hp: HyperParameters) -> Optimizer:
        if isinstance(self._source, Optimizer):
            spec = self._source
        else:
            spec = self._source(hp)
            if not isinstance(spec, Optimizer):
                kind = type(spec)  # torch and thrifty have classes of the same names
                got = "None" if spec is None else f"an object of {kind.__module__}.{kind.__name__}"
                raise TaskError(
                    f"the task's optimizer(hp) returned {got}; it must return a specification "
                    "such as thrifty.SGD(lr=hp.lr)"
                )
            self._names |= hp.names_read
        self._names |= spec.names()
        return spec

    def _regrouped(self, spec: Optimizer) -> tuple[ParameterGroup, ...]:
        """Return the groups with the options from another call of the method."""
        was = self._spec
        change = None
        if not _same_factory(was.factory, spec.factory):
            change = f"{was!r} became {spec!r}"
        elif _shape(was) != _shape(spec):
            change = f"its options changed: {was!r} became {spec!r}"
        elif not _same_keys(was, spec) and spec.match(self._parameters.items()) != self._matches:
            change = "other parameters belong to its groups"
        if change is not None:
            raise TaskError(
                f"the task's optimizer(hp) returns another kind of optimizer while it trains: "
                f"{change}; let hyper-parameters that move change values of options only"
            )
        return tuple(
            ParameterGroup(names=group.names, options=spec.merged(self._matches[group.names[0]]))
            for group in self.groups
        )

    # -- what a factory built ------------------------------------------------------------

    def _check_made(self) -> None:
        """Record which group of the specification each param group follows."""
        if not hasattr(self.torch, "param_groups"):
            raise TaskError(
                f"{self._spec!r} made a {type(self.torch).__name__}; its factory must make a "
                f"torch optimizer"
            )
        name_of = {id(p): name for name, p in self._parameters.items()}
        self._held: list[tuple[str, ...]] = []
        for group in self.torch.param_groups:
            names = tuple(name_of.get(id(p), "") for p in group["params"])
            if "" in names:
                raise TaskError(
                    f"{self._spec!r} trains a parameter that the model does not have, so its "
                    f"value would not be in checkpoints; make it a parameter of the model"
                )
            self._held.append(names)
        if not self._spec.groups:
            self._numbers = [0] * len(self._held)
            return
        place_of = {frozenset(group.names): n for n, group in enumerate(self.groups)}
        found = [place_of.get(frozenset(names)) for names in self._held]
        if None in found or len(found) != len(self.groups):
            raise TaskError(
                f"{self._spec!r}: its factory makes param groups of its own, which cannot be "
                f"combined with groups=; use one of the two"
            )
        self._numbers = [number for number in found if number is not None]

    def _related(self, place: int, option: str) -> Callable[[Any], Any]:
        """Return the map from the specification's value of an option to a param group's value."""
        key = (place, option)
        if key not in self._relations:
            self._relations[key] = self._relation(place, option)
        return self._relations[key]

    def _relation(self, place: int, option: str) -> Callable[[Any], Any]:
        given, built = self._built[place][option]
        if self._spec.is_class and _same(given, built):
            return _itself
        if isinstance(given, tuple) and isinstance(built, tuple) and len(given) == len(built):
            parts = [self._ratio(place, option, part) for part in range(len(given))]
            return partial(_each, parts)
        return partial(_scaled, self._ratio(place, option, None))

    def _ratio(self, place: int, option: str, part: int | None) -> float | None:
        """Return the factor of an option; None to leave the value as it is."""
        given, built = (v if part is None else v[part] for v in self._built[place][option])
        if not (is_number(given) and is_number(built)):
            if not _same(given, built):
                raise self._unrelated(place, option)
            return None
        if given:
            return None if given == built else float(built) / float(given)
        if built:
            raise self._unrelated(place, option)
        return self._probed(place, option, part)

    def _probed(self, place: int, option: str, part: int | None) -> float | None:
        """Return the ratio where 0 became 0, by building another optimizer for stand-ins."""
        options = resolved(self._spec.options, self._values)
        value: float | tuple[Any, ...] = PROBE
        if part is not None:
            value = tuple(PROBE if n == part else v for n, v in enumerate(options[option]))
        stand_ins = [
            torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            for p in self._parameters.values()
        ]
        try:
            with borrowed_streams():
                made = self._spec.factory(stand_ins, **{**options, option: value})
            built = made.param_groups[place][option]
            return float(built if part is None else built[part]) / PROBE
        except Exception as error:  # a factory may do anything
            raise self._unrelated(place, option) from error

    def _unrelated(self, place: int, option: str) -> TaskError:
        given, built = self._built[place][option]
        return TaskError(
            f"{self._spec!r}: {option} follows a hyper-parameter that moves, but the factory "
            f"has built param group {place} with {option}={built!r} from {option}={given!r}, "
            f"which is no ratio that could be kept. Use groups=... of a torch class instead of a "
            f"factory, or give {option} a fixed value"
        )

    # -- state ---------------------------------------------------------------------------

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return the torch optimizer's state by parameter name; views, not copies."""
        by_number = self.torch.state_dict()["state"]
        names = [name for held in self._held for name in held]
        found = {
            names[number]: state for number, state in by_number.items() if isinstance(number, int)
        }
        return {name: found[name] for name in self._parameters if name in found}

    def state(self, moments: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return everything needed to continue, by parameter name; views, not copies.

        Args:
            moments: The state of each parameter (default: that of the torch optimizer).
        """
        own = self.torch.state_dict()
        found = self.moments() if moments is None else moments
        out: dict[str, Any] = {
            "state": {name: dict(found[name]) for name in self._parameters if name in found},
            "groups": [
                {
                    "names": list(self._held[place]),
                    "options": _saved(group, self._given[place]),
                    "given": {k: v for k, v in self._given[place].items() if _is_plain(v)},
                }
                for place, group in enumerate(own["param_groups"])
            ],
        }
        shared = {k: v for k, v in own["state"].items() if not isinstance(k, int)}
        return {**out, "shared": shared} if shared else out

    def load(self, state: Mapping[Any, Any]) -> None:
        """Restore what ``state`` returned, now or in version 0.1 (state by parameter number).

        It does not matter which parameters are frozen now. A parameter without state begins with
        none, and the state of a frozen parameter is kept.

        Raises:
            TaskError: The state belongs to other parameters, or to other param groups.
        """
        if "groups" in state:
            self._load_groups(state["groups"])
            self.load_moments(state["state"], shared=state.get("shared", {}))
            return
        names = [name for held in self._held for name in held]
        by_name = {names[n]: moments for n, moments in state.items() if isinstance(n, int)}
        shared = {k: v for k, v in state.items() if not isinstance(k, int)}
        self.load_moments(by_name, shared=shared)

    def load_moments(
        self, moments: Mapping[str, Mapping[str, Any]], *, shared: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the state of all parameters; it is used as it is, not copied.

        Raises:
            TaskError: It has state of a parameter that the optimizer does not have.
        """
        numbers = {name: n for n, name in enumerate(name for held in self._held for name in held)}
        for name in moments:
            if name not in numbers:
                raise TaskError(
                    f"the checkpoint has optimizer state of parameter {name!r}, which the "
                    f"optimizer does not train now (it trains: {', '.join(numbers)}); build "
                    f"model and optimizer as they were"
                )
        groups = self.torch.state_dict()["param_groups"]
        by_number = {numbers[name]: dict(own) for name, own in moments.items()}
        self.torch.load_state_dict({
            "state": {**by_number, **(shared or {})},
            "param_groups": groups,
        })
        for name, own in moments.items():
            self._keep_dtypes(self._parameters[name], own)

    def _keep_dtypes(self, parameter: torch.nn.Parameter, saved: Mapping[str, Any]) -> None:
        """Undo torch's cast of state to the dtype of its parameter."""
        held = self.torch.state[parameter]
        for key, value in saved.items():
            now = held.get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(now, torch.Tensor)
                and now.dtype != value.dtype
            ):
                held[key] = value.to(now.device)

    def _load_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        saved = {frozenset(group["names"]): group for group in groups}
        if saved.keys() != {frozenset(names) for names in self._held}:
            raise TaskError(
                "the checkpoint's optimizer has other param groups: it had "
                f"{[sorted(names) for names in saved]} and has {[list(n) for n in self._held]} "
                f"now; build the optimizer as it was"
            )
        for place, names in enumerate(self._held):
            group = saved[frozenset(names)]
            own = self.torch.param_groups[place]
            own.update({k: _on_device(v, own) for k, v in group["options"].items()})
            self._given[place].update(group["given"])


def _saved(group: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that a checkpoint holds.

    Entries that are not data, such as functions, return when the optimizer is built.
    """
    return {
        name: value
        for name, value in group.items()
        if name not in NOT_SAVED
        and (_is_plain(value) or not (name in given or isinstance(value, _CODE) or callable(value)))
    }


_CODE = (torch.dtype, torch.device, Enum)


def _is_plain(value: Any) -> bool:
    """Return whether a state can hold a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _on_device(value: Any, group: Mapping[str, Any]) -> Any:
    """Return a loaded value on the device of a group's parameters."""
    if isinstance(value, torch.Tensor) and group["params"]:
        return value.to(group["params"][0].device)
    return value


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


def _itself(value: Any) -> Any:
    return value


def _scaled(ratio: float | None, value: Any) -> Any:
    return value if ratio is None else ratio * value


def _each(ratios: Iterable[float | None], value: Any) -> Any:
    return tuple(_scaled(ratio, part) for ratio, part in zip(ratios, value, strict=True))


def _shape(spec: Optimizer) -> tuple[Any, ...]:
    """Return the option names of all groups, and whether there is clipping."""
    return (
        frozenset(spec.options),
        *(frozenset(options) for _, options in spec.groups),
        spec.clip_norm is None,
        spec.clip_value is None,
    )


def _same_keys(a: Optimizer, b: Optimizer) -> bool:
    """Return whether two specifications have the same patterns; False if any is a function."""
    keys = [key for key, _ in b.groups]
    return keys == [key for key, _ in a.groups] and all(isinstance(key, str) for key in keys)


def _same_factory(a: Any, b: Any) -> bool:
    """Return whether two factories are equal, or made by the same code from equal values."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        return bool(a == b) or (_parts(a) is not None and _parts(a) == _parts(b))
    except Exception:  # noqa: BLE001 (comparing a closure's values may raise anything)
        return False


def _parts(factory: Any) -> tuple[Any, ...] | None:
    """Return the code and values that make up a factory; None if they cannot be told."""
    if isinstance(factory, partial):
        return (factory.func, factory.args, factory.keywords)
    code = getattr(factory, "__code__", None)
    if code is None:
        return None
    # hyper-parameters that a factory reads are recorded when it is called
    cells = [cell.cell_contents for cell in factory.__closure__ or ()]
    cells = [None if isinstance(value, HyperParameters) else value for value in cells]
    return (code, factory.__defaults__, factory.__kwdefaults__, cells)


SINGLE = "optimizer"
"""The name of an optimizer that is the only one."""

Source = Optimizer | Optimizers | Callable[[HyperParameters], Optimizer | Optimizers]


class FollowedOptimizers:
    """The optimizers of a task, each following the hyper-parameters that it names.

    Args:
        source: One specification, several, or a method that returns either.
        model: The model whose parameters are trained.
        values: The hyper-parameters to build with.

    Attributes:
        parts: The optimizers by name; a single one has the name ``SINGLE``.
        is_single: Whether there is one that trains all parameters.

    Raises:
        TaskError: The optimizers cannot be built for this model, or do not partition its
            parameters.
    """

    def __init__(self, source: Source, model: torch.nn.Module, values: Mapping[str, Any]) -> None:
        parameters = dict(model.named_parameters())
        given = source
        read: frozenset[str] = frozenset()
        if not isinstance(source, Optimizer | Optimizers):
            hp = HyperParameters(values)
            given = source(hp)
            read = frozenset(hp.names_read)
        self.is_single = not isinstance(given, Optimizers)
        self._model = model
        self._read = read
        if not isinstance(given, Optimizers):
            if isinstance(given, Optimizer) and given.params is not None:
                raise TaskError(
                    f"{given!r} has params= but is the only optimizer; leave params= out, or use "
                    "thrifty.Optimizers(...) and give the other parameters to another one"
                )
            one: Any = source
            self.parts = {SINGLE: FollowedOptimizer(one, parameters, values)}
            return
        assigned = given.assign(parameters.items())
        self.parts = {
            name: FollowedOptimizer(_part_of(source, name), assigned[name], values)
            for name in given
        }

    @property
    def only(self) -> FollowedOptimizer:
        """The only optimizer; ask ``is_single`` first."""
        assert self.is_single, "there are several optimizers"
        return self.parts[SINGLE]

    @property
    def torch(self) -> dict[str, torch.optim.Optimizer]:
        """The torch optimizers by name."""
        return {name: part.torch for name, part in self.parts.items()}

    @property
    def names(self) -> frozenset[str]:
        """The hyper-parameters that they follow."""
        return frozenset().union(*(part.names for part in self.parts.values()))

    @property
    def read_when_built(self) -> frozenset[str]:
        """Hyper-parameters that a method's results read only while they were built."""
        return frozenset().union(*(part.read_when_built for part in self.parts.values()))

    def follow(self, values: Mapping[str, Any]) -> None:
        """Bring the torch optimizers up to date."""
        for part in self.parts.values():
            part.follow(values)

    def check(self, moving: Iterable[str]) -> None:
        """Check that all can follow the given hyper-parameters.

        Raises:
            TaskError: A factory has built an option with no ratio to the value it was given.
        """
        names = set(moving)
        for part in self.parts.values():
            part.check(names)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for part in self.parts.values():
            part.torch.zero_grad(set_to_none=True)

    def clip(self) -> None:
        """Clip the gradients of each optimizer's parameters, by value and then by norm."""
        for part in self.parts.values():
            if part.clipping:
                part.clipping.apply(self._model.parameters() if self.is_single else part.parameters)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped now."""
        return any(part.clipping for part in self.parts.values())

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return the torch optimizers' state by parameter name; views, not copies."""
        return {name: own for part in self.parts.values() for name, own in part.moments().items()}

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue; views, not copies."""
        if self.is_single:
            return self.only.state()
        return {"optimizers": {name: part.state() for name, part in self.parts.items()}}

    def load(self, state: Mapping[Any, Any]) -> None:
        """Restore what ``state`` returned.

        Raises:
            TaskError: The state belongs to other optimizers.
        """
        if self.is_single:
            self.only.load(state)
            return
        saved = state.get("optimizers", {SINGLE: state})
        if saved.keys() != self.parts.keys():
            raise TaskError(
                f"the checkpoint has the optimizers {', '.join(saved)}, and the task has "
                f"{', '.join(self.parts)} now; build them as they were"
            )
        for name, part in self.parts.items():
            part.load(saved[name])


def _part_of(source: Source, name: str) -> Any:
    """Return the source of one of several optimizers."""
    if isinstance(source, Optimizers):
        return source[name]
    assert not isinstance(source, Optimizer)

    def part(hp: HyperParameters) -> Any:
        given = source(hp)
        if not isinstance(given, Optimizers) or name not in given:
            raise TaskError(
                f"the task's optimizer(hp) returned {given!r}, which has no optimizer {name!r}; "
                "return the same ones each time"
            )
        return given[name]

    return part
