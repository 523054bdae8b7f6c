"""Optimizers by name; options may be hyper-parameters that change over time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeGuard

import torch

from thrifty.core import TaskError, gc_paused


@dataclass(frozen=True)
class Times:
    """A product that is followed over time; made by ``times``."""

    value: float | str | Times
    factor: float | str | Times

    def __post_init__(self) -> None:
        for name in ("value", "factor"):
            given = getattr(self, name)
            if not isinstance(given, str | Times) and not is_number(given):
                raise TaskError(
                    f"times({self.value!r}, {self.factor!r}): {name} must be a number or the "
                    f"name of a hyper-parameter, got {given!r}"
                )

    def __repr__(self) -> str:
        return f"times({self.value!r}, {self.factor!r})"


Value: TypeAlias = "float | str | Times | tuple[Value, ...]"
Limit = float | str | Times | None
Factory = Callable[..., torch.optim.Optimizer]
Predicate = Callable[[torch.nn.Parameter], bool]
Key = str | Predicate
Groups = Mapping[Key, Mapping[str, Value]]


class Clipping(NamedTuple):
    """The limits of gradients at one step, in the order in which they apply; None for no limit.

    >>> bool(Clipping(None, None)), bool(Clipping(None, 1.0))
    (False, True)
    """

    value: float | None
    norm: float | None

    def __bool__(self) -> bool:
        return self.value is not None or self.norm is not None

    def apply(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Clip the gradients of some parameters."""
        given = list(parameters)
        if self.value is not None:
            torch.nn.utils.clip_grad_value_(given, self.value)
        if self.norm is not None:
            torch.nn.utils.clip_grad_norm_(given, self.norm)


NO_CLIPPING = Clipping(None, None)


def times(value: float | str | Times, factor: float | str | Times) -> Times:
    """Multiply a hyper-parameter by a factor, for use as the value of an optimizer's option.

    The product follows the schedules of all hyper-parameters in it. The factor may be a
    hyper-parameter.

    >>> times("lr", 0.1)
    times('lr', 0.1)
    >>> SGD(lr=times("lr", "scale")).resolve({"lr": 0.5, "scale": 2.0})["lr"]
    1.0

    Args:
        value: A number, the name of a hyper-parameter, or another product.
        factor: The same.

    Raises:
        TaskError: One of them is something else.
    """
    return Times(value, factor)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """One torch param group: parameters by name, and options that may name hyper-parameters."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


class Optimizer:
    """A torch optimizer class and its options; a string option names a hyper-parameter.

    A named hyper-parameter follows its schedule, step by step. Other options go to the torch class
    as they are. A specification cannot be changed once it is made.

    Args:
        factory: A torch optimizer class, or a function of parameters and options that makes an
            optimizer. If the optimizer has several param groups whose options differ, their ratios
            are kept while hyper-parameters change.
        clip_norm: The norm to which the gradient of all parameters together is clipped before each
            step; None for no clipping.
        clip_value: The largest absolute value of each entry of a gradient; None for no limit. It is
            applied before ``clip_norm``.
        params: Which parameters this optimizer trains, where there are several (``Optimizers``):
            a pattern over names, a function of the parameter, or a list of these. None: those that
            no other optimizer trains.
        groups: Options for some of the parameters. A key is a pattern over parameter names, such as
            ``"*.bias"``, or a function of the parameter, such as ``lambda p: p.ndim < 2``.
            A parameter gets the options of every group that matches; for each option the last group
            wins. A pattern must match at least one parameter, a function need not.
        options: Options of the factory, for all parameters.

    Raises:
        TaskError: The torch class does not have an option, a limit of gradients is not above 0, or
            a key is neither a string nor a function of one argument.

    Example:
        >>> optimizer = Optimizer(torch.optim.Adadelta, lr="lr", groups={"*.bias": {"rho": "rho"}})
        >>> sorted(optimizer.names())
        ['lr', 'rho']
        >>> optimizer
        Optimizer(Adadelta, lr='lr', groups={'*.bias': {'rho': 'rho'}})
    """

    factory: Factory
    clip_norm: Limit
    clip_value: Limit = None
    params: tuple[Key, ...] | None = None
    options: Mapping[str, Any]
    groups: tuple[tuple[Key, Mapping[str, Any]], ...]

    def __init__(
        self,
        factory: Factory,
        *,
        clip_norm: Limit = None,
        clip_value: Limit = None,
        params: Key | list[Key] | tuple[Key, ...] | None = None,
        groups: Groups | None = None,
        **options: Any,
    ) -> None:
        pairs = tuple((key, dict(own)) for key, own in (groups or {}).items())
        vars(self).update(factory=factory, clip_norm=clip_norm, options=options, groups=pairs)
        if clip_value is not None:  # what is not given is no part of a task's identity
            vars(self).update(clip_value=clip_value)
        if params is not None:
            keys = tuple(params) if isinstance(params, list | tuple) else (params,)
            vars(self).update(params=keys)
            for key in keys:
                _check_key(key, option="params")
        for key, _ in pairs:
            _check_key(key)
        self._check_options()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"an optimizer specification cannot be changed; make another one with {name}={value!r}"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError("an optimizer specification cannot be changed; make another one")

    def __repr__(self) -> str:
        parts = [_name_of(self.factory)]
        parts += [f"{name}={value!r}" for name, value in self.options.items()]
        if self.clip_norm is not None:
            parts.append(f"clip_norm={self.clip_norm!r}")
        if self.clip_value is not None:
            parts.append(f"clip_value={self.clip_value!r}")
        if self.params is not None:
            parts.append(f"params=[{', '.join(map(_shown, self.params))}]")
        if self.groups:
            inside = ", ".join(f"{_shown(key)}: {own!r}" for key, own in self.groups)
            parts.append(f"groups={{{inside}}}")
        return f"Optimizer({', '.join(parts)})"

    def names(self) -> set[str]:
        """Return the hyper-parameters that it follows."""
        own = (value for _, options in self.groups for value in options.values())
        return set(names_in([*self.options.values(), *own, self.clip_norm, self.clip_value]))

    @property
    def is_class(self) -> bool:
        """Whether the factory is a torch optimizer class, or a ``partial`` of one."""
        kind = self.factory.func if isinstance(self.factory, partial) else self.factory
        return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)

    # -- parameter groups ----------------------------------------------------------------

    def match(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the numbers of the groups that each parameter belongs to, by its name.

        Raises:
            TaskError: A pattern matches no parameter.
        """
        named = list(parameters)
        found: dict[str, list[int]] = {name: [] for name, _ in named}
        for number, (key, _) in enumerate(self.groups):
            matching = [name for name, p in named if _matches(key, name, p)]
            if not matching and isinstance(key, str):
                raise TaskError(_no_match(key, list(found)))
            for name in matching:
                found[name].append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}

    def merged(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Return the options of a parameter in some groups; they may name hyper-parameters."""
        out = dict(self.options)
        for number in numbers:
            out.update(self.groups[number][1])
        return out

    def partition(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], *, join: bool = True
    ) -> tuple[ParameterGroup, ...]:
        """Return the param groups for the parameters of a model, in order of first occurrence.

        Args:
            parameters: Parameters by name, in the model's order.
            join: Whether parameters that belong to different groups but have equal options form one
                param group.

        Raises:
            TaskError: A pattern matches no parameter.
        """
        found: list[tuple[tuple[int, ...], dict[str, Any], list[str]]] = []
        for name, numbers in self.match(parameters).items():
            options = self.merged(numbers)
            for known, same, names in found:
                if known == numbers or (join and same == options):
                    names.append(name)
                    break
            else:
                found.append((numbers, options, [name]))
        return tuple(ParameterGroup(names=tuple(n), options=o) for _, o, n in found)

    # -- values --------------------------------------------------------------------------

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        values: Mapping[str, Any],
    ) -> torch.optim.Optimizer:
        """Build the torch optimizer with the current values.

        Args:
            parameters: The parameters of a model, such as ``model.named_parameters()``. Names may
                be left out if there are no ``groups``.
            values: Hyper-parameters by name.

        Raises:
            TaskError: A named hyper-parameter is not in the space, a pattern matches no parameter,
                or there are ``groups`` and no names.
        """
        given: list[Any] = list(parameters)
        is_named = bool(given) and isinstance(given[0], tuple)
        if not self.groups:
            return self.make([p for _, p in given] if is_named else given, values)
        if not is_named:
            raise TaskError(
                "the optimizer has groups=, which need the names of parameters; give it "
                "model.named_parameters()"
            )
        return self.make_groups(dict(given), self.partition(given), values)

    def make(
        self, parameters: list[torch.nn.Parameter], values: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Build the torch optimizer for parameters without groups."""
        _import_compiler()
        return self.factory(parameters, **self.resolve(values))

    def make_groups(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Iterable[ParameterGroup],
        values: Mapping[str, Any],
    ) -> torch.optim.Optimizer:
        """Build the torch optimizer for groups of parameters.

        Raises:
            TaskError: The torch optimizer does not know an option of a group.
        """
        _import_compiler()
        base = self.resolve(values)
        given = []
        for group in groups:
            own = {k: v for k, v in group.options.items() if self.options.get(k, group) is not v}
            given.append({
                "params": [parameters[name] for name in group.names],
                **resolved(own, values),
            })
        made = self.factory(given, **base)
        known = getattr(made, "defaults", None)
        if isinstance(known, Mapping):
            for _, options in self.groups:
                self._refuse_unknown(options, list(known))
        return made

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options outside of groups, with names replaced by values."""
        return resolved(self.options, values)

    def clipping(self, values: Mapping[str, Any]) -> Clipping:
        """Return the current limits of gradients.

        Raises:
            TaskError: One is not a number above 0.
        """
        if self.clip_norm is None and self.clip_value is None:
            return NO_CLIPPING
        return Clipping(
            _limit(self.clip_value, values, where="clip_value"),
            _limit(self.clip_norm, values, where="clip_norm"),
        )

    # -- checks --------------------------------------------------------------------------

    def _check_options(self) -> None:
        for name in ("clip_norm", "clip_value"):
            if not isinstance(given := getattr(self, name), str | Times):
                _limit(given, {}, where=name)
        for _, options in self.groups:
            for name in ("params", "clip_norm", "clip_value"):
                if name in options:
                    why = (
                        "the key of the group says which parameters it has"
                        if name == "params"
                        else "it is for all parameters together; give it outside of groups"
                    )
                    raise TaskError(f"groups={{...: {{{name!r}: ...}}}}: {why}")
        if not self.is_class:
            return
        try:
            parameters = inspect.signature(self.factory).parameters.values()
        except (TypeError, ValueError):  # a class without a signature raises when it is built
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters if p.name != "params"]
        for options in (self.options, *(own for _, own in self.groups)):
            self._refuse_unknown(options, known)

    def _refuse_unknown(self, options: Mapping[str, Any], known: list[str]) -> None:
        for name in options:
            if name not in known:
                raise TaskError(
                    f"{_name_of(self.factory)} has no option {name!r} (it has: "
                    f"{', '.join(known)}); correct the name or leave it out"
                )


class Optimizers(Mapping[str, Optimizer]):
    """Several optimizers, each for some of the parameters.

    ``params=`` of an ``Optimizer`` says which parameters it trains. At most one optimizer may leave
    it out, and trains the rest. Each trainable parameter must belong to exactly one optimizer. Each
    optimizer clips the gradients of its own parameters.

    Args:
        named: The optimizers by name.

    Raises:
        TaskError: There is none, one is not an ``Optimizer``, or several leave ``params`` out.

    >>> both = Optimizers(
    ...     hidden=Optimizer(torch.optim.Muon, params="blocks.*.weight", lr="lr"),
    ...     rest=AdamW(lr=times("lr", 0.1)),
    ... )
    >>> list(both), sorted(both.names())
    (['hidden', 'rest'], ['lr'])
    """

    def __init__(self, **named: Optimizer) -> None:
        if not named:
            raise TaskError("Optimizers() has no optimizer; give each one by name")
        for name, each in named.items():
            if not isinstance(each, Optimizer):
                raise TaskError(
                    f"Optimizers({name}=...) is a {type(each).__name__}; give an Optimizer, such "
                    "as thrifty.AdamW(lr='lr')"
                )
        rest = [name for name, each in named.items() if each.params is None]
        if len(rest) > 1:
            raise TaskError(
                f"Optimizers: {' and '.join(rest)} both train the parameters that no other one "
                "trains; give params= to all but one"
            )
        self._named = dict(named)

    def __getitem__(self, name: str) -> Optimizer:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        return f"Optimizers({', '.join(f'{k}={v!r}' for k, v in self._named.items())})"

    def names(self) -> set[str]:
        """Return the hyper-parameters that they follow."""
        return {name for each in self.values() for name in each.names()}

    def assign(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> dict[str, dict[str, torch.nn.Parameter]]:
        """Return the parameters of each optimizer, by the optimizer's name and their own.

        Frozen parameters that no optimizer names belong to none.

        Raises:
            TaskError: A trainable parameter belongs to two optimizers or to none, a pattern matches
                no parameter, or an optimizer has no parameters.
        """
        named = dict(parameters)
        out: dict[str, dict[str, torch.nn.Parameter]] = {name: {} for name in self}
        owner: dict[str, str] = {}
        for name, spec in self.items():
            for key in spec.params or ():
                matching = [place for place, p in named.items() if _matches(key, place, p)]
                if not matching and isinstance(key, str):
                    raise TaskError(_no_match(key, list(named), option=f"{name}: params"))
                for place in matching:
                    if owner.setdefault(place, name) != name:
                        raise TaskError(
                            f"the parameter {place!r} belongs to two optimizers, {owner[place]} "
                            f"and {name}; change params= so that it belongs to one"
                        )
        rest = next((name for name, spec in self.items() if spec.params is None), None)
        for place, parameter in named.items():
            name = owner.get(place, rest) or ""
            if name:
                out[name][place] = parameter
            elif parameter.requires_grad:
                raise TaskError(
                    f"the parameter {place!r} belongs to no optimizer; change params= of one, or "
                    "give an optimizer without params=, which trains the rest"
                )
        empty = [name for name, found in out.items() if not found]
        if empty:
            raise TaskError(
                f"the optimizer {empty[0]} has no parameters: others train all of them; leave it "
                "out or change params="
            )
        return out


def SGD(  # noqa: N802 (named like the torch class that it stands for)
    *,
    lr: Value,
    momentum: Value = 0.0,
    clip_norm: Limit = None,
    groups: Groups | None = None,
    **options: Any,
) -> Optimizer:
    """Stochastic gradient descent (``torch.optim.SGD``); any option may name a hyper-parameter.

    ``clip_norm`` and ``groups`` are those of ``Optimizer``.
    """
    return Optimizer(
        torch.optim.SGD, lr=lr, momentum=momentum, clip_norm=clip_norm, groups=groups, **options
    )


def Adam(  # noqa: N802
    *, lr: Value, clip_norm: Limit = None, groups: Groups | None = None, **options: Any
) -> Optimizer:
    """Adam (``torch.optim.Adam``); any option may name a hyper-parameter.

    ``clip_norm`` and ``groups`` are those of ``Optimizer``.
    """
    return Optimizer(torch.optim.Adam, lr=lr, clip_norm=clip_norm, groups=groups, **options)


def AdamW(  # noqa: N802
    *, lr: Value, clip_norm: Limit = None, groups: Groups | None = None, **options: Any
) -> Optimizer:
    """AdamW (``torch.optim.AdamW``); any option may name a hyper-parameter.

    ``clip_norm`` and ``groups`` are those of ``Optimizer``.

    >>> AdamW(lr="lr", weight_decay="wd", groups={"*.bias": {"weight_decay": 0}})
    Optimizer(AdamW, lr='lr', weight_decay='wd', groups={'*.bias': {'weight_decay': 0}})
    """
    return Optimizer(torch.optim.AdamW, lr=lr, clip_norm=clip_norm, groups=groups, **options)


def RMSprop(  # noqa: N802
    *, lr: Value, clip_norm: Limit = None, groups: Groups | None = None, **options: Any
) -> Optimizer:
    """RMSprop (``torch.optim.RMSprop``); any option may name a hyper-parameter.

    ``clip_norm`` and ``groups`` are those of ``Optimizer``.
    """
    return Optimizer(torch.optim.RMSprop, lr=lr, clip_norm=clip_norm, groups=groups, **options)


def Adagrad(  # noqa: N802
    *, lr: Value, clip_norm: Limit = None, groups: Groups | None = None, **options: Any
) -> Optimizer:
    """Adagrad (``torch.optim.Adagrad``); any option may name a hyper-parameter.

    ``clip_norm`` and ``groups`` are those of ``Optimizer``.
    """
    return Optimizer(torch.optim.Adagrad, lr=lr, clip_norm=clip_norm, groups=groups, **options)


@cache
def _import_compiler() -> None:
    """Import what torch imports when it builds its first optimizer, a third faster than it does."""
    with gc_paused():
        import_module("torch._dynamo")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that can be multiplied; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def names_in(values: Iterable[Any]) -> Iterator[str]:
    """Yield the names of hyper-parameters in some values of options."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from names_in(value)
        elif isinstance(value, Times):
            yield from names_in((value.value, value.factor))


def resolved(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every name in options by its value.

    Raises:
        TaskError: A name is not in ``values``, or ``times`` has something that is not a number.
    """
    return {option: _lookup(value, values, where=option) for option, value in options.items()}


def _lookup(value: Any, values: Mapping[str, Any], *, where: str, may_be_text: bool = False) -> Any:
    if isinstance(value, tuple):
        return tuple(_lookup(item, values, where=where) for item in value)
    if isinstance(value, Times):
        return _product(value, values, where=where)
    if not isinstance(value, str):
        return value
    if value not in values:
        known = ", ".join(values) or "none"
        raise TaskError(
            f"the task's optimizer follows hyper-parameter {value!r} ({where}={value!r}), "
            f"which the search space does not have (it has: {known}); add it to the space or "
            f"give {where} a number"
        )
    found = values[value]
    if where in _NUMBERS and isinstance(found, str) and not may_be_text:
        raise TaskError(
            f"the task's optimizer follows hyper-parameter {value!r} ({where}={value!r}), whose "
            f"value is the text {found!r}; give it numbers in the space"
        )
    if where in _NUMBERS and where != "betas" and isinstance(found, tuple | list):
        raise TaskError(
            f"the task's optimizer follows hyper-parameter {value!r} ({where}={value!r}), whose "
            f"value is the {type(found).__name__} {found!r}; if these are the values to try, write "
            f"thrifty.Choice({[*found]!r}) in the space"
        )
    return found


_NUMBERS = frozenset({
    *("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "lr_decay"),
    *("betas", "lambd", "initial_accumulator_value"),
})
"""Options of torch's optimizers that are numbers. Options of other names may be texts."""


def _limit(given: Limit, values: Mapping[str, Any], *, where: str) -> float | None:
    limit: float | None = _lookup(given, values, where=where)
    if limit is not None and not (is_number(limit) and limit > 0):
        raise TaskError(
            f"{where}={given!r} of the task's optimizer is {limit!r}; it must be a number above 0, "
            "or None for no clipping"
        )
    return limit


def _product(product: Times, values: Mapping[str, Any], *, where: str) -> Any:
    out: float | torch.Tensor = 1
    for part in (product.value, product.factor):
        number = _lookup(part, values, where=where, may_be_text=True)
        if not is_number(number) and not isinstance(number, torch.Tensor):
            raise TaskError(
                f"the task's optimizer has {where}={product!r}, but {part!r} is {number!r}; "
                f"only numbers can be multiplied"
            )
        out = out * number
    return out


def _check_key(key: object, *, option: str = "groups") -> None:
    if isinstance(key, str):
        return
    try:
        inspect.signature(key).bind(None)  # type: ignore[arg-type]
    except ValueError:  # a built-in without a signature
        return
    except TypeError:
        given = f"{{{_shown(key)}: ...}}" if option == "groups" else f"{_shown(key)}"
        raise TaskError(
            f"{option}={given}: a key must be a pattern over parameter names, "
            f"such as '*.bias', or a function of one parameter, such as lambda p: p.ndim < 2"
        ) from None


def _matches(key: str | Predicate, name: str, parameter: torch.nn.Parameter) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else bool(key(parameter))


def _no_match(pattern: str, names: list[str], *, option: str = "groups") -> str:
    some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    given = f"{{{pattern!r}: ...}}" if option == "groups" else f"{pattern!r}"
    return (
        f"{option}={given}: no parameter of the model has such a name (it has: "
        f"{some or 'none'}); correct the pattern"
    )


def _name_of(factory: Any) -> str:
    """Return a name for a factory; it has no address, which differs from process to process."""
    if isinstance(factory, partial):
        given = [repr(each) for each in factory.args]
        given += [f"{name}={value!r}" for name, value in factory.keywords.items()]
        return f"partial({', '.join([_name_of(factory.func), *given])})"
    return str(getattr(factory, "__name__", type(factory).__name__))


def _shown(key: object) -> str:
    return repr(key) if isinstance(key, str) else _name_of(key)
