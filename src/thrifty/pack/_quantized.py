"""Layers of bitsandbytes in 8 and 4 bits: what they hold beside their parameters.

Such a layer has packed numbers as its weight, and scales in attributes. Its state names the scales,
but its own loading refuses them; its kernels take the addresses of tensors for writing; and some of
its attributes change in each forward pass. This module is the only one that knows this.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from thrifty.core import TaskError


WEIGHT = "weight"


class QuantizedLayer(ABC):
    """A frozen layer whose weight is quantised.

    Attributes:
        module: The layer.
        attributes: Names of its attributes that hold the scales.
    """

    attributes: frozenset[str]

    @property
    def is_product(self) -> bool:
        """Whether it computes a product with its weight, each row by itself."""
        return True

    def __init__(self, module: Any) -> None:
        self.module = module

    def entries(self) -> dict[str, torch.Tensor]:
        """Return what its state has beside parameters and buffers, by name: scales and their kind.

        Those that it holds as tensors are these tensors, not copies.
        """
        found: dict[str, torch.Tensor] = {}
        self.module._save_to_state_dict(found, "", keep_vars=True)
        own = {*self.module._parameters, *self.module._buffers}
        return {name: value for name, value in found.items() if name not in own}

    def contents(self) -> dict[str, torch.Tensor]:
        """Return its packed weight and the entries."""
        return {WEIGHT: self.module._parameters[WEIGHT], **self.entries()}

    def digest(self) -> str:
        """Return the digest of its scales."""
        out = hashlib.blake2b(digest_size=16)
        for name, value in self.entries().items():
            whole = plain(value).contiguous()
            out.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            out.update(whole.reshape(-1).view(torch.uint8).cpu().numpy().data)
        return out.hexdigest()

    @abstractmethod
    def settle(self) -> None:
        """Let forward passes change nothing of it."""

    @abstractmethod
    def set_weight(self, packed: torch.Tensor) -> None:
        """Give it other packed numbers, in memory that it shall not write to."""

    @abstractmethod
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give it the weight and the entries of a stored state."""

    @abstractmethod
    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return its weight in full, ``[out, in]``, made from its packed numbers."""

    @abstractmethod
    def note_copies(self, memo: dict[int, Any], *, empty: bool = False) -> None:
        """Let a deep copy of the model have the tensors of this layer, and no copies of them.

        Args:
            memo: As for ``copy.deepcopy``.
            empty: Whether the weight of the copy is on the meta device.
        """


def _data(weight: torch.Tensor, *, empty: bool) -> torch.Tensor:
    return torch.empty_like(plain(weight), device="meta") if empty else plain(weight)


class _FourBit(QuantizedLayer):
    """``Linear4bit``: half bytes, with a scale for each block of numbers."""

    attributes = frozenset({"quant_state", "support_avx512bf16_for_cpu"})

    def settle(self) -> None:
        if getattr(self._scales, "packing_format_for_cpu", False):
            self.entries()  # which brings the usual format back
        if self.module.weight.dtype.is_floating_point:  # bytes that look like numbers
            self.set_weight(plain(self.module.weight).view(torch.uint8).reshape(-1, 1))
            self.module.weight.quant_storage = self.module.quant_storage = torch.uint8
        # Else the first evaluation repacks the weight and rounds its scales, and a later training
        # step fails.
        self.module.support_avx512bf16_for_cpu = False
        if self.module.compute_dtype is None:
            self.module.compute_type_is_set = True  # else the type of the first input is kept

    def set_weight(self, packed: torch.Tensor) -> None:
        self.module.weight.data = packed

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        prefix = f"{WEIGHT}."
        scales = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
        weight = self.module.weight
        weight.data = values[WEIGHT].to(weight.device)
        weight.quant_state = type(self._scales).from_dict(scales, device=weight.device)
        self.module.quant_state = weight.quant_state

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        scales, operations = self._scales, torch.ops.bitsandbytes
        absmax = scales.absmax
        if scales.nested:
            inner = scales.state2
            absmax = scales.offset + operations.dequantize_blockwise(
                absmax, inner.absmax, inner.code, inner.blocksize, torch.float32
            )
        known = torch.float32 if dtype == torch.float64 else dtype
        made: torch.Tensor = operations.dequantize_4bit(
            self.module._parameters[WEIGHT], absmax, scales.blocksize, scales.quant_type,
            scales.shape, known,
        )  # fmt: skip
        return made.to(dtype)

    def note_copies(self, memo: dict[int, Any], *, empty: bool = False) -> None:
        weight = self.module.weight
        memo[id(weight)] = type(weight)(
            _data(weight, empty=empty),
            requires_grad=False,
            quant_state=weight.quant_state,
            blocksize=weight.blocksize,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
            bnb_quantized=True,
        )
        memo[id(self._scales)] = self._scales

    @property
    def _scales(self) -> Any:
        found = getattr(self.module.weight, "quant_state", None)
        return self.module.quant_state if found is None else found


class _EightBit(QuantizedLayer):
    """``Linear8bitLt``: bytes, with a scale for each row."""

    attributes = frozenset({"state"})

    @property
    def is_product(self) -> bool:
        """Whether it computes a product; else inputs are rounded, too, by the whole batch."""
        kind = self.module._parameters[WEIGHT].device.type
        return self.module.training and kind in ("cpu", "xpu")

    def settle(self) -> None:
        if self.module.weight.CB is not None:
            self.module.init_8bit_state()  # as the first forward pass does
        _say_once()
        if self.module.weight.CB is None and self.module.state.CB is None:
            raise TaskError(
                "two layers in 8 bits have one weight, and bitsandbytes keeps its scales in one of "
                "them only; call one layer twice, or give each a weight of its own"
            )
        # each forward pass makes the weight the state's tensor, which was the same when it was made
        self.set_weight(plain(self.module.weight))
        state = self.module.state
        if not isinstance(vars(type(state)).get("is_training"), _Scratch):
            now = {name: vars(state).pop(name) for name in _SCRATCH & vars(state).keys()}
            state.__class__ = _with_scratch(type(state))  # type: ignore[arg-type]
            for name, value in now.items():
                setattr(state, name, value)

    def set_weight(self, packed: torch.Tensor) -> None:
        self.module.weight.data = self.module.state.CB = packed

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        device = self.module.weight.device
        self.set_weight(values[WEIGHT].to(device))
        self.module.state.SCB = values["SCB"].to(device)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self.module._parameters[WEIGHT]
        scales = self.module.state.SCB.unsqueeze(1).mul(1.0 / 127.0)
        made: torch.Tensor = (packed.to(dtype) * scales).to(dtype)
        return made

    def note_copies(self, memo: dict[int, Any], *, empty: bool = False) -> None:
        weight, state = self.module.weight, self.module.state
        memo[id(weight)] = type(weight)(
            _data(weight, empty=empty),
            requires_grad=False,
            has_fp16_weights=weight.has_fp16_weights,
        )
        memo[id(state.CB)], memo[id(state.SCB)] = state.CB, state.SCB


@cache
def _say_once() -> None:
    """Let bitsandbytes say once that it rounds what goes in, and not in each layer and batch."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_known = record.getMessage() in said
        said.add(record.getMessage())
        return not is_known

    logging.getLogger("bitsandbytes.autograd._functions").addFilter(is_new)


class _Scratch:
    """An attribute that each forward pass writes before it is read, so it is no state."""

    def __init__(self, default: Any) -> None:
        self._default = default
        self._values: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self._default if owner is None else self._values.get(owner, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        self._values[owner] = value


_SCRATCH = {"is_training", "idx"}


@cache
def _with_scratch(kind: Any) -> Any:
    """Return a class whose instances keep scratch values elsewhere than in their attributes."""
    held = {name: _Scratch(getattr(kind, name, None)) for name in _SCRATCH}

    def deep_copy(one: Any, memo: dict[int, Any]) -> Any:
        made = memo[id(one)] = object.__new__(type(one))
        vars(made).update(deepcopy(vars(one), memo))
        return made

    methods = {
        "__eq__": object.__eq__,
        "__hash__": object.__hash__,
        "__deepcopy__": deep_copy,
        # a file with a whole model needs no thrifty to be read
        "__reduce_ex__": lambda one, _: (object.__new__, (kind,), vars(one)),
    }
    return type(kind.__name__, (kind,), {"__module__": __name__, **held, **methods})


_KINDS: dict[str, type[QuantizedLayer]] = {
    "bitsandbytes.nn.modules.Linear4bit": _FourBit,
    "bitsandbytes.nn.modules.Linear8bitLt": _EightBit,
}


_NOT_SAVED = frozenset({
    "bitsandbytes.nn.modules.Embedding4bit",
    "bitsandbytes.nn.modules.Embedding8bit",
})


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)


@cache
def _kind_of(kind: type) -> type[QuantizedLayer] | None:
    return next((_KINDS[name] for name in _names_of(kind) if name in _KINDS), None)


def layer_of(module: torch.nn.Module) -> QuantizedLayer | None:
    """Return what is known of a module as a frozen layer that is quantised; None for any other."""
    kind = _kind_of(type(module))  # type: ignore[arg-type]  # mypy: a class is not hashable
    weight: Any = None if kind is None else module._parameters.get(WEIGHT)
    if kind is None or weight is None or weight.requires_grad or weight.is_meta:
        return None
    is_packed = not weight.dtype.is_floating_point or getattr(weight, "bnb_quantized", False)
    return kind(module) if is_packed else None


def first_quantized(model: torch.nn.Module) -> str:
    """Return the path of a frozen layer that is quantised, or will be on a device; "" if none is.

    A ``Linear8bitLt`` that trains its weight has the state of a usual layer.
    """
    path: str
    for path, module in model.named_modules():
        weight = module._parameters.get(WEIGHT)
        is_known = _kind_of(type(module)) is not None  # type: ignore[arg-type]
        if is_known and weight is not None and not weight.requires_grad:
            return path
    return ""


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLayer]:
    """Return the frozen layers of a model that are quantised, by all their paths."""
    if "bitsandbytes" not in sys.modules:
        return {}
    modules = model.named_modules(remove_duplicate=False)  # as its state names them
    found = ((path, layer_of(module)) for path, module in modules)
    return {path: layer for path, layer in found if layer is not None}


def settled(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model, of whose quantised layers forward passes change nothing from here on.

    Raises:
        TaskError: It has a layer that its library cannot save.
    """
    if "bitsandbytes" not in sys.modules:
        return model
    for path, module in model.named_modules():
        if not _NOT_SAVED.isdisjoint(_names_of(type(module))):  # type: ignore[arg-type]
            raise TaskError(
                f"the model's {path!r} is a {type(module).__name__}, which bitsandbytes cannot "
                "save; leave embeddings as they are, and quantise linear layers"
            )
    for layer in quantized_layers(model).values():
        layer.settle()
    return model


def with_products(model: torch.nn.Module, *, whole: bool) -> None:
    """Replace the quantised layers of a model by products with their weights in full.

    Args:
        model: The model.
        whole: Whether the weights become parameters; else they are made anew in each forward pass.
    """
    for path, layer in quantized_layers(model).items():
        parent, _, name = path.rpartition(".")
        made: torch.nn.Module = _Product(layer)
        if whole:
            weight, bias = layer.weight(torch.float32), layer.module.bias
            made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            made.weight = torch.nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                made.bias = torch.nn.Parameter(plain(bias).float(), requires_grad=False)
        setattr(model.get_submodule(parent), name, made)


class _Product(torch.nn.Module):
    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return F.linear(x, self._layer.weight(x.dtype), self._layer.module.bias)


def quantized_entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the packed weights of a model and their scales, by their names in its state."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in quantized_layers(model).items()
        for name, value in layer.contents().items()
    }


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory, without gradients and a class of its own."""
    return tensor.data.as_subclass(torch.Tensor)
