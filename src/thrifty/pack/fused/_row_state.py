"""The rows of a block: all that its trials consist of, one trial's beside the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thrifty.pack.verify import OwnState, own_tensors

from ._member import FusedTrial
from ._structure import Structure
from .optimizers import RowOptimizer, Rows, clip_rows


class RowState:
    """Trained parameters, gradients and moments as rows of flat state, ``[C, P]``; all other tensors as ``[C, *shape]``.

    C is how many trials there is room for; the tensors of a trial's module are views of its row.
    """

    def __init__(
        self,
        structure: Structure,
        optimizer: RowOptimizer,
        *,
        capacity: int,
        device: torch.device,
    ) -> None:
        self._structure = structure
        self._optimizer = optimizer
        self._capacity = capacity
        layout = structure.layout

        def zeros() -> torch.Tensor:
            return torch.zeros(capacity, layout.width, dtype=layout.dtype, device=device)

        self._rows = Rows(
            parameters=zeros(),
            gradients=zeros(),
            moments={name: zeros() for name in optimizer.moments},
            steps=[0] * capacity,
        )
        self._mask: torch.Tensor | None = None
        self._others: list[torch.Tensor] = []  # frozen parameters and buffers, [C, *shape]
        self._counters = [
            place
            for place, name in enumerate(structure.untrained)
            if name in structure.counters
        ]

    # -- as a program takes it -----------------------------------------------------------

    def trained(self, num: int) -> list[torch.Tensor]:
        """The trained parameters of the first rows, each ``[num, *shape]``."""
        return list(self._structure.layout.views(self._rows.parameters[:num]))

    def gradients(self, num: int) -> list[torch.Tensor]:
        """Where their gradients belong."""
        return list(self._structure.layout.views(self._rows.gradients[:num]))

    def untrained(self, num: int) -> list[torch.Tensor]:
        """The frozen parameters and buffers of the first rows, each ``[num, *shape]``."""
        return [other[:num] for other in self._others]

    def of_rows(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """All tensors of some rows, each ``[number of rows, *shape]``: views of them if they lie side by side, else copies."""
        where = _where(rows)
        flat = self._rows.parameters[where]
        return [*self._structure.layout.views(flat), *[other[where] for other in self._others]]

    def take_gradients(
        self, rows: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Writes gradients, each ``[number of rows, *shape]``, where the optimiser reads them; none is zero."""
        where = _where(rows)
        for segment, gradient in zip(self._structure.layout.segments, gradients, strict=True):
            self._rows.gradients[where, segment.start : segment.stop] = (
                0.0 if gradient is None else gradient.reshape(len(rows), -1)
            )

    def take_untrained(self, rows: Sequence[int], untrained: Sequence[torch.Tensor]) -> None:
        """Writes back what a step has changed in copies."""
        where = _where(rows)
        if isinstance(where, list):
            for other, changed in zip(self._others, untrained, strict=True):
                other[where] = changed

    def tensors(self) -> list[torch.Tensor]:
        """All that is held."""
        rows = self._rows
        return [rows.parameters, rows.gradients, *rows.moments.values(), *self._others]

    def updater(
        self, options: Sequence[tuple[Mapping[str, Any], float | None]]
    ) -> Callable[[], None]:
        """One update of the first rows, each by its options and its clipping norm."""
        limits = [limit for _, limit in options]
        clips = any(limit is not None for limit in limits)
        step = self._optimizer.stepper(self._rows, [each for each, _ in options])
        counters = [self._others[place][: len(options)] for place in self._counters]
        if self._mask is None and not clips and not counters:
            return step
        gradients = self._rows.gradients[: len(options)]
        mask = None if self._mask is None else self._mask[: len(options)]

        def update() -> None:
            if mask is not None:
                gradients.mul_(mask)
            if clips:
                clip_rows(gradients, limits)
            step()
            for counter in counters:
                counter += 1

        return update

    # -- trials come, move and go --------------------------------------------------------

    def put(self, trial: FusedTrial, row: int) -> None:
        """A trial takes a row, with its values and moments; its module's tensors become views of it."""
        own = {**dict(trial.model.named_parameters()), **dict(trial.model.named_buffers())}
        untrained = self._structure.untrained
        if not self._others:
            self._others = [
                own[name].detach().new_zeros((self._capacity, *own[name].shape))
                for name in untrained
            ]
        with torch.no_grad():
            self._rows.parameters[row].zero_()
            self._note_width(trial, row)
            for name, view in self._views(trial, self._rows.parameters[row]):
                view.copy_(own[name])
            for name, other in zip(untrained, self._others, strict=True):
                other[row].copy_(own[name])
            self._rows.clear(row)
            self._load_moments(trial, row)
        self._attach(trial, row)

    def move(self, trial: FusedTrial, source: int, target: int) -> None:
        """The trial of one row takes another one."""
        with torch.no_grad():
            self._rows.move(source, target)
            for tensor in (*([] if self._mask is None else [self._mask]), *self._others):
                tensor[target].copy_(tensor[source])
        self._attach(trial, target)

    def release(self, trial: FusedTrial) -> None:
        """The tensors of a trial's module are its own again."""
        for tensor in (*trial.model.parameters(), *trial.model.buffers()):
            tensor.data = tensor.data.clone()

    def _attach(self, trial: FusedTrial, row: int) -> None:
        own = {**dict(trial.model.named_buffers()), **dict(trial.model.named_parameters())}
        for name, view in self._views(trial, self._rows.parameters[row]):
            own[name].data = view
            own[name].grad = None
        for name, other in zip(self._structure.untrained, self._others, strict=True):
            own[name].data = other[row]

    def _views(
        self, trial: FusedTrial, row: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The trial's part of each tensor of a row, by name: a corner, if its model is narrower than the block's."""
        layout = self._structure.layout
        shapes = {name: p.shape for name, p in trial.model.named_parameters()}
        return zip(self._structure.trained, layout.row_views(row, shapes), strict=True)

    def _note_width(self, trial: FusedTrial, row: int) -> None:
        """Gradients beyond a narrower model's own tensors are zeroed, so that what lies there stays zero."""
        shapes = {name: p.shape for name, p in trial.model.named_parameters()}
        narrow = any(shapes[s.name] != s.shape for s in self._structure.layout.segments)
        if narrow and self._mask is None:
            self._mask = torch.ones_like(self._rows.gradients)
        if self._mask is not None:
            self._mask[row].fill_(0.0 if narrow else 1.0)
            if narrow:
                for _, view in self._views(trial, self._mask[row]):
                    view.fill_(1.0)

    # -- moments, as torch's optimiser keeps them ----------------------------------------

    def moments(self, trial: FusedTrial, row: int) -> dict[int, dict[str, Any]]:
        """The optimiser's state of a trial by number of the parameter; views, not copies."""
        steps = self._rows.steps[row]
        if not steps:
            return {}
        numbers = _numbers(trial)
        kept = self._optimizer.kept(trial.options_now())
        views = {
            moment: dict(self._views(trial, tensor[row]))
            for moment, tensor in self._rows.moments.items()
            if moment in kept
        }
        return {
            numbers[name]: {
                **({"step": torch.tensor(float(steps))} if self._optimizer.counts else {}),
                **{moment: views[moment][name] for moment in views},
            }
            for name in self._structure.trained
        }

    def moments_by_name(self, trial: FusedTrial, row: int) -> dict[str, dict[str, Any]]:
        """A copy of the optimizer's state of a trial, by parameter name."""
        names = {number: name for name, number in _numbers(trial).items()}
        return {
            names[number]: {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in moments.items()
            }
            for number, moments in self.moments(trial, row).items()
        }

    def restore(self, trial: FusedTrial, row: int, state: OwnState) -> None:
        """Put a trial back to another state."""
        with torch.no_grad():
            for name, tensor in own_tensors(trial.model).items():
                tensor.copy_(state.tensors[name])
            self._rows.clear(row)
            numbers = _numbers(trial)
            self._fill_moments(trial, row, {numbers[n]: m for n, m in state.moments.items()})

    def gradients_by_name(self, trial: FusedTrial, row: int) -> dict[str, torch.Tensor]:
        """The gradients of a trial as views, in the shapes of its own parameters."""
        return dict(self._views(trial, self._rows.gradients[row]))

    def _load_moments(self, trial: FusedTrial, row: int) -> None:
        self._fill_moments(trial, row, trial.optimizer.state_dict()["state"])

    def _fill_moments(
        self, trial: FusedTrial, row: int, state: Mapping[int, Mapping[str, Any]]
    ) -> None:
        if not state:
            return
        numbers = _numbers(trial)
        for moment, tensor in self._rows.moments.items():
            for name, view in self._views(trial, tensor[row]):
                held = state.get(numbers[name], {}).get(moment)
                if held is not None:
                    view.copy_(held)
        first = next(iter(state.values()))
        self._rows.steps[row] = int(first["step"]) if "step" in first else 1


def _where(rows: Sequence[int]) -> slice | list[int]:
    first = rows[0]
    together = list(rows) == list(range(first, first + len(rows)))
    return slice(first, first + len(rows)) if together else list(rows)


def _numbers(trial: FusedTrial) -> dict[str, int]:
    """Parameters are numbered in the order that the optimiser was given them."""
    return {name: i for i, (name, _) in enumerate(trial.model.named_parameters())}
