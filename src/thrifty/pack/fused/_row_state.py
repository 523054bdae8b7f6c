"""The rows of a block: the tensors and optimizer state of its trials, one row per trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from thrifty.pack._frozen import FrozenTensor, address, are_intact, cheap_copy
from thrifty.pack._state import named_tensors
from thrifty.pack.task._followed_optimizer import Options
from thrifty.pack.verify import OwnState, own_tensors

from ._fusable import UnfusableError, number_values
from ._member import FusedTrial
from ._structure import Structure
from .optimizers import GroupedOptimizer, Rows, clip_rows


_LARGE = 2**20
"""Bytes from which on rows are mapped, in whole pages."""


class RowState:
    """Trained parameters, gradients and moments as rows of flat state, ``[C, P]``.

    C is the number of trials that fit, P the length of a row. Other tensors (frozen parameters and
    buffers) are ``[C, *shape]``. The tensors of a trial's module are views of its row. The
    parameters of one param group lie side by side, so that each group is a range of columns with
    its own optimizer. Tensors that the structure holds for all trials exist once, ``[*shape]``, and
    are lent to each module.

    Attributes:
        lent: What is held for all rows, by name.
    """

    def __init__(
        self,
        structure: Structure,
        optimizer: GroupedOptimizer,
        *,
        capacity: int,
        device: torch.device,
    ) -> None:
        self._structure = structure
        self._optimizer = optimizer
        self._capacity = capacity
        layout = structure.layout

        def zeros() -> torch.Tensor:
            return _zeros(capacity, layout.width, dtype=layout.dtype, device=device)

        self._parameters, self._gradients = zeros(), zeros()
        self._moments = {name: zeros() for name in optimizer.moments}
        self._columns = [layout.range_of(names) for names in optimizer.names]
        self._groups = [self._group(columns) for columns in self._columns]
        self._outside: dict[int, list[torch.Tensor]] = {}
        """Views of the gradients outside of a narrower model's own tensors, for each row."""
        self._unused = set(range(capacity))
        """Rows that no trial has had yet. Writing zeros to them would only take memory."""
        self._others: list[torch.Tensor] = []  # frozen parameters and buffers, [C, *shape]
        self.lent: dict[str, FrozenTensor] = {}
        self._is_held = [name in structure.held for name in structure.untrained]
        self._addresses: dict[int, list[int]] = {}  # of the module's tensors, for each row
        self._counters = [
            place for place, name in enumerate(structure.untrained) if name in structure.counters
        ]

    def _group(self, columns: tuple[int, int] | None) -> Rows | None:
        """Return the rows of one param group; None if none of its parameters is trained."""
        if columns is None:
            return None
        start, stop = columns
        return Rows(
            parameters=self._parameters[:, start:stop],
            gradients=self._gradients[:, start:stop],
            moments={name: moment[:, start:stop] for name, moment in self._moments.items()},
            steps=[0] * self._capacity,
        )

    # -- inputs and results of programs --------------------------------------------------

    def trained(self, rows: slice) -> list[torch.Tensor]:
        """Return the trained parameters of some rows, each ``[number of rows, *shape]``."""
        return list(self._structure.layout.views(self._parameters[rows]))

    def gradients(self, rows: slice) -> list[torch.Tensor]:
        """Return the memory for their gradients, each ``[number of rows, *shape]``."""
        return list(self._structure.layout.views(self._gradients[rows]))

    def untrained(self, rows: slice) -> list[torch.Tensor]:
        """Return the frozen parameters and buffers of some rows, each ``[number of rows, *shape]``.

        Those that are held for all rows are ``[*shape]``.
        """
        return self._of(rows)

    def _of(self, where: slice | list[int]) -> list[torch.Tensor]:
        return [
            other if held else other[where]
            for other, held in zip(self._others, self._is_held, strict=True)
        ]

    def of_rows(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return all tensors of some rows, each ``[number of rows, *shape]``.

        They are views if the rows are consecutive, otherwise copies.
        """
        where = _where(rows)
        flat = self._parameters[where]
        return [*self._structure.layout.views(flat), *self._of(where)]

    def take_gradients(self, rows: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Write gradients to where the optimizer reads them.

        Args:
            rows: The rows that the gradients belong to.
            gradients: One for each trained parameter, ``[number of rows, *shape]``. None means
                zero.
        """
        where = _where(rows)
        for segment, gradient in zip(self._structure.layout.segments, gradients, strict=True):
            self._gradients[where, segment.start : segment.stop] = (
                0.0 if gradient is None else gradient.reshape(len(rows), -1)
            )

    def take_untrained(self, rows: Sequence[int], untrained: Sequence[torch.Tensor]) -> None:
        """Write back frozen parameters and buffers if ``of_rows`` returned copies of them."""
        where = _where(rows)
        if isinstance(where, list):
            for other, changed in self._apart(untrained):
                other[where] = changed

    def _apart(self, values: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Yield each untrained tensor of which every row has its own, with one of ``values``."""
        for other, held, value in zip(self._others, self._is_held, values, strict=True):
            if not held:
                yield other, value

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that the rows hold."""
        return [self._parameters, self._gradients, *self._moments.values(), *self._own_others()]

    def updater(self, options: Sequence[Options]) -> Callable[[], None]:
        """Return a function that updates the first rows, each by its own options and limits."""
        limits = [limit for _, limit in options]
        clips = any(limits)
        step = self._optimizer.stepper(self._groups, [each for each, _ in options])
        counters = [self._others[place][: len(options)] for place in self._counters]
        outside = [view for row in range(len(options)) for view in self._outside.get(row, ())]
        if not outside and not clips and not counters:
            return step
        gradients = self._gradients[: len(options)]

        def update() -> None:
            if outside:
                torch._foreach_zero_(outside)  # so that padding stays zero
            if clips:
                clip_rows(gradients, limits)
            step()
            for counter in counters:
                counter += 1

        return update

    # -- adding, moving and releasing trials ---------------------------------------------

    def put(self, trial: FusedTrial, row: int) -> None:
        """Give a trial a row and copy its values and moments there.

        The tensors of its module become views of the row.

        Raises:
            UnfusableError: What the block holds for all trials is not what this trial has.
        """
        own = self._structure.state_of(trial.model)
        lent = self.lent or {name: trial.frozen[name] for name in self._structure.held}
        if not are_intact(lent, own):
            raise UnfusableError("its frozen tensors are not those of the trials in its block")
        trial.layouts = {name: _layout(tensor) for name, tensor in own.items()}
        trial.held = self._structure.held
        untrained = self._structure.untrained
        if not self._others:
            self.lent = lent
            self._others = [
                self.lent[name].tensor
                if name in self.lent
                else own[name].detach().new_zeros((self._capacity, *own[name].shape))
                for name in untrained
            ]
        with torch.no_grad():
            if row in self._unused:
                self._unused.remove(row)
            else:
                for rows in self._trained_groups():
                    rows.empty(row)
            self._note_width(trial, row)
            for name, view in self._views(trial, self._parameters[row]):
                view.copy_(own[name])
            for other, name in self._apart(untrained):
                other[row].copy_(own[name])
            self._load_moments(trial, row)
        self._attach(trial, row)

    def move(self, trial: FusedTrial, source: int, target: int) -> None:
        """Move a trial from one row to another.

        A trial whose module has been given other memory keeps that, and does not hold its row.
        """
        holds = self.holds(trial, source)
        with torch.no_grad():
            for rows in self._trained_groups():
                rows.move(source, target)
            for tensor in self._own_others():
                tensor[target].copy_(tensor[source])
        self._note_width(trial, target)
        if holds:
            self._attach(trial, target)
        else:
            self.release(trial)
            self._addresses[target] = []

    def release(self, trial: FusedTrial) -> None:
        """Give the tensors of a trial's module their own memory again, in their former layout.

        Some kernels add in an order that depends on the memory layout. In another layout, a trial
        that goes on alone would differ in its last bits from a restored one.
        """
        own = named_tensors(trial.model)
        trial.held = None
        for name, tensor in own.items():
            if name in self.lent and self.lent[name].is_in(tensor):
                continue
            layout = trial.layouts.get(name)
            if layout is None or layout.shape != tensor.shape:
                tensor.data = tensor.data.clone()
            else:
                like = torch.empty_like(layout, dtype=tensor.dtype, device=tensor.device)
                tensor.data = like.copy_(tensor.data)

    def _attach(self, trial: FusedTrial, row: int) -> None:
        own = named_tensors(trial.model)
        for name, view in self._views(trial, self._parameters[row]):
            own[name].data = with_own_storage(view)
            own[name].grad = None
        for other, name in self._apart(self._structure.untrained):
            if name in own:  # a number is no tensor in the module
                own[name].data = with_own_storage(other[row])
        self._addresses[row] = self._addresses_of(trial)

    def _own_others(self) -> list[torch.Tensor]:
        return [other for other, _ in self._apart(self._structure.untrained)]

    def holds(self, trial: FusedTrial, row: int) -> bool:
        """Return whether the tensors of a trial's module are still views of its row.

        Those that are held for all rows do not count; see ``FusedTrial.frozen_key``.
        """
        return self._addresses[row] == self._addresses_of(trial)

    def _addresses_of(self, trial: FusedTrial) -> list[int]:
        own = named_tensors(trial.model)
        return [address(tensor) for name, tensor in own.items() if name not in self.lent]

    def _views(self, trial: FusedTrial, row: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the trial's part of each trained tensor of a row, by name.

        If the trial's model is narrower than the block's, its part is a corner of the tensor.
        """
        layout = self._structure.layout
        shapes = {name: p.shape for name, p in named_tensors(trial.model).items()}
        return zip(self._structure.trained, layout.row_views(row, shapes), strict=True)

    def _note_width(self, trial: FusedTrial, row: int) -> None:
        """Note which part of a row a model has, and where gradients are outside of it."""
        self._outside[row] = []
        shapes = {name: p.shape for name, p in named_tensors(trial.model).items()}
        for rows, columns in zip(self._groups, self._columns, strict=True):
            if rows is not None and columns is not None:
                rows.use(row, self._structure.layout.parts(shapes, within=columns))
        layout = self._structure.layout
        for segment, whole in zip(
            layout.segments, layout.row_views(self._gradients[row]), strict=True
        ):
            view = whole
            for dim, size in enumerate(shapes[segment.name]):
                if size < segment.shape[dim]:
                    self._outside[row].append(view.narrow(dim, size, segment.shape[dim] - size))
                    view = view.narrow(dim, 0, size)
        trial.is_narrow = bool(self._outside[row])

    def refresh_numbers(self, trial: FusedTrial, row: int) -> None:
        """Take over numbers of a trial's module that ``adapt`` may have changed."""
        if self._structure.numbers:
            values = number_values(trial.model)
            for other, name in self._apart(self._structure.untrained):
                if name in self._structure.numbers:
                    other[row] = values[name]

    # -- moments, as torch's optimizer keeps them ----------------------------------------

    def moments(self, trial: FusedTrial, row: int) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of a trial's trained parameters by name, as views."""
        views = {m: dict(self._views(trial, rows[row])) for m, rows in self._moments.items()}
        return self._moments_in(views, trial, row)

    def copied_tensors(self, trial: FusedTrial, row: int) -> dict[str, torch.Tensor]:
        """Return a copy of a trial's tensors, by name."""
        trained = self._copied_views(trial, self._parameters[row])
        own = own_tensors(trial.model)
        return {n: trained[n] if n in trained else cheap_copy(t) for n, t in own.items()}

    def copied_moments(self, trial: FusedTrial, row: int) -> dict[str, dict[str, Any]]:
        """Return a copy of a trial's moments, as ``moments`` does."""
        copied = {m: self._copied_views(trial, rows[row]) for m, rows in self._moments.items()}
        return self._moments_in(copied, trial, row)

    def _copied_views(self, trial: FusedTrial, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a copy of the trial's part of each trained tensor of a row, by name."""
        if trial.is_narrow:
            return {name: view.clone() for name, view in self._views(trial, row)}
        return dict(self._views(trial, row.clone()))  # one copy is faster than many

    def _moments_in(
        self, views: Mapping[str, Mapping[str, torch.Tensor]], trial: FusedTrial, row: int
    ) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, given the views of each moment."""
        out: dict[str, dict[str, Any]] = {}
        for optimizer, names, rows, options in zip(
            self._optimizer.optimizers,
            self._optimizer.names,
            self._groups,
            trial.options_now(),
            strict=True,
        ):
            if rows is None or not rows.steps[row]:
                continue
            steps = float(rows.steps[row])
            for name in self._structure.layout.within(names):
                counted = {"step": torch.tensor(steps)} if optimizer.counts else {}
                kept = {moment: views[moment][name] for moment in optimizer.kept(options)}
                out[name] = {**counted, **kept}
        return out

    def restore(self, trial: FusedTrial, row: int, state: OwnState) -> None:
        """Restore a trial to another state."""
        with torch.no_grad():
            for name, tensor in own_tensors(trial.model).items():
                if name not in self.lent:
                    tensor.copy_(state.tensors[name])
            for rows in self._trained_groups():
                rows.clear(row)
            self._fill_moments(trial, row, state.moments)

    def own_gradients(self, trial: FusedTrial, row: int) -> dict[str, torch.Tensor]:
        """Return a copy of a trial's gradients, in the shapes of its own parameters."""
        return self._copied_views(trial, self._gradients[row])

    def _load_moments(self, trial: FusedTrial, row: int) -> None:
        state = trial.followed.moments()
        trained = set(self._structure.trained)
        idle = {name: own for name, own in state.items() if name not in trained}
        trial.enter(idle_moments=idle)
        self._fill_moments(trial, row, state)

    def _fill_moments(
        self, trial: FusedTrial, row: int, state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        for moment, tensor in self._moments.items():
            for name, view in self._views(trial, tensor[row]):
                held = state.get(name, {}).get(moment)
                if held is not None:
                    view.copy_(held)
        steps = steps_taken(trial, self._optimizer, self._structure, state=state)
        for number, rows in zip(steps, self._groups, strict=True):
            if rows is not None:
                rows.steps[row] = number

    def _trained_groups(self) -> Iterator[Rows]:
        return (rows for rows in self._groups if rows is not None)


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, rows that no trial has had yet take no memory.

    The system maps pages of zeros that exist once they are written to; ``torch.zeros`` writes. They
    are private, so that a process which user code forks writes to pages of its own.
    """
    num = prod(shape)
    if device.type != "cpu" or num * dtype.itemsize < _LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap(-1, num * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=num).view(shape)


def _layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape and memory layout, which takes no memory."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def steps_taken(
    trial: FusedTrial,
    optimizer: GroupedOptimizer,
    structure: Structure,
    *,
    state: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return how many updates each param group has had; 0 or 1 where torch does not count them.

    Args:
        trial: The trial; its options decide how strictly update counts must match.
        optimizer: The optimizer over rows.
        structure: The structure of the trial's block.
        state: Optimizer state by parameter name (default: that of the trial's own optimizer).

    Raises:
        UnfusableError: Some parameters of a group have had more updates than others.
    """
    state = trial.followed.moments() if state is None else state
    out = []
    for own, names, options in zip(
        optimizer.optimizers, optimizer.names, trial.options_now(), strict=True
    ):
        found = {_steps_of(state.get(name, {})) for name in structure.layout.within(names)}
        # without dampening, a momentum buffer of zeros acts like a missing one
        is_even = len(found) <= 1 or not (own.counts or options.get("dampening", 0.0))
        if not is_even:
            raise UnfusableError(
                "some of its parameters were frozen for a while, and have been updated less often"
            )
        out.append(max(found, default=0))
    return out


def check_moments(
    trial: FusedTrial,
    optimizer: GroupedOptimizer,
    structure: Structure,
    *,
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Check that an optimizer over rows goes on from a trial's state as torch's does.

    Args:
        trial: The trial.
        optimizer: The optimizer over rows.
        structure: The structure of the trial's block.
        options: Options of each param group in the next step.

    Raises:
        UnfusableError: torch's optimizer has made other buffers than these options need, because
            the options were others at its first step.
    """
    state = trial.followed.moments()
    for own, names, now in zip(optimizer.optimizers, optimizer.names, options, strict=True):
        for name in structure.layout.within(names):
            held = {k for k, value in state.get(name, {}).items() if value is not None}
            if held and not own.takes(held - {"step"}, now):
                raise UnfusableError(
                    f"its optimizer has made {', '.join(sorted(held - {'step'})) or 'no buffers'} "
                    "under other options"
                )


def _steps_of(state: Mapping[str, Any]) -> int:
    if "step" in state:
        return int(state["step"])
    return int(any(value is not None for value in state.values()))


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage is no larger than itself, if possible.

    ``torch.save`` writes whole storages. Without this, saving a packed model's ``state_dict`` would
    save the parameters of all models of its pack.
    """
    if not view.numel():
        return view
    try:
        return from_dlpack(to_dlpack(view))
    except (BufferError, RuntimeError):  # DLPack lacks this dtype
        return view


def _where(rows: Sequence[int]) -> slice | list[int]:
    first = rows[0]
    together = list(rows) == list(range(first, first + len(rows)))
    return slice(first, first + len(rows)) if together else list(rows)
