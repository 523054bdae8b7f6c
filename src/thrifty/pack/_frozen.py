"""Frozen tensors, kept once for all trials of a process.

The trials of a fine-tuning study have the same frozen base. Each trial's model is made by user
code, with a base of its own. ``FrozenTensors`` recognises equal tensors and lets the models share
one memory, copy-on-write: code that writes into such a tensor gets memory of its own first, so no
trial can change what another one reads. Whether a tensor is still the shared one follows from its
address, without reading it.
"""

from __future__ import annotations

import ctypes
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from thrifty.core import CheckpointError

from ._quantized import WEIGHT, plain, quantized_layers


K = TypeVar("K")

_CHUNK = 2**24
_NUM_SAMPLES = 16

CAN_SHARE = hasattr(torch, "_lazy_clone") and all(
    hasattr(torch._C, name) for name in ("_is_cow_tensor", "_data_address", "_storage_Use_Count")
)
"""Whether this version of PyTorch has tensors that are copied when they are written to."""


_NUMBERS = count()


class FrozenTensor:
    """A tensor that several models share.

    Args:
        tensor: The tensor.
        as_alias: Whether models get the same memory without copy-on-write. Sums over it show
            whether something has written there.

    Attributes:
        tensor: Its values. Nothing writes into it.
        number: A number that no other one has, past ones included.
    """

    def __init__(self, tensor: torch.Tensor, *, as_alias: bool = False) -> None:
        self._is_alias = as_alias
        self.tensor = plain(tensor) if as_alias else torch._lazy_clone(tensor)
        self.number = next(_NUMBERS)
        if as_alias:
            _ALIASES[address(self.tensor)] = self
        unseen = as_alias or _writes_are_unseen(self.tensor)
        self._sums = checksums(self.tensor) if unseen else None

    def lend(self) -> torch.Tensor:
        """Return a tensor over the same memory, which is copied as soon as one writes into it."""
        return plain(self.tensor) if self._is_alias else torch._lazy_clone(self.tensor)

    def is_in(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is lent from this one and was not written to since.

        Of an alias, only ``difference`` knows whether it was written to.
        """
        return (
            (self._is_alias or is_shared(tensor))
            and address(tensor) == address(self.tensor)
            and tensor.shape == self.tensor.shape
            and tensor.stride() == self.tensor.stride()
        )

    def equals(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the same bits."""
        if self.is_in(tensor):
            return True
        like = (tensor.shape, tensor.dtype) == (self.tensor.shape, self.tensor.dtype)
        return like and torch.equal(bits(self.tensor), bits(plain(tensor).contiguous()))

    @cached_property
    def digest(self) -> str:
        """The digest of its dtype, shape and values."""
        return digest_of(self.tensor)

    def difference(self) -> torch.Tensor | None:
        """Return a number that is not zero if something has written into it; None if nothing can.

        The number is a tensor, so that a GPU is waited for once for many.
        """
        return None if self._sums is None else (checksums(self.tensor) != self._sums).any()


_ALIASES: WeakValueDictionary[int, FrozenTensor] = WeakValueDictionary()
"""Tensors that models share as aliases, by address."""


def keep(tensor: torch.Tensor) -> FrozenTensor:
    """Return a shared tensor over a tensor's memory, which models then find there.

    As long as it is kept, so is its digest.
    """
    out = _KEPT[address(tensor)] = FrozenTensor(tensor.detach())
    return out


_KEPT: WeakValueDictionary[int, FrozenTensor] = WeakValueDictionary()
"""Tensors that are kept for models to come, by address."""


def written(frozen: Mapping[K, FrozenTensor]) -> list[K]:
    """Return the keys of shared tensors that something has written into without copying them."""
    found = {key: each.difference() for key, each in frozen.items()}
    marks = {key: mark for key, mark in found.items() if mark is not None}
    if not marks:
        return []
    flags = torch.stack(list(marks.values())).tolist()
    return [key for key, flag in zip(marks, flags, strict=True) if flag]


def _writes_are_unseen(tensor: torch.Tensor) -> bool:
    """Return whether a write may change a shared tensor instead of a copy of it.

    On a GPU, PyTorch's kernels for lists of tensors (``torch._foreach_mul_``) do that.
    """
    return tensor.is_cuda


def checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums over a tensor's bytes, which nearly any change of its values changes.

    They are a tensor on its device, so that a GPU is waited for once for many.
    """
    out = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits(tensor), _CHUNK):
        numbers = part.to(torch.int64)
        out += torch.stack([numbers.sum(), (numbers * _weights(len(numbers), tensor.device)).sum()])
    return out


def _weights(num: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, num + 1, device=device) % _PRIME


_PRIME = 65_521


def _is_in_saved_file(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a mapped safetensors file, as ``from_pretrained`` returns it.

    The mapping is this process's own, and only tensors that were read from it lie there.
    """
    if tensor.device.type != "cpu":
        return False
    at = storage_address(tensor)
    return any(start <= at < stop for start, stop in _saved_files())


def _saved_files() -> list[tuple[int, int]]:
    """Return the addresses of all private mappings of safetensors files; none beside Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = [line.split(maxsplit=5) for line in lines if line.endswith(".safetensors")]
    ranges = [each[0].split("-") for each in found if len(each) == 6 and each[1].endswith("p")]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


class FrozenTensors:
    """The frozen tensors of the models of one task on one device, each kept once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, WeakSet[FrozenTensor]] = {}
        self.restored: set[str] = set()
        """Digests of bases that were stored, because the task makes others by now."""

    def adopt(
        self, model: torch.nn.Module, *, only: Collection[str] | None = None
    ) -> dict[str, FrozenTensor]:
        """Let a model share its frozen parameters and its buffers with earlier models.

        Does nothing for a model without frozen parameters. Of quantised layers, it also shares the
        scales.

        Args:
            model: The model.
            only: The names to which this is limited; None for no limit.

        Returns:
            What the model shares now, by name; tied tensors have several names.
        """
        named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        if not CAN_SHARE or all(p.requires_grad for p in named.values()):
            return {}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        frozen |= dict(model.named_buffers(remove_duplicate=False))
        first: dict[int, FrozenTensor] = {}
        out: dict[str, FrozenTensor] = {}
        for name, tensor in frozen.items():
            if only is not None and name not in only:
                continue
            if id(tensor) not in first:
                if not _is_plain(tensor):
                    continue
                if not is_shared(tensor) and has_views(tensor):
                    continue  # they have to see what is written here, and the other way round
                try:
                    shared = self._shared(tensor.detach())
                except RuntimeError:  # PyTorch does not own its memory
                    continue
                first[id(tensor)] = shared
                if not shared.is_in(tensor):
                    tensor.data = shared.lend()
            out[name] = first[id(tensor)]
        return {**out, **self._adopt_quantized(model, only=only)}

    def _adopt_quantized(
        self, model: torch.nn.Module, *, only: Collection[str] | None
    ) -> dict[str, FrozenTensor]:
        out: dict[str, FrozenTensor] = {}
        for path, layer in quantized_layers(model).items():
            for entry, tensor in layer.contents().items():
                name = f"{path}.{entry}" if path else entry
                if only is not None and name not in only:
                    continue
                shared = out[name] = self._shared(plain(tensor), as_alias=True)
                if shared.is_in(tensor):
                    continue
                if entry == WEIGHT:
                    layer.set_weight(shared.lend())
                else:
                    tensor.data = shared.lend()
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that models share now."""
        return sum(each.tensor.nbytes for known in self._known.values() for each in known)

    def _shared(self, tensor: torch.Tensor, *, as_alias: bool = False) -> FrozenTensor:
        """Return the shared tensor of these values; a new one if there is none yet."""
        known = self._known.setdefault((*_key(tensor), as_alias), WeakSet())
        for each in known:
            if each.equals(tensor):
                return each
        if not tensor.untyped_storage().resizable():
            tensor = tensor.clone()  # its memory is an array's, or a file's
        kept = _KEPT.get(address(tensor))
        if kept is None or as_alias or not kept.is_in(tensor):
            kept = FrozenTensor(tensor, as_alias=as_alias)
        known.add(kept)
        return kept


class Base(ABC):
    """The frozen parameters of a fresh model, which states name and leave out."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest of their names and contents."""

    @abstractmethod
    def tensor(self, name: str, *, digest: str) -> torch.Tensor:
        """Return a parameter.

        Args:
            name: Its name.
            digest: What ``digest_of`` returns for it.

        Raises:
            CheckpointError: It is not there, or has another digest.
        """


class LoadedBase(Base):
    """A base in memory.

    Attributes:
        tensors: Its parameters by name; tied ones have several names.
    """

    def __init__(self, tensors: Mapping[str, FrozenTensor]) -> None:
        self.tensors = dict(sorted(tensors.items()))

    @cached_property
    def digest(self) -> str:
        """The digest of names and contents."""
        out = hashlib.blake2b(digest_size=16)
        for name, each in self.tensors.items():
            out.update(f"{len(name)} {name} {each.digest}".encode())
        return out.hexdigest()

    def tensor(self, name: str, *, digest: str) -> torch.Tensor:
        """Return a parameter.

        Raises:
            CheckpointError: It is not there, or has another digest.
        """
        found = self.tensors.get(name)
        if found is None or found.digest != digest:
            raise CheckpointError(f"the base in memory has another {name!r}")
        return found.tensor


class FrozenContents:
    """What the trials in training have frozen, by a key of what they have in common."""

    def __init__(self) -> None:
        self._known: dict[Hashable, WeakKeyDictionary[object, Hashable]] = {}

    def note(self, key: Hashable, trial: object, content: Hashable) -> None:
        """Record the content of a trial, until the trial is gone."""
        self._known.setdefault(key, WeakKeyDictionary())[trial] = content

    def num_equal(self, key: Hashable, trial: object, content: Hashable) -> int:
        """Return how many trials have this content, the given one included."""
        return list(self._with(key, trial, content).values()).count(content)

    def mostly_differ(self, key: Hashable, trial: object, content: Hashable) -> bool:
        """Return whether more than half of the contents would be those of a single trial."""
        known = self._with(key, trial, content)
        different = len(set(known.values()))
        return different > 1 and 2 * different > len(known)

    def _with(self, key: Hashable, trial: object, content: Hashable) -> dict[object, Hashable]:
        return {**self._known.get(key, {}), trial: content}


def frozen_of(task: object, device: torch.device) -> FrozenTensors:
    """Return the frozen tensors of a task's models on a device."""
    return _FROZEN.setdefault(task, {}).setdefault(device, FrozenTensors())


_FROZEN: WeakKeyDictionary[object, dict[torch.device, FrozenTensors]] = WeakKeyDictionary()


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor's values begin in memory.

    Unlike ``data_ptr``, it does not give a shared tensor memory of its own.
    """
    return storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def places_in_memory(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that are equal as long as all the tensors stay where they are in memory."""
    begins = torch._C._data_address if CAN_SHARE else storage_address  # type: ignore[attr-defined]
    return [*map(begins, tensors), *map(torch.Tensor.storage_offset, tensors)]


def storage_address(tensor: torch.Tensor) -> int:
    """Return where the memory that a dense tensor is a part of begins."""
    if not CAN_SHARE:
        return tensor.untyped_storage().data_ptr()
    # it leaves out the offset, unlike ``data_ptr``
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is copied as soon as one writes into it."""
    return CAN_SHARE and bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, for a function that asks for more than to read it.

    A shared tensor would get memory of its own from such a function, though nothing is written. The
    result is right as long as the tensor stays where it is.
    """
    if not is_shared(tensor) or not tensor.numel():
        return tensor
    shape, stride = tensor.shape, tensor.stride()
    num = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = (ctypes.c_byte * (num * tensor.element_size())).from_address(address(tensor))
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(shape, stride)


def is_lent(tensor: torch.Tensor) -> bool:
    """Return whether models share a tensor's memory, with copy-on-write or as aliases."""
    alias = _ALIASES.get(address(tensor))
    return is_shared(tensor) or (alias is not None and alias.is_in(tensor))


def cheap_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that may be changed; one of a shared tensor takes no memory until it is.

    One of a tensor that is shared as an alias is that tensor: nothing may change it.
    """
    if is_shared(tensor):
        return torch._lazy_clone(tensor)
    return plain(tensor) if is_lent(tensor) else tensor.clone()


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor as it is now; one of a shared tensor takes no memory.

    What is not seen to be written into is copied.
    """
    is_dense = tensor.layout is torch.strided
    if is_dense and is_shared(tensor) and not _writes_are_unseen(tensor):
        return torch._lazy_clone(tensor.detach())
    return tensor.detach().clone()


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two shared tensors are in the same memory, so that they have the same bits."""
    return (
        one.layout is other.layout is torch.strided
        and is_shared(one)
        and is_shared(other)
        and address(one) == address(other)
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def unshare_before_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer give shared parameters memory of their own before it writes into them.

    On a GPU, PyTorch's kernels for lists of tensors, which its optimizers use there, write into
    shared memory without copying it first. Every other model would get the update, too.
    """
    optimizer.register_step_pre_hook(_unshare)


def _unshare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and is_shared(parameter):
                parameter.data = parameter.data.clone()


def share(model: torch.nn.Module, names: Collection[str]) -> None:
    """Let copies of a model share some of its parameters and buffers, until one is written to."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in names:
        if CAN_SHARE and name in own and _is_plain(own[name]):
            torch._lazy_clone(own[name].detach())


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a model; what is shared takes no memory until it is written to."""
    copied: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if _is_plain(tensor) and is_shared(tensor):
            copy = torch._lazy_clone(tensor.detach())
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            copied[id(tensor)] = copy
    for layer in quantized_layers(model).values():
        if is_lent(layer.module.weight):
            layer.note_copies(copied)
    return deepcopy(model, copied)


def are_intact(frozen: Mapping[str, FrozenTensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether some named tensors are still those that were lent."""
    return all(n in tensors and each.is_in(tensors[n]) for n, each in frozen.items())


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and values."""
    whole = tensor.detach()
    out = hashlib.blake2b(f"{whole.dtype} {tuple(whole.shape)}".encode(), digest_size=16)
    for part in bytes_of(whole):
        out.update(part)
    return out.hexdigest()


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Return a tensor's values as bytes, in parts; a shared tensor stays shared.

    They are read where they are, so they are those of now only until something writes there.
    """
    flat = bits(tensor.detach().contiguous())  # in bytes, because NumPy has no bfloat16
    if not flat.is_cpu:
        for part in torch.split(flat, _CHUNK):
            yield part.cpu().numpy().data
    elif flat.numel():
        # An array of the tensor would count as a view of it, and give it memory of its own.
        memory = (ctypes.c_byte * flat.numel()).from_address(address(flat))
        memory.tensor = cheap_copy(flat) if is_shared(flat) else flat  # type: ignore[attr-defined]
        whole = memoryview(memory).cast("B")
        for begin in range(0, len(whole), _CHUNK):
            yield whole[begin : begin + _CHUNK]


def has_views(tensor: torch.Tensor) -> bool:
    """Return whether other tensors or arrays, wherever they are, may have the same memory."""
    storage = tensor.untyped_storage()
    if not storage.resizable() and not _is_in_saved_file(tensor):
        return True  # an array gave it the memory, or was given it
    # the tensor holds it, and so does the variable here
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and bool(tensor.numel())
    )


def _key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    flat = tensor.reshape(-1)
    some = flat[:: max(1, len(flat) // _NUM_SAMPLES)].clone()
    return (tensor.shape, tensor.dtype, tensor.device, bytes(bits(some).tolist()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor: numbers may be equal and have other bits."""
    return tensor.reshape(-1).view(torch.uint8)
