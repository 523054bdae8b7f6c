"""One step of a block: its options, its losses, and experiments: packed and alone."""

from __future__ import annotations

import cProfile
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.core import plain_logger
from thrifty.pack._frozen import copy_of
from thrifty.pack._state import loose_streams, seed_step, torch_streams
from thrifty.pack.task._data import WholeBatch
from thrifty.pack.task._task import Task

from ._fusable import UnfusableError, dropout_rates
from ._narrowing import optimized
from ._packed import corner
from ._padding import not_proved
from ._randomness import Randomness, fill
from ._structure import Recorded, Structure, Variant, in_order, named, upcast
from ._tape import bind


logger = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Options for fusing one structure.

    ``compile`` keeps a block's steps at its full size, so that trials can come and go without
    anything being built again.

    Attributes:
        size: Number of trials per block.
        max_padding: Maximum ratio of the largest to the smallest batch size in a block.
        channels_last: Whether images are stored in channels-last layout.
        compile: Whether training steps go through ``torch.compile``.
        cuda_graphs: Whether programs are captured as CUDA graphs on a GPU.
    """

    size: int = 8
    max_padding: float = 1.5
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = True

    @property
    def fixed(self) -> bool:
        """Whether steps always have the full size, so that free rows train too, with no use."""
        return self.compile


def flushes_denormals() -> bool:
    """Return whether this thread treats denormal numbers as zero."""
    # torch can set the mode but cannot report it, so multiply two normal numbers to find out
    return bool(torch.tensor(1e-30) * torch.tensor(1e-10) == 0)


class LossHistory:
    """A ring buffer of the losses of each step; ``tick`` counts all steps ever added."""

    def __init__(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._steps = torch.zeros(0, capacity, dtype=dtype, device=device)
        self._on_host: torch.Tensor | None = None
        self.tick = 0

    def make_room(self, num_steps: int) -> None:
        """Make room for the steps of an epoch that begins now."""
        steps = self._steps
        if num_steps <= len(steps):
            return
        longer = steps.new_zeros(2 * num_steps, steps.shape[1])
        for tick in range(max(0, self.tick - len(steps)), self.tick):
            longer[tick % len(longer)] = steps[tick % len(steps)]
        self._steps = longer
        self._on_host = None

    def note(self, losses: torch.Tensor) -> None:
        """Add the losses of one more step."""
        self._steps[self.tick % len(self._steps), : len(losses)].copy_(losses)
        self._on_host = None
        self.tick += 1

    def move(self, source: int, target: int) -> None:
        """Move a trial's losses from one row to another."""
        self._steps[:, target].copy_(self._steps[:, source])
        self._on_host = None

    def mean(self, row: int, *, since: int) -> float:
        """Return the mean loss of the trial in a row over all steps from tick ``since`` on."""
        if self._on_host is None:
            self._on_host = self._steps.cpu()  # from a GPU once for all trials
        ticks = torch.arange(since, self.tick)
        return float(self._on_host[ticks % len(self._steps), row].mean())

    def last(self, num: int) -> torch.Tensor:
        """Return a copy of the losses of the first rows in the last step, ``[num]``."""
        return self._steps[(self.tick - 1) % len(self._steps), :num].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one trial's step: loss, gradients by name, and buffers after the step."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


def check_same(packed: Step, alone: Step, *, tolerance: float) -> None:
    """Check that a packed step equals the same step alone.

    Only the gradients and buffers in ``packed`` are compared. For a narrower model, only its own
    corner of each gradient counts.

    Raises:
        UnfusableError: The steps differ.
    """
    # a step that diverges shows nothing, and whatever has diverged is trained alone
    if bool(alone.loss.isnan().any()) or not close(packed.loss, alone.loss, tolerance):
        raise UnfusableError("its packed loss differs from that of one model alone")
    for name, gradient in packed.gradients.items():
        wanted = alone.gradients[name]
        if (
            gradient is None
            or wanted is None
            or not close(corner(gradient, wanted.shape), wanted, tolerance)
        ):
            raise UnfusableError(
                f"the packed gradient of {name} differs from that of one model alone"
            )
    for name, buffer in packed.buffers.items():
        if not close(buffer, alone.buffers[name], tolerance):
            raise UnfusableError(f"packed, buffer {name} differs from that of one model alone")


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree, relative to the largest finite value in ``wanted``.

    NaN agrees with NaN, and infinity with infinity of the same sign.
    """
    if found.shape != wanted.shape and found.numel() != wanted.numel():
        return False
    wanted = wanted.reshape(found.shape)
    if not found.dtype.is_floating_point:
        return bool(torch.equal(found, wanted))
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool(
        torch.allclose(found, wanted, rtol=0, atol=tolerance * max(scale, 1e-3), equal_nan=True)
    )


def train_alone(
    task: Task, model: torch.nn.Module, batch: Any, *, seed: int, lower: Collection[str] = ()
) -> Step:
    """Run one step of a model, up to its gradients, and return the result.

    ``lower`` names its tensors that are stored in a lower precision than it computes in.

    Raises:
        UnfusableError: The step draws from a random stream that is not torch's.
    """
    before = loose_streams()
    device = next(model.parameters()).device
    seed_step(seed, device)
    model.train()
    many = torch.autograd.set_multithreading_enabled(not lower)
    with upcast(named(model, lower)), many, _no_reads_of_streams():
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    if before != loose_streams():
        raise UnfusableError("it draws from Python's or NumPy's random stream")
    return Step(
        loss=loss.detach(),
        gradients={
            name: p.grad if p.requires_grad else None for name, p in model.named_parameters()
        },
        buffers=dict(model.named_buffers()),
    )


@contextmanager
def _no_reads_of_streams() -> Iterator[None]:
    """Refuse code that asks for the seed or the state of a random stream.

    Each step of a trial alone has its own, and a recorded program would keep that of the recording.

    Raises:
        UnfusableError: It asked within the context.
    """
    before, reads = sys.getprofile(), False

    def note(frame: FrameType, event: Any, arg: Any) -> None:
        nonlocal reads
        if (
            event == "c_call"
            and getattr(arg, "__name__", "") in _READS_OF_STREAMS
            and isinstance(getattr(arg, "__self__", None), torch.Generator | random.Random)
            and _asks(frame)
        ):
            reads = True
        if callable(before):
            before(frame, event, arg)

    with _no_profiler(before):
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
    if reads:
        raise UnfusableError("it reads the seed or the state of a random stream")


@contextmanager
def _no_profiler(before: Any) -> Iterator[None]:
    """Stop a profiler within the context: there can be only one, and one in C starts itself."""
    if isinstance(before, cProfile.Profile):
        before.disable()
    try:
        yield
    finally:
        if isinstance(before, cProfile.Profile):
            before.enable()
        else:
            sys.setprofile(before)


_READS_OF_STREAMS = frozenset({"initial_seed", "get_state", "graphsafe_get_state", "getstate"})


def _asks(frame: FrameType) -> bool:
    """Return whether other code than PyTorch's and thrifty's asks, such as that of the user.

    PyTorch puts back what it reads, as in ``torch.utils.checkpoint``.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename in _FILES_OF_STREAMS:
        caller = caller.f_back
    return caller is not None and not caller.f_code.co_filename.startswith(_FOLDERS)


_FILES_OF_STREAMS = frozenset({torch.random.__file__, torch.cuda.random.__file__, random.__file__})
_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def evaluate_alone(
    task: Task, model: torch.nn.Module, batch: Any, *, lower: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return the metrics of a model on one batch; ``lower`` as for ``train_alone``.

    Raises:
        UnfusableError: They draw from a random stream that is not torch's. A recorded program would
            draw the same numbers each time.
    """
    model.eval()
    before = loose_streams()
    with torch.no_grad(), upcast(named(model, lower)), _no_reads_of_streams():
        found = task.metrics(model, batch)
    if before != loose_streams():
        raise UnfusableError("they draw from Python's or NumPy's random stream")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Models that fit into a structure, with a batch for each.

    Attributes:
        structure: The structure that runs the models packed.
        models: The models.
        batches: The batch of each model, as a list of its tensors (pytree leaves).
        tolerance: Relative difference that is allowed; see ``close``.
        shared: Whether all batches are the same, so that the packed models get only one.
        num_rows: Number of real rows of each batch where these differ, the other rows being
            padding; None where all rows are real.
    """

    structure: Structure
    models: Sequence[torch.nn.Module]
    batches: Sequence[Sequence[torch.Tensor]]
    tolerance: float
    shared: bool = False
    num_rows: Sequence[int] | None = None

    def trains_alike(self, *, own: Experiment | None = None) -> bool:
        """Return whether each model's step is the same packed and alone.

        Args:
            own: The same models in a structure that is as wide as they are, if this one's is wider;
                then that the step does not see the padding is proved, too.
        """
        recorded = self.trained_alike()
        if recorded is None or own is None:
            return recorded is not None
        try:
            return _sees_no_padding(recorded, own.record())
        except UnfusableError:
            return False

    def trained_alike(self) -> Recorded | None:
        """Return the packed step if it is that of each model alone; None if it is not."""
        alone = self._alone()
        try:
            recorded = self.record()
            self.check(recorded, alone)
        except UnfusableError:
            return None
        return recorded

    def evaluates_alike(self, *, own: Experiment | None = None) -> bool:
        """Return whether each model's metrics are the same packed and alone; ``own`` as above."""
        try:
            recorded = self.record(training=False)
            if own is not None and not _sees_no_padding(recorded, own.record(training=False)):
                return False
        except UnfusableError:
            return False
        found = self._replay(recorded, self._state())
        try:
            alone = self._metrics_alone()
        except UnfusableError:
            return False
        for k, wanted in enumerate(alone):
            if list(wanted) != list(recorded.names):
                return False
            for value, name in zip(found, recorded.names, strict=True):
                if value is None or not close(
                    value[k].double(), torch.as_tensor(wanted[name]).double(), self.tolerance
                ):
                    return False
        return True

    def _metrics_alone(self) -> list[Mapping[str, Any]]:
        lower = self.structure.lower
        return [
            evaluate_alone(self.structure.task, model, self._whole(batch), lower=lower)
            for model, batch in zip(self.models, self.batches, strict=True)
        ]

    def check(self, recorded: Recorded, alone: Sequence[Step]) -> None:
        """Compare a recorded training step with the step of each model alone.

        Raises:
            UnfusableError: They differ.
        """
        for packed, one in zip(self.packed(recorded), alone, strict=True):
            check_same(packed, one, tolerance=self.tolerance)

    def record(self, *, training: bool = True, seed: int = 0) -> Recorded:
        """Record one step of all models at once.

        Raises:
            UnfusableError: The step cannot be recorded for all models at once.
        """
        variant = Variant(
            size=len(self.models),
            training=training,
            shared=self.shared,
            padded=self.num_rows is not None,
            batch=(),
        )
        return self.structure.record(
            variant, batch=self._batch(), rows=self._rows(), state=self._state(), seed=seed
        )

    def packed_metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each model, computed packed.

        Raises:
            UnfusableError: They cannot be computed for all models at once.
        """
        recorded = self.record(training=False)
        found = self._replay(recorded, self._state())
        values = {n: v for n, v in zip(recorded.names, found, strict=True) if v is not None}
        return [
            {name: float(value[k]) for name, value in values.items()}
            for k in range(len(self.models))
        ]

    def packed(self, recorded: Recorded) -> list[Step]:
        """Replay a recorded step and return each model's result."""
        state = self._state()
        losses, *gradients = self._replay(recorded, state)
        assert losses is not None
        named = dict(zip(self.structure.trained, gradients, strict=True))
        after = dict(zip(self.structure.state_names, state, strict=True))
        return [
            Step(
                loss=losses[k],
                gradients={name: None if g is None else g[k] for name, g in named.items()},
                buffers={
                    name: after[name][k]
                    for name in self.structure.buffers
                    if name not in self.structure.held
                },
            )
            for k in range(len(self.models))
        ]

    def _replay(
        self, recorded: Recorded, state: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Replay a recording with other random numbers; this may change ``state``."""
        batch, rows = self._batch(), self._rows()
        generators = [
            torch.Generator(device=batch[0].device).manual_seed(k) for k in range(len(self.models))
        ]
        rates = [dropout_rates(model) for model in self.models]
        for draw in recorded.draws:
            fill(draw, generators=generators, rates=rates, num_rows=self.num_rows)
        inputs = in_order(batch, rows, state)
        program = optimized(recorded.program, device=inputs[0].device)
        tape = bind(program, inputs, draws=[d.noise for d in recorded.draws])
        with torch.no_grad():
            tape()
        return tape.outputs

    def _alone(self) -> list[Step]:
        steps = []
        for k, (model, batch) in enumerate(zip(self.models, self.batches, strict=True)):
            num = None if self.num_rows is None else self.num_rows[k]
            real = self._whole([leaf[:num] for leaf in batch])
            own = copy_of(model)
            steps.append(
                train_alone(self.structure.task, own, real, seed=k, lower=self.structure.lower)
            )
        return steps

    def _whole(self, leaves: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.structure.batch_spec)

    def _batch(self) -> list[torch.Tensor]:
        if self.shared:
            return list(self.batches[0])
        return [torch.stack(leaves) for leaves in zip(*self.batches, strict=True)]

    def _rows(self) -> torch.Tensor | None:
        """Return the weights of the rows in the form of ``Group.rows``."""
        if self.num_rows is None:
            return None
        weights = torch.zeros(
            len(self.num_rows),
            max(self.num_rows),
            dtype=self.structure.layout.dtype,
            device=self.batches[0][0].device,
        )
        for k, num in enumerate(self.num_rows):
            weights[k, :num] = 1 / num
        return weights

    def _state(self) -> list[torch.Tensor]:
        """Return a stacked copy of the state of all models, in the structure's order and shapes.

        What the structure holds for all of them is that of the first model.
        """
        full = self._state_of(self.structure.model)
        states = [self._state_of(model) for model in self.models]
        return [
            own[0]
            if name in self.structure.held
            else torch.stack([_padded(t, like.shape) for t in own])
            for name, like, *own in zip(self.structure.state_names, full, *states, strict=True)
        ]

    def _state_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        own = self.structure.state_of(model)
        return [own[name].detach() for name in self.structure.state_names]


def _sees_no_padding(recorded: Recorded, own: Recorded) -> bool:
    why_not = not_proved(recorded.program, own.program)
    if why_not:
        logger.debug("a narrower model has a block of its own: %s may see its padding", why_not)
    return not why_not


def run_packed(
    structure: Structure, models: Sequence[torch.nn.Module], batch: WholeBatch
) -> list[Step]:
    """Run a packed step on a whole batch and return each model's result.

    Raises:
        UnfusableError: The step draws random numbers that are not each trial's own.
    """
    state = stacked(structure, models)
    generators = [
        torch.Generator(device=state[0].device).manual_seed(k) for k in range(len(models))
    ]
    before = torch_streams(state[0].device)
    losses, *gradients = structure.run(batch, state=state, randomness=Randomness(generators))
    if not all(map(torch.equal, before, torch_streams(state[0].device))):
        raise UnfusableError("it draws random numbers that are not each trial's own")
    assert losses is not None
    after = dict(zip(structure.state_names, state, strict=True))
    return [
        Step(
            loss=losses[k],
            gradients={
                name: None if g is None else g[k]
                for name, g in zip(structure.trained, gradients, strict=True)
            },
            buffers={name: after[name][k] for name in structure.buffers},
        )
        for k in range(len(models))
    ]


def stacked(structure: Structure, models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return a stacked copy of the state of models, in the structure's order."""
    own = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    return [torch.stack([each[name].detach() for each in own]) for name in structure.state_names]


def _padded(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    out = tensor.new_zeros(shape)
    corner(out, tensor.shape).copy_(tensor)
    return out
