"""Second opinions in double precision: is a difference rounding, or another computation?

In single precision, a tie (a ReLU at zero, two equal maxima) may resolve differently in a block and
alone. In double precision the same inputs hardly ever tie, so a difference that remains there is
structural.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch.utils import _pytree as pytree

from thrifty.pack.verify import compare_metrics, own_tensors

from ._experiment import Experiment, run_packed
from ._member import FusedTrial
from ._registry import UnfusableError
from ._step import check_same, evaluate_alone, train_alone
from ._structure import Structure


TOLERANCE = 1e-8
MAX_ROWS = 16
"""Maximum number of rows of the step's batch that a second opinion uses."""


def agrees_in_double(
    structure: Structure,
    trial: FusedTrial,
    state: Mapping[str, torch.Tensor],
    *,
    is_current: Callable[[], bool] | None,
) -> bool:
    """Return whether a trial's step is the same in a block and alone, in double precision.

    Args:
        structure: The structure that the block runs; it may have been recorded from another trial.
        trial: The trial, with its own task and module, before it moves on from the step.
        state: Its tensors before the step.
        is_current: Returns whether recording the step again gives the program that the block runs.
            If it does not, a second opinion would be about another program. None where nothing is
            recorded.
    """
    try:
        with torch.enable_grad():
            if is_current is None:
                return _agrees_whole(structure, trial, state)
            return _agrees(structure, trial, state, is_current=is_current)
    except (UnfusableError, RuntimeError, TypeError, ValueError):
        return False


def metrics_agree_in_double(
    structure: Structure, trial: FusedTrial, *, is_current: Callable[[], bool]
) -> bool:
    """Return whether a trial's metrics agree in a block and alone, in double precision.

    Every validation batch is compared. The result is False for structures with whole batches.

    Args:
        structure: The structure that the block runs.
        trial: The trial, with its own task and module.
        is_current: Returns whether recording the metrics again gives the programs that the block
            runs.
    """
    if structure.whole:
        return False
    try:
        return is_current() and _metrics_agree(structure, trial)
    except (UnfusableError, RuntimeError, TypeError, ValueError):
        return False


def _metrics_agree(structure: Structure, trial: FusedTrial) -> bool:
    double = _in_double(structure)
    batches = trial.source.valid_batches(batch_size=structure.task.eval_batch_size)
    state = own_tensors(trial.model)
    with _in_double_for_a_while(trial.model, state) as model:
        for batch, _ in batches:
            leaves, spec = pytree.tree_flatten(batch)
            rows = _double(leaves)
            experiment = Experiment(
                structure=double,
                models=[model],
                batches=[rows],
                tolerance=TOLERANCE,
                shared=True,
            )
            packed = experiment.packed_metrics()[0]
            own = pytree.tree_unflatten([row.clone() for row in rows], spec)
            alone = {n: float(v) for n, v in evaluate_alone(trial.task, model, own).items()}
            if compare_metrics(packed, alone, tolerance=TOLERANCE) is not None:
                return False
    return True


def _agrees(
    structure: Structure,
    trial: FusedTrial,
    state: Mapping[str, torch.Tensor],
    *,
    is_current: Callable[[], bool],
) -> bool:
    leaves = [leaf[:MAX_ROWS] for leaf in _double(trial.feed.batch(trial.step_index))]
    known = structure.in_double.get(len(leaves[0]))
    double = _in_double(structure) if known is None else known[0]
    with _in_double_for_a_while(trial.model, state) as model:
        experiment = Experiment(
            structure=double, models=[model], batches=[leaves], tolerance=TOLERANCE
        )
        if known is None:
            # From here on, the two programs count as equivalent: neither is recorded again.
            if not is_current():
                return False
            known = structure.in_double[len(leaves[0])] = (double, experiment.record())
        packed = experiment.packed(known[1])[0]
        batch = pytree.tree_unflatten([leaf.clone() for leaf in leaves], double.batch_spec)
        alone = train_alone(trial.task, model, batch, seed=0)
        check_same(packed, alone, tolerance=TOLERANCE)
    return True


def _agrees_whole(
    structure: Structure, trial: FusedTrial, state: Mapping[str, torch.Tensor]
) -> bool:
    batch = trial.batch_alone(None).double()
    with _in_double_for_a_while(trial.model, state) as model:
        packed = run_packed(_in_double(structure), [model], batch)[0]
        alone = train_alone(trial.task, model, batch, seed=0)
        check_same(packed, alone, tolerance=TOLERANCE)
    return True


@contextmanager
def _in_double_for_a_while(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor]
) -> Iterator[torch.nn.Module]:
    """Give a module the given tensors in double precision within the context.

    It is the module itself, since a copy may compute something else (hooks, object identities).
    """
    own: dict[str, torch.Tensor] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    homes = {name: tensor.data for name, tensor in own.items()}
    modes = {module: module.training for module in model.modules()}
    try:
        for name, tensor in own.items():
            tensor.grad = None
            tensor.data = _double([state[name]])[0]
        yield model
    finally:
        for name, tensor in own.items():
            tensor.grad = None
            tensor.data = homes[name]
        for module, mode in modes.items():
            module.training = mode


def _in_double(structure: Structure) -> Structure:
    out = Structure(
        structure.task,
        deepcopy(structure.model).double(),
        batch_spec=structure.batch_spec,
        trained=structure.trained,
    )
    out.whole = structure.whole
    return out


def _double(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf.double() if leaf.dtype.is_floating_point else leaf.clone() for leaf in leaves]
