"""Profile a training step by its batch size, and keep profiles in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from thrifty.core import Clock, HeteroError, SystemClock, fingerprint, plain_logger
from thrifty.core._files import replacing
from thrifty.hetero._samples import Samples
from thrifty.hetero.training._flat import gradient_buckets, median_shape
from thrifty.hetero.training._learner import Loss
from thrifty.hetero.workers._measure import device_of, to_device
from thrifty.pack import out_of_memory
from thrifty.pack._backend import device_name
from thrifty.perf import Precision, StepProfile

from ._rehearsal import TINY_S, OtherPrograms, Rehearsal, ThreadQueues


_log = plain_logger("thrifty.hetero")

Make = Callable[[int], Any]
"""Builds a batch of the given number of samples."""

_WARM_UP = 2
_SHAPES = 3
_LEAST, _MOST = 3, 100
"""Minimum and maximum number of timed steps per batch size."""
_AGAIN = 3
"""How often all sizes are timed again where a larger batch took less time than a smaller one."""
_SAME = 0.05
"""Relative difference up to which two batch sizes count as equally fast."""

DISTURBED = (
    "while a step was timed, %s; forecasts may be off, so time it again when nothing else runs"
)
"""Warning about a profile that other work disturbed; takes ``StepProfile.disturbance``."""
_MEASURED_PEAK = 0.1
"""``StepProfile.peak_error`` of a measured memory: what an allocator loses to fragments."""
_ESTIMATED_PEAK = 0.5
"""``StepProfile.peak_error`` of an estimated memory.

The estimate knows neither the workspaces of a GPU's libraries nor results that are freed at once.
"""

_THREADS = Path("/proc/self/task")
"""What Linux says about each thread of this process; other systems have no such folder."""

_STAT = Path("/proc/stat")
"""What Linux says about all processors."""

_METHOD = 5
"""Number of the way of measuring; profiles of earlier ways are not used."""


def profile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset[Any] | Make,
    *,
    loss: Loss,
    batches: Sequence[int] = (8, 16, 32, 64),
    budget_s: float = 5.0,
    clock: Clock | None = None,
    cache: Path | str | None = None,
) -> StepProfile:
    """Time the phases of a training step, for ``perf.iteration_s`` to predict other machines.

    For each batch size it measures the least time of forward pass, backward pass and optimizer, in
    rounds over all sizes: what else the machine does only adds to a time. How much it added is the
    profile's ``noise``: by how much the median step is longer, or how long a thread waited for a
    processor (on Linux); ``others`` is what other programs used of the machine's processors (on
    Linux). On a CUDA device the median counts, and ``noise`` is 0. A profile with much of either is
    a warning, and is not cached. For the gradient, it records the buckets of PyTorch's DDP (1 MiB,
    then 25 MiB, in reverse order of the parameters) and the share of the backward pass after which
    each bucket is complete. Hooks measure that share in separate steps, so they do not affect the
    times. Measuring stops at the batch size that does not fit into memory, or that would exceed
    ``budget_s``.

    On a CUDA device the peak memory is measured. On a CPU it is an estimate: parameters, gradients,
    buffers, the optimizer's state, the batch, and what autograd keeps for the backward pass. The
    profile's ``peak_error`` is larger then. The profile's ``precision`` is that of the layers'
    results, so it tells whether ``loss`` uses autocast.

    Afterwards model, optimizer, gradients, buffers and global random streams are as before.

    Args:
        model: A plain model on the device to measure, in the mode in which it trains.
        optimizer: Optimizer of the model's parameters.
        data: A map-style data set, or a function that makes a batch of a given number of samples.
        loss: Function from a model and a batch to a scalar.
        batches: Batch sizes, ascending.
        budget_s: Seconds that measuring may take.
        clock: Clock for measurements on a CPU (default: the machine's). A CUDA device has its own.
            With a clock of your own, waiting for a processor does not count as noise.
        cache: Folder to cache profiles in. Another model, optimizer, data shape, device or version
            of torch is measured again; another ``loss`` is not, so use another folder after you
            turn autocast on or off in it.

    Raises:
        HeteroError: The batch sizes are invalid, no parameter is trained, or the smallest size does
            not fit into memory.

    >>> model = nn.Linear(4, 2)
    >>> profile = profile_step(
    ...     model,
    ...     torch.optim.SGD(model.parameters()),
    ...     lambda n: torch.zeros(n, 4),
    ...     loss=lambda net, batch: net(batch).sum(),
    ...     batches=(8, 16),
    ...     budget_s=2.0,
    ... )
    >>> profile.batches, profile.bucket_bytes
    ((8, 16), (40.0,))
    """
    rehearsal = Rehearsal(model, optimizer, loss=loss, clock=clock or SystemClock())
    # A step on a GPU does not wait for the host's threads; they only launch its kernels.
    on_processors = clock is None and rehearsal.device.type == "cpu"
    queues = ThreadQueues(_THREADS if on_processors else None)
    others = OtherPrograms(_STAT if on_processors else None)
    sizes, make = _sizes(batches, data)
    with rehearsal.left_as_it_was():
        path = None
        if cache is not None:
            key = profile_key(model, optimizer, make(sizes[0]), sizes=sizes)
            path = Path(cache) / f"profile-{key}.json"
            known = read_profile(path)
            if known is not None:
                return known
        profile = _profile(rehearsal, sizes, make, budget_s=budget_s, queues=queues, others=others)
        profile = replace(profile, precision=_precision(rehearsal, model, make(sizes[0])))
    if path is not None and not profile.is_noisy:
        write_profile(path, profile)
    return profile


@dataclass(kw_only=True)
class _Measured:
    """Measurements of one batch size.

    What else a processor does only adds to a time, so the least is the step's own. The times of a
    GPU's clock have no such floor: most of a small step is launches by Python, which take a third
    longer as a rule than when all goes well, on an idle machine, too. There, the median counts.

    Attributes:
        on_gpu: Whether the times are those of a GPU's clock.
        batch: A batch of this size, in the host's memory.
        input_s: Seconds to make such a batch.
        phases: Seconds of forward pass, backward pass and optimizer, for each timed step.
        shapes: When each gradient is complete, for each step with hooks.
        peak_bytes: Peak memory of a step.
    """

    on_gpu: bool = False
    batch: Any = None
    input_s: list[float] = field(default_factory=list)
    phases: list[tuple[float, float, float]] = field(default_factory=list)
    shapes: list[dict[int, float]] = field(default_factory=list)
    peak_bytes: float = 0.0

    def phase(self, at: int) -> float:
        """Return the seconds of a phase."""
        return self._one_of([each[at] for each in self.phases])

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return self._one_of([sum(each) for each in self.phases])

    @property
    def noise(self) -> float:
        """By how much, relative to it, the median step is longer than what counts."""
        more = median(map(sum, self.phases)) - self.step_s
        return more / max(self.step_s, TINY_S)

    def _one_of(self, seconds: Sequence[float]) -> float:
        return median(seconds) if self.on_gpu else min(seconds)


def _profile(
    rehearsal: Rehearsal,
    sizes: Sequence[int],
    make: Make,
    *,
    budget_s: float,
    queues: ThreadQueues,
    others: OtherPrograms,
) -> StepProfile:
    began, before = rehearsal.clock.monotonic(), queues.waited_s()
    until = began + budget_s
    done = _fitting(rehearsal, sizes, make, until=until)
    _time_rounds(rehearsal, done, until=until)
    took_s = rehearsal.clock.monotonic() - began
    noise = max(
        median(each.noise for each in done.values()),
        queues.noise(before, queues.waited_s(), took_s=took_s),
    )
    ready = median_shape([shape for each in done.values() for shape in each.shapes])
    buckets = gradient_buckets(rehearsal.parameters, ready)
    profile = StepProfile(
        device=_device(rehearsal.device),
        batches=tuple(done),
        forward_s=tuple(each.phase(0) for each in done.values()),
        backward_s=tuple(each.phase(1) for each in done.values()),
        optimizer_s=min(each.phase(2) for each in done.values()),
        peak_bytes=tuple(each.peak_bytes for each in done.values()),
        bucket_bytes=tuple(num_bytes for num_bytes, _ in buckets),
        bucket_ready=tuple(share for _, share in buckets),
        sample_input_s=median(s / size for size, each in done.items() for s in each.input_s),
        noise=noise,
        others=others.share(),
        peak_error=_MEASURED_PEAK if rehearsal.device.type == "cuda" else _ESTIMATED_PEAK,
    )
    if profile.is_noisy:
        _log.warning(DISTURBED, profile.disturbance)
    return profile


def _precision(rehearsal: Rehearsal, model: nn.Module, batch: Any) -> Precision:
    """Return the smallest precision of the results of a model's layers."""
    seen: set[torch.dtype] = set()

    def note(_module: nn.Module, _args: Any, out: Any) -> None:
        seen.update(each.dtype for each in tree_leaves(out) if isinstance(each, Tensor))

    handles = [each.register_forward_hook(note) for each in model.modules()]
    try:
        rehearsal.phases(to_device(batch, rehearsal.device))
    finally:
        for handle in handles:
            handle.remove()
    if torch.bfloat16 in seen:
        return "bfloat16"
    return "float16" if torch.float16 in seen else "float32"


def _fitting(
    rehearsal: Rehearsal, sizes: Sequence[int], make: Make, *, until: float
) -> dict[int, _Measured]:
    """Measure memory and the gradient's timing of the sizes that fit, and time one step of each.

    Raises:
        HeteroError: Not even the smallest size fits into memory.
    """
    clock, done = rehearsal.clock, dict[int, _Measured]()
    for size in sizes:
        if done:
            last = max(done)
            more = (_WARM_UP + _LEAST + _SHAPES) * done[last].step_s * size / last
            rest = (_LEAST - 1) * sum(each.step_s for each in done.values())
            if clock.monotonic() + more + rest > until:
                break
        try:
            done[size] = _first(rehearsal, size, make)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if not done:
                raise HeteroError(
                    f"a step with {size} sample(s) does not fit into the memory of "
                    f"{rehearsal.device}; smaller batches, or a smaller model, would"
                ) from error
            break
    return done


def _first(rehearsal: Rehearsal, size: int, make: Make) -> _Measured:
    """Run warm-up steps, then steps with hooks for the gradient's timing, then one timed step."""
    clock, out = rehearsal.clock, _Measured(on_gpu=rehearsal.device.type == "cuda")
    for _ in range(_LEAST):
        began = clock.monotonic()
        out.batch = make(size)
        out.input_s.append(clock.monotonic() - began)
    batch = to_device(out.batch, rehearsal.device)
    for _ in range(_WARM_UP):
        out.peak_bytes = rehearsal.peak_bytes(batch)
    out.shapes = [rehearsal.shape(batch) for _ in range(_SHAPES)]
    out.phases = [rehearsal.phases(batch)]
    return out


def _time_rounds(rehearsal: Rehearsal, done: Mapping[int, _Measured], *, until: float) -> None:
    """Time steps in rounds over all sizes, so that a busy moment does not hit one size only.

    If a larger batch then takes less time than a smaller one, all are timed again.
    """
    clock = rehearsal.clock
    round_s = sum(each.step_s for each in done.values())
    num = 1
    while num < _LEAST or (num < _MOST and clock.monotonic() + round_s <= until):
        _time_round(rehearsal, done)
        num += 1
    for _ in range(_AGAIN):
        if _is_ascending([each.step_s for each in done.values()]):
            return
        for _ in range(_LEAST):
            _time_round(rehearsal, done)


def _time_round(rehearsal: Rehearsal, done: Mapping[int, _Measured]) -> None:
    for each in done.values():
        each.phases.append(rehearsal.phases(to_device(each.batch, rehearsal.device)))


def _is_ascending(seconds: Sequence[float]) -> bool:
    return all(larger > (1 - _SAME) * smaller for smaller, larger in pairwise(seconds))


def _sizes(batches: Sequence[int], data: Dataset[Any] | Make) -> tuple[list[int], Make]:
    """Return the batch sizes that the data can fill, and a function that makes the batches."""
    sizes = list(batches)
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise HeteroError(f"`batches` must ascend from 1 or more, got {sizes}")
    if callable(data):
        return sizes, data
    samples = Samples(data, None)
    enough = [size for size in sizes if size <= len(samples)]
    if not enough:
        raise HeteroError(
            f"the data set has {len(samples)} samples, and the smallest batch {sizes[0]}: ask for "
            "smaller batches"
        )
    return enough, lambda num: samples.batch(range(num))


def _device(device: torch.device) -> str:
    """Return the name of a device; for a CPU also the number of threads."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} thread(s)"


def profile_key(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, sizes: Sequence[int]
) -> str:
    """Return a digest of everything that a profile depends on, except the loss."""
    return fingerprint({
        "parameters": [
            [list(each.shape), str(each.dtype), each.requires_grad] for each in model.parameters()
        ],
        "model": repr(model),
        "training": [module.training for module in model.modules()],
        "optimizer": type(optimizer).__qualname__,
        "batch": [
            [list(each.shape), str(each.dtype)] if isinstance(each, Tensor) else type(each).__name__
            for each in tree_leaves(batch)
        ],
        "sizes": list(sizes),
        "device": _device(device_of(model)),
        "torch": torch.__version__,
        "method": _METHOD,
    })


def read_profile(path: Path) -> StepProfile | None:
    """Return the cached profile, or None if there is none or it cannot be read."""
    try:
        return StepProfile.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s holds no profile (%s): measured again", path, error)
        return None


def write_profile(path: Path, profile: StepProfile) -> None:
    """Write a profile atomically; log a warning if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(json.dumps(profile.to_json()))
    except OSError as error:
        _log.warning("a profile cannot be kept in %s: %s", path.parent, error)
