"""The content of tensors, arrays, data frames and random generators."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ._place import vars_of


Token = Callable[..., None]
"""A function that writes texts and bytes."""
Inside = Callable[[Any], None]
"""A function that writes any value."""
Writer = Callable[[Any, Token, Inside], None]

CHUNK_BYTES = 2**24


@functools.lru_cache(maxsize=4096)
def writer_for(kind: type) -> Writer | None:
    """Return the function that writes the content of arrays and the like; None for other types."""
    for base, write in (*_WRITERS, *_optional_writers()):
        if issubclass(kind, base):
            return write
    return None


def _tensor(value: torch.Tensor, token: Token, inside: Inside) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # so that no method of the user's runs
        _plain_tensor(value, token, inside)


def _plain_tensor(value: torch.Tensor, token: Token, inside: Inside) -> None:
    shape, grad = tuple(value.shape), value.requires_grad
    token("tensor", str(value.dtype), str(shape), str(value.layout), f"requires_grad={grad}")
    own = vars_of(value)
    if own:
        inside(own)
    hooks = hooks_of(value)
    if any(hooks.values()):
        inside(hooks)
    if value.is_meta:
        return
    plain = value.detach()
    if value.is_quantized:
        token(str(value.qscheme()), repr(plain.dequantize().dtype))
        inside([plain.int_repr(), plain.dequantize()])
    elif value.is_nested:
        inside(list(plain.unbind()))
    elif value.layout in _PARTS:
        inside([part(plain) for part in _PARTS[value.layout]])
    else:
        dense = plain if value.layout is torch.strided else plain.to_dense()
        whole = dense.as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu()
        token(_bytes_of_tensor(whole))


def hooks_of(tensor: torch.Tensor) -> dict[str, list[Any]]:
    """Return the hooks of a tensor by their kind, in the order in which they are called."""
    with torch._C.DisableTorchFunctionSubclass():  # so that no method of the user's runs
        tables = {name: getattr(tensor, name) for name in _HOOKS}
    return {name: list(table.values()) if table else [] for name, table in tables.items()}


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _bytes_of_tensor(tensor: torch.Tensor) -> bytes:
    out = hashlib.blake2b(digest_size=16)
    for part in _chunks(tensor, tensor.is_contiguous(), tensor.numel() * tensor.element_size()):
        # A copy: what NumPy has seen can never be resized or shared with other trials.
        own = part.clone(memory_format=torch.contiguous_format)
        # in bytes, because NumPy has no bfloat16 and no eight-bit floats
        out.update(_buffer(own.reshape(-1).view(torch.uint8).numpy()))
    return out.digest()


def _buffer(array: np.ndarray[Any, Any]) -> Any:
    return memoryview(array)  # type: ignore[arg-type]


def _array(value: np.ndarray[Any, Any], token: Token, inside: Inside) -> None:
    token("array", _dtype_text(value.dtype), str(value.shape))
    if type(value) not in (np.ndarray, np.memmap) and vars_of(value):
        inside(vars_of(value))
    plain = value.view(np.ndarray)
    if plain.dtype.hasobject or plain.dtype.kind == "T":
        inside(plain.reshape(-1).tolist())
        return
    out = hashlib.blake2b(digest_size=16)
    for part in _chunks(plain, plain.flags.c_contiguous, plain.nbytes):
        out.update(_buffer(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))
    token(out.digest())


def _scalar(value: np.generic, token: Token, inside: Inside) -> None:
    token("scalar")
    _array(np.asarray(value), token, inside)


def _dtype(value: np.dtype[Any], token: Token, inside: Inside) -> None:  # noqa: ARG001
    token("dtype", _dtype_text(value))


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return repr(dtype.descr) if dtype.names else dtype.str


def _chunks(array: Any, contiguous: bool, num_bytes: int) -> list[Any]:  # noqa: FBT001
    """Return an array whole, or in slices if it would have to be copied."""
    if contiguous or num_bytes <= CHUNK_BYTES or len(array) < 2:
        return [array]
    rows = max(1, len(array) * CHUNK_BYTES // num_bytes)
    return [array[start : start + rows] for start in range(0, len(array), rows)]


def _torch_generator(value: torch.Generator, token: Token, inside: Inside) -> None:
    token("generator", str(value.device))
    inside(value.get_state())


def _numpy_generator(value: Any, token: Token, inside: Inside) -> None:
    token("generator", type(value).__name__)
    inside(getattr(value, "bit_generator", value).state)


def _random_state(value: np.random.RandomState, token: Token, inside: Inside) -> None:
    token("random state")
    inside(value.get_state(legacy=False))


def _seed_sequence(value: np.random.SeedSequence, token: Token, inside: Inside) -> None:
    token("seeds")
    inside(value.state)


def _python_random(value: random.Random, token: Token, inside: Inside) -> None:
    token("random", type(value).__name__)
    if not isinstance(value, random.SystemRandom):
        inside(value.getstate())


def _script_module(value: Any, token: Token, inside: Inside) -> None:
    token("script", value.original_name)
    for name, part in value.named_modules():
        with contextlib.suppress(RuntimeError):  # the module has no ``forward``
            token(name, part.code)
    inside(dict(value.state_dict()))
    if more := {name: _of_script(part) for name, part in value.named_modules()}:
        inside({name: found for name, found in more.items() if found})


def _of_script(part: Any) -> dict[str, Any]:
    """Return what the code of a scripted module uses besides its tensors and ``forward``."""
    compiled, stored = part._c, part.state_dict()
    methods = {name: compiled._get_method(name) for name in sorted(compiled._method_names())}
    found: dict[str, Any] = {}
    for name, method in methods.items():
        code, constants = method.code_with_constants
        if name != "forward":
            found[f"{name}()"] = code
        found |= {f"{name}.{each}": constant for each, constant in constants.items()}
        for attribute in set(_ATTRIBUTES.findall(code)):
            if compiled.hasattr(attribute) and attribute not in {*methods, *stored}:
                held = compiled.getattr(attribute)
                if isinstance(held, _VALUES):  # modules within it are written, too
                    found[attribute] = held
    return found


_VALUES = (bool, int, float, str, list, tuple, dict, torch.Tensor)
_ATTRIBUTES = re.compile(r"\bself\.(\w+)")


def _compiled_module(value: Any, token: Token, inside: Inside) -> None:
    token("compiled")
    inside(value._orig_mod)


def _fingerprinted(value: Any, token: Token, inside: Inside) -> None:  # noqa: ARG001
    token("fingerprint", value._fingerprint)


def _optional_writers() -> list[tuple[type, Writer]]:
    """Return writers for types of modules that are slow to import.

    If such a module is not imported yet, no value of its types exists.
    """
    out: list[tuple[type, Writer]] = []
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        out += [
            (pandas.DataFrame, _frame),
            (pandas.Series, _series),
            (pandas.MultiIndex, _multi_index),
            (pandas.Index, _index),
            (pandas.api.extensions.ExtensionArray, _column),
        ]
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        out.append((compiler.OptimizedModule, _compiled_module))
    datasets = sys.modules.get("datasets")
    if datasets is not None and hasattr(datasets, "Dataset"):
        # Hugging Face's fingerprint depends on the source of the rows and on all operations on them
        out.append((datasets.Dataset, _fingerprinted))
    return out


def _frame(value: Any, token: Token, inside: Inside) -> None:
    token("frame", str(value.shape))
    inside([value.index, value.columns])
    for position in range(value.shape[1]):
        _column(value.iloc[:, position].array, token, inside)


def _series(value: Any, token: Token, inside: Inside) -> None:
    token("series")
    inside([value.name, value.index])
    _column(value.array, token, inside)


def _index(value: Any, token: Token, inside: Inside) -> None:
    token("index")
    inside(value.name)
    _column(value.array, token, inside)


def _multi_index(value: Any, token: Token, inside: Inside) -> None:
    token("index")
    inside([list(value.names), list(value.levels), [np.asarray(each) for each in value.codes]])


def _column(value: Any, token: Token, inside: Inside) -> None:
    """Write a column by its values: its layout in pandas' blocks depends on how it was made."""
    token("column", str(value.dtype))
    if isinstance(value.dtype, np.dtype):
        inside(np.asarray(value))
    elif hasattr(value, "categories"):
        inside([value.categories, np.asarray(value.codes), bool(value.ordered)])
    else:
        inside([repr(each) if each is not None else None for each in value.astype(object)])


_PARTS: dict[torch.layout, list[Callable[[torch.Tensor], Any]]] = {
    torch.sparse_coo: [
        torch.Tensor._indices, torch.Tensor._values, torch.Tensor.is_coalesced,
    ],
    **{
        layout: [torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values]
        for layout in (torch.sparse_csr, torch.sparse_bsr)
    },
    **{
        layout: [torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values]
        for layout in (torch.sparse_csc, torch.sparse_bsc)
    },
}  # fmt: skip


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of a tensor: itself, or indices and values of a sparse one.

    >>> [part.tolist() for part in parts_of(torch.tensor([0.0, 2.0]).to_sparse())]
    [[[1]], [2.0]]
    """
    if tensor.layout is torch.strided:
        return [tensor]
    plain = tensor.detach()
    found = [part(plain) for part in _PARTS.get(tensor.layout, [torch.Tensor.to_dense])]
    return [part for part in found if isinstance(part, torch.Tensor)]


_WRITERS: tuple[tuple[type, Writer], ...] = (
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
    (np.generic, _scalar),
    (np.dtype, _dtype),
    (torch.Generator, _torch_generator),
    (np.random.Generator, _numpy_generator),
    (np.random.BitGenerator, _numpy_generator),
    (np.random.RandomState, _random_state),
    (np.random.SeedSequence, _seed_sequence),
    (random.Random, _python_random),
    (torch.jit.ScriptModule, _script_module),
)
