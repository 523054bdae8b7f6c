"""Structures: what the trials of a fused pack have in common, with the programs recorded for it.

They are compared in double precision beside a frozen base in single precision, which is never held
twice (``upcast``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.core import freed_at_once
from thrifty.pack._frozen import copy_of, storage_address
from thrifty.pack._state import named_tensors, step_counters
from thrifty.pack.task._task import Task
from thrifty.pack.verify import KnownRounding

from . import rules as rules
from ._fusable import UnfusableError, dropouts, follows_rate_itself, none_caught, numbers_of
from ._packed import EachItsOwnMask, Group, Layout, Packed
from ._randomness import DropoutMask, Randomness, TrialValue, plain
from ._record import VIEWS, Program, record
from ._tape import writes_into, written_inputs
from .rules._layers import compute_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The variant of a program: for how many trials and for what batches.

    Attributes:
        size: Number of trials.
        training: Whether the program is a training step; otherwise it computes metrics.
        shared: Whether all trials see the same batch.
        padded: Whether batches differ in size and have row weights.
        batch: Shape and dtype of each tensor of one trial's batch.
    """

    size: int
    training: bool
    shared: bool
    padded: bool
    batch: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded program.

    Attributes:
        program: The program.
        draws: The random draws that it needs.
        names: Names of the outputs that come before any gradients.
    """

    program: Program
    draws: tuple[DropoutMask, ...]
    names: tuple[str, ...]


def in_order(
    batch: Sequence[torch.Tensor], rows: torch.Tensor | None, state: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the inputs of a program in the order in which it takes them."""
    return [*batch, *([] if rows is None else [rows]), *state]


class Structure:
    """A skeleton model whose tensors are replaced by packed ones while a program is recorded.

    Attributes:
        layout: Layout of the trained parameters in a row.
        frozen: Names of the parameters that are not trained.
        buffers: Names of the buffers.
        held: Names of frozen parameters and buffers that all trials of a block share. A program
            computes once for all trials what depends on these and on a shared batch alone.
        numbers: Paths of the numbers that the model keeps outside of tensors, and in which trials
            may differ (``numbers_of``); in a program they are tensors.
        counters: Names of the buffers that count optimizer steps.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        *,
        batch_spec: Any,
        trained: Sequence[str],
        held: Collection[str] = (),
        numbers: Collection[str] = (),
        channels_last: bool = False,
    ) -> None:
        self.task = task
        self.model = model
        compute_products(model)
        self.batch_spec = batch_spec
        self.channels_last = channels_last
        parameters = dict(model.named_parameters())
        self.layout = Layout.of([(name, parameters[name]) for name in trained])
        self.frozen = tuple(name for name in parameters if name not in trained)
        self.buffers = tuple(name for name, _ in model.named_buffers())
        self.counters = frozenset(step_counters(model))
        self.held = frozenset(held)
        self.numbers = tuple(sorted(numbers))
        self._places = _places(model)
        known = numbers_of(model)
        self._places.update({path: [known[path]] for path in self.numbers})
        self.built_in: set[str] = set()
        """Paths of dropout rates and numbers that the model computes with.

        Programs are valid for these values only.
        """
        for path, (layer, name) in dropouts(model).items():
            own = self.built_in if follows_rate_itself(layer) else None
            setattr(layer, name, TrialValue(plain(getattr(layer, name)), path, own))
        self._recorded: dict[Variant, Recorded] = {}
        self.in_double: dict[int, tuple[Structure, Recorded]] = {}
        """Double-precision version for second opinions, by the number of rows."""
        self.rounding = KnownRounding()
        """What second opinions have found to be the rounding of TF32."""
        self.lower: frozenset[str] = frozenset()
        """Names of tensors that are stored in a lower precision than programs compute in.

        It is not empty for the double-precision version only (``upcast``).
        """
        self.whole = False
        """Whether batches are objects that all trials of a group see at once.

        Their shapes change from step to step.
        """
        self.sharing = True
        """Whether trials that see the same batch may read a single copy of it."""
        self.padding = True
        """Whether batches of different sizes may be padded."""
        self.reads_of_rows: tuple[str, ...] | None = None
        """What a step on padded batches computes with the weights of rows; None if unknown."""
        self.draws_nothing = False
        """Whether the training steps need no random numbers."""
        self.fused_metrics = True
        """Whether metrics can be computed for all trials at once."""
        self.evaluation_s: float | None = None
        """Seconds of an evaluation alone, once it has given the same as one in turn with others."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        return tuple(segment.name for segment in self.layout.segments)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of frozen parameters, buffers and numbers."""
        return (*self.frozen, *self.buffers, *self.numbers)

    def state_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return all tensors of a model by name, and its numbers as tensors."""
        out = named_tensors(model)
        if self.numbers:
            known = numbers_of(model)
            like: dict[str, Any] = {
                "dtype": self.layout.dtype,
                "device": next(iter(out.values())).device,
            }
            for path in self.numbers:
                held, key = known[path]
                out[path] = torch.tensor(float(held[key]), **like)
        return out

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order in which a program takes them."""
        return (*self.trained, *self.untrained)

    @property
    def has_images(self) -> bool:
        """Whether it has image convolutions, which may be faster in channels-last layout."""
        return any(len(segment.shape) == 4 for segment in self.layout.segments)

    def arranged(
        self, groups: Sequence[Sequence[str]], *, channels_last: bool = False
    ) -> Structure:
        """Return the same structure with its trained parameters in the order of param groups.

        Args:
            groups: Names of the parameters of each param group.
            channels_last: Whether images are stored in channels-last layout.
        """
        trained = set(self.trained)
        out = Structure(
            self.task,
            self.model,
            batch_spec=self.batch_spec,
            trained=[name for names in groups for name in names if name in trained],
            held=self.held,
            numbers=self.numbers,
            channels_last=channels_last,
        )
        return self._with_findings(out)

    def narrowed(self, model: torch.nn.Module) -> Structure:
        """Return the structure of a narrower model, with the findings of this one's dry run.

        Args:
            model: A model that, padded with zeros, has its own step in this structure.
        """
        own, numbers = dict(model.named_parameters()), numbers_of(model)
        out = Structure(
            self.task,
            copy_of(model),
            batch_spec=self.batch_spec,
            trained=[name for name in self.trained if name in own],
            held=self.held,
            numbers=[path for path in self.numbers if path in numbers],
        )
        return self._with_findings(out)

    def _with_findings(self, other: Structure) -> Structure:
        other.built_in |= self.built_in
        other.whole, other.sharing, other.padding = self.whole, self.sharing, self.padding
        other.reads_of_rows = self.reads_of_rows
        other.draws_nothing, other.fused_metrics = self.draws_nothing, self.fused_metrics
        return other

    def recorded(
        self,
        variant: Variant,
        *,
        batch: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        state: Sequence[torch.Tensor],
    ) -> Recorded:
        """Return the program of a variant, recorded on the given tensors when first needed."""
        if variant not in self._recorded:
            self._recorded[variant] = self.record(variant, batch=batch, rows=rows, state=state)
        return self._recorded[variant]

    def record(
        self,
        variant: Variant,
        *,
        batch: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        state: Sequence[torch.Tensor],
        seed: int = 0,
    ) -> Recorded:
        """Record loss and gradients (training) or metrics (otherwise) of ``variant.size`` trials.

        Args:
            variant: The variant of the program.
            batch: The tensors of the batch.
            rows: Weights of the rows (``Group.rows``); None where all rows are real.
            state: The tensors of ``state_names``, each ``[K, ...]``, those of ``held`` without K.
            seed: Seed of the random numbers that are drawn during the recording.

        Raises:
            UnfusableError: The model does something that cannot be done for all trials at once, or
                writes into a tensor that is one for all trials; metrics that change any.
        """
        group = self._new_group(variant.size, rows=rows, device=state[0].device, seed=seed)
        num_trained = len(self.layout.segments)
        trained = [t.detach().requires_grad_(variant.training) for t in state[:num_trained]]
        state = [*trained, *[t.detach() for t in state[num_trained:]]]
        leaves = list(batch) if variant.shared else [group.pack(t) for t in batch]
        whole = pytree.tree_unflatten(leaves, self.batch_spec)
        names: list[str] = []

        def train() -> list[torch.Tensor | None]:
            names.append("loss")
            return self._train(group, whole, trained)

        def evaluate() -> list[torch.Tensor | None]:
            metrics = self._evaluate(group, whole)
            names.extend(metrics)
            return list(metrics.values())

        stored = [t for n, t in zip(self.state_names, state, strict=True) if n in self.lower]

        def compute() -> list[torch.Tensor | None]:
            with upcast(stored):
                return train() if variant.training else evaluate()

        inputs = in_order(batch, rows, state)
        with (
            freed_at_once(sum(tensor.nbytes for tensor in state)),
            self._holding(group, state),
            torch.set_grad_enabled(variant.training),
            EachItsOwnMask(group),
        ):
            self.model.train(variant.training)
            draws = group.randomness.draws
            program = record(compute, inputs, draws=lambda: [draw.noise for draw in draws])[0]
        written = self._written(program, num_before=len(inputs) - len(self.state_names))
        self._check_written(written, training=variant.training)
        if variant.padded and variant.training:
            self._check_padded(program, place=len(batch))
        return Recorded(program=program, draws=tuple(draws), names=tuple(names))

    def _new_group(
        self, size: int, *, rows: torch.Tensor | None, device: torch.device, seed: int
    ) -> Group:
        """Return a group of trials, each with random numbers of its own, for a recording."""
        generators = [torch.Generator(device=device).manual_seed(seed + k) for k in range(size)]
        return Group(
            size, randomness=Randomness(generators), rows=rows, channels_last=self.channels_last
        )

    def _check_written(self, written: set[str], *, training: bool) -> None:
        """Refuse metrics that change the state, and steps that change what is one for all trials.

        Args:
            written: Names of the tensors of the state that the program writes into.
            training: Whether it trains; else it computes metrics.
        """
        if written and not training:
            # a check evaluates a trial once more, which must not count
            raise UnfusableError(f"computing its metrics changes {min(written)}")
        if self.held & written:
            raise UnfusableError(f"it writes into {min(self.held & written)}, which is frozen")

    def _check_padded(self, program: Program, *, place: int) -> None:
        """Refuse a step that weighs other tensors by rows than the dry run's did.

        Which tensors have the rows of a batch is told by their size, and another one, such as a
        weight, may have the same. In the dry run, which has few rows, results would be wrong then.
        """
        found = program.readers(place)
        if self.reads_of_rows is not None and found != self.reads_of_rows:
            raise UnfusableError(
                "batches differ in size, and its step is not that of smaller batches: a tensor "
                f"other than the batch may have {program.meta[place][0][1]} rows, too"
            )

    def _written(self, program: Program, *, num_before: int) -> set[str]:
        """Return the names of the tensors of the state that a program writes into."""
        names = self.state_names
        return {names[n - num_before] for n in written_inputs(program) if n >= num_before}

    def run(
        self, batch: Any, *, state: Sequence[torch.Tensor], randomness: Randomness
    ) -> list[torch.Tensor | None]:
        """Run a training step without a recording.

        Args:
            batch: The batch, in the form that the user's code takes.
            state: As for ``record``.
            randomness: The source of each trial's random numbers.

        Returns:
            Losses, ``[K]``, then gradients in the order of ``trained``.

        Raises:
            UnfusableError: The model does something that cannot be done for all trials at once.
        """
        group = Group(len(randomness.generators), randomness=randomness)
        num_trained = len(self.layout.segments)
        trained = [t.detach().requires_grad_() for t in state[:num_trained]]
        holding = self._holding(group, [*trained, *state[num_trained:]])
        with holding, torch.enable_grad(), none_caught():
            self.model.train()
            return self._train(group, batch, trained)

    def metrics(
        self, batch: Any, *, state: Sequence[torch.Tensor], size: int
    ) -> dict[str, torch.Tensor]:
        """Return metrics, each ``[K]``, on a batch in the form that the user's code takes.

        Raises:
            UnfusableError: As for ``run``.
        """
        group = Group(size, randomness=Randomness([]))
        with self._holding(group, state), torch.no_grad(), none_caught():
            self.model.eval()
            return self._evaluate(group, batch)

    def _train(
        self, group: Group, batch: Any, trained: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        losses = _scalar(group, self.task.loss(self.model, batch), "the loss")
        gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        return [losses.detach(), *gradients]

    def _evaluate(self, group: Group, batch: Any) -> dict[str, torch.Tensor]:
        metrics = self.task.metrics(self.model, batch)
        return {name: _scalar(group, value, f"metric {name!r}") for name, value in metrics.items()}

    @contextmanager
    def _holding(self, group: Group, state: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace the skeleton's tensors by packed ones within the context."""
        before = []
        for name, tensor in zip(self.state_names, state, strict=True):
            held = tensor if name in self.held else group.pack(tensor)
            for home, key in self._places[name]:
                before.append((home, key, home[key]))
                home[key] = held
        try:
            yield
        finally:
            for home, key, value in before:
                home[key] = value


def _places(model: torch.nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Return the dicts and keys that hold each parameter and buffer; a tied one has several."""
    first: dict[int, str] = {}
    places: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for path, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for key, tensor in home.items():
                if tensor is None:
                    continue
                name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                places.setdefault(name, []).append((home, key))
    return places


def _scalar(group: Group, value: Any, what: str) -> torch.Tensor:
    """Return one number per trial, ``[K]``; ``what`` names the value in error messages."""
    if type(value) is Packed:
        if value.numel() != 1:
            raise UnfusableError(f"{what} has shape {tuple(value.shape)}; it must be one number")
        return group.first(value).reshape(group.size)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(1).expand(group.size)
    raise UnfusableError(f"{what} is a {type(value).__name__}, not worked out by torch")


_to_copy: Any = torch.ops.aten._to_copy.default


def upcast(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Compute in double precision with some tensors that are stored in a lower one.

    Within the context, a call that reads one of them gets copies in double precision of all that it
    reads, which are freed after the call. So a whole model may be compared in double precision,
    with little more memory than its largest tensor takes.

    Raises:
        RuntimeError: Within the context, a call writes into one of them.
    """
    lower = [t for t in tensors if t.dtype.is_floating_point and t.dtype != torch.float64]
    return _Upcast(lower) if lower else nullcontext()


def doubled(model: torch.nn.Module, *, besides: Collection[str]) -> torch.nn.Module:
    """Convert a model to double precision in place, besides some of its tensors."""
    if not besides:
        return model.double()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in besides and tensor.dtype.is_floating_point:
            tensor.data = tensor.data.double()
    return model


def named(model: torch.nn.Module, names: Collection[str]) -> list[torch.Tensor]:
    """Return some parameters and buffers of a model."""
    own = (*model.named_parameters(), *model.named_buffers())
    return [tensor for name, tensor in own if name in names]


class _Upcast(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that knows the tensors by their memory, so that it knows views of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tuple(tensors)  # kept, so that no other tensor gets their memory
        self._places = {storage_address(tensor) for tensor in self._tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS or func.is_view or func is _to_copy:
            return func(*args, **kwargs)
        if not any(map(self._is_lower, pytree.tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        written = writes_into(func, args, kwargs)
        if any(map(self._is_lower, written)):
            raise RuntimeError(f"{func.name()} writes into a tensor that is to stay as it is")
        stays = set(map(id, written))

        def up(value: Any) -> Any:
            """Copy in double precision: a product, say, takes no two precisions."""
            if not _is_single(value) or id(value) in stays:
                return value
            # `double` would be recorded as `to`, which counts as a view, since it may be one.
            return _to_copy(value, dtype=torch.float64)

        return func(*pytree.tree_map(up, args), **pytree.tree_map(up, kwargs))

    def _is_lower(self, value: Any) -> bool:
        if not _is_single(value):
            return False
        if storage_address(value) not in self._places:
            # A call that takes a shared tensor's address for writing gives it memory of its own.
            self._places = {storage_address(tensor) for tensor in self._tensors}
        return storage_address(value) in self._places


def _is_single(value: Any) -> bool:
    """Return whether a value is a tensor of real numbers in less than double precision."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
    )
