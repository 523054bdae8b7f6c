"""What one step of a model consists of, measured on one device."""

from __future__ import annotations

import copy
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from thrifty.core import Clock, HeteroError, SystemClock, fingerprint
from thrifty.pack import borrowed_streams, out_of_memory
from thrifty.perf import StepProfile

from ._learner import Loss, _to, device_of
from ._samples import Samples


_log = logging.getLogger("thrifty.hetero")

Make = Callable[[int], Any]
"""From a number of samples to a batch."""

_MIB = 2**20
_CAPS = (1 * _MIB, 25 * _MIB)
"""Of the first bucket and of the others, as in PyTorch's DDP."""

_WARM_UP = 2
_SHAPES = 3
_LEAST, _MOST = 3, 100
"""Timed steps of a batch size."""


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
    """Times the phases of a training step, as perf.iteration_s replays them for many machines.

    Medians of forward, backward and optimiser for each batch size; of the gradient, how it falls into buckets of PyTorch's DDP (1 MiB, then 25 MiB, in reverse order of the parameters), and the share of the backward
    pass after which each is complete. Hooks find that share in steps of their own, so that they cost the times nothing. Sizes end where memory ends, or where the next one would take it beyond ``budget_s``.

    The peak of memory is counted on a CUDA device. On a CPU it is an estimate: parameters, gradients, buffers, the optimiser's state, the batch, and what autograd keeps for the backward pass.

    Model, optimiser, gradients, buffers and global random streams are afterwards as before.

    Args:
        model: plain, on the device that is asked about, and in the mode in which it trains.
        optimizer: of its parameters.
        data: a map-style data set, or a function that makes a batch of so many samples.
        loss: from a model and a batch to a scalar.
        batches: sizes, ascending.
        budget_s: seconds that measuring may take.
        clock: to read on a CPU; the machine's unless told. A CUDA device has its own.
        cache: folder in which profiles are kept. Another model, optimiser, data shape, device or version of torch is measured anew, another ``loss`` is not.

    Raises:
        HeteroError: sizes that cannot be measured, nothing to train, or no memory for the smallest size.

    >>> model = nn.Linear(4, 2)
    >>> profile = profile_step(model, torch.optim.SGD(model.parameters()), lambda n: torch.zeros(n, 4),
    ...     loss=lambda net, batch: net(batch).sum(), batches=(8, 16), budget_s=0.1)
    >>> profile.batches, profile.bucket_bytes
    ((8, 16), (40.0,))
    """
    rehearsal = _Rehearsal(model, optimizer, loss=loss, clock=clock or SystemClock())
    sizes, make = _sizes(batches, data)
    with rehearsal.left_as_it_was():
        path = None
        if cache is not None:
            key = _key(model, optimizer, make(sizes[0]), sizes=sizes)
            path = Path(cache) / f"profile-{key}.json"
            known = _read(path)
            if known is not None:
                return known
        profile = _profile(rehearsal, sizes, make, budget_s=budget_s)
    if path is not None:
        _write(path, profile)
    return profile


@dataclass(kw_only=True)
class _Measured:
    """What is known of one batch size."""

    input_s: list[float] = field(default_factory=list)
    phases: list[tuple[float, float, float]] = field(default_factory=list)
    shapes: list[dict[int, float]] = field(default_factory=list)
    peak_bytes: float = 0.0

    def phase(self, at: int) -> float:
        return median(each[at] for each in self.phases)


def _profile(
    rehearsal: _Rehearsal, sizes: Sequence[int], make: Make, *, budget_s: float
) -> StepProfile:
    clock, done = rehearsal.clock, dict[int, _Measured]()
    began = clock.monotonic()
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        until = clock.monotonic() + (budget_s - (clock.monotonic() - began)) / left
        if done:
            last = max(done)
            least = (_WARM_UP + _LEAST + _SHAPES) * sum(map(done[last].phase, range(3)))
            if clock.monotonic() - began + least * size / last > budget_s:
                break
        try:
            done[size] = _measure(rehearsal, size, make, until=until)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if not done:
                raise HeteroError(
                    f"a step with {size} sample(s) does not fit into the memory of {rehearsal.device}; smaller batches, or a smaller model, would"
                ) from error
            break
    ready = _median_shape([shape for each in done.values() for shape in each.shapes])
    buckets = _buckets(rehearsal.parameters, ready)
    return StepProfile(
        device=_device_name(rehearsal.device),
        batches=tuple(done),
        forward_s=tuple(each.phase(0) for each in done.values()),
        backward_s=tuple(each.phase(1) for each in done.values()),
        optimizer_s=median(phase[2] for each in done.values() for phase in each.phases),
        peak_bytes=tuple(each.peak_bytes for each in done.values()),
        bucket_bytes=tuple(num_bytes for num_bytes, _ in buckets),
        bucket_ready=tuple(share for _, share in buckets),
        sample_input_s=median(s / size for size, each in done.items() for s in each.input_s),
    )


def _measure(rehearsal: _Rehearsal, size: int, make: Make, *, until: float) -> _Measured:
    """Some steps to warm up, some with hooks for the shape, and the rest timed."""
    clock, out = rehearsal.clock, _Measured()
    batch = None
    for _ in range(_LEAST):
        began = clock.monotonic()
        batch = make(size)
        out.input_s.append(clock.monotonic() - began)
    batch = _to(batch, rehearsal.device)
    for _ in range(_WARM_UP):
        out.peak_bytes = rehearsal.peak_bytes(batch)
    out.shapes = [rehearsal.shape(batch) for _ in range(_SHAPES)]
    while len(out.phases) < _LEAST or (len(out.phases) < _MOST and clock.monotonic() < until):
        out.phases.append(rehearsal.phases(batch))
    return out


class _Rehearsal:
    """Steps that count for nothing but their time."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, loss: Loss, clock: Clock
    ) -> None:
        self.device = device_of(model)
        self.clock = clock
        # Each counts once, whatever names it has; reversed, as a backward pass comes to them.
        self.parameters = [each for each in model.parameters() if each.requires_grad][::-1]
        if not self.parameters:
            raise HeteroError("no parameter of the model needs a gradient")
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._watch = _Stopwatch(self.device, clock)
        self._kept_bytes = 0

    def phases(self, batch: Any) -> tuple[float, float, float]:
        """Seconds forward, backward and of the optimiser."""
        marks = self._step(batch)
        return tuple(self._watch.seconds(*pair) for pair in pairwise(marks))  # type: ignore[return-value]

    def shape(self, batch: Any) -> dict[int, float]:
        """By parameter: the share of the backward pass after which its gradient is there."""
        arrived: dict[int, Any] = {}

        def arrive(at: int, _: Tensor) -> None:
            arrived[at] = self._watch.mark()

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(arrive, at))
            for at, parameter in enumerate(self.parameters)
        ]
        try:
            _, begin, end, _ = self._step(batch)
        finally:
            for hook in hooks:
                hook.remove()
        whole = max(self._watch.seconds(begin, end), 1e-12)
        return {
            at: min(1.0, self._watch.seconds(begin, mark) / whole)
            for at, mark in arrived.items()
        }

    def peak_bytes(self, batch: Any) -> float:
        """Memory of a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._step(batch)
            return torch.cuda.max_memory_allocated(self.device) - self._kept_bytes
        during, after = _Storages(), _Storages()
        for each in [*self._model.parameters(), *self._model.buffers(), *tree_leaves(batch)]:
            during.note(each)
        with torch.autograd.graph.saved_tensors_hooks(during.note, lambda tensor: tensor):
            self._step(batch)
        # Gradients may lie where activations have been: they count apart.
        gradients = [parameter.grad for parameter in self.parameters]
        for each in [*gradients, *tree_leaves(dict(self._optimizer.state))]:
            after.note(each)
        return during.num_bytes + after.num_bytes

    @contextmanager
    def left_as_it_was(self) -> Iterator[None]:
        """Puts everything back that steps change."""
        before = self._allocated()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        state = copy.deepcopy(self._optimizer.state_dict())
        gradients = [parameter.grad for parameter in self._model.parameters()]
        self._kept_bytes = self._allocated() - before
        try:
            for parameter in self._model.parameters():
                parameter.grad = None
            with borrowed_streams():
                yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(tensors, kept, strict=True):
                    tensor.copy_(old)
            self._optimizer.load_state_dict(state)
            for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                parameter.grad = gradient

    def _step(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        """A step as plain loops have it; marks at the ends of its phases."""
        mark = self._watch.mark
        begin = mark()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._model, batch)
        forward = mark()
        loss.backward()
        backward = mark()
        self._optimizer.step()
        end = mark()
        self._watch.wait()
        return begin, forward, backward, end

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


class _Stopwatch:
    """Moments on a device: a clock's on a CPU, events on CUDA, where the host runs ahead."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return self._clock.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Before ``seconds``."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        took = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return max(float(took), 1e-9)


class _Storages:
    """Counts each storage once; those of views are their bases'."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    @property
    def num_bytes(self) -> float:
        return float(sum(self._seen.values()))

    def note(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            self._seen[storage.data_ptr()] = storage.nbytes()
        return value


def _median_shape(shapes: Sequence[dict[int, float]]) -> dict[int, float]:
    return {
        at: median(shape[at] for shape in shapes if at in shape)
        for at in sorted(set().union(*shapes))
    }


def _buckets(
    parameters: Sequence[nn.Parameter], ready: dict[int, float]
) -> list[tuple[float, float]]:
    """Bytes of each bucket and when it is complete, in the order in which they begin; one kind of tensor each."""
    if not ready:
        raise HeteroError("no parameter got a gradient: the loss depends on none of them")
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    closed: list[list[int]] = []
    started: set[tuple[torch.dtype, torch.device]] = set()

    def num_bytes(members: Sequence[int]) -> int:
        return sum(parameters[at].numel() * parameters[at].element_size() for at in members)

    for at in sorted(ready):
        kind = parameters[at].dtype, parameters[at].device
        filling.setdefault(kind, []).append(at)
        if num_bytes(filling[kind]) >= _CAPS[kind in started]:
            closed.append(filling.pop(kind))
            started.add(kind)
    out, latest = [], 0.0
    for members in [*closed, *filling.values()]:
        # A bucket waits for its turn, whoever else is complete.
        latest = max(latest, *(ready[at] for at in members))
        out.append((float(num_bytes(members)), latest))
    return out


def _sizes(batches: Sequence[int], data: Dataset[Any] | Make) -> tuple[list[int], Make]:
    """Those that the data can fill, and what fills them."""
    sizes = list(batches)
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise HeteroError(f"batches ascend from 1 or more, not {sizes}")
    if callable(data):
        return sizes, data
    samples = Samples(data, None)
    enough = [size for size in sizes if size <= len(samples)]
    if not enough:
        raise HeteroError(
            f"the data set has {len(samples)} samples, and the smallest batch {sizes[0]}: ask for smaller batches"
        )
    return enough, lambda num: samples.batch(range(num))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} thread(s)"


def _key(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, sizes: Sequence[int]
) -> str:
    return fingerprint({
        "parameters": [
            [list(each.shape), str(each.dtype), each.requires_grad]
            for each in model.parameters()
        ],
        "model": repr(model),
        "training": [module.training for module in model.modules()],
        "optimizer": type(optimizer).__qualname__,
        "batch": [
            [list(each.shape), str(each.dtype)]
            if isinstance(each, Tensor)
            else type(each).__name__
            for each in tree_leaves(batch)
        ],
        "sizes": list(sizes),
        "device": _device_name(device_of(model)),
        "torch": torch.__version__,
    })


def _read(path: Path) -> StepProfile | None:
    try:
        return StepProfile.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s holds no profile (%s): measured again", path, error)
        return None


def _write(path: Path, profile: StepProfile) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile.to_json()))
        temporary.replace(path)
    except OSError as error:
        _log.warning("a profile cannot be kept in %s: %s", path.parent, error)
        with suppress(OSError):
            temporary.unlink()
