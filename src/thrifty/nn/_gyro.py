"""Gyro dropout: few subnetworks, each trained often, and ensembles of them at inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import LayerError, check_integers

from ._masks import (
    GyroSchedule,
    KeptGroups,
    Order,
    draw_groups,
    draw_masks,
    multiply_parts,
    unit_dim,
)


class GyroLayer(nn.Module):
    """Base class of gyro dropout layers, with a schedule and rows to multiply by."""

    by_position = True
    """Whether the effect on a sample depends on its place in the batch in training."""

    def __init__(
        self, p: float, *, num_features: int, schedule: GyroSchedule, dim: int | None
    ) -> None:
        super().__init__()
        check_integers(LayerError, 1, num_features=num_features)
        self.p = _check_rate(p)
        self.num_features = int(num_features)
        self.dim = dim
        self.schedule = schedule
        self.inplace = False
        """Whether to write the result to the input, as ``nn.Dropout(inplace=True)`` does."""
        self.subnetwork: int | None = None
        """The subnetwork that all samples go through, also in evaluation mode.

        None uses the subnetworks whose turn it is, in training only.
        """

    def rows(self, subnetworks: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the factors that subnetworks multiply units by.

        ``subnetworks`` has shape ``(num,)``, the result has shape ``(num, num_features)``.
        """
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Drop units.

        Args:
            x: Shape ``(batch, ..., num_features)``, or ``(batch, num_features, ...)`` with four
                or more dimensions.

        Raises:
            LayerError: ``x`` has no batch dimension, or another number of units.
        """
        if x.dim() < 2:
            raise LayerError(
                f"x has shape {tuple(x.shape)}; give a batch: the first dimension counts samples"
            )
        dim = unit_dim(x) if self.dim is None else self.dim % x.dim()
        if self.dim is not None and not (dim > 0 and -x.dim() <= self.dim < x.dim()):
            raise LayerError(
                f"dim={self.dim}, and x has shape {tuple(x.shape)}; give a dimension of it "
                "other than the batch"
            )
        if x.shape[dim] != self.num_features:
            raise LayerError(
                f"x has shape {tuple(x.shape)}, so {x.shape[dim]} units in dimension {dim}, "
                f"and the layer {self.num_features}; "
                "if units are in another dimension, say so with dim="
            )
        if self.subnetwork is not None:
            chosen = torch.full((1,), self.subnetwork, device=x.device)
        elif self.training:
            self.schedule.watch()
            chosen = self.schedule.active()
        else:
            return x
        out = multiply_parts(x, self.rows(chosen, dtype=x.dtype), dim=dim)
        return x.copy_(out) if self.inplace else out

    def extra_repr(self) -> str:
        return f"p={self.p}, num_features={self.num_features}"


class GyroDropout(GyroLayer):
    """Dropout whose subnetworks are drawn beforehand and trained a few at a time.

    Source: Gyro Dropout (Lee et al., MLSys 2022). In training, the batch is split among
    ``concurrent`` of the ``subnetworks``, in contiguous parts that differ by at most one sample.
    After a while, the next subnetworks have their turn. Shuffle the data: in a batch sorted by
    class, each part would be a class. Kept units are scaled by ``1 / (1 - p)``. Evaluation is the
    identity.

    Args:
        p: Probability that a unit is dropped from a subnetwork.
        num_features: Number of units.
        subnetworks: Number of subnetworks to draw (the paper's sigma).
        concurrent: Number of subnetworks to train at a time (tau).
        total_steps: Optimizer steps of the whole training.
        schedule: The schedule of another layer, which then replaces the three arguments above;
            both layers train the same subnetworks. Or ``"partition"`` or ``"legacy"`` for a
            schedule of its own, see ``GyroSchedule`` (which also supports several cycles).
        dim: Dimension of the units; None is the last one, or 1 (channels) with four or more
            dimensions.
        generator: Source of the masks and the order; None is torch's global stream.

    Raises:
        LayerError: An argument is invalid.

    >>> layer = GyroDropout(0.5, num_features=6, subnetworks=8, concurrent=2, total_steps=100)
    >>> out = layer(torch.ones(4, 6))
    >>> bool((out[0] == out[1]).all()), sorted(out.unique().tolist()) <= [0.0, 2.0]
    (True, True)
    """

    trial_rate = "p"
    """Name of the attribute that may differ between packed trials.

    Its value went into the buffers; ``forward`` does not read it.
    """

    masks: Tensor
    scale: Tensor

    def __init__(
        self,
        p: float = 0.5,
        *,
        num_features: int,
        subnetworks: int | None = None,
        concurrent: int | None = None,
        total_steps: int | None = None,
        schedule: GyroSchedule | Order = "partition",
        dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        own = own_schedule(
            schedule,
            subnetworks=subnetworks,
            concurrent=concurrent,
            total_steps=total_steps,
            generator=generator,
        )
        super().__init__(p, num_features=num_features, schedule=own, dim=dim)
        drawn = draw_masks(own.subnetworks, self.num_features, self.p, generator=generator)
        self.register_buffer("masks", drawn)
        self.register_buffer("scale", torch.tensor(1 / (1 - self.p)))

    def rows(self, subnetworks: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the factors that subnetworks multiply units by.

        ``subnetworks`` has shape ``(num,)``, the result has shape ``(num, num_features)``.
        """
        return self.masks[subnetworks].to(dtype) * self.scale.to(dtype)


class BlockGyroDropout(GyroLayer):
    """Gyro dropout of groups of neighbouring units.

    Every subnetwork keeps exactly ``round((1 - p) * groups)`` of them. Shapes therefore never
    change, and ``GyroSequential`` can leave out what is dropped. Source: block-wise gyro dropout
    (Lee et al., MLSys 2022), where a group is what a GPU computes at once.

    Args:
        p: Share of groups that is dropped.
        num_features: Number of units, a multiple of ``group_size``.
        group_size: Number of units in a group.
        subnetworks: See ``GyroDropout``.
        concurrent: See ``GyroDropout``.
        total_steps: See ``GyroDropout``.
        schedule: See ``GyroDropout``.
        dim: See ``GyroDropout``.
        generator: See ``GyroDropout``.

    Raises:
        LayerError: An argument is invalid, or no group would be kept.

    >>> layer = BlockGyroDropout(
    ...     0.5, num_features=8, group_size=2, subnetworks=4, concurrent=2, total_steps=100
    ... )
    >>> (layer(torch.ones(2, 8)) > 0).sum(1).tolist()
    [4, 4]
    """

    trial_rate = "p"
    """Name of the attribute that may differ between packed trials.

    Its value went into the buffers; ``forward`` does not read it.
    """

    kept: Tensor

    def __init__(  # noqa: PLR0913 -- GyroDropout's options and group_size; all but p are keywords
        self,
        p: float = 0.5,
        *,
        num_features: int,
        group_size: int = 64,
        subnetworks: int | None = None,
        concurrent: int | None = None,
        total_steps: int | None = None,
        schedule: GyroSchedule | Order = "partition",
        dim: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        own = own_schedule(
            schedule,
            subnetworks=subnetworks,
            concurrent=concurrent,
            total_steps=total_steps,
            generator=generator,
        )
        super().__init__(p, num_features=num_features, schedule=own, dim=dim)
        check_integers(LayerError, 1, group_size=group_size)
        if num_features % group_size:
            raise LayerError(
                f"num_features={num_features} is no multiple of group_size={group_size}; "
                "groups are of one size"
            )
        self.group_size = int(group_size)
        drawn = draw_groups(own.subnetworks, self.num_groups, self.p, generator=generator)
        self.register_buffer("kept", drawn)

    @property
    def num_groups(self) -> int:
        """Number of all groups."""
        return self.num_features // self.group_size

    @property
    def scale(self) -> float:
        """Factor of kept units, which exactly keeps the mean over all groups."""
        return self.num_groups / self.kept.shape[-1]

    def kept_of(self, subnetworks: Tensor) -> KeptGroups:
        """Return the groups that some subnetworks, shape ``(num,)``, keep."""
        return KeptGroups(self.kept.index_select(0, subnetworks), self.group_size, self.num_groups)

    def rows(self, subnetworks: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the factors that subnetworks multiply units by.

        ``subnetworks`` has shape ``(num,)``, the result has shape ``(num, num_features)``.
        """
        kept = self.kept[subnetworks]
        groups = torch.arange(self.num_groups, device=kept.device)
        held = (kept.unsqueeze(-1) == groups).any(1).to(dtype) * self.scale
        return held.unsqueeze(-1).expand(*held.shape, self.group_size).flatten(1)

    def extra_repr(self) -> str:
        return f"p={self.p}, num_features={self.num_features}, group_size={self.group_size}"


def own_schedule(
    schedule: GyroSchedule | Order,
    *,
    subnetworks: int | None,
    concurrent: int | None,
    total_steps: int | None,
    generator: torch.Generator | None,
) -> GyroSchedule:
    """Return the given schedule, or make one from the other arguments.

    Raises:
        LayerError: Both are given, or neither is.
    """
    given = {"subnetworks": subnetworks, "concurrent": concurrent, "total_steps": total_steps}
    if isinstance(schedule, GyroSchedule):
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise LayerError(
                f"{', '.join(twice)}: the schedule given says that already; leave it out"
            )
        return schedule
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise LayerError(
            f"{', '.join(missing)} missing: give them, or the schedule of another layer as "
            "schedule="
        )
    return GyroSchedule(**given, order=schedule, generator=generator)  # type: ignore[arg-type]


def _check_rate(p: Any) -> float:
    """Return the probability that a unit is dropped, as a float.

    Raises:
        LayerError: It is not a probability, or no unit would be left.
    """
    is_number = isinstance(p, Real) and not isinstance(p, bool)
    if not (is_number and 0.0 <= p < 1.0):
        raise LayerError(f"p={p!r}; give a probability from 0 up to, but not, 1")
    return float(p)


class SubnetworkEnsemble(nn.Module):
    """An ensemble that averages the outputs of some subnetworks of a trained model.

    It replaces one pass through all units, and costs one forward pass for each subnetwork.

    Args:
        model: Model whose gyro dropout layers share one schedule.
        num: Number of subnetworks to average.
        transform: Function applied to each output before averaging; for probabilities, pass
            ``functools.partial(torch.softmax, dim=-1)``.
        generator: Source of the subnetworks, which are drawn without replacement.

    Raises:
        LayerError: The model has no gyro dropout, its layers have several schedules, or it has
            fewer subnetworks.

    >>> from thrifty.nn import GyroDropout
    >>> dropout = GyroDropout(0.5, num_features=8, subnetworks=4, concurrent=2, total_steps=100)
    >>> model = nn.Sequential(nn.Linear(3, 8), dropout, nn.Linear(8, 1))
    >>> SubnetworkEnsemble(model, num=4)(torch.zeros(2, 3)).shape
    torch.Size([2, 1])
    """

    chosen: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        num: int,
        transform: Callable[[Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_integers(LayerError, 1, num=num)
        layers = [layer for layer in model.modules() if isinstance(layer, GyroLayer)]
        if not layers:
            raise LayerError(f"{type(model).__name__} has no gyro dropout, so no subnetworks")
        if len({id(layer.schedule) for layer in layers}) > 1:
            raise LayerError(
                "the model's layers have several schedules, so a subnetwork is no combination "
                "of masks; give them one schedule="
            )
        there = layers[0].schedule.subnetworks
        if num > there:
            raise LayerError(f"num={num}, and the model has {there} subnetworks")
        self.model = model
        self.transform = transform
        drawn = torch.randperm(there, generator=generator)[:num]
        self.register_buffer("chosen", drawn)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the mean over the chosen subnetworks; inputs are those of the model."""
        total: Tensor | None = None
        for number in self.chosen.tolist():
            with subnetwork(self.model, number):
                out = self.model(*inputs, **options)
            out = out if self.transform is None else self.transform(out)
            total = out if total is None else total + out
        assert total is not None
        return total / len(self.chosen)


@contextmanager
def subnetwork(model: nn.Module, number: int) -> Iterator[None]:
    """Send all samples through one subnetwork, also in evaluation mode.

    Args:
        model: Model with gyro dropout.
        number: Number of the subnetwork, from 0.

    Raises:
        LayerError: The subnetwork does not exist.

    >>> from thrifty.nn import GyroDropout
    >>> layer = GyroDropout(
    ...     0.5, num_features=8, subnetworks=4, concurrent=2, total_steps=100
    ... ).eval()
    >>> with subnetwork(layer, 3):
    ...     out = layer(torch.ones(1, 8))
    >>> bool((out[0] > 0).equal(layer.masks[3]))
    True
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GyroLayer)]
    for layer in layers:
        if not 0 <= number < layer.schedule.subnetworks:
            raise LayerError(
                f"subnetwork {number} does not exist: there are {layer.schedule.subnetworks}, "
                "counted from 0"
            )
    before = [layer.subnetwork for layer in layers]
    try:
        for layer in layers:
            layer.subnetwork = number
        yield
    finally:
        for layer, number_before in zip(layers, before, strict=True):
            layer.subnetwork = number_before
