"""What a trial needs: the inputs that thrifty gives it, and memory beside what it shares.

Inputs are the initial weights, the order of batches, and random numbers. For the memory, nothing is
trained: the model is made on PyTorch's meta device, where tensors have shapes and no values. One
step of it shows which tensors it keeps, and which products depend on the frozen base and the batch
alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from thrifty.core import derive_seed, plain_logger, size_text, step_seed
from thrifty.pack._quantized import settled
from thrifty.pack._state import borrowed_streams, seed_everything, seed_step
from thrifty.pack.task._data import Batch, open_source, steps_of, train_batches, valid_batches
from thrifty.pack.task._followed_optimizer import FollowedOptimizers
from thrifty.pack.task._step_options import epoch_batches, epoch_length
from thrifty.pack.task._streams import trial_stream
from thrifty.pack.task._task import HyperParameters, Task, options_of, own_task

from ._trial import batch_size_of, check_batches


class TrialInputs:
    """The inputs of a trial, for a plain PyTorch loop that reproduces it bit for bit.

    Everything follows from the seed. The global random streams are left where they are after the
    last call, as in a trial.

    Args:
        task: The task of the study.
        values: The trial's hyper-parameters in epoch 0.
        seed: The study's seed. For replica ``r`` of a study with several seeds, it is
            ``thrifty.core.replica_seed(seed, r)``.
        device: Where model and batches are.

    Example:
        >>> import thrifty as th
        >>> class Line(th.Task):
        ...     batch_size, optimizer = 16, th.SGD(lr="lr")
        ...
        ...     def data(self, hp):
        ...         x = torch.linspace(-1, 1, 32)[:, None]
        ...         return th.ArrayData(train=(x, 2 * x), valid=(x, 2 * x))
        ...
        ...     def model(self, hp):
        ...         return torch.nn.Linear(1, 1)
        ...
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return (model(x) - y).square().mean()
        ...
        ...     def metrics(self, model, batch):
        ...         return {"mse": self.loss(model, batch)}
        >>> inputs = TrialInputs(Line(), {"lr": 0.1}, seed=0)
        >>> model = inputs.model()
        >>> [len(x) for x, y in inputs.batches(0)]
        [16, 16]
    """

    def __init__(
        self,
        task: Task,
        values: Mapping[str, Any],
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._task = task
        self._values = values
        self._seed = seed
        self._device = torch.device(device)
        seed_everything(derive_seed(seed, "data"))
        self._source = open_source(task.data(HyperParameters(values)), device=self._device)
        self._stream = trial_stream(self._source)
        self._num_steps = options_of(task).steps_per_epoch

    def model(self) -> torch.nn.Module:
        """Return a model with the trial's initial weights."""
        seed_everything(derive_seed(self._seed, "model"))
        return settled(self._task.model(HyperParameters(self._values)).to(self._device))

    def batches(self, epoch: int, *, values: Mapping[str, Any] | None = None) -> Iterator[Batch]:
        """Yield the training batches of an epoch (0, 1, ...), and seed what each step draws.

        The random streams are seeded before a batch is returned, so a step that begins with it
        draws the trial's random numbers: dropout masks, noise, augmentation. Read the epochs of a
        stream in their order, each to its end.

        Args:
            epoch: The epoch.
            values: The hyper-parameters in that epoch, if ``batch_size`` follows one that changes.
        """
        size = batch_size_of(self._task, self._values if values is None else values)
        found = self._read(epoch, size)
        epoch_seed = derive_seed(self._seed, "epoch", epoch)
        seed_everything(epoch_seed)
        for step in count():
            if self._source.arrays is None:
                seed_everything(step_seed(derive_seed(self._seed, "fetch", epoch), step))
            batch = next(found, None)
            if batch is None:
                return
            seed_step(step_seed(epoch_seed, step), self._device)
            yield batch

    def _read(self, epoch: int, size: int) -> Iterator[Batch]:
        if self._stream is None:
            return epoch_batches(
                self._source,
                seed=self._seed,
                epoch=epoch,
                batch_size=size,
                num_steps=self._num_steps,
            )
        num = epoch_length(
            self._source, seed=self._seed, batch_size=size, num_steps=self._num_steps
        )
        return self._stream.epoch(epoch, batch_size=size, num=num)

    def valid_batches(self, epoch: int) -> Iterator[tuple[Batch, int]]:
        """Yield each validation batch and its number of rows, for the evaluation after an epoch.

        The random streams are seeded once, at the beginning.
        """
        seed_everything(derive_seed(self._seed, "evaluate", epoch))
        yield from valid_batches(self._source, batch_size=self._task.eval_batch_size)


logger = plain_logger(__name__)

SLACK = 2.0
"""How much more than what a step keeps it may take: temporaries, workspaces, fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMemory:
    """The memory of one trial, about.

    Attributes:
        base_bytes: Frozen parameters and buffers, which trials share.
        trained_bytes: Trained parameters, their gradients, and the optimizer's state.
        activation_bytes: What a step keeps for its gradient; None if that is not known.
        shared_work: Share of a step's multiplications below the first trained parameter. Trials
            that see the same batch do them once; None if that is not known.
        epoch_flops: Floating-point operations of the products of an epoch; None if that is not
            known.
    """

    base_bytes: int
    trained_bytes: int
    activation_bytes: int | None
    shared_work: float | None
    epoch_flops: float | None = None

    @property
    def own_bytes(self) -> tuple[float, float]:
        """Bytes that a trial adds to the base: at least, and with all that a step may take."""
        kept = self.activation_bytes or 0
        return self.trained_bytes + kept, self.trained_bytes + SLACK * kept


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """The memory of trials of a study, with one base for all of them and with a base for each.

    Attributes:
        trials: Some trials of the study.
        capacity_bytes: The memory that trials may take.
        place: Whose memory that is.
        flops_per_s: How many floating-point operations a second it does in a product of matrices.
    """

    trials: Sequence[TrialMemory]
    capacity_bytes: float
    place: str
    flops_per_s: float | None = None

    @property
    def base_bytes(self) -> int:
        """Bytes of the base."""
        return max(each.base_bytes for each in self.trials)

    @property
    def own_bytes(self) -> tuple[float, float]:
        """Bytes that a trial adds to the base: of the smallest trial, and of the largest one."""
        own = [each.own_bytes for each in self.trials]
        return min(low for low, _ in own), max(high for _, high in own)

    def num_trials(self, *, shared: bool) -> tuple[int, int]:
        """Return how many trials fit at a time: for certain as far as is known, and at best.

        Args:
            shared: Whether all have one base.
        """
        low, high = self.own_bytes
        if shared:
            left = max(0.0, self.capacity_bytes - self.base_bytes)
            return int(left // high), int(left // low)
        base, capacity = self.base_bytes, self.capacity_bytes
        return int(capacity // (base + high)), int(capacity // (base + low))

    def least_seconds(self, epochs: float, *, at_once: int) -> float | None:
        """Return the least time of some epochs, by the multiplications alone.

        Args:
            epochs: How many epochs are trained.
            at_once: How many trials are trained together; what depends on base and batch alone is
                done once for them.
        """
        known = [
            each.epoch_flops * (1 - (1 - 1 / at_once) * (each.shared_work or 0.0))
            for each in self.trials
            if each.epoch_flops is not None
        ]
        if not known or not self.flops_per_s:
            return None
        return epochs * sum(known) / len(known) / self.flops_per_s

    def lines(self) -> list[str]:
        """Return the forecast as text."""
        trained = [each.trained_bytes for each in self.trials]
        known = [each.activation_bytes for each in self.trials]
        base = f"a base of {size_text(self.base_bytes)}, once for all trials of a worker; "
        adds = f"a trial adds about {_span(*self.own_bytes, size_text)}"
        out = [f"memory: {base if self.base_bytes else ''}{adds}"]
        state = f"{_span(min(trained), max(trained), size_text)} of trained parameters, gradients "
        state += "and optimizer state"
        numbers = [each for each in known if each is not None]
        if len(numbers) == len(known):
            acts = _span(min(numbers), SLACK * max(numbers), size_text)
            out.append(f"  {state}, and about {acts} of activations")
        else:
            out.append(f"  {state}; its activations are not known")
        shared, own = (self.num_trials(shared=each) for each in (True, False))
        out.append(
            f"  about {_span(*shared, _number)} trials fit into {size_text(self.capacity_bytes)} "
            f"({self.place}), and {_span(*own, _number)} if each had a base of its own"
        )
        works = [each.shared_work for each in self.trials if each.shared_work is not None]
        if works:
            out.append(
                f"  about {_span(min(works), max(works), _percent)} of a step's multiplications "
                "depend on base and batch alone: a pack does them once"
            )
        return out


BASE_BYTES = "_thrifty_base_bytes"
"""The attribute of a meta model that says how much its base takes, where that is quantised."""


def memory_of(task: Task, values: Mapping[str, Any], *, real: bool = False) -> TrialMemory | None:
    """Return the memory of a trial; None if the task makes no model on the meta device.

    Args:
        task: The task.
        values: The hyper-parameters in the first epoch.
        real: Whether to make a real model if the task makes none on the meta device.
    """
    hp = HyperParameters(values)
    with borrowed_streams():
        mine = own_task(task)
        model = mine.meta_model(hp)
        if model is None:
            if not real:
                return None
            model = mine.model(hp).to("meta")
        frozen = [p for p in model.parameters() if not p.requires_grad]
        base_bytes = sum(p.nbytes for p in (*frozen, *model.buffers()))
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        kept, work, flops = _step(mine, model, values)
        return TrialMemory(
            base_bytes=getattr(model, BASE_BYTES, base_bytes),
            trained_bytes=2 * weights + _state_bytes(mine, model, values),
            activation_bytes=kept,
            shared_work=work,
            epoch_flops=flops,
        )


def flops_per_s() -> float:
    """Measure how fast the first GPU, or else this machine, multiplies matrices."""
    on_gpu = torch.cuda.is_available()
    size = 4096 if on_gpu else 1024
    x = torch.ones(size, size, device="cuda" if on_gpu else "cpu")
    times = []
    for _ in range(4):
        began = time.perf_counter()
        x @ x
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(times)


def available_memory() -> tuple[float, str]:
    """Return the memory of the first GPU, or else of this machine, and what it belongs to."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), "the first GPU"
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "this machine"
    except (ValueError, OSError, AttributeError):
        return math.inf, "a memory that is not known"


def _state_bytes(task: Task, model: torch.nn.Module, values: Mapping[str, Any]) -> int:
    """Return the bytes of the optimizer's state after a step."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizers = FollowedOptimizers(task.optimizer, model, values)
    optimizers.follow(values)
    out = 0
    for part in optimizers.parts.values():
        part.torch.step()
        for state in part.torch.state.values():
            out += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    return out


def _step(
    task: Task, model: torch.nn.Module, values: Mapping[str, Any]
) -> tuple[int | None, float | None, float | None]:
    """Return the bytes that a step keeps for its gradient, its shared work, and an epoch's work.

    The shared work is a share of the multiplications, an epoch's work their number. All are None if
    the step needs values, which tensors on the meta device have not.
    """
    source = open_source(task.data(HyperParameters(values)), device=torch.device("cpu"))
    options = options_of(task)
    batch_size = batch_size_of(task, values)
    num_parts = check_batches(task, options, values)
    rows = batch_size // num_parts
    batch = next(iter(train_batches(source, seed=0, epoch=0, batch_size=rows)))
    on_meta = pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    own = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers(), *pytree.tree_leaves(on_meta))
        if isinstance(tensor, torch.Tensor)
    }
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    counter = _SharedWork(model)
    model.train()
    try:
        with counter, saved_tensors_hooks(keep, lambda tensor: tensor):
            torch.autograd.backward(task.loss(model, on_meta))
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        logger.debug("activations are not forecast: %s: %s", type(error).__name__, error)
        return None, None, None
    steps = options.steps_per_epoch or steps_of(source, batch_size)
    flops = float(counter.flops) * num_parts * steps
    return sum(kept.values()), counter.share, flops or None


class _SharedWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications of operations that do not depend on what is trained, and of all."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._differ = {id(p) for p in self._held}
        self._shared = self._all = 0

    @property
    def flops(self) -> int:
        """The operations of all of them."""
        return self._all

    @property
    def share(self) -> float | None:
        """The share of the shared ones; None if there are no multiplications."""
        return self._shared / self._all if self._all else None

    def __torch_dispatch__(  # noqa: PLR0917 (PyTorch calls it so)
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # transformers asks so whether each row of a batch is one sequence
        out = func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        differs = any(id(t) in self._differ for t in tensors)
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if differs:
            self._differ.update(map(id, made))
        self._held += made  # an identity must not be given to another tensor
        packet = getattr(func, "overloadpacket", func)
        if packet in flop_registry:
            num = int(flop_registry[packet](*args, **kwargs, out_val=out))
            self._all += num
            self._shared += 0 if differs else num
        return out


def _number(value: int) -> str:
    return f"{value:,}"


def _span(low: float, high: float, shown: Callable[[Any], str]) -> str:
    one, other = shown(low), shown(high)
    return one if one == other else f"{one} to {other}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
