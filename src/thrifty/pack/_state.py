"""Trial states as tensors and a plain tree, step counters, and the process's global random streams.

Models draw from torch's global generator (dropout), data sets perhaps from NumPy's or Python's.
While a trial trains, these are seeded by (trial seed, step). Afterwards the process finds its
streams as they were.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thrifty.core import CheckpointError, StateError, TaskError, derive_seed

from ._frozen import Base
from .identity import parts_of


def step_counters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that modules name in ``step_counters``, by path, each once.

    Training loops add one to each of them after each optimizer step. A layer that has to know the
    step cannot count its own calls, because a step may call it several times, nor rely on the hooks
    of another training loop.
    """
    # ``named_modules`` visits a module that is used in several places only once
    return {
        f"{path}.{name}" if path else name: getattr(module, name)
        for path, module in model.named_modules()
        for name in getattr(type(module), "step_counters", ())
    }


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name, then its buffers, each once.

    This is what ``named_parameters`` and ``named_buffers`` return, in a tenth of their time. For
    hundreds of modules, they take a millisecond each, and ten such walks of each trial add up in
    short epochs.
    """
    modules = _modules_in_order(model)
    if modules is None:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    out: dict[str, torch.Tensor] = {}
    for held in (_PARAMETERS, _BUFFERS):
        seen: set[int] = set()
        for prefix, module in modules:
            for name, tensor in held(module).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    out[prefix + name] = tensor
    return out


_PARAMETERS, _BUFFERS = attrgetter("_parameters"), attrgetter("_buffers")


def _modules_in_order(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]] | None:
    """Return modules in the order of ``named_modules``; None if one of them has another order."""
    out: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    left: list[tuple[str, torch.nn.Module]] = [("", model)]
    while left:
        prefix, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        children, kind = module._modules, type(module)
        if not isinstance(children, dict):
            return None  # of a scripted module
        if not _walks_as_usual(kind):  # type: ignore[arg-type]  # mypy: a class is not hashable
            return None
        out.append((prefix, module))
        for name, child in reversed(children.items()):
            if child is not None:
                left.append((f"{prefix}{name}.", child))
    return out


@cache
def _walks_as_usual(kind: type) -> bool:
    names = ("named_parameters", "named_buffers", "named_modules", "_named_members")
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in names)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state without objects that need pickle, so reading a checkpoint never runs code from it.

    ``tree`` is JSON in which ``{"tensor": key}`` stands for ``tensors[key]``, which is dense. A
    sparse tensor is stored as its layout, its shape and the keys of its indices and values.
    ``base`` has the frozen parameters that the state leaves out; None if it leaves out none, or an
    earlier version wrote it.
    """

    tensors: Mapping[str, torch.Tensor]
    tree: Any
    base: Base | None = field(default=None, compare=False)


def pack_state(value: Any, *, base: Base | None = None) -> State:
    """Split nested dicts, lists, tensors and plain values into a state; tensors are copied.

    >>> state = pack_state({"w": torch.ones(2), "step": 3})
    >>> sorted(state.tensors), unpack_state(state)["step"]
    (['w'], 3)

    Raises:
        TaskError: A value cannot be stored without pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    return State(tree=_take_apart(value, tensors, path=""), tensors=tensors, base=base)


def unpack_state(state: State) -> Any:
    """Restore the value that ``pack_state`` was given.

    Tensors are copied: an optimizer updates its tensors in place, and a state may be used again.
    """
    return _put_together(state.tree, state.tensors)


def state_versions(state: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """Return the versions of the modules that wrote a ``state_dict``; None for other mappings.

    Without them, ``load_state_dict`` takes the state for one of an older version and converts it.
    """
    # PyTorch keeps them in an attribute of an ``OrderedDict``
    return vars(state).get("_metadata") if isinstance(state, OrderedDict) else None


def with_versions(
    state: Mapping[str, Any], versions: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Return a state with the versions that ``state_versions`` returned."""
    if versions is None:
        return state
    made = OrderedDict(state)
    made._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return made


def leave_out(state: Mapping[str, Any], names: Container[str]) -> Mapping[str, Any]:
    """Return a module's state without what a fresh module has, too."""
    held = {name: value for name, value in state.items() if name not in names}
    return with_versions(held, state_versions(state))


def fill_in(
    state: Mapping[str, Any],
    digests: Mapping[str, str],
    *,
    fresh: Mapping[str, torch.Tensor],
    digest_of: Callable[[str], str],
    base: Base | None = None,
    any_shape: Container[str] = (),
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return a module's state with what ``leave_out`` has left out.

    Args:
        state: The state.
        digests: The digests of what was left out, by name.
        fresh: The tensors of a fresh module.
        digest_of: Returns the digest of one of them.
        base: What was left out, for a fresh module that has something else.
        any_shape: Names of what may have another shape in ``base`` than in the fresh module.

    Returns:
        The state, and the names of what is from ``base``.

    Raises:
        StateError: Neither the fresh module nor ``base`` has what was left out.
    """
    if not digests:
        return state, frozenset()
    held = dict(state)
    restored = set()
    for name, digest in digests.items():
        if name in fresh and digest_of(name) == digest:
            held[name] = fresh[name]
        else:
            fits = partial(_fits, fresh.get(name), any_shape=name in any_shape)
            held[name] = _from_base(name, digest, fits=fits, base=base)
            restored.add(name)
    return with_versions(held, state_versions(state)), frozenset(restored)


def _fits(like: torch.Tensor | None, found: torch.Tensor, *, any_shape: bool) -> bool:
    if like is None or found.dtype != like.dtype:
        return False
    return any_shape or found.shape == like.shape


def _from_base(
    name: str, digest: str, *, fits: Callable[[torch.Tensor], bool], base: Base | None
) -> torch.Tensor:
    why = "no copy of it was stored"
    if base is not None:
        try:
            found = base.tensor(name, digest=digest)
        except CheckpointError as error:
            why = str(error)
        else:
            if fits(found):
                return found
            why = "the model has no parameter of this name, shape and type now"
    raise StateError(
        f"the frozen parameter {name!r} is not what it was when the checkpoint was "
        f"written, so the checkpoint does not have it, and {why}; let the function that makes the "
        "model return the same frozen parameters each time: pin the revision that you "
        "download, and let them follow from no hyper-parameter that changes"
    )


def _take_apart(value: Any, tensors: dict[str, torch.Tensor], *, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout in _COMPRESSED or value.layout is torch.sparse_coo:
            return {"sparse": _sparse(value.detach(), tensors, path=path)}
        check_dense(value, path=path)
        key = _free_key(path or "value", tensors)
        tensors[key] = value.detach().clone()
        return {"tensor": key}
    if isinstance(value, Mapping):
        items = [
            [_plain_key(key), _take_apart(v, tensors, path=f"{path}.{key}" if path else f"{key}")]
            for key, v in value.items()
        ]
        versions = state_versions(value)
        if versions is None:
            return {"dict": items}
        # Hooks may add anything to the versions; only plain values can be stored.
        plain = {
            place: {key: v for key, v in each.items() if _is_plain(v)}
            for place, each in versions.items()
            if isinstance(each, Mapping)
        }
        held = _take_apart(plain, tensors, path=f"{path}._metadata" if path else "_metadata")
        return {"state_dict": [items, held]}
    if isinstance(value, list | tuple):
        parts = [_take_apart(v, tensors, path=f"{path}.{i}") for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if _is_plain(value):
        return value
    raise TaskError(
        f"the state at {path or 'the top'!r} is a {type(value).__name__}; keep tensors, numbers, "
        "strings, lists and dicts in it (they are stored without pickle)"
    )


def check_dense(value: Any, *, path: str) -> None:
    """Refuse a tensor that consists of others, such as a weight that torchao has quantised.

    Raises:
        TaskError: It does.
    """
    if is_composite(value):
        raise TaskError(
            f"the state at {path or 'the top'!r} is a {type(value).__name__}, a tensor that "
            "consists of others, and checkpoints hold plain ones; give a base in its own precision "
            "or one in 8 or 4 bits by bitsandbytes, or let the module's state_dict return the parts"
        )


def is_composite(value: Any) -> bool:
    """Return whether a tensor consists of others and has no memory of its own."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _sparse(value: torch.Tensor, tensors: dict[str, torch.Tensor], *, path: str) -> dict[str, Any]:
    keys = []
    for part in parts_of(value):
        keys.append(_free_key(path or "value", tensors))
        tensors[keys[-1]] = part.clone()
    return {
        "layout": str(value.layout).removeprefix("torch."),
        "shape": list(value.shape),
        "parts": keys,
        # the order in which entries at the same index are summed must not change
        "coalesced": value.layout is torch.sparse_coo and value.is_coalesced(),
    }


def _made_sparse(inside: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parts = [tensors[key].clone() for key in inside["parts"]]
    layout, shape = getattr(torch, inside["layout"]), inside["shape"]
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=inside["coalesced"], check_invariants=True
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=True
    )


def _free_key(path: str, taken: Container[str]) -> str:
    """Return the path, or a variant of it if it is taken.

    ``{"a.b": x}`` and ``{"a": {"b": x}}`` have the same path, and so do ``1`` and ``"1"``.
    """
    key, number = path, 1
    while key in taken:
        number += 1
        key = f"{path}#{number}"
    return key


def _put_together(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    ((kind, inside),) = tree.items()
    if kind == "tensor":
        return tensors[inside].clone()
    if kind == "sparse":
        return _made_sparse(inside, tensors)
    if kind == "dict":
        return {key: _put_together(v, tensors) for key, v in inside}
    if kind == "state_dict":
        items, versions = inside
        return with_versions(
            {key: _put_together(v, tensors) for key, v in items}, _put_together(versions, tensors)
        )
    parts = [_put_together(v, tensors) for v in inside]
    return tuple(parts) if kind == "tuple" else parts


def _plain_key(key: Any) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TaskError(f"the state has a key {key!r}; keys must be strings or integers")


@dataclass(frozen=True, slots=True)
class Streams:
    """The positions of Python's, NumPy's and torch's global streams."""

    python: Any
    numpy: Any
    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> Streams:
        """Return the present positions."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # noqa: NPY002 (kept to be restored)
            torch_cpu=torch.get_rng_state(),
            torch_cuda=torch.cuda.get_rng_state_all() if in_use else [],
        )

    def restore(self) -> None:
        """Bring the streams back to these positions."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)


@contextmanager
def borrowed_streams() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global streams on exit."""
    before = Streams.now()
    try:
        yield
    finally:
        before.restore()


_OTHER = ContextVar("_OTHER", default=False)


@contextmanager
def seeded_otherwise() -> Iterator[None]:
    """Let ``seed_everything`` seed with other numbers, to see what depends on the seed."""
    token = _OTHER.set(True)
    try:
        yield
    finally:
        _OTHER.reset(token)


def seed_everything(seed: int) -> None:
    """Seed the three global streams."""
    if _OTHER.get():
        seed = derive_seed(seed, "other")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (user code may draw from it)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's streams on the CPU and on GPUs in use.

    Use this instead of ``torch.manual_seed``: on a machine without a GPU, that records every call
    and its stack for a GPU initialised later, which costs 0.7 ms and some memory each time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the streams that a training step draws from: torch's on the CPU and on the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        cuda_generator(device).manual_seed(seed)


def cuda_generator(device: torch.device) -> torch.Generator:
    """Return the generator that PyTorch's own functions draw from on a GPU."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before it, there are no generators
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def torch_streams(device: torch.device) -> list[torch.Tensor]:
    """Return the positions of torch's global streams on the CPU and on a device."""
    cpu = torch.get_rng_state()
    return [cpu, cuda_generator(device).get_state()] if device.type == "cuda" else [cpu]


def stream_positions(device: torch.device) -> tuple[Any, ...]:
    """Return the positions of all seeded streams, to be compared with ``==``."""
    return (*(bytes(each.numpy()) for each in torch_streams(device)), *loose_streams())


def loose_streams() -> tuple[Any, ...]:
    """Return the positions of Python's and NumPy's global streams, which steps do not seed."""
    # The state is only read, nothing is drawn.
    numpy = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002
    return (random.getstate(), numpy[2:], bytes(numpy[1]))
