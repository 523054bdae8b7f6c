"""State that a pass through a model changes besides gradients, and batch normalisation.

Such state is copied to restore or to inspect it. Batch normalisation is over the whole global
batch, for shares of any size and on any device.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from thrifty.core import HeteroError


_NUMBERS = (int, float, complex, bool)
_PLAIN = (*_NUMBERS, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)


class KeptBuffers:
    """A copy of a model's buffers, with references to the originals.

    A forward pass may change a buffer in place or replace it by another tensor. ``restore`` undoes
    both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def changed(self, *, besides: tuple[type[nn.Module], ...] = ()) -> bool:
        """Return whether a buffer was written to or replaced, except those of some module types."""
        return any(
            module._buffers.get(name) is not buffer or buffer._version != version
            for module, name, buffer, _, version in self._held
            if not isinstance(module, besides)
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        for module, name, buffer, value, _ in self._held:
            module._buffers[name] = buffer
            buffer.copy_(value)


class StateSnapshot:
    """A copy of the state that user code may change in a pass.

    It covers buffers and attributes of the model's modules, and what functions keep in closures,
    globals and the objects that they are methods of, including modules among these. Containers are
    copied one level deep. Other objects are not copied.

    Args:
        model: The model, with its modules.
        functions: Functions that are called with the model.
        besides: Module types whose values are restored but are not part of ``values``.
        lists: Whether to also restore lists and other containers that functions write to.
    """

    def __init__(
        self,
        model: nn.Module,
        *functions: Callable[..., Any] | None,
        besides: tuple[type[nn.Module], ...] = (),
        lists: bool = True,
    ) -> None:
        self._besides = besides
        self._lists = True
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._slots: list[tuple[str, MutableMapping[str, Any]]] = []
        self._cells: dict[str, tuple[CellType, Any]] = {}
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._keep_module(model, "")
        self._lists = lists
        for function in functions:
            self._keep_function(function)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all copied state."""
        for container, before in self._containers:
            _refill(container, before)
        for cell, value in self._cells.values():
            cell.cell_contents = value
        for place, name, value in self._globals:
            place[name] = value
        for tensor, value in self._tensors:
            tensor.copy_(value)

    def values(self) -> dict[str, Any]:
        """Return copies of all current tensors and numbers, by name."""
        found = {
            f"{path}{name}": value
            for path, place in self._slots
            for name, value in place.items()
            if not isinstance(value, nn.Parameter)
        }
        found |= {name: cell.cell_contents for name, (cell, _) in self._cells.items()}
        found |= {name: place[name] for place, name, _ in self._globals}
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in found.items()
            if isinstance(value, Tensor) or type(value) in _NUMBERS
        }

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign other values to tensors and numbers, until ``restore``."""
        places = dict(reversed(self._slots))  # of a module: its attributes, not its buffers
        for path, place in self._slots:
            for name in place:
                if f"{path}{name}" in values:
                    place[name] = _copy(values[f"{path}{name}"])
        for full, value in values.items():
            path, dot, name = full.rpartition(".")
            if type(value) in _NUMBERS and f"{path}{dot}" in places:
                places[f"{path}{dot}"].setdefault(name, value)
        for name, (cell, _) in self._cells.items():
            if name in values:
                cell.cell_contents = _copy(values[name])
        for place, name, _ in self._globals:
            if name in values:
                place[name] = values[name]

    def _keep_module(self, module: nn.Module, path: str) -> None:
        lists, self._lists = self._lists, True
        for name, each in module.named_modules():
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            where = f"{path}{name}." if name else path
            self._keep_attributes(each, where, listed=not isinstance(each, self._besides))
        self._lists = lists

    def _keep_attributes(self, owner: Any, path: str, *, listed: bool = True) -> None:
        attributes = vars(owner)
        self._keep_container(attributes)
        if listed:
            self._slots.append((path, attributes))
        for name, value in list(attributes.items()):
            self._keep_value(value)
            if listed and type(value) is dict:
                # Name buffers as PyTorch does, without "_buffers" in the path.
                self._slots.append((path if name == "_buffers" else f"{path}{name}.", value))

    def _keep_value(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.grad_fn is None and not isinstance(value, nn.Parameter):
                self._tensors.append((value, value.detach().clone()))
        elif type(value) in _CONTAINERS and self._lists:
            self._keep_container(value)

    def _keep_container(self, container: Any) -> None:
        if id(container) not in self._seen:
            self._seen.add(id(container))
            self._containers.append((container, container.copy()))
            if type(container) is dict:
                for value in list(container.values()):
                    if isinstance(value, Tensor):
                        self._keep_value(value)

    def _keep_function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        if isinstance(function, nn.Module):
            self._keep_module(function, f"{type(function).__name__}.")
            return
        self._seen.add(id(function))
        if isinstance(function, partial):
            for each in (function.func, *function.args, *function.keywords.values()):
                self._keep_function(each) if callable(each) else self._keep_value(each)
        elif isinstance(function, MethodType):
            self._keep_function(function.__func__)
            self._keep_owner(function.__self__)
        elif isinstance(function, FunctionType):
            self._keep_closure(function)
        else:
            self._keep_owner(function)

    def _keep_owner(self, owner: Any) -> None:
        if isinstance(owner, nn.Module):
            self._keep_function(owner)
        elif hasattr(owner, "__dict__") and not isinstance(owner, type):
            self._keep_attributes(owner, f"{type(owner).__name__}.")
            for value in list(vars(owner).values()):
                self._follow(value)

    def _keep_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                value = cell.cell_contents
                self._cells[f"{function.__name__}.{name}"] = cell, value
                self._keep_value(value)
                self._follow(value)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, function)
            if type(value) in _PLAIN:
                self._globals.append((function.__globals__, name, value))
            elif type(value) in _CONTAINERS:
                self._keep_value(value)
            elif isinstance(value, nn.Module):
                self._keep_function(value)

    def _follow(self, value: Any) -> None:
        if isinstance(value, FunctionType | MethodType | partial | nn.Module):
            self._keep_function(value)


@contextlib.contextmanager
def untouched(
    model: nn.Module, *functions: Callable[..., Any] | None, lists: bool = True
) -> Iterator[StateSnapshot]:
    """Restore on exit everything that ``StateSnapshot`` copies."""
    kept = StateSnapshot(model, *functions, lists=lists)
    try:
        yield kept
    finally:
        kept.restore()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _refill(container: Any, before: Any) -> None:
    """Restore the elements of a container if they have changed."""
    if isinstance(container, dict):
        if list(container) != list(before) or any(container[k] is not before[k] for k in before):
            container.clear()
            container.update(before)
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container |= before
    elif len(container) != len(before) or any(
        a is not b for a, b in zip(container, before, strict=True)
    ):
        container.clear()
        container.extend(before)


Sum = Callable[[Tensor], None]
"""Replaces a tensor by its sum over all workers."""


class WholeBatchNorm(_BatchNorm):
    """A batch normalisation layer with the statistics of the global batch.

    ``HeteroTrainer`` gives the layers of a model a subclass of this class and of their own class.
    They stay the same objects, with their parameters, buffers, hooks and methods.

    ``nn.SyncBatchNorm`` does the same on GPUs. This class also supports CPUs and workers that join
    and leave. Each mean is a sum over all workers divided by the total number of samples, so any
    split gives the statistics and the gradient of one process with the whole batch. Outside of
    training steps, and in copies, the layer is the plain one.
    """

    _shared: SharedSums
    _plain: type[_BatchNorm]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the plain layer, because the connections belong to this process."""
        state = {name: value for name, value in vars(self).items() if name != "_shared"}
        return _new, (self._plain,), state

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as ``nn.BatchNorm`` does."""
        # As in torch, a layer without statistics uses those of the batch in evaluation, too.
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not by_batch or not self._shared.active:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # As in torch, statistics of half-precision inputs are computed in single precision.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        own = x.numel() // max(1, x.shape[1])
        sums = self._shared.add(torch.cat([x.sum(dims), x.new_full((1,), own)]))
        total = sums[-1].detach()
        if own <= 1:  # only then is it worth waiting for the device
            self._shared.check_total(total)
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        var = self._shared.add(centred.square().sum(dims)) / total
        self._shared.ran(self, sums.detach())
        self._track(mean.detach(), var.detach(), total)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        # Either may be missing: ``bias=False``, or a user has removed it.
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def shadow(self, like: Tensor, *, shared: SharedSums) -> None:
        """Take part in the others' forward pass without samples, tracking the same statistics."""
        sums = shared.add(torch.zeros_like(like))
        total = sums[-1]
        shared.check_total(total)
        var = shared.add(torch.zeros_like(like[:-1])) / total
        self._track(sums[:-1] / total, var, total)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        rate = self.momentum or 0.0  # torch's default where nothing counts the batches
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                rate = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None:
            return  # a user has removed the statistics, and torch tracks none either
        kind = self.running_mean.dtype
        self.running_mean.lerp_(mean.to(kind), rate)
        self.running_var.lerp_((var * total / (total - 1).clamp(min=1)).to(kind), rate)


def _new(kind: type[_BatchNorm]) -> _BatchNorm:
    return kind.__new__(kind)


class SharedSums:
    """Sums over all workers in the forward and the backward pass.

    A worker without samples in a step sends zeros instead (``shadow``), in the order of its last
    pass with samples.
    """

    def __init__(self, sum_: Sum | None) -> None:
        self._sum = sum_
        self._together = False
        self._forward: list[tuple[WholeBatchNorm, Tensor]] = []
        self._backward: list[Tensor] = []
        self.active = False

    @contextmanager
    def step(self, *, together: bool) -> Iterator[None]:
        """Run a forward and a backward pass with samples.

        Args:
            together: Whether to sum with the other workers; a rehearsal sums nothing.
        """
        self._forward, self._backward = [], []
        self._together, self.active = together, True
        try:
            yield
        finally:
            self.active = False

    def __deepcopy__(self, memo: Any) -> SharedSums:
        """Give copies of a layer sums of their own, which are never active."""
        return SharedSums(None)

    def shadow(self) -> None:
        """Take part in a forward and a backward pass without samples."""
        self._together = True
        for layer, like in list(self._forward):
            layer.shadow(like, shared=self)
        for like in list(self._backward):
            self.forward_sum(torch.zeros_like(like))

    def add(self, value: Tensor) -> Tensor:
        """Return the sum over all workers. Its gradient is the sum of their gradients."""
        return _Added.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def check_total(self, total: Tensor) -> None:
        """Raise torch's error if all workers together have a single value per channel.

        Raises:
            ValueError: They have, and the variance of one value says nothing.
        """
        # A rehearsal stands for a step in which others have samples, too.
        if self._together and float(total) == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 over all workers: use "
                "a larger global_batch, or leave out the last samples of the data set"
            )

    def ran(self, layer: WholeBatchNorm, like: Tensor) -> None:
        """Record that a layer ran in this pass."""
        self._forward.append((layer, like))

    def forward_sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over all workers now."""
        out = value.detach().clone().contiguous()
        if self._together and self._sum is not None:
            self._sum(out)
        return out

    def backward_sum(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over all workers now, and record it."""
        out = self.forward_sum(gradient)
        self._backward.append(out)
        return out


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, shared: SharedSums) -> Tensor:
        ctx.shared = shared
        return shared.forward_sum(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.backward_sum(grad), None


def whole_batch_norm(model: nn.Module, shared: SharedSums) -> int:
    """Let a model's batch normalisation layers sum over the workers; return their number.

    The layers stay the same objects, so code that holds one of them outside of the model uses the
    statistics of the global batch, too.

    Raises:
        HeteroError: A layer computes in its own way, so its statistics cannot be summed.
    """
    layers = [each for each in model.named_modules() if isinstance(each[1], _BatchNorm)]
    for name, layer in layers:
        _check_is_plain(name, layer)
    for _, layer in layers:
        if not isinstance(layer, WholeBatchNorm):
            kind: type[nn.Module] = type(layer)
            layer.__class__ = _whole(kind)  # type: ignore[arg-type]
        layer.__dict__["_shared"] = shared  # not a module or tensor, and not part of the state
    return len(layers)


def unshared_batch_norm(model: nn.Module, shared: SharedSums) -> str:
    """Return why some layer uses the statistics of this worker's share only; empty if none does.

    Such a layer has come to the model after ``whole_batch_norm``, or another trainer's call of it
    has taken the layer over.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or vars(layer).get("_shared") is shared:
            continue
        if layer.training or (layer.running_mean is None and layer.running_var is None):
            return (
                f"layer {name!r} ({type(layer).__name__}) has come to the model since this trainer "
                "was made, or another trainer has been made for it, so it would use the statistics "
                "of each worker's share; make a new HeteroTrainer after such a change, or pass "
                "HeteroOptions(batch_norm='local')"
            )
    return ""


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _check_is_plain(name: str, layer: nn.Module) -> None:
    kind = layer._plain if isinstance(layer, WholeBatchNorm) else type(layer)
    where = f"layer {name!r}" if name else "the model"
    if isinstance(layer, LazyModuleMixin):
        raise HeteroError(
            f"{where} ({kind.__name__}) has no shape yet; run the model on a batch before you make "
            "the trainer"
        )
    own = "forward" in vars(layer) or getattr(kind, "forward", None) not in _FORWARDS
    called = any(
        getattr(kind, method) is not getattr(nn.Module, method)
        for method in ("__call__", "_call_impl", "_wrapped_call_impl")
    )
    if own or called:
        raise HeteroError(
            f"{where} ({kind.__name__}) is batch normalisation with a "
            f"`{'forward' if own else '__call__'}` of its own, which cannot use the statistics of "
            "the global batch; put a plain nn.BatchNorm layer and what it adds (such as an "
            "activation) into an nn.Sequential, or pass HeteroOptions(batch_norm='local') to use "
            "the statistics of each worker's share, which changes the answer"
        )


@functools.cache
def _whole(kind: type[nn.Module]) -> type[WholeBatchNorm]:
    """Return a subclass of a layer's class, which keeps all its methods except ``forward``."""
    return type(f"Whole{kind.__name__}", (WholeBatchNorm, kind), {"_plain": kind})
