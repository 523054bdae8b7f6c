"""A trial's weights: what checkpoints hold of them, frozen ones that trials share, averages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from thrifty.core import StateError, plain_logger
from thrifty.pack._frozen import (
    Base,
    FrozenTensor,
    FrozenTensors,
    LoadedBase,
    address,
    cheap_copy,
    copy_of,
    digest_of,
    is_lent,
    is_same_memory,
    is_shared,
    written,
)
from thrifty.pack._quantized import WEIGHT, plain, quantized_entries, quantized_layers
from thrifty.pack._state import fill_in, leave_out, state_versions, with_versions


logger = plain_logger(__name__)

MIN_LEFT_OUT_BYTES = 2**16
"""The size of all frozen parameters from which checkpoints leave them out."""


class SharedWeights:
    """The weights of a model, which lets the frozen ones lie in memory that trials share.

    Args:
        model: A fresh model.
        known: The frozen weights of the task on this device.
        name: The task, for messages.

    Attributes:
        frozen: The frozen parameters and buffers that are shared, with a fresh model's values.
    """

    def __init__(self, model: torch.nn.Module, known: FrozenTensors, *, name: str) -> None:
        self._model, self._known, self._name = model, known, name
        self._fresh: Mapping[str, FrozenTensor] = known.adopt(model)
        self.frozen = self._fresh

    def adopt(self, *, only: Collection[str] | None = None) -> None:
        """Let the model share again what a fresh model shares, where its values are still those.

        Args:
            only: The names to which this is limited; None for no limit.
        """
        found, fresh = self._known.adopt(self._model, only=only), self._fresh
        self.frozen = {name: each for name, each in found.items() if fresh.get(name) is each}

    def check(self) -> None:
        """Check that nothing has changed the memory that trials share.

        Raises:
            StateError: Something has, in this trial or in another one.
        """
        if names := written(self.frozen):
            why = (
                "on a GPU, PyTorch's functions for lists of tensors, such as torch._foreach_mul_, "
                "write into it without a copy; write with copy_ or mul_"
            )
            if names[0] in quantized_entries(self._model):
                why = "code may not write to weights in 8 or 4 bits, or to their scales"
            raise StateError(
                f"the frozen {names[0]!r} of {self._name}.model has changed in "
                f"memory that several trials share: {why}"
            )

    # -- checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model; views, not copies.

        Frozen parameters that a fresh model has, too, are named with their digests only.
        """
        state, own = plain_state(self._model), self._that_may_be_left_out()
        same = {
            name: each
            for name, each in self._fresh.items()
            if name in own and name in state and each.equals(own[name])
        }
        if sum(each.tensor.nbytes for each in same.values()) < MIN_LEFT_OUT_BYTES:
            return {"model": state}
        return {
            "model": leave_out(state, same),
            "frozen": {name: each.digest for name, each in same.items()},
        }

    def base(self) -> LoadedBase:
        """Return the weights that ``state`` has left out."""
        own = self._that_may_be_left_out()
        return LoadedBase({name: each for name, each in self._fresh.items() if name in own})

    def load(
        self, held: Mapping[str, Any], digests: Mapping[str, str], *, base: Base | None
    ) -> None:
        """Load what ``state`` has returned.

        Args:
            held: The weights that a checkpoint holds.
            digests: The digests of those that it has left out.
            base: Those, for a model whose frozen weights have changed since.

        Raises:
            StateError: A frozen parameter is not what it was, and the base cannot be read.
        """
        restored = self._load(held, digests, base=base)
        if base is not None and restored:
            self._note_restored(restored, base)
        self.adopt()  # loading copies values, the frozen ones included

    def _load(
        self, held: Mapping[str, Any], digests: Mapping[str, str], *, base: Base | None
    ) -> frozenset[str]:
        """Load the model's state, and return the names of what comes from ``base``."""
        known, own = self._fresh, self._model.state_dict()
        filled, restored = fill_in(
            held,
            digests,
            fresh={**own, **{name: each.tensor for name, each in known.items()}},
            digest_of=lambda name: known[name].digest if name in known else digest_of(own[name]),
            base=base,
            any_shape=quantized_entries(self._model),
        )
        # references to the model's tensors end with this method, so they can be shared again
        load_model(self._model, filled)
        return restored

    def _note_restored(self, names: Collection[str], base: Base) -> None:
        """Take parameters that came from a base for those of a fresh model."""
        self._fresh = {**self._fresh, **self._known.adopt(self._model, only=names)}
        if base.digest not in self._known.restored:
            self._known.restored.add(base.digest)
            logger.warning(
                "the frozen parameters that %s.model makes have changed since a checkpoint was "
                "written (%s, and perhaps others); trials that go on from it keep the stored ones, "
                "and new trials begin with the changed ones",
                self._name,
                min(names),
            )

    def _that_may_be_left_out(self) -> dict[str, torch.Tensor]:
        """Return the tensors that checkpoints leave out if a fresh model has equal ones, by name.

        These are parameters, the scales of quantised layers, and large buffers.
        """
        return {
            **dict(self._model.named_parameters(remove_duplicate=False)),
            **{
                name: buffer
                for name, buffer in self._model.named_buffers(remove_duplicate=False)
                if buffer.layout is torch.strided and buffer.nbytes >= MIN_LEFT_OUT_BYTES
            },
            **quantized_entries(self._model),
        }


# -- states of models ------------------------------------------------------------------


def plain_state(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the state of a model, with packed weights as plain tensors; views, not copies."""
    state = model.state_dict()
    for path in quantized_layers(model):
        name = f"{path}.{WEIGHT}" if path else WEIGHT
        state[name] = plain(state[name])
    return state


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a whole state into a model.

    Raises:
        RuntimeError: The state is not that of such a model.
        StateError: A layer is not quantised as in the state.
    """
    layers = quantized_layers(model)
    apart = _there_already(model, state)
    if not (layers or apart):
        model.load_state_dict(state)
        return
    for path, layer in layers.items():
        prefix, now = f"{path}." if path else "", layer.contents()
        apart |= {prefix + name for name in now}
        held: dict[str, Any] = {name: state.get(prefix + name) for name in now}
        if all(_are_equal(now[name], value) for name, value in held.items()):
            continue
        if not all(_are_alike(now[name], value) for name, value in held.items()):
            raise StateError(
                f"the layer {path!r} is quantised in another way than when the checkpoint was "
                "written; let the function that makes the model quantise it as before, or start a "
                "new study"
            )
        layer.load({name: plain(value).clone() for name, value in held.items()})
    others = {name: value for name, value in state.items() if name not in apart}
    found = model.load_state_dict(with_versions(others, state_versions(state)), strict=False)
    if found.unexpected_keys or set(found.missing_keys) - apart:
        model.load_state_dict(state)  # which says what is wrong


def _there_already(model: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that a model has in the same memory already.

    Loading would copy them, and take the memory again that models share. The result is empty if a
    module loads its state by code of its own, which may expect all of it.
    """
    if not all(map(_loads_plainly, model.modules())):
        return set()
    own = model.state_dict()
    return {
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and is_same_memory(own[name], value)
    }


def _loads_plainly(module: torch.nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict is torch.nn.Module._load_from_state_dict
        and kind.load_state_dict is torch.nn.Module.load_state_dict
        and kind.set_extra_state is torch.nn.Module.set_extra_state
        and "load_state_dict" not in vars(module)
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
    )


def _are_alike(now: torch.Tensor, value: Any) -> bool:
    like = isinstance(value, torch.Tensor) and value.dtype == now.dtype
    return like and (value.shape == now.shape or now.dim() == 1)  # a text, as bytes


def _are_equal(now: torch.Tensor, value: Any) -> bool:
    return (
        _are_alike(now, value)
        and value.shape == now.shape
        and torch.equal(plain(now), plain(value).to(now.device))
    )


# -- averages --------------------------------------------------------------------------


_PREFIX = "module."


class SharingAverage(AveragedModel):
    """An average of a model's weights, as torch computes it.

    Frozen parameters that the model shares with other trials are in the same memory here. Their
    average is what they are, so nothing is computed, and checkpoints hold them once.

    Args:
        model: The model, before it is trained.
        function: As ``AveragedModel(multi_avg_fn=)``.
    """

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any] | None) -> None:
        super().__init__(torch.nn.Identity(), multi_avg_fn=function)
        self.module = copy_of(model)
        self._model = (model,)  # in a tuple, so that it is no module of this one
        self._averaged: list[torch.nn.Parameter] | None = None

    def parameters(self, *args: Any, **options: Any) -> Iterator[torch.nn.Parameter]:
        """Return all parameters; while the average is updated, those that are not shared."""
        if self._averaged is not None:
            return iter(self._averaged)
        return super().parameters(*args, **options)

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take in the weights of a model."""
        packed = self._follow_quantized(model)
        apart = [
            (own, other)
            for own, other in zip(self.module.parameters(), model.parameters(), strict=True)
            if id(own) not in packed and not _are_one(own, other)
        ]
        for own, _ in apart:
            if is_shared(own):  # on a GPU, torch would write into the memory of all
                own.data = own.data.clone()
        self._averaged = [own for own, _ in apart]
        try:
            super().update_parameters(_Weights(model, [other for _, other in apart]))
        finally:
            self._averaged = None

    def _follow_quantized(self, model: torch.nn.Module) -> set[int]:
        """Give quantised layers what a model's have, and return the identities of their weights.

        Packed numbers have no average.
        """
        layers = quantized_layers(self.module)
        others = quantized_layers(model) if layers else {}
        for path, layer in layers.items():
            own, other = layer.module.weight, others.get(path)
            if other is not None and not _are_one(own, other.module.weight):
                now = other.contents()
                if any(not _equal(value, now[name]) for name, value in layer.contents().items()):
                    layer.load({name: plain(value).clone() for name, value in now.items()})
        return {id(layer.module.weight) for layer in layers.values()}

    def parts(self) -> tuple[Mapping[str, Any], list[str]]:
        """Return the state without what is shared with the model, and the names of that."""
        (model,) = self._model
        state, known = plain_state(self), plain_state(model)
        own, others = _tensors(self.module), _tensors(model)
        packed = quantized_entries(model)
        shared = [
            name
            for name, tensor in own.items()
            if name in others
            and name in known
            and _PREFIX + name in state
            # what such a layer makes anew for each state has no memory that could be shared
            and (
                _are_one(tensor, others[name]) or (name in packed and _equal(tensor, packed[name]))
            )
        ]
        return leave_out(state, {_PREFIX + name for name in shared}), sorted(shared)

    def take(self, state: Mapping[str, Any], *, shared: Collection[str]) -> None:
        """Restore what ``parts`` returned, after the model was restored."""
        (model,) = self._model
        own = plain_state(model) if shared else {}
        held = {**state, **{_PREFIX + name: own[name] for name in shared}}
        load_model(self, with_versions(held, state_versions(state)))
        lent = _tensors(model) if shared else {}
        for name, tensor in _tensors(self.module).items():
            if name in shared and not _are_one(tensor, lent[name]):
                tensor.data = cheap_copy(lent[name].detach())


class _Weights(torch.nn.Module):
    """Some parameters of a model, and its buffers."""

    def __init__(self, model: torch.nn.Module, parameters: Collection[torch.nn.Parameter]) -> None:
        super().__init__()
        self._those = list(parameters)
        self._model = (model,)

    def parameters(self, *_: Any, **__: Any) -> Iterator[torch.nn.Parameter]:
        """Return the parameters."""
        return iter(self._those)

    def buffers(self, *args: Any, **options: Any) -> Iterator[torch.Tensor]:
        """Return the buffers of the model."""
        return self._model[0].buffers(*args, **options)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **quantized_entries(model)}


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are in the same memory, which is copied before one is written."""
    return (
        (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        and is_lent(one)
        and is_lent(other)
        and address(one) == address(other)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(plain(one), plain(other))
