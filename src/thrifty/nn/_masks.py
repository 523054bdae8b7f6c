"""Masks of gyro dropout, and the schedule that renews them."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thrifty.core import LayerError, check_integers


def draw_masks(
    subnetworks: int, num_features: int, p: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw which units each subnetwork keeps; bool, shape ``(subnetworks, num_features)``."""
    return torch.rand(subnetworks, num_features, generator=generator) >= p


def draw_groups(
    subnetworks: int, num_groups: int, p: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw which ``round((1 - p) * num_groups)`` groups each subnetwork keeps, in ascending order.

    Returns:
        int64, shape ``(subnetworks, kept)``.

    Raises:
        LayerError: No group would be kept.

    >>> draw_groups(3, 4, 0.5, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """
    num_kept = round((1 - p) * num_groups)
    if not num_kept:
        raise LayerError(
            f"p={p} keeps none of {num_groups} groups; give a smaller p or smaller groups"
        )
    noise = torch.rand(subnetworks, num_groups, generator=generator)
    return noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values


def unit_dim(x: Tensor) -> int:
    """Return the dimension of the units.

    It is the last one for rows and sequences, and that of the channels for images and volumes.
    """
    return 1 if x.dim() > 3 else x.dim() - 1


def multiply_parts(x: Tensor, rows: Tensor, *, dim: int) -> Tensor:
    """Multiply the samples of each part of a batch by the row of that part.

    Args:
        x: Shape ``(batch, ..., units, ...)``, with units at ``dim``.
        rows: Shape ``(parts, units)``. Sample ``i`` belongs to part ``i * parts // batch``.

    >>> multiply_parts(torch.ones(3, 2), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), dim=1)
    tensor([[0., 1.],
            [0., 1.],
            [2., 3.]])
    """
    num_parts, num_units = rows.shape
    others = [1] * (x.dim() - 2)
    others.insert(dim - 1, num_units)
    batch = x.shape[0]
    if batch % num_parts:
        part = torch.arange(batch, device=x.device) * num_parts // batch
        return x * rows[part].reshape(batch, *others)
    parts = x.reshape(num_parts, batch // num_parts, *x.shape[1:])
    return (parts * rows.reshape(num_parts, 1, *others)).reshape(x.shape)


class KeptGroups(NamedTuple):
    """The groups of units that each part of a batch keeps.

    Attributes:
        groups: Kept groups in ascending order; int64, shape ``(parts, kept)``.
        group_size: Number of units in a group.
        num_groups: Number of all groups.
    """

    groups: Tensor
    group_size: int
    num_groups: int

    @property
    def num_units(self) -> int:
        """Number of units that each part keeps."""
        return self.groups.shape[1] * self.group_size

    def units(self) -> Tensor:
        """Return the numbers of the kept units; int64, shape ``(parts, num_units)``."""
        within = torch.arange(self.group_size, device=self.groups.device)
        return (self.groups.unsqueeze(-1) * self.group_size + within).flatten(1)

    def spread(self, factor: int) -> KeptGroups:
        """Return the same groups after each unit became ``factor`` units side by side.

        Flattened channels are an example.
        """
        return self._replace(group_size=self.group_size * factor)


class Parts(NamedTuple):
    """The split of a batch into parts that differ by at most one sample.

    Sample ``i`` belongs to part ``i * num // batch``.

    >>> parts = Parts.of(5, num=2)
    >>> split = parts.split(torch.arange(5.0))
    >>> split.shape, parts.join(split)
    (torch.Size([2, 3]), tensor([0., 1., 2., 3., 4.]))
    """

    num: int
    batch: int
    places: Tensor | None
    """The sample at each place of the parts, shape ``(num * longest,)``.

    None if all parts have the same length.
    """
    samples: Tensor | None
    """The place of each sample."""

    @staticmethod
    def of(batch: int, *, num: int, device: torch.device | None = None) -> Parts:
        """Return the parts of a batch."""
        if batch % num == 0:
            return Parts(num, batch, None, None)
        every = torch.arange(batch, device=device)
        part = every * num // batch
        starts = -(
            -torch.arange(num, device=device) * batch // num
        )  # the first i with i * num // batch >= part
        longest = -(-batch // num)
        samples = part * longest + every - starts[part]
        # Places that are left over hold an arbitrary sample, which is never taken out again.
        places = torch.zeros(num * longest, dtype=torch.int64, device=device)
        places[samples] = every
        return Parts(num, batch, places, samples)

    def split(self, x: Tensor) -> Tensor:
        """Split ``(batch, ...)`` into ``(num, longest, ...)``."""
        if self.places is not None:
            x = x.index_select(0, self.places)
        return x.reshape(self.num, x.shape[0] // self.num, *x.shape[1:])

    def join(self, x: Tensor) -> Tensor:
        """Join ``(num, longest, ...)`` into ``(batch, ...)``."""
        x = x.flatten(0, 1)
        return x if self.samples is None else x.index_select(0, self.samples)


def take(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return the kept units of each part.

    Args:
        x: Shape ``(parts, samples, ..., units, ...)``, with units at ``dim``.
        kept: The units that each part keeps.
    """
    # One launch for all parts: on a CPU, this is slower.
    if x.is_cuda:
        return take_at_once(x, kept, dim=dim)
    units = kept.units()
    return torch.stack([
        part.index_select(dim - 1, unit) for part, unit in zip(x, units, strict=True)
    ])


def put(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return all units, with zeros for those that were not kept."""
    if x.is_cuda:
        return put_at_once(x, kept, dim=dim)
    shape = _whole_shape(x, kept, dim=dim)[1:]
    units = kept.units()
    return torch.stack([
        part.new_zeros(shape).index_copy(dim - 1, unit, part)
        for part, unit in zip(x, units, strict=True)
    ])


def take_at_once(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return the result of ``take`` by one call for all parts."""
    whole = _in_groups(x, kept.group_size, dim=dim)
    return whole.gather(dim, _index(kept, whole, dim=dim)).flatten(dim, dim + 1)


def put_at_once(x: Tensor, kept: KeptGroups, *, dim: int) -> Tensor:
    """Return the result of ``put`` by one call for all parts."""
    some = _in_groups(x, kept.group_size, dim=dim)
    whole = _in_groups(x.new_zeros(_whole_shape(x, kept, dim=dim)), kept.group_size, dim=dim)
    return whole.scatter(dim, _index(kept, some, dim=dim), some).flatten(dim, dim + 1)


def _whole_shape(x: Tensor, kept: KeptGroups, *, dim: int) -> list[int]:
    return [*x.shape[:dim], kept.num_groups * kept.group_size, *x.shape[dim + 1 :]]


def _in_groups(x: Tensor, group_size: int, *, dim: int) -> Tensor:
    """Split the units at ``dim`` into groups and the units of each."""
    return x.reshape(*x.shape[:dim], -1, group_size, *x.shape[dim + 1 :])


def _index(kept: KeptGroups, x: Tensor, *, dim: int) -> Tensor:
    """Return the kept groups for each place of ``x``, whose groups are at ``dim``."""
    shape = list(x.shape)
    shape[dim] = kept.groups.shape[1]
    view = [1] * len(shape)
    view[0], view[dim] = kept.groups.shape
    return kept.groups.reshape(view).expand(shape)


Order = Literal["partition", "legacy"]

_PATIENCE = 1_000
"""Training forward passes without a schedule step before a warning that the schedule is unused."""
# Not an attribute, so that schedules that differ in it alone are equal.
_num_forward: WeakKeyDictionary[GyroSchedule, int] = WeakKeyDictionary()


class GyroSchedule(nn.Module):
    """The order in which subnetworks have their turn, and the position in it.

    All layers of a model share one. Source: Gyro Dropout (Lee et al., MLSys 2022).
    ``"partition"`` trains every subnetwork equally often. ``"legacy"`` draws with replacement for
    each period, as the paper's code does, and thereby leaves some out.

    Args:
        subnetworks: Number of subnetworks (the paper's sigma).
        concurrent: Number of subnetworks to train at a time (tau).
        total_steps: Optimizer steps of the whole training; after them, the order starts again.
        order: ``"partition"`` or ``"legacy"``, see above.
        cycles: How often each subnetwork has its turn; ``"partition"`` only.
        generator: Source of the order; None is torch's global stream, as for the weights of a
            layer.

    Raises:
        LayerError: An argument is invalid.

    >>> schedule = GyroSchedule(subnetworks=4, concurrent=2, total_steps=10)
    >>> seen = schedule.active().tolist()
    >>> for _ in range(5):
    ...     schedule.step()
    >>> sorted(seen + schedule.active().tolist())
    [0, 1, 2, 3]
    """

    step_counters = ("position",)
    """Buffers that thrifty's training loops increase by one after each optimizer step."""

    order: Tensor
    position: Tensor

    def __init__(
        self,
        *,
        subnetworks: int,
        concurrent: int,
        total_steps: int,
        order: Order = "partition",
        cycles: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_integers(
            LayerError,
            1,
            subnetworks=subnetworks,
            concurrent=concurrent,
            total_steps=total_steps,
            cycles=cycles,
        )
        if concurrent > subnetworks:
            raise LayerError(
                f"concurrent={concurrent} of subnetworks={subnetworks}: no more than there are "
                "can be trained at a time"
            )
        if order not in get_args(Order):
            raise LayerError(
                f"order={order!r}; give one of {', '.join(map(repr, get_args(Order)))}"
            )
        if order == "legacy" and cycles != 1:
            raise LayerError(f"cycles={cycles} with order='legacy', which has none; leave it out")
        self.subnetworks, self.concurrent = int(subnetworks), int(concurrent)
        self.total_steps = int(total_steps)
        drawn = (
            _partition(self, cycles=int(cycles), generator=generator)
            if order == "partition"
            else _with_replacement(self, generator)
        )
        self.register_buffer("order", drawn)
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def active(self) -> Tensor:
        """Return the subnetworks that are trained now; int64, shape ``(concurrent,)``."""
        num_phases = self.order.shape[0]
        phase = self.position.remainder(self.total_steps) * num_phases // self.total_steps
        # Take one row by an index of shape (1,): a 0-dimensional index would be read on the CPU.
        return self.order[phase.reshape(1)].squeeze(0)

    def step(self) -> None:
        """Note an optimizer step; thrifty's own training loops do this for you."""
        self.position.add_(1)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note each step of an optimizer from now on."""

        def note(*_: Any) -> None:
            self.step()

        optimizer.register_step_post_hook(note)

    def watch(self) -> None:
        """Warn once if the schedule never advances; layers call this in training."""
        # A packed position belongs to thrifty's own training.
        if torch.compiler.is_compiling() or type(self.position) is not Tensor:
            return
        num = _num_forward[self] = _num_forward.get(self, 0) + 1
        if num == _PATIENCE and not int(self.position):
            warnings.warn(
                f"{_PATIENCE} forward passes in training and no optimizer step noted: the same "
                f"{self.concurrent} subnetworks "
                "are trained all the time; call schedule.follow(optimizer)",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        return (
            f"subnetworks={self.subnetworks}, concurrent={self.concurrent}, "
            f"total_steps={self.total_steps}"
        )


def _partition(schedule: GyroSchedule, *, cycles: int, generator: torch.Generator | None) -> Tensor:
    """Return permutations one after the other, cut into phases.

    The last phase is filled up from another permutation.
    """
    num_phases = math.ceil(cycles * schedule.subnetworks / schedule.concurrent)
    num_phases = min(num_phases, schedule.total_steps)
    num = num_phases * schedule.concurrent
    drawn = [
        torch.randperm(schedule.subnetworks, generator=generator)
        for _ in range(math.ceil(num / schedule.subnetworks))
    ]
    return torch.cat(drawn)[:num].reshape(num_phases, schedule.concurrent)


def _with_replacement(schedule: GyroSchedule, generator: torch.Generator | None) -> Tensor:
    num_phases = min(max(schedule.subnetworks // schedule.concurrent, 1), schedule.total_steps)
    shape = (num_phases, schedule.concurrent)
    return torch.randint(schedule.subnetworks, shape, generator=generator)
