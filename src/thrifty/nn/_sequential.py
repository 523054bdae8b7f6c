"""Sequential layers that leave out what block-wise gyro dropout drops."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeGuard, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thrifty.core import LayerError, plain_logger
from thrifty.perf import SlicedProduct, SlicingCosts, SlicingKernelCosts

from ._gyro import BlockGyroDropout
from ._masks import GyroSchedule, KeptGroups, Parts, put, take
from ._sliced import (
    gyro_conv2d,
    gyro_linear,
    is_captured,
    is_plain,
    is_transformed,
    is_trusted,
    multiplies_exactly,
    runs_in_place,
)


logger = plain_logger(__name__)

Execution = Literal["auto", "sliced", "masked"]

_Product = nn.Linear | nn.Conv2d
"""A layer that multiplies by a weight."""

_ZERO_STAYS = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU,
    nn.CELU, nn.Tanh, nn.Softsign, nn.Hardswish,
)  # fmt: skip
"""Functions of each unit that leave a dropped unit at zero.

They are matched by exact type, because a subclass may do anything.
"""
_BY_UNIT = (
    *_ZERO_STAYS, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip
"""Functions of each unit."""
_BY_CHANNEL = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


_COSTS = SlicingCosts()
_KERNEL_COSTS = SlicingKernelCosts()
_CAPTURED_COSTS = SlicingKernelCosts(overhead=5e8)
"""The same in a CUDA graph: kernels wait for each other, but not for Python."""


@dataclass(slots=True)
class _Found:
    """What batches of one kind have shown: see ``GyroSequential._costs_of``."""

    rehearsed: set[Any] = field(default_factory=set)
    unsliced: set[Any] = field(default_factory=set)


# Not an attribute: models that differ in it alone are equal, and copies do not contain it.
_found: WeakKeyDictionary[GyroSequential, _Found] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Split:
    """A batch in parts, each with the units ``kept`` of dimension ``dim``, or with all units."""

    x: Tensor
    parts: Parts
    kept: KeptGroups | None = None
    dim: int = 2

    def whole(self) -> Tensor:
        """Return the batch, with zeros for units that were not kept."""
        x = self.x
        if self.kept is not None:
            x = put(x, self.kept, dim=self.dim)
        return self.parts.join(x)

    def map(self, layer: Callable[[Tensor], Tensor]) -> _Split:
        """Apply a layer that treats all samples and units alike."""
        if type(layer) in _BY_UNIT:
            return _Split(layer(self.x), self.parts, self.kept, self.dim)
        out = layer(self.x.flatten(0, 1))
        return replace(self, x=out.reshape(*self.x.shape[:2], *out.shape[1:]))


class GyroSequential(nn.Sequential):
    """``nn.Sequential`` that does not compute what ``BlockGyroDropout`` drops.

    Activations and, for images, pooling may stand between an ``nn.Linear`` or ``nn.Conv2d`` and
    the dropout. From the dropout on, dropped units are left out up to the next linear or
    convolution layer, also across ``nn.Flatten``. All other layers get the whole batch. Outputs,
    gradients and the ``state_dict`` are those of ``nn.Sequential``, up to rounding.

    Training checks this: at the first batch and at random steps, each group of layers whose
    forward pass is replaced also runs unchanged, and outputs and gradients are compared. If they
    differ, these layers run unchanged from then on, and a warning says so. Layers with hooks,
    parametrizations, ``weight_norm``, ``spectral_norm`` or pruning, and subclasses, always run
    unchanged. Under ``torch.compile``, the types of layers are checked, and nothing is compared.

    Args:
        layers: As for ``nn.Sequential``.
        execution: ``"sliced"``, ``"masked"``, or ``"auto"`` for whichever is faster for a layer
            and its input according to ``costs``.
        costs: Costs that tell when slicing pays. None takes ``perf.SlicingCosts`` on a CPU. On a
            GPU it takes ``perf.SlicingKernelCosts`` where Triton kernels multiply float32 without
            TF32, and masks otherwise.

    Raises:
        LayerError: ``execution`` is none of the three, or the dropout layers have several
            schedules.

    >>> dropout = BlockGyroDropout(
    ...     0.5, num_features=8, group_size=2, subnetworks=4, concurrent=2, total_steps=100
    ... )
    >>> model = GyroSequential(
    ...     nn.Linear(3, 8), nn.ReLU(), dropout, nn.Linear(8, 1), execution="sliced"
    ... )
    >>> x = torch.ones(4, 3)
    >>> torch.allclose(model(x), nn.Sequential(*model)(x))
    True
    """

    def __init__(
        self, *layers: nn.Module, execution: Execution = "auto", costs: SlicingCosts | None = None
    ) -> None:
        super().__init__(*layers)
        if execution not in get_args(Execution):
            raise LayerError(
                f"execution={execution!r}; give one of {', '.join(map(repr, get_args(Execution)))}"
            )
        if len({id(d.schedule) for d in self.modules() if isinstance(d, BlockGyroDropout)}) > 1:
            raise LayerError(
                "the dropout layers have several schedules, and a batch can only be split in "
                "one way; give them one schedule="
            )
        self.execution = execution
        self.costs = costs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers with the result of ``nn.Sequential``."""
        layers = list(self)
        drops = [layer for layer in layers if isinstance(layer, BlockGyroDropout)]
        if self._is_masked(x, drops):
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        active = drops[0].schedule.active()
        # A split of which no layer makes use costs time, above all where launches do.
        key = None if torch.compiler.is_compiling() else self._setting(x, drops)
        known = _Found() if key is None else _found.setdefault(self, _Found())
        if key in known.unsliced:
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        costs = self._costs_of(x, key=key, known=known)
        is_sliced = False
        parts = Parts.of(len(x), num=len(active), device=x.device)
        now = _Split(parts.split(x), parts)
        kept_by: dict[BlockGyroDropout | None, KeptGroups] = {
            drop: drop.kept_of(active) for drop in drops
        }
        position = 0
        while position < len(layers):
            end, quick = self._quick(layers, position, now, kept_by=kept_by, costs=costs)
            group = layers[position:end]
            if quick is None or not is_trusted(
                self, group, position=position, now=now, quick=quick
            ):
                quick, end = partial(_as_whole, layers[position]), position + 1
            now = quick(now)
            is_sliced = is_sliced or now.kept is not None
            position = end
        if not is_sliced and key is not None:
            known.unsliced.add(key)
        return now.whole()

    def _costs_of(self, x: Tensor, *, key: Any, known: _Found) -> SlicingCosts:
        """Return the costs that decide what is sliced in this batch.

        On a GPU, slicing may pay in a CUDA graph alone, where nothing can be compared. So the first
        batch of a kind slices what a graph would: it is compared then.
        """
        if self.costs is not None:
            return self.costs
        if not x.is_cuda:
            return _COSTS
        if is_captured(x):
            return _CAPTURED_COSTS
        if key in known.rehearsed:
            return _KERNEL_COSTS
        known.rehearsed.add(key)
        return _CAPTURED_COSTS

    def __getitem__(self, index: Any) -> Any:
        """Return a layer, or several layers in a row with the same options."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = OrderedDict(list(self.named_children())[index])
        # A subclass may take other arguments.
        options: dict[str, Any] = {"execution": self.execution, "costs": self.costs}
        return GyroSequential(layers, **options)  # type: ignore[arg-type]

    def _setting(self, x: Tensor, drops: Sequence[BlockGyroDropout]) -> tuple[Any, ...]:
        """Return what decides whether slicing pays."""
        active = tuple(drop.training for drop in drops), len(drops[0].schedule.active())
        half = torch.is_autocast_enabled(x.device.type)
        options = self.execution, id(self.costs), is_captured(x), half
        return (x.shape, x.dtype, x.device, active, *options)

    def _is_masked(self, x: Tensor, drops: Sequence[BlockGyroDropout]) -> bool:
        """Return whether all layers run unchanged."""
        if self.execution == "masked" or not self.training or not drops:
            return True
        # Packed trials have one subnetwork each, and an empty batch has no parts.
        return (
            any(drop.subnetwork is not None for drop in drops)
            or type(x) is not Tensor
            or type(drops[0].kept) is not Tensor
            or not len(x)
            or is_transformed(x)
        )

    def _quick(
        self,
        layers: Sequence[nn.Module],
        position: int,
        now: _Split,
        *,
        kept_by: Mapping[BlockGyroDropout | None, KeptGroups],
        costs: SlicingCosts,
    ) -> tuple[int, Callable[[_Split], _Split] | None]:
        """Find how to compute a layer, or a product up to its dropout, without dropped units.

        Returns:
            The position of the next layer, and the computation. None means to run the layer
            unchanged.
        """
        layer = layers[position]
        if not is_plain(layer):
            return position, None
        if _is_product(layer):
            end, drop = _dropout_after(layers, position, now.x)
            outputs = kept_by.get(drop)
            if not self._pays(layer, now, outputs, costs=costs):
                return position, None
            if drop is None:
                return position + 1, partial(_product, layer, outputs=None)
            return end + 1, partial(
                _dropped, layer, layers[position + 1 : end], drop=drop, outputs=outputs
            )
        if _drops(layer) and now.kept is None:
            kept = kept_by[layer]
            after = _product_after(layers, position, now.x)
            if after is not None and self._pays(
                cast("_Product", layers[after]),
                replace(now, kept=kept),
                # Slicing one side alone may not pay where slicing both does.
                kept_by.get(_dropout_after(layers, after, now.x)[1]),
                costs=costs,
            ):
                return position + 1, partial(_taken, drop=layer, kept=kept)
            return position, None
        if _is_mapped(layer, now):
            return position + 1, partial(_Split.map, layer=layer)
        if type(layer) is nn.Flatten and _flattens_all(layer):
            return position + 1, _flattened
        return position, None

    def _pays(
        self, layer: _Product, now: _Split, outputs: KeptGroups | None, *, costs: SlicingCosts
    ) -> bool:
        """Return whether to slice the product."""
        inputs = now.kept
        if inputs is None and outputs is None:
            return False
        if type(layer) is nn.Conv2d and now.x.dim() != 5:
            return False
        if self.execution == "sliced":
            return True
        num_out, num_in = layer.weight.shape[:2]
        area = layer.weight[0, 0].numel()
        product = SlicedProduct(
            parts=now.parts.num,
            rows=_num_rows(layer, now.x),
            inputs=num_in * area,
            outputs=num_out,
            inputs_kept=area * (num_in if inputs is None else inputs.num_units),
            outputs_kept=num_out if outputs is None else outputs.num_units,
        )
        pays = costs.pays(product)
        if pays and self.costs is None and now.x.is_cuda:
            # Gathering copies through a GPU's memory loses, and so do the launches of the kernels
            # where dense products are several times as fast: in half precision and TF32.
            pays = (
                type(layer) is nn.Linear
                and runs_in_place(now.x, layer.weight, layer.bias, inputs=inputs, outputs=outputs)
                and multiplies_exactly(now.x)
            )
        if not pays and not torch.compiler.is_compiling():
            _say_once(layer, now.parts)
        return pays


class GyroMLP(GyroSequential):
    """A multi-layer perceptron with block-wise gyro dropout after each hidden layer.

    Args:
        in_features: Number of input features.
        hidden: Number of units of each hidden layer, multiples of ``group_size``.
        out_features: Number of output features.
        p: Share of groups that is dropped.
        group_size: Number of units in a group.
        schedule: Order in which subnetworks are trained.
        activation: Makes the module before each dropout.
        execution: See ``GyroSequential``.
        generator: Source of the masks.

    Raises:
        LayerError: An argument is invalid.

    >>> schedule = GyroSchedule(subnetworks=16, concurrent=4, total_steps=1000)
    >>> GyroMLP(784, [1024, 1024], 10, schedule=schedule)(torch.zeros(8, 784)).shape
    torch.Size([8, 10])
    """

    def __init__(  # noqa: PLR0913 -- three sizes; the rest are keywords
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        *,
        schedule: GyroSchedule,
        p: float = 0.5,
        group_size: int = 64,
        activation: Callable[[], nn.Module] = nn.ReLU,
        execution: Execution = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        layers: list[nn.Module] = []
        before = in_features
        for width in hidden:
            drop = BlockGyroDropout(
                p, num_features=width, group_size=group_size, schedule=schedule, generator=generator
            )
            layers += [nn.Linear(before, width), activation(), drop]
            before = width
        super().__init__(*layers, nn.Linear(before, out_features), execution=execution)


def _is_product(layer: nn.Module) -> TypeGuard[_Product]:
    if not is_plain(layer):
        return False
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return type(layer) is nn.Linear


def _drops(layer: nn.Module) -> TypeGuard[BlockGyroDropout]:
    """Return whether a layer is a dropout that can be sliced and drops units now."""
    if type(layer) is not BlockGyroDropout:
        return False
    return layer.training and not layer.inplace and is_plain(layer)


def _is_mapped(layer: nn.Module, now: _Split) -> bool:
    """Return whether a layer treats all units alike and leaves dropped units at zero."""
    if type(layer) in _BY_CHANNEL:
        return now.x.dim() == 5
    return type(layer) in (_BY_UNIT if now.kept is None else _ZERO_STAYS)


def _dropout_after(
    layers: Sequence[nn.Module], position: int, x: Tensor
) -> tuple[int, BlockGyroDropout | None]:
    """Return the dropout whose units are a product's outputs, after its position."""
    product = cast("_Product", layers[position])
    allowed = _BY_UNIT + _BY_CHANNEL if type(product) is nn.Conv2d else _BY_UNIT
    for end in range(position + 1, len(layers)):
        layer = layers[end]
        if _drops(layer):
            assert isinstance(layer, BlockGyroDropout)
            fits = _same_units(layer, product, x) and layer.num_features == product.weight.shape[0]
            return (end, layer) if fits else (position, None)
        if type(layer) not in allowed or not is_plain(layer):
            break
    return position, None


def _product_after(layers: Sequence[nn.Module], position: int, x: Tensor) -> int | None:
    """Return the position of the product whose inputs are a dropout's units."""
    drop = layers[position]
    assert isinstance(drop, BlockGyroDropout)
    for place in range(position + 1, len(layers)):
        layer = layers[place]
        if _is_product(layer):
            fits = _same_units(drop, layer, x) and drop.num_features == layer.weight.shape[1]
            return place if fits else None
        if type(layer) not in _ZERO_STAYS or not is_plain(layer):
            return None
    return None


def _same_units(drop: BlockGyroDropout, product: _Product, x: Tensor) -> bool:
    """Return whether both layers have their units in the same dimension.

    ``x`` is the input of the first of them, in parts.
    """
    if type(product) is nn.Conv2d:
        return x.dim() == 5 and drop.dim in (None, 1)
    return drop.dim == -1 or (drop.dim is None and x.dim() < 5)


def _product(layer: _Product, now: _Split, *, outputs: KeptGroups | None) -> _Split:
    options: dict[str, Any] = {"inputs": now.kept, "outputs": outputs}
    if type(layer) is nn.Conv2d:
        options |= {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        x = gyro_conv2d(now.x, layer.weight, layer.bias, **options)
        return replace(now, x=x, kept=outputs, dim=2)
    x = gyro_linear(now.x, layer.weight, layer.bias, **options)
    return _Split(x, now.parts, outputs, x.dim() - 1)


def _dropped(
    layer: _Product,
    between: Sequence[nn.Module],
    now: _Split,
    *,
    drop: BlockGyroDropout,
    outputs: KeptGroups | None,
) -> _Split:
    """Compute a product and what follows it up to its dropout, for the kept units only."""
    now = _product(layer, now, outputs=outputs)
    for each in between:
        now = now.map(each)
    drop.schedule.watch()
    return _Split(now.x * drop.scale, now.parts, now.kept, now.dim)


def _taken(now: _Split, *, drop: BlockGyroDropout, kept: KeptGroups) -> _Split:
    """Return what a dropout keeps."""
    drop.schedule.watch()
    dim = now.x.dim() - 1 if drop.dim == -1 else _unit_dim(now.x)
    return replace(now, x=take(now.x, kept, dim=dim) * drop.scale, kept=kept, dim=dim)


def _as_whole(layer: nn.Module, now: _Split) -> _Split:
    out = layer(now.whole())
    return _Split(now.parts.split(out), now.parts)


def _unit_dim(x: Tensor) -> int:
    """Return the unit dimension of parts ``(parts, samples, ...)``, as ``unit_dim`` of a batch."""
    return 2 if x.dim() > 4 else x.dim() - 1


def _flattens_all(layer: nn.Flatten) -> bool:
    return layer.start_dim == 1 and layer.end_dim == -1


def _flattened(now: _Split) -> _Split:
    if now.kept is None:
        return replace(now, x=now.x.flatten(2))
    if now.dim != 2:
        # Kept units are no longer side by side.
        return _Split(now.parts.split(now.whole().flatten(1)), now.parts)
    beside = math.prod(now.x.shape[3:])
    return replace(now, x=now.x.flatten(2), kept=now.kept.spread(beside))


def _num_rows(layer: _Product, x: Tensor) -> int:
    """Return the number of rows of one part that a weight is multiplied with."""
    if type(layer) is nn.Conv2d:
        return x.shape[1] * x.shape[3] * x.shape[4]
    return x[0, ..., 0].numel()


_said: set[tuple[int, int, int]] = set()


def _say_once(layer: _Product, parts: Parts) -> None:
    key = (*layer.weight.shape[:2], parts.num)
    if key not in _said:
        _said.add(key)
        logger.warning(
            "a layer of %d x %d weights is multiplied whole and masked: slicing it for %d "
            "subnetworks at a time would be slower",
            key[1], key[0], parts.num,
        )  # fmt: skip
