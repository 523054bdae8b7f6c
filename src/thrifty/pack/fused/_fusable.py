"""What can be fused: the registry of rules for torch functions, and signatures of trials.

Trials of equal signatures can be packed together: they have in common everything about their
models except the numbers in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError
from thrifty.pack._frozen import is_lent, storage_address
from thrifty.pack._quantized import layer_of
from thrifty.pack.identity import content_digest
from thrifty.pack.verify import num_hooks


Rule = Callable[..., Any]
"""``rule(group, *args, **kwargs)`` with the torch function's arguments, returning a packed result.

Arguments that differ from trial to trial are packed.
"""

RULES: dict[Any, Rule] = {}

DRAWS: dict[Any, Callable[..., bool]] = {}
"""Functions that draw random numbers: whether a call with some arguments does."""


class UnfusableError(Exception):
    """Error raised when a model cannot be fused; the message says why.

    Another back-end then trains the model.
    """

    __module__ = "thrifty.pack"  # tracebacks name the place to import it from


class _Refusals(threading.local):
    """What has been raised in this thread to say that something cannot be packed."""

    depth = 0
    """How many functions on packed tensors run now, one within the other."""
    first: Exception | None = None


_refusals = _Refusals()


@contextmanager
def within_rule() -> Iterator[None]:
    """Run a function on packed tensors; what it raises reaches the user's code."""
    _refusals.depth += 1
    try:
        yield
    except Exception as error:
        if _refusals.depth == 1:
            note_refusal(error)
        raise
    finally:
        _refusals.depth -= 1


def note_refusal(error: Exception) -> Exception:
    """Note an error that reaches the user's code, unless a function on packed tensors handles it.

    ``none_caught`` raises it again if that code goes on.
    """
    if _refusals.depth <= 1 and _refusals.first is None:
        _refusals.first = error
    return error


@contextmanager
def none_caught() -> Iterator[None]:
    """Refuse code that catches an error which only packed tensors raise, and goes on without it.

    Alone, there is no such error, so the code would compute something else.

    Raises:
        UnfusableError: It did so within the context.
    """
    before, _refusals.first = _refusals.first, None
    try:
        yield
        if _refusals.first is not None:
            raise UnfusableError(f"it goes on after an error: {_refusals.first}")
    finally:
        _refusals.first = before


def register_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register how torch functions (or your own, see below) act on packed tensors.

    The rule is called as ``rule(group, *args, **kwargs)`` with the function's own arguments.
    Arguments that differ from trial to trial are packed: ``group.first(x)`` gives the plain tensor
    with the trials as its first dimension, and ``group.pack(y)`` turns such a tensor into a packed
    result. A function without a rule goes through ``torch.vmap``.

    You can register torch functions and any function that calls
    ``torch.overrides.handle_torch_function``. A rule that raises ``UnfusableError`` sends the model
    to the concatenated back-end.

    >>> import torch
    >>> @register_rule(torch.special.xlog1py)
    ... def xlog1py(group, x, y):
    ...     return group.pack(torch.special.xlog1py(group.first(x), group.first(y)))
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


# the rates of these layers are set per trial while training, see Randomness
_DROPOUTS = torch.nn.modules.dropout._DropoutNd
_OWN = frozenset({
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
})
_MAX_DEPTH = 4
_MAX_HASHED_BYTES = 2**20
"""Size up to which arrays are compared by content; larger ones are compared by identity."""


def signature(model: torch.nn.Module, *, attributes: Mapping[str, Any]) -> Hashable:
    """Return a key that is equal for models that compute the same.

    It covers classes, settings and shapes. Dropout rates do not count, as they may differ from
    trial to trial.

    Args:
        model: The model.
        attributes: The task's own attributes.

    Raises:
        UnfusableError: The model has hooks, which may do anything, or is a scripted one.
    """
    if _is_backward_patched():
        raise UnfusableError("Tensor.backward is not that of PyTorch")
    parts: list[Hashable] = [_value(dict(attributes), 0)]
    places: dict[int, int] = {}  # tells one tensor used in several places from equal tensors
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnfusableError("it is compiled by torch.jit, whose code cannot be packed")
        settings = _settings(path, module)
        kind = type(module)
        tensors = tuple(
            (
                name,
                tuple(t.shape),
                str(t.dtype),
                t.requires_grad,
                places.setdefault(id(t), len(places)),
            )
            for held in (module._parameters, module._buffers)
            for name, t in held.items()
            if t is not None
        )
        parts.append((path, f"{kind.__module__}.{kind.__qualname__}", _value(settings, 0), tensors))
    return tuple(parts)


def _is_backward_patched() -> bool:
    """Return whether a step alone computes gradients in a way of the user's own."""
    own = str(Path(torch.__file__).parent)
    found = (torch.Tensor.backward, torch.autograd.backward)
    files = (getattr(getattr(each, "__code__", None), "co_filename", "") for each in found)
    return not all(file.startswith(own) for file in files)


NO_RECURRENT_RULE = "recurrent layers (nn.LSTM, nn.GRU, nn.RNN) have no batched rule"


def check_memory(models: Sequence[torch.nn.Module]) -> None:
    """Check that each tensor of some models has its own memory, so that it can become a row.

    Raises:
        UnfusableError: Two tensors share memory, within a model or between two, or one is sparse.
    """
    owners: dict[int, int] = {}
    for model in models:
        own = {id(t): t for t in (*model.parameters(), *model.buffers())}
        for key, tensor in own.items():
            if tensor.layout is not torch.strided:
                raise UnfusableError("one of its parameters or buffers is sparse")
            if not tensor.numel() or is_lent(tensor):
                continue
            memory = storage_address(tensor)
            if memory in owners:
                if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
                    # On a GPU, these keep all their weights in one piece of memory.
                    raise UnfusableError(NO_RECURRENT_RULE)
                raise UnfusableError("two of its parameters or buffers share memory")
            owners[memory] = key


def settings(attributes: Mapping[str, Any]) -> Hashable:
    """Return a key that is equal for task attributes that act equally."""
    return _value(dict(attributes), 0)


def _settings(path: str, module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module in which trials of one signature agree.

    Raises:
        UnfusableError: The module or one of its tensors has hooks.
    """
    _check_tensors(path, module)
    settings = {}
    for name, value in vars(module).items():
        if name in _OWN:
            continue
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            # hooks for loading and saving have no effect in training
            if value and "state_dict" not in name:
                raise UnfusableError(f"{path or 'the model'} has hooks")
            continue
        settings[name] = value
    for apart in (_rate_of(module), *_apart(module)):
        if apart is not None:
            settings.pop(apart, None)
    layer = layer_of(module)
    if layer is not None:  # its scales are constants of a program
        settings = {k: v for k, v in settings.items() if k not in layer.attributes}
        settings["scales"] = layer.digest()
    return settings


def _check_tensors(path: str, module: torch.nn.Module) -> None:
    """Check that rows can stand for the tensors of a module.

    Raises:
        UnfusableError: One has hooks, or is of a class of its own.
    """
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        where = f"{path}.{name}" if path else name
        if num_hooks(tensor):
            raise UnfusableError(f"its {where} has hooks")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not layer_of(module):
            raise UnfusableError(f"its {where} is a {type(tensor).__name__}, not a plain tensor")


_WIDTHS = frozenset({
    "in_features", "out_features", "in_channels", "out_channels", "num_features",
    "num_embeddings", "embedding_dim", "normalized_shape",
})  # fmt: skip
"""Attributes of torch's own layers that only say how wide their parameters are."""


def family(model: torch.nn.Module) -> Hashable:
    """Return a key that is equal for models that differ at most in widths.

    The same parameters require gradients in such models, and all settings are equal besides the
    widths of torch's own layers: a program that was recorded with the settings of one is right for
    the others.

    Raises:
        UnfusableError: The model has hooks, which may do anything.
    """
    return tuple(
        (
            path,
            type(module),
            _value(_besides_widths(module, _settings(path, module)), 0),
            tuple(
                (name, p.dim(), p.dtype, p.requires_grad)
                for name, p in module._parameters.items()
                if p is not None
            ),
            tuple((name, tuple(b.shape)) for name, b in module._buffers.items() if b is not None),
        )
        for path, module in model.named_modules()
    )


def _besides_widths(module: torch.nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return {k: v for k, v in settings.items() if not (is_torchs and k in _WIDTHS)}


BASE_RATIO = 10
"""How many times as many parameters as are trained a base has that decides what a model costs."""


def has_base(model: torch.nn.Module) -> bool:
    """Return whether most of a model is a frozen base."""
    numbers = {True: 0, False: 0}
    for parameter in model.parameters():
        numbers[parameter.requires_grad] += parameter.numel()
    return numbers[False] >= BASE_RATIO * numbers[True]


def has_trunk(model: torch.nn.Module) -> bool:
    """Return whether most products of a model come before everything that is trained.

    It is a guess by the order of registration, for decisions about speed alone.
    """
    before = others = 0
    is_trained = False
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            is_trained = is_trained or parameter.requires_grad
            if parameter.dim() < 2 or isinstance(module, torch.nn.Embedding):
                continue
            if is_trained:
                others += parameter.numel()
            else:
                before += parameter.numel()
    return before > others


def rough_signature(model: torch.nn.Module) -> Hashable:
    """Return a key that is equal for models that cost about the same.

    It covers layers with parameters and the shapes of these. Activations may differ. Where most of
    a model is a frozen base, the base alone counts: adapters of all ranks cost about the same.
    """
    frozen_only = has_base(model)
    return tuple(
        (type(module).__qualname__, tuple((name, tuple(p.shape), p.dtype) for name, p in own))
        for module in model.modules()
        if (
            own := [
                (name, p)
                for name, p in module._parameters.items()
                if p is not None and not (frozen_only and p.requires_grad)
            ]
        )
    )


def dropout_rates(model: torch.nn.Module) -> dict[str, float]:
    """Return the rates of all dropout layers, by path."""
    return {path: float(getattr(module, name)) for path, (module, name) in dropouts(model).items()}


def dropouts(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return all modules with a dropout rate and the name of its attribute, by path."""
    found = ((path, module, _rate_of(module)) for path, module in model.named_modules())
    return {path: (module, name) for path, module, name in found if name is not None}


def rate_places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return each layer with a dropout rate and its attribute's name: where trials may differ."""
    return list(dropouts(model).values())


Number = tuple[dict[str, Any], str]
"""The dictionary and the key under which a model keeps a number."""

_LORA = "peft.tuners.lora."
_NUMBERS = {_LORA + "layer.LoraLayer": ("scaling",)}
"""Attributes with numbers by adapter, by the name of their class. Trials may differ in them."""
_DESCRIPTIONS = {
    _LORA + "layer.LoraLayer": ("r", "lora_alpha", "kwargs"),
    _LORA + "model.LoraModel": ("peft_config", "targeted_module_names"),
    "peft.peft_model.PeftModel": (
        "_peft_config",
        # methods of the base, bound to it and so to its description; only generation calls them
        "base_model_prepare_inputs_for_generation",
        "base_model_prepare_encoder_decoder_kwargs_for_generation",
    ),
    "transformers.modeling_utils.PreTrainedModel": ("peft_config",),
}
"""Attributes that only describe an adapter, by the name of their class."""


def numbers_of(model: torch.nn.Module) -> dict[str, Number]:
    """Return where a model keeps numbers in which trials may differ, by path.

    They are the factors of adapters. A recorded program takes them as inputs, so code that computes
    with them otherwise than in tensors, such as a comparison, is refused.
    """
    return {
        f"{path}.{name}[{key}]": (held, key)
        for path, module in model.named_modules()
        for name in _listed(_NUMBERS, module)
        for held in (vars(module).get(name),)
        if type(held) is dict
        for key, value in held.items()
        if type(value) in (int, float)
    }


def number_values(model: torch.nn.Module) -> dict[str, float]:
    """Return the numbers of a model in which trials may differ, by path."""
    return {path: float(held[key]) for path, (held, key) in numbers_of(model).items()}


def _apart(module: torch.nn.Module) -> list[str]:
    """Return the attributes of a module in which trials of one signature may differ."""
    return [*_listed(_NUMBERS, module), *_listed(_DESCRIPTIONS, module)]


def _listed(table: Mapping[str, Sequence[str]], module: torch.nn.Module) -> list[str]:
    names = _names_of(type(module))  # type: ignore[arg-type]  # mypy: a class is not hashable
    return [each for name in names for each in table.get(name, ())]


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)


def follows_rate_itself(module: torch.nn.Module) -> bool:
    """Return whether a layer passes its rate only to torch's own dropout.

    Layers that name their rate (``trial_rate``) may do more with it and declare that this is safe.
    """
    return isinstance(module, _DROPOUTS)


def _rate_of(module: torch.nn.Module) -> str | None:
    """Return the name of the attribute that may differ from trial to trial, or None.

    Other classes may do anything with a rate, so a class must declare in its own ``trial_rate``
    that its attribute may differ. The declaration is not inherited by subclasses.
    """
    if isinstance(module, _DROPOUTS):
        return "p"
    return vars(type(module)).get("trial_rate")


def _value(value: Any, depth: int) -> Hashable:
    """Return a hashable stand-in that is equal only for values that act equally.

    Where equality cannot be established, the stand-in equals only that of the same object.
    """
    if value is None or isinstance(
        value, bool | int | float | str | bytes | complex | torch.dtype | torch.device
    ):
        return (type(value).__name__, value)
    if depth <= _MAX_DEPTH and type(value) in (list, tuple):
        return (type(value).__name__, tuple(_value(v, depth + 1) for v in value))
    if depth <= _MAX_DEPTH and type(value) is dict:
        return ("dict", tuple((_value(k, depth), _value(v, depth + 1)) for k, v in value.items()))
    if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _MAX_HASHED_BYTES:
        return ("array", id(value))
    try:
        return ("content", content_digest(value))
    except TaskError:
        return ("object", id(value))
