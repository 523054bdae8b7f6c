"""Compares the gradient of a batch with that of its parts, the premise of training in shares.

The inspector at the end decides when a loss is checked, and with which samples.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core import Clock, HeteroError, derive_seed, plain_logger
from thrifty.hetero._samples import ReadSamples
from thrifty.hetero.training._learner import Learner, Objective
from thrifty.hetero.training._model_state import StateSnapshot, untouched
from thrifty.hetero.workers._measure import to_device
from thrifty.pack import borrowed_streams
from thrifty.pack._state import seed_everything
from thrifty.pack.task._own_generators import OwnGenerators

from ._gradient_comparison import Comparison, Pass, close, equal_draws, largest_difference


_log = plain_logger("thrifty.hetero")

_MOST = {"cpu": 256}
_MOST_ELSEWHERE = 32
"""Maximum number of samples compared; accelerators are slow in double precision."""
_FEW = 4
"""Number of samples to compare where more do not fit into memory."""

_MORE = 10
"""Additional comparisons where draws differ and the process has other threads.

A model draws in every pass. Other threads draw only sometimes, so a repetition may be undisturbed.
"""

_ONE_AT_A_TIME = threading.RLock()
"""Serialises checks: random streams and the data that a loss reads belong to the process."""


class LossCheck:
    """Checks that a loss may be split: its gradient must be the sum of its parts' gradients.

    A batch is computed whole and in two uneven parts, with the model's own parameters, in double
    precision where the model allows it. All samples get the same random draws. Batch normalisation,
    which has its own sum, uses fixed statistics. Everything that a pass changes is restored.

    Args:
        model: The model to train.
        objective: Its loss.
        device: Device of the model.
        collate: The user's collate function, if there is one.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, *, device: torch.device, collate: Any = None
    ) -> None:
        self._model = model
        self._objective = objective
        self._device = device
        self._functions = (objective.loss, objective.weight, collate)
        self._generators = OwnGenerators({"collate": collate})
        self._collate_draws = False
        """Whether the collate function has drawn from a generator of its own."""
        self._said = False

    def find(self, taken: ReadSamples, *, seed: int) -> str:
        """Return a description of the problem with the samples or the loss; empty if there is none.

        Args:
            taken: Samples of one batch.
            seed: Seed of the draws of a pass.
        """
        if taken.reused is not None:
            return (
                f"reading another sample changes sample {taken.reused}: the data set returns the "
                "same object again with new content; return a copy (`x.clone()`, `x.copy()`)"
            )
        num = min(len(taken), _MOST.get(self._device.type, _MOST_ELSEWHERE))
        if num < 2:
            return ""
        failure: Exception | None = None
        with _ONE_AT_A_TIME, borrowed_streams(), untouched(self._model, *self._functions):
            for size in dict.fromkeys((num, min(num, _FEW))):
                for double in (True, False):
                    try:
                        return self._find(_Probe(taken, size, seed), double=double)
                    except Exception as error:  # noqa: BLE001 -- user code may not run in double
                        failure = error
            return self._blame(_Probe(taken, num, seed), failure)

    def _find(self, probe: _Probe, *, double: bool) -> str:
        found = self._compared(probe, double=double)
        for _ in range(_MORE if threading.active_count() > 1 else 0):
            if found.difference is None or not found.draws:
                break
            found = self._compared(probe, double=double)
        if found.difference is None:
            return self._state(probe, found, double=double)
        if found.draws or not self._repeats(probe, double=double):
            # Draws that cannot be equalised make batches differ. Without draws they must not
            # differ.
            found = self._compared(probe, double=double, evaluating=True)
            if found.difference is None:
                self._say(
                    "the model draws random numbers that cannot be repeated for a part of a batch: "
                    "its loss was checked in evaluation mode only"
                )
                return ""
        if self._collate_draws and not probe.is_cut:
            return self._find_in_cut(probe, double=double)
        return self._message(found)

    def _find_in_cut(self, probe: _Probe, *, double: bool) -> str:
        """Look for a problem with parts that are cut out of the batch.

        A collate function that draws for each sample from a generator of its own draws other
        numbers for a part of the samples.
        """
        with self._generators.seeded(probe.seed):
            whole = probe.taken.batch(0, probe.num, pristine=True)
        leaves = tree_leaves(whole)
        if all(isinstance(each, Tensor) and each.shape[:1] == (probe.num,) for each in leaves):
            return self._find(replace(probe, whole=whole), double=double)
        self._say(
            "`collate` draws from a generator of its own, and its batches cannot be cut: it was "
            "not checked that the loss may be split over workers"
        )
        return ""

    def _compared(self, probe: _Probe, *, double: bool, evaluating: bool = False) -> Comparison:
        with self._prepared(double=double, evaluating=evaluating):
            passes = [self._pass(probe, span, double=double) for span in probe.spans]
        return Comparison(passes, probe.sizes, reduction=self._objective.reduction)

    def _batch(self, probe: _Probe, span: tuple[int, int]) -> Any:
        if probe.whole is not None:
            return tree_map(lambda each: each[slice(*span)].clone(), probe.whole)
        with self._generators.seeded(probe.seed):
            batch = probe.taken.batch(*span, pristine=True)
            self._collate_draws |= bool(self._generators.drawn_from())
        return batch

    def _repeats(self, probe: _Probe, *, double: bool) -> bool:
        with self._prepared(double=double):
            one, two = (self._pass(probe, probe.spans[0], double=double) for _ in range(2))
        return largest_difference(one, two.loss, two.gradients, eps=one.eps) is None

    def _state(self, probe: _Probe, found: Comparison, *, double: bool) -> str:
        """Describe state that depends on the samples and affects the loss; "" if there is none."""
        whole, *parts = found.passes
        there = self._keep().values()
        follows = {
            name: [part.values.get(name, value) for part in parts]
            for name, value in whole.values.items()
            # A tensor that a pass has created is a cache: the next pass creates it again.
            if name in there or not isinstance(value, Tensor)
        }
        follows = {
            name: others
            for name, others in follows.items()
            if not all(close(whole.values[name], each, eps=whole.eps) for each in others)
        }
        if not follows:
            return ""
        either = (
            {name: whole.values[name] for name in follows},
            {name: others[0] for name, others in follows.items()},
        )
        for evaluating in (False, True):
            with self._prepared(double=double, evaluating=evaluating):
                one, two = (
                    self._pass(probe, probe.spans[0], double=double, values=values)
                    for values in either
                )
            if largest_difference(one, two.loss, two.gradients, eps=one.eps) is not None:
                return (
                    f"{', '.join(map(repr, follows))} in the model or the loss follows the samples "
                    "of a batch (a buffer, an attribute or a variable): each worker would see "
                    "those of its share only, and workers would differ. Do without it, or pass "
                    "HeteroOptions(verify=False) to let each worker keep its own, which changes "
                    "the answer"
                )
        return ""

    def _keep(self) -> StateSnapshot:
        return StateSnapshot(self._model, *self._functions, besides=(_BatchNorm,))

    @contextlib.contextmanager
    def _prepared(self, *, double: bool, evaluating: bool = False) -> Iterator[None]:
        """Prepare the model for a comparison; restore it on exit."""
        model, kept = self._model, StateSnapshot(self._model)
        parameters = list(model.parameters())
        held = [(each, each.data, each.grad) for each in parameters]
        try:
            if evaluating:
                model.eval()
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    module.forward = _with_fixed_statistics(module)  # type: ignore[method-assign]
                if getattr(type(module), "by_position", False):
                    module.training = False
            for each in parameters:
                # Train on a copy, so that user code that writes to a parameter writes to the copy.
                each.grad, each.data = None, each.data.clone()
            if double:
                _to_double(model)
            with _eager(model):
                yield
        finally:
            for each, data, grad in held:
                each.data, each.grad = data, grad
            kept.restore()

    def _pass(
        self,
        probe: _Probe,
        span: tuple[int, int],
        *,
        double: bool,
        values: Mapping[str, Any] | None = None,
    ) -> Pass:
        before = self._sums()
        kept = self._keep()
        try:
            kept.assign(values or {})
            seed_everything(probe.seed)
            with equal_draws(probe.seed) as draws, torch.enable_grad():
                batch = to_device(self._batch(probe, span), self._device)
                batch = _doubled(batch) if double else batch
                weight = self._objective.weigh(batch, span[1] - span[0])
                draws.eps = 0.0  # the precision of stored data says nothing about the model
                loss = self._objective.loss(self._model, batch)
                gradients = self._gradients(loss)
            made = Pass(
                loss=float(loss.detach()),
                weight=weight,
                gradients=gradients,
                values=kept.values(),
                eps=draws.eps,
                draws=draws.summary(),
            )
        finally:
            kept.restore()
        for name, value in self._sums().items():
            if not torch.equal(value, before[name]):
                raise _ChangesParameterError(name)
        return made

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {
            name: torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            for (name, parameter), gradient in zip(trained.items(), found, strict=True)
        }

    @torch.no_grad()
    def _sums(self) -> dict[str, Tensor]:
        """Return sums that reveal a write to a parameter, with less memory than a copy."""
        return {
            name: torch.stack([each.sum(), each.abs().sum().to(each.dtype)]).nan_to_num()
            for name, each in self._model.named_parameters()
            if each.numel()
        }

    def _blame(self, probe: _Probe, failure: Exception | None) -> str:
        """Return what to report where no comparison was possible."""
        if isinstance(failure, _ChangesParameterError):
            return str(failure)
        for span in probe.spans:
            try:
                with untouched(self._model, *self._functions), torch.enable_grad():
                    seed_everything(probe.seed)
                    batch = probe.taken.batch(*span, pristine=True)
                    self._objective.loss(self._model, to_device(batch, self._device))
            except Exception as error:  # noqa: BLE001 -- user code may raise anything
                if span == probe.spans[0]:
                    return ""  # training raises it, too, with its own traceback
                return (
                    f"the loss of {span[1] - span[0]} samples failed, while that of "
                    f"{probe.sizes[0]} did not, and workers get shares of any size: "
                    f"{type(error).__name__}: {error}"
                )
        self._say(f"it could not be checked that the loss may be split over workers: {failure}")
        return ""

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            _log.warning("%s", text)

    def _message(self, found: Comparison) -> str:
        whole, *parts = found.sizes
        text = (
            f"the loss cannot be split over workers: for {whole} samples, {found.difference} from "
            f"what their parts of {' and '.join(map(str, parts))} samples add up to. "
        )
        if self._objective.has_weights:
            weights = ", ".join(f"{each.weight:g}" for each in found.passes)
            sizes = ", ".join(map(str, found.sizes))
            return text + (
                f"`weight` returned {weights} for the {sizes} samples; it must return what the "
                "loss of a batch divides by"
            )
        if self._objective.reduction == "mean" and found.is_sum:
            return text + "It is a sum: pass reduction='sum', or return the mean"
        if self._objective.reduction == "sum" and found.is_mean:
            return text + "It is a mean: leave out reduction='sum'"
        return text + (
            "If it is a weighted mean (class weights, ignore_index, masked tokens), pass weight=, "
            "a function from a batch to the sum of its weights. A loss over pairs of samples "
            "cannot be split: use one worker, or HeteroOptions(verify=False) to train each share "
            "by its own loss, which changes the answer"
        )


class _ChangesParameterError(HeteroError):
    """A forward pass writes to a parameter."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the forward pass changes parameter {name!r}: workers without a share in a step would "
            "not; change it between two steps, in the loop over `trainer.run()`"
        )


@dataclass(frozen=True, slots=True)
class _Probe:
    """The samples of a check, and how they are split."""

    taken: ReadSamples
    num: int
    seed: int
    whole: Any = None
    """The batch of all samples, out of which parts are cut; None if parts are collated."""

    @property
    def is_cut(self) -> bool:
        """Whether parts are cut out of the whole batch."""
        return self.whole is not None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """All samples, then two uneven parts."""
        cut = max(1, self.num // 3)
        return (0, self.num), (0, cut), (cut, self.num)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.spans)


def _with_fixed_statistics(layer: _BatchNorm) -> Any:
    """Return the layer's own ``forward``, which runs as in evaluation."""
    own = layer.forward

    def forward(*args: Any, **options: Any) -> Any:
        # A loss may call ``model.train()`` itself, so this is set anew in each call.
        before = layer.training, layer.running_mean, layer.running_var
        try:
            layer.training = False
            if layer.running_mean is None and layer.running_var is None:
                x = next(iter((*args, *options.values())))
                layer.running_mean = x.new_zeros(x.shape[1])
                layer.running_var = x.new_ones(x.shape[1])
            return own(*args, **options)
        finally:
            layer.training, layer.running_mean, layer.running_var = before

    return forward


def _to_double(model: nn.Module) -> None:
    """Convert in place, so that a loss that holds the model itself uses the same tensors."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()


def _doubled(batch: Any) -> Any:
    def double(leaf: Any) -> Any:
        real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if real else leaf

    return tree_map(double, batch)


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Disable compilation, because compiled code would not let draws be replaced."""
    compiled = any(type(module).__name__ == "OptimizedModule" for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


_SHARE = 0.01
"""Maximum share of the training time that checks may take."""
_LEAST_GAP = 100
"""Minimum number of steps between two checks, however cheap they are."""
_ENOUGH = 8
"""Minimum number of samples to check the loss with, if there are enough."""


class CheckSchedule:
    """Picks seeded random steps, so that all checks after the first take at most 1 % of the time.

    It depends only on numbers that all workers know, so all check at the same steps and none waits
    for another.

    Args:
        seed: Seed of the steps.

    Attributes:
        next_step: Steps trained when the next check is due.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self.next_step = 0

    def restart(self) -> None:
        """Check at the next step."""
        self.next_step = 0

    def is_due(self, step: int) -> bool:
        """Return whether to check before this step."""
        return step >= self.next_step

    def checked(self, step: int, *, check_s: float, step_s: float) -> None:
        """Record a check, and pick the step of the next one.

        Args:
            step: Step at which the check was made.
            check_s: Seconds that the check took.
            step_s: Seconds that the step took without the check.
        """
        gap = math.ceil(check_s / (_SHARE * max(step_s, 1e-9)))
        gap = max(gap, _LEAST_GAP)
        self.next_step = step + gap + derive_seed(self._seed, "check", step) % gap


class Inspector:
    """Checks the loss of a worker's share, at the steps of a ``CheckSchedule``.

    Args:
        check: Compares a batch with its parts.
        learner: The learner whose samples are checked.
        seed: Seed of the steps and of the draws in a check.
        clock: Clock to measure with.
        enabled: Whether to check at all.

    Attributes:
        finding: Description of the problem; empty if there is none.
        seconds: Seconds that the check of this step took.
    """

    def __init__(
        self, check: LossCheck, learner: Learner, *, seed: int, clock: Clock, enabled: bool
    ) -> None:
        self.finding = ""
        self.seconds = 0.0
        self._check = check
        self._learner = learner
        self._seed = seed
        self._clock = clock
        self._enabled = enabled
        self._schedule = CheckSchedule(seed=seed)
        self._step = 0
        self._largest = 0

    def restart(self) -> None:
        """Check at the next step, because workers or parameters have changed."""
        self._schedule.restart()

    @property
    def next_step(self) -> int:
        """Steps trained when the next check is due; a worker that stood by takes the others'."""
        return self._schedule.next_step

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._schedule.next_step = step

    def begin(self, step: int, *, largest: int) -> bool:
        """Begin a step; return whether to inspect its samples.

        Args:
            step: Steps trained before it.
            largest: Samples of the worker with the largest share.
        """
        self.finding, self.seconds = "", 0.0
        self._step, self._largest = step, largest
        return self._enabled and self._schedule.is_due(step)

    def inspect(self, taken: ReadSamples) -> None:
        """Check the samples of this worker's share."""
        began = self._clock.monotonic()
        seed = derive_seed(self._seed, "check", self._step)
        # The step must draw the same numbers, whether its samples are checked or not.
        with borrowed_streams():
            self.finding = self._check.find(self._enough(taken, seed), seed=seed)
        self._learner.synchronise()
        self.seconds = self._clock.monotonic() - began

    def end(self, *, check_s: float, step_s: float) -> None:
        """Record the cost of all workers' checks; see ``CheckSchedule.checked``."""
        self._schedule.checked(self._step + 1, check_s=check_s, step_s=step_s)

    def _enough(self, taken: ReadSamples, seed: int) -> ReadSamples:
        """Return the share, or some public samples if all shares are too small to be split."""
        samples = self._learner.samples
        if max(len(taken), self._largest) >= _ENOUGH or samples.num_public <= len(taken):
            return taken
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(samples.num_public, generator=generator)[:_ENOUGH]
        return samples.take(some.tolist(), (), watched=True)
