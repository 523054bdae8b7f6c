"""The dry run before a structure is fused: does each trial get its own gradient when packed?

It runs in double precision, where rounding cannot hide a wrong rule, on two trials with different
weights and different batches. It uses recording and tape, as training does.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from thrifty.pack._frozen import cheap_copy, copy_of, share
from thrifty.pack._quantized import quantized_layers
from thrifty.pack._state import seed_step, step_counters, torch_streams
from thrifty.pack.task._data import WholeBatch
from thrifty.pack.task._task import Task
from thrifty.pack.verify import Watch, as_it_was

from ._fusable import UnfusableError, numbers_of, rate_places
from ._padding import reads_outputs_alone
from ._step import (
    Experiment,
    Step,
    check_same,
    close,
    evaluate_alone,
    run_packed,
    stacked,
    train_alone,
)
from ._structure import Recorded, Structure, doubled
from .rules._layers import compute_products


NUM_ROWS = 5
"""Maximum number of rows in each batch of the dry run."""
TOLERANCE = 1e-8
SINGLE_TOLERANCE = 2e-3
"""Tolerance for models that do not run in double precision."""


def dry_run(
    task: Task, model: torch.nn.Module, batch: Any, *, frozen: Collection[str] = ()
) -> Structure:
    """Test whether a model can be fused and return its structure.

    The dry run draws from torch's random stream. Anything that the user's code changes meanwhile (a
    counter in a closure, a global) is restored afterwards.

    Args:
        task: The task of the model.
        model: The model.
        batch: One of its training batches.
        frozen: Names of parameters and buffers that may be one tensor for all trials. The structure
            holds those of them that its step does not write.

    Raises:
        UnfusableError: The model cannot be fused; the message says why.
    """
    with as_it_was({"task": task, "model": model}) as caches:
        if caches:
            _check_caches(caches, task=task, model=model, batch=batch)
        return _dry_run(task, model, batch, frozen=frozen)


SETTLES = "config.problem_type"
"""How the name of the value ends that ``settle`` sets."""


def settle(task: Task, model: torch.nn.Module, batch: Any) -> bool:
    """Set what the first step of a transformers model writes into its configuration.

    A classifier that gets labels finds out from them which loss it has, and stores that in
    ``config.problem_type``. Once it is stored, steps change it no more, and compute what the first
    one computes.

    Returns:
        Whether there was something to set.
    """
    with as_it_was({"task": task, "model": model}), torch.no_grad():
        stepped = copy_of(model)
        task.loss(stepped, pytree.tree_map(_copied, batch))
    found = False
    for module, other in zip(model.modules(), stepped.modules(), strict=True):
        config, now = getattr(module, "config", None), getattr(other, "config", None)
        settled = getattr(now, "problem_type", None)
        if getattr(config, "problem_type", "") is None and settled is not None:
            config.problem_type = settled  # type: ignore[union-attr]
            found = True
    return found


def _check_caches(caches: Sequence[Any], *, task: Task, model: torch.nn.Module, batch: Any) -> None:
    """Check that functions with cached results draw no random numbers at their first call.

    A pack would make that first call at another position of the random stream.

    Raises:
        UnfusableError: One of them draws random numbers.
    """
    states = []
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    # an exception here is suppressed because it recurs in the dry run itself
    with torch.no_grad(), suppress(Exception):
        for _ in range(2):
            seed_step(0, device)
            task.loss(copy_of(model), pytree.tree_map(_copied, batch))
            states.append(torch_streams(device))
    filled = any(cache.cache_info().currsize for cache in caches)
    if filled and len(states) == 2 and not all(map(torch.equal, *states)):
        raise UnfusableError("it caches a value that is drawn at random")


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _dry_run(
    task: Task, model: torch.nn.Module, batch: Any, *, frozen: Collection[str]
) -> Structure:
    leaves, spec = pytree.tree_flatten(batch)
    if isinstance(batch, WholeBatch) and not isinstance(batch, torch.Tensor):
        return _tested_whole(task, model, batch)
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        raise UnfusableError("its batches hold something that is not a tensor of rows")
    if len({len(leaf) for leaf in leaves}) > 1:
        raise UnfusableError("the tensors of its batches differ in length")
    names, numbers = tuple(frozen), tuple(numbers_of(model))
    refused = UnfusableError()
    # first with everything that may be shared or be an input, at last with nothing of it
    tried = [(names, numbers), (names, ()), ((), numbers), ((), ())]
    if quantized_layers(model):
        tried = tried[:2]
    for held, inputs in dict.fromkeys(tried):
        try:
            return _tested_as_it_runs(task, model, leaves, spec, frozen=held, numbers=inputs)
        except _StepError:
            raise
        except UnfusableError as error:
            refused = error
    raise refused


def _tested_as_it_runs(
    task: Task,
    model: torch.nn.Module,
    leaves: Sequence[torch.Tensor],
    spec: Any,
    *,
    frozen: Collection[str],
    numbers: Collection[str],
) -> Structure:
    tested = partial(_tested, task, model, leaves, spec, frozen=frozen, numbers=numbers)
    # a frozen base need not be held twice, unless its code insists on equal precisions
    for lower in dict.fromkeys([tuple(frozen), ()]):
        with suppress(_NoDoubleError):
            return tested(double=True, lower=lower)
    # the model insists on its own precision, so the comparison is coarser
    return tested(double=False)


def _tested_whole(task: Task, model: torch.nn.Module, batch: WholeBatch) -> Structure:
    """Return the tested structure of a model that trains on whole batches.

    Two models with different weights run on the same batch in double precision, alone and packed.
    """
    models = [_copy(model, double=True) for _ in range(2)]
    _perturb(models[1])
    batch = batch.double()
    alone = _all_alone(task, models, [batch] * 2, double=False)
    trained = [name for name, g in alone[0].gradients.items() if g is not None]

    def structure(*, double: bool) -> Structure:
        out = Structure(task, _copy(model, double=double), batch_spec=None, trained=trained)
        out.whole, out.padding = True, False
        return out

    tested = structure(double=True)
    for packed, one in zip(run_packed(tested, models, batch), alone, strict=True):
        check_same(packed, one, tolerance=TOLERANCE)
    out = structure(double=False)
    out.fused_metrics = _evaluates_whole(tested, models, batch)
    return out


def _evaluates_whole(
    structure: Structure, models: Sequence[torch.nn.Module], batch: WholeBatch
) -> bool:
    """Return whether each model's metrics on a whole batch are the same packed and alone."""
    state = stacked(structure, models)
    before = torch_streams(state[0].device)
    versions = [tensor._version for tensor in state]
    try:
        found = structure.metrics(batch, state=state, size=len(models))
        if versions != [tensor._version for tensor in state]:
            return False  # a check evaluates a trial once more, which must not count
        wanted = [evaluate_alone(structure.task, model, batch) for model in models]
    except UnfusableError:
        return False
    return all(map(torch.equal, before, torch_streams(state[0].device))) and all(
        found.keys() == each.keys()
        and all(
            close(found[name][k].double(), torch.as_tensor(value).double(), TOLERANCE)
            for name, value in each.items()
        )
        for k, each in enumerate(wanted)
    )


def fits_inside(structure: Structure, model: torch.nn.Module, batch: Any) -> bool:
    """Return whether a narrower model, padded with zeros, gets its own results.

    Its tensors are padded to the shapes of the structure. Training zeroes the gradients of the
    padding. That no value depends on the padding is proved from the programs of both models
    (``_padding``), so it holds for all data. Loss, gradients and metrics are compared, too, for
    random weights, because a fresh adapter is zero in a factor, which would hide a difference.
    """
    if structure.whole:
        return False
    rows = _some_rows(pytree.tree_leaves(batch), double=True)
    with as_it_was({"task": structure.task, "model": model}):
        # as in a dry run, the base is only held twice if its code insists on equal precisions
        for lower in dict.fromkeys([structure.held, frozenset()]):
            with suppress(RuntimeError):
                return _fits_inside(structure, model, rows, lower=lower)
    return False


def _fits_inside(
    structure: Structure,
    model: torch.nn.Module,
    rows: Sequence[torch.Tensor],
    *,
    lower: frozenset[str],
) -> bool:
    try:
        narrow = _copy(model, double=True, lower=lower)
        _perturb(narrow, besides=structure.held)
        lent = _lent(structure.model, structure.held, by=narrow)
        wide = Structure(
            structure.task,
            doubled(lent, besides=lower),
            batch_spec=structure.batch_spec,
            trained=structure.trained,
            held=structure.held,
            numbers=structure.numbers,
        )
        wide.lower = lower
        own = Structure(
            structure.task,
            copy_of(narrow),
            batch_spec=structure.batch_spec,
            trained=structure.trained,
            held=structure.held,
            numbers=structure.numbers,
        )
        own.lower = lower
        padded, alone = (
            Experiment(structure=each, models=[narrow], batches=[rows], tolerance=TOLERANCE)
            for each in (wide, own)
        )
        if not padded.trains_alike(own=alone):
            return False
        if not structure.fused_metrics:
            return True
        beside = replace(alone, shared=True) if reads_outputs_alone(structure.task) else None
        return replace(padded, shared=True).evaluates_alike(own=beside)
    except UnfusableError:
        return False


class _StepError(UnfusableError):
    """Error raised when steps alone show that a model cannot be fused in any way."""


class _NoDoubleError(Exception):
    """Error raised when the model does not run in double precision."""


def _tested(
    task: Task,
    model: torch.nn.Module,
    leaves: Sequence[torch.Tensor],
    spec: Any,
    *,
    frozen: Collection[str],
    numbers: Collection[str],
    double: bool,
    lower: Collection[str] = (),
) -> Structure:
    """Return a structure that is right for two models, in all variants of its programs.

    With ``double``, all but the tensors named in ``lower`` are in double precision.
    """
    first = _copy(model, double=double, lower=lower)
    share(first, frozen)
    models = [first, copy_of(first)]
    _perturb(models[1], besides=frozen)
    known = numbers_of(models[1])
    for path in numbers:
        held_in, key = known[path]
        held_in[key] *= 1.5
    batches = [_some_rows(leaves, double=double, last=last) for last in (False, True)]
    wholes = [pytree.tree_unflatten(batch, spec) for batch in batches]
    alone = _all_alone(task, models, wholes, double=double, lower=lower)
    trained = [name for name, g in alone[0].gradients.items() if g is not None]
    held = _held(models[0], alone[0], frozen=frozen, trained=trained)

    def structure(*, double: bool) -> Structure:
        made = copy_of(models[0]) if double else _copy(model, double=False)
        out = Structure(task, made, batch_spec=spec, trained=trained, held=held, numbers=numbers)
        out.lower = frozenset(lower if double else ())
        return out

    experiment = Experiment(
        structure=structure(double=double),
        models=models,
        batches=batches,
        tolerance=TOLERANCE if double else SINGLE_TOLERANCE,
    )
    recorded = _steady(experiment)
    experiment.check(recorded, alone)
    together = replace(experiment, batches=[batches[0]] * 2, shared=True)
    out = structure(double=False)
    out.built_in |= experiment.structure.built_in | (known.keys() - set(numbers))
    out.draws_nothing = not recorded.draws
    out.fused_metrics = together.evaluates_alike()
    out.sharing = together.trains_alike()
    out.reads_of_rows = _reads_of_rows(experiment)
    out.padding = out.reads_of_rows is not None
    return out


def _held(
    model: torch.nn.Module, step: Step, *, frozen: Collection[str], trained: Collection[str]
) -> set[str]:
    """Return the frozen tensors that a step of a model has left as they were."""
    counters = step_counters(model)
    written = {
        name
        for name, buffer in model.named_buffers()
        if name in counters or not torch.equal(buffer, step.buffers[name])
    }
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return (own & set(frozen)) - set(trained) - written


def _all_alone(
    task: Task,
    models: Sequence[torch.nn.Module],
    batches: Sequence[Any],
    *,
    double: bool,
    lower: Collection[str] = (),
) -> list[Step]:
    """Return each model's step alone, after checking that computing the loss changes nothing else.

    Raises:
        _StepError: The code reads an iterator, the loss trains no parameter, or computing it
            changes a watched value.
        _NoDoubleError: The step fails in double precision.
    """
    copies = [copy_of(model) for model in models]
    watch = Watch({"task": task, "model": copies[0]}, ignored=rate_places(copies[0]))
    if watch.unwatchable:
        raise _StepError(f"{watch.unwatchable} is an iterator, whose position cannot be read")
    try:
        steps = [
            train_alone(task, model, batch, seed=k, lower=lower)
            for k, (model, batch) in enumerate(zip(copies, batches, strict=True))
        ]
    except RuntimeError as error:
        if double:
            raise _NoDoubleError from error
        raise
    if all(gradient is None for gradient in steps[0].gradients.values()):
        raise _StepError("nothing in it is trained")
    if changed := watch.changed():
        raise _StepError(f"computing its loss changes {changed.name}")
    return steps


def _steady(experiment: Experiment) -> Recorded:
    """Record the step twice, with other batches and random numbers, and return the first recording.

    Raises:
        UnfusableError: The two recordings differ in their calls.
    """
    first = experiment.record()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 (user code may draw from it)
    second = replace(experiment, batches=experiment.batches[::-1]).record(seed=1)
    if not first.program.same_calls(second.program):
        raise UnfusableError("its forward pass is not the same at every step")
    return first


def _reads_of_rows(experiment: Experiment) -> tuple[str, ...] | None:
    """Return what a step computes with weights of rows; None if rows of weight zero change it."""
    rows = len(experiment.batches[0][0])
    if rows < 2:
        return None
    padded = replace(experiment, num_rows=(rows, max(1, rows - 2)))
    recorded = padded.trained_alike()
    return None if recorded is None else recorded.program.readers(len(experiment.batches[0]))


def _lent(
    model: torch.nn.Module, names: Collection[str], *, by: torch.nn.Module
) -> torch.nn.Module:
    """Return a copy of a model with some tensors of another one, without copies of these."""
    share(by, names)
    out = copy_of(model)
    own = {**dict(out.named_parameters()), **dict(out.named_buffers())}
    for name, tensor in (*by.named_parameters(), *by.named_buffers()):
        if name in names:
            own[name].data = cheap_copy(tensor.detach())
    return out


def _some_rows(
    leaves: Sequence[torch.Tensor], *, double: bool, last: bool = False
) -> list[torch.Tensor]:
    """Return copies of up to ``NUM_ROWS`` rows of a batch: the first ones, or the last ones."""
    num = min(NUM_ROWS, len(leaves[0]))
    rows = [leaf[-num:] if last else leaf[:num] for leaf in leaves]
    return [t.double() if double and t.dtype.is_floating_point else t.clone() for t in rows]


def _perturb(model: torch.nn.Module, *, besides: Collection[str] = ()) -> None:
    """Change a model's parameters by random noise, keeping its structure.

    Parameters named in ``besides`` stay as they are.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dtype.is_floating_point and name not in besides:
                parameter.add_(0.05 * torch.randn_like(parameter))


def _copy(model: torch.nn.Module, *, double: bool, lower: Collection[str] = ()) -> torch.nn.Module:
    try:
        out = copy_of(model)
    except Exception as error:  # copying a model's attributes may raise anything
        raise UnfusableError(f"it cannot be copied: {error}") from error
    if not double:
        return out
    compute_products(out)
    return doubled(out, besides=lower)
