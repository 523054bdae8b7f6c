"""The dry run before a structure is fused: does the packed computation give each trial its own gradient?

It is made in double precision, where rounding cannot hide a wrong rule, on two trials with different weights and different
batches, through recording and tape: all that training will go through.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from thrifty.pack._task import Task

from ._randomness import fill
from ._record import Program
from ._registry import UnfusableError
from ._signature import dropout_rates, signature
from ._structure import Recorded, Structure, Variant
from ._tape import bind


NUM_ROWS = 8
"""Rows of each batch of the dry run."""


def dry_run(task: Task, model: torch.nn.Module, batch: Any) -> Structure:
    """The structure of a model, tested; ``batch`` is one of its training batches. Draws from torch's stream.

    Raises:
        UnfusableError: it cannot be fused; the message says why.
    """
    leaves, spec = pytree.tree_flatten(batch)
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        raise UnfusableError("its batches hold something that is not a tensor of rows")
    if len({len(leaf) for leaf in leaves}) > 1:
        raise UnfusableError("the tensors of its batches differ in length")
    for double in (True, False):
        try:
            return _tested(task, model, leaves, spec, double=double)
        except _NoDoubleError:
            continue  # it insists on its own precision; then the comparison is coarser
    raise AssertionError("unreachable")


def fits_inside(structure: Structure, model: torch.nn.Module, batch: Any) -> bool:
    """Whether a narrower model, its tensors padded with zeros to those of a structure, gets its own loss and gradients.

    Gradients beyond its own tensors are zeroed in training, so what holds for one step holds for all.
    """
    leaves = pytree.tree_leaves(batch)
    rows = min(NUM_ROWS, len(leaves[0]))
    own = [_cast(leaf[:rows], double=True) for leaf in leaves]
    try:
        wide = Structure(
            structure.task,
            _copy(structure.model, double=True),
            batch_spec=structure.batch_spec,
            trained=[segment.name for segment in structure.layout.segments],
        )
        narrow = _copy(model, double=True)
        (alone,) = _all_alone(wide, [narrow], [own])
        state = [t.new_zeros(1, *t.shape) for t in _state_of(wide, wide.model)]
        parameters = dict(narrow.named_parameters())
        shapes = {name: p.shape for name, p in parameters.items()}
        for tensor, small in zip(state, _state_of(wide, narrow), strict=True):
            tensor[0][tuple(slice(n) for n in small.shape)] = small.detach()
        variant = Variant(size=1, training=True, shared=False, padded=False, batch=())
        packed = [leaf.unsqueeze(0) for leaf in own]
        recorded = wide.record(
            variant,
            batch=packed,
            rows=None,
            state=_clones(state),
            generators=[torch.Generator(device=own[0].device).manual_seed(0)],
        )
        found = _run(recorded, packed, None, state, [narrow])
        loss, *gradients = found
        assert loss is not None
        if not _close(loss[0], alone.loss, 1e-8):
            return False
        for segment, gradient in zip(wide.layout.segments, gradients, strict=True):
            wanted = alone.gradients[segment.name]
            if gradient is None or wanted is None:
                return False
            corner = gradient[0][tuple(slice(n) for n in shapes[segment.name])]
            if not _close(corner, wanted, 1e-8):
                return False
        buffers = state[len(state) - len(wide.buffers) :] if wide.buffers else []
        return all(
            _close(buffer[0], alone.buffers[name], 1e-8)
            for name, buffer in zip(wide.buffers, buffers, strict=True)
        )
    except (UnfusableError, RuntimeError):
        return False


class _NoDoubleError(Exception):
    """The model does not run in double precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """What one trial gives by itself: loss, gradients by name, buffers after the step."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


def _tested(
    task: Task,
    model: torch.nn.Module,
    leaves: Sequence[torch.Tensor],
    spec: Any,
    *,
    double: bool,
) -> Structure:
    models = [_copy(model, double=double) for _ in range(2)]
    _perturb(models[1])
    rows = min(NUM_ROWS, len(leaves[0]))
    batches = [
        [_cast(leaf[-rows:] if k else leaf[:rows], double=double) for leaf in leaves]
        for k in range(2)
    ]
    copies = [deepcopy(m) for m in models]
    before = signature(copies[0], attributes=vars(task))
    try:
        alone = [
            _train_alone(task, m, pytree.tree_unflatten(b, spec), seed=k)
            for k, (m, b) in enumerate(zip(copies, batches, strict=True))
        ]
    except RuntimeError as error:
        if double:
            raise _NoDoubleError from error
        raise
    trained = [name for name, g in alone[0].gradients.items() if g is not None]
    if not trained:
        raise UnfusableError("nothing in it is trained")
    if before != signature(copies[0], attributes=vars(task)):
        raise UnfusableError("its forward pass changes its own attributes")

    checked = Structure(task, _copy(model, double=double), batch_spec=spec, trained=trained)
    tolerance = 1e-8 if double else 2e-3
    _check_training(checked, models, batches, alone, tolerance=tolerance)
    structure = Structure(task, _copy(model, double=False), batch_spec=spec, trained=trained)
    structure.draws_nothing = checked.draws_nothing
    structure.fused_metrics = _metrics_agree(checked, models, batches, tolerance=tolerance)
    structure.sharing = _sharing_agrees(checked, models, batches[0], tolerance=tolerance)
    structure.padding = _padding_agrees(checked, models, batches, tolerance=tolerance)
    return structure


def _check_training(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    batches: Sequence[Sequence[torch.Tensor]],
    alone: Sequence[_Alone],
    *,
    tolerance: float,
) -> None:
    state = _stacked(structure, models)
    batch = [torch.stack(ts) for ts in zip(*batches, strict=True)]
    variant = Variant(size=2, training=True, shared=False, padded=False, batch=())
    first = _record(structure, variant, batch, None, _clones(state), seed=0)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 (user code may draw from it)
    second = _record(
        structure, variant, [b.flip(0) for b in batch], None, _clones(state), seed=1
    )
    if not first.program.same_calls(second.program):
        raise UnfusableError("its forward pass is not the same at every step")
    structure.draws_nothing = not first.draws
    found = _run(first, batch, None, state, models)
    _compare(structure, found, state, alone, tolerance=tolerance)


def _sharing_agrees(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    batch: Sequence[torch.Tensor],
    *,
    tolerance: float,
) -> bool:
    """Whether a batch that all trials see need not be there for each of them."""
    variant = Variant(size=2, training=True, shared=True, padded=False, batch=())
    alone = _all_alone(structure, models, [batch, batch])
    return _trains_alike(structure, models, variant, batch, alone=alone, tolerance=tolerance)


def _padding_agrees(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    tolerance: float,
) -> bool:
    """Whether rows of weight zero leave everything else as it is."""
    rows = len(batches[0][0])
    if rows < 2:
        return False
    fewer = max(1, rows - 2)
    short = [list(batches[0]), [leaf[:fewer] for leaf in batches[1]]]
    alone = _all_alone(structure, models, short)
    batch = [torch.stack(ts) for ts in zip(*batches, strict=True)]
    variant = Variant(size=2, training=True, shared=False, padded=True, batch=())
    return _trains_alike(
        structure,
        models,
        variant,
        batch,
        alone=alone,
        tolerance=tolerance,
        num_rows=(rows, fewer),
    )


def _trains_alike(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    variant: Variant,
    batch: Sequence[torch.Tensor],
    *,
    alone: Sequence[_Alone],
    tolerance: float,
    num_rows: Sequence[int] | None = None,
) -> bool:
    state = _stacked(structure, models)
    weights = None
    if num_rows is not None:
        weights = torch.zeros(
            2, max(num_rows), dtype=structure.layout.dtype, device=batch[0].device
        )
        for k, num in enumerate(num_rows):
            weights[k, :num] = 1 / num
    try:
        recorded = _record(structure, variant, batch, weights, _clones(state), seed=0)
        found = _run(recorded, batch, weights, state, models, num_rows=num_rows)
        _compare(structure, found, state, alone, tolerance=tolerance)
    except UnfusableError:
        return False
    return True


def _all_alone(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    batches: Sequence[Sequence[torch.Tensor]],
) -> list[_Alone]:
    return [
        _train_alone(
            structure.task,
            deepcopy(model),
            pytree.tree_unflatten(list(batch), structure.batch_spec),
            seed=k,
        )
        for k, (model, batch) in enumerate(zip(models, batches, strict=True))
    ]


def _metrics_agree(
    structure: Structure,
    models: Sequence[torch.nn.Module],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    tolerance: float,
) -> bool:
    state = _stacked(structure, models)
    variant = Variant(size=2, training=False, shared=True, padded=False, batch=())
    try:
        recorded = _record(structure, variant, batches[0], None, _clones(state), seed=0)
    except UnfusableError:
        return False
    found = _run(recorded, batches[0], None, state, models)
    whole = pytree.tree_unflatten(list(batches[0]), structure.batch_spec)
    for k, model in enumerate(models):
        wanted = _evaluate_alone(structure.task, model, whole)
        if list(wanted) != list(recorded.names):
            return False
        for value, name in zip(found, recorded.names, strict=True):
            if value is None or not _close(
                value[k].double(), torch.as_tensor(wanted[name]).double(), tolerance
            ):
                return False
    return True


def _compare(
    structure: Structure,
    found: Sequence[torch.Tensor | None],
    state: Sequence[torch.Tensor],
    alone: Sequence[_Alone],
    *,
    tolerance: float,
) -> None:
    loss, *gradients = found
    buffers = state[len(state) - len(structure.buffers) :] if structure.buffers else []
    for k, one in enumerate(alone):
        assert loss is not None
        if not _close(loss[k], one.loss, tolerance):
            raise UnfusableError("its packed loss differs from that of one model alone")
        for segment, gradient in zip(structure.layout.segments, gradients, strict=True):
            wanted = one.gradients[segment.name]
            if gradient is None or wanted is None or not _close(gradient[k], wanted, tolerance):
                raise UnfusableError(
                    f"the packed gradient of {segment.name} differs from that of one model alone"
                )
        for name, buffer in zip(structure.buffers, buffers, strict=True):
            if not _close(buffer[k], one.buffers[name], tolerance):
                raise UnfusableError(
                    f"packed, buffer {name} differs from that of one model alone"
                )


def _record(
    structure: Structure,
    variant: Variant,
    batch: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    state: Sequence[torch.Tensor],
    *,
    seed: int,
) -> Recorded:
    generators = [
        torch.Generator(device=batch[0].device).manual_seed(seed + k) for k in range(2)
    ]
    return structure.record(variant, batch=batch, rows=rows, state=state, generators=generators)


def _run(
    recorded: Recorded,
    batch: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    state: Sequence[torch.Tensor],
    models: Sequence[torch.nn.Module],
    *,
    num_rows: Sequence[int] | None = None,
) -> Sequence[torch.Tensor | None]:
    program: Program = recorded.program
    generators = [torch.Generator(device=batch[0].device).manual_seed(k) for k in range(2)]
    for draw in recorded.draws:
        rates = [dropout_rates(m) for m in models]
        fill(draw, generators=generators, rates=rates, num_rows=num_rows)
    inputs = [*batch, *([] if rows is None else [rows]), *state]
    tape = bind(program, inputs, draws=[d.noise for d in recorded.draws])
    with torch.no_grad():
        tape()
    return tape.outputs


def _train_alone(task: Task, model: torch.nn.Module, batch: Any, *, seed: int) -> _Alone:
    """One model, plain autograd."""
    streams = (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index, union-attr]  # noqa: NPY002
    device = next(model.parameters()).device
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    model.train()
    loss = task.loss(model, batch)
    loss.backward()
    if streams != (random.getstate(), np.random.get_state()[1].tobytes()):  # type: ignore[index, union-attr]  # noqa: NPY002
        raise UnfusableError("it draws from Python's or NumPy's random stream")
    return _Alone(
        loss=loss.detach(),
        gradients={
            name: p.grad if p.requires_grad else None for name, p in model.named_parameters()
        },
        buffers=dict(model.named_buffers()),
    )


def _evaluate_alone(task: Task, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
    model.eval()
    with torch.no_grad():
        return task.metrics(model, batch)


def _stacked(structure: Structure, models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """The state of some models, one beside the other."""
    states = [_state_of(structure, model) for model in models]
    return [torch.stack(tensors) for tensors in zip(*states, strict=True)]


def _state_of(structure: Structure, model: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors of a model in the order of a structure's state."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [segment.name for segment in structure.layout.segments]
    return [own[name].detach() for name in (*names, *structure.frozen, *structure.buffers)]


def _clones(state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in state]


def _perturb(model: torch.nn.Module) -> None:
    """Another model of the same structure."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.is_floating_point:
                parameter.add_(0.05 * torch.randn_like(parameter))


def _copy(model: torch.nn.Module, *, double: bool) -> torch.nn.Module:
    try:
        out = deepcopy(model)
    except Exception as error:  # a model may hold anything
        raise UnfusableError(f"it cannot be copied: {error}") from error
    return out.double() if double else out


def _cast(leaf: torch.Tensor, *, double: bool) -> torch.Tensor:
    return leaf.double() if double and leaf.dtype.is_floating_point else leaf.clone()


def _close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape and found.numel() != wanted.numel():
        return False
    wanted = wanted.reshape(found.shape)
    if not found.dtype.is_floating_point:
        return bool(torch.equal(found, wanted))
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(
        torch.allclose(found, wanted, rtol=0, atol=tolerance * max(scale, 1e-3), equal_nan=True)
    )
