"""What fine-tuning starts from: a folder, a configuration or a function that makes models."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from thrifty.core import TaskError, ThriftyError, error_text, require
from thrifty.integrations._model_copies import is_copyable
from thrifty.pack._backend import out_of_memory
from thrifty.pack._frozen import CAN_SHARE, FrozenTensor, has_views, is_shared, keep
from thrifty.pack.fused._activations import free_memory

from ._lora import Kind


_LARGEST_SHARE = 0.25
"""Share of the free memory that a base may take to be kept."""

Made = tuple[Any, Collection[str]]
"""A base, and the names of parameters that its folder lacks."""


class Head(NamedTuple):
    """What a base ends in: the next token, or this number of classes."""

    kind: Kind
    num_labels: int

    @property
    def options(self) -> dict[str, Any]:
        """What a configuration has to say of it."""
        return {} if self.kind == "causal" else {"num_labels": self.num_labels}

    @property
    def auto(self) -> Any:
        """The class of transformers that makes models with it."""
        name = "CausalLM" if self.kind == "causal" else "SequenceClassification"
        return getattr(transformers_library(), f"AutoModelFor{name}")


class Base:
    """A folder with a model, a transformers configuration, or a function that returns a model.

    Args:
        source: The folder, the configuration or the function.

    Raises:
        TaskError: The source is a model, or a folder without one.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, torch.nn.Module):
            raise TaskError(
                f"FineTune: model is a {type(source).__name__}, and trials would all train this "
                "one; give a folder that save_pretrained has written, or a function that returns "
                "a new copy, such as lambda hp: copy.deepcopy(model)"
            )
        if isinstance(source, str | Path) and not (Path(source) / "config.json").is_file():
            raise TaskError(
                f"FineTune: there is no model in {str(source)!r} (no config.json); give a folder "
                "that save_pretrained has written, a configuration, or a function that returns a "
                "model"
            )
        self._source = source
        self._kept = KeptBase()
        self._identified: dict[str, str] | None = None
        """Digests of the folder's files in the identity that was taken last."""

    @property
    def is_described(self) -> bool:
        """Whether it is a folder or a configuration, not a function."""
        return isinstance(self._source, str | Path | transformers_library().PretrainedConfig)

    @property
    def quantizer(self) -> str:
        """The library that has quantised the base in a folder; empty for any other base."""
        if not self._folder:
            return ""
        with self._reading():
            return quantizer_of(self._folder)

    @property
    def may_be_half(self) -> bool:
        """Whether logits may be in half precision; a function may make any base."""
        if not self.is_described:
            return True
        config = self._source
        if self._folder:
            config = self._configuration()
        said = config.to_dict()
        dtype = str(said.get("dtype") or said.get("torch_dtype"))
        return dtype.removeprefix("torch.") in ("float16", "bfloat16")

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in a folder."""
        return sum(file.stat().st_size for file in Path(self._source).glob("*.safetensors"))

    def identity(self) -> Any:
        """Return what the base depends on: its files by content, its settings, or the function."""
        if self._folder:
            self._identified = digests_of(self._folder)
            return self._identified
        if self.is_described:
            return self._source.to_dict() | _implementations(self._source)
        return self._source

    def check_unchanged(self) -> None:
        """Check that the files of the base are those of the identity.

        Raises:
            TaskError: They are not.
        """
        if self._identified is None or not self._folder:
            return
        then, now = self._identified, digests_of(self._folder)
        if names := [name for name in {**then, **now} if then.get(name) != now.get(name)]:
            raise TaskError(
                f"FineTune: the files of the base in {str(self._source)!r} have changed since the "
                f"study began ({', '.join(names)}); put the earlier ones back, or start a new study"
            )

    def model(self, hp: Any, *, head: Head, seed: int) -> Made:
        """Return a new model.

        Args:
            hp: Hyper-parameters, for a function.
            head: What the model ends in.
            seed: Seed of random weights.
        """
        if not self.is_described:
            return self._source(hp), ()
        if self._folder:
            content: Any = (str(self._folder.resolve()), stamps(self._folder))
        else:
            content = (type(self._source), repr(self.identity()))
        where = (torch.get_default_dtype(), str(torch.get_default_device()))
        made_from = (content, *head, seed, where)
        return self._kept.copy(made_from, make=lambda: self._made(head, seed))

    def empty(self, *, head: Head) -> Made:
        """Return the model of a folder or configuration without values."""
        if not self._folder:
            with torch.device("meta"):
                return self._by_configuration(head), ()
        config = self._configuration(**head.options)
        # quantised weights have other names, and may load onto some devices only
        if head.kind == "classification" and not self.quantizer:
            return self._loaded(head, device_map="meta")
        with torch.device("meta"):
            return head.auto.from_config(config), ()

    @property
    def _folder(self) -> Path | None:
        return Path(self._source) if isinstance(self._source, str | Path) else None

    def _made(self, head: Head, seed: int) -> Made:
        # the base does not depend on the seed of a trial
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if not self._folder:
                return self._by_configuration(head), ()
            loaded, missing = self._loaded(head)
            for parameter in loaded.parameters():
                # mapped memory cannot be shared by trials
                parameter.data = parameter.detach().clone()
            return loaded, missing

    def _loaded(self, head: Head, **options: Any) -> Made:
        options |= {"local_files_only": True, "output_loading_info": True}
        with self._reading():
            loaded, found = head.auto.from_pretrained(self._source, **head.options, **options)
        return loaded, found["missing_keys"]

    def _configuration(self, **options: Any) -> Any:
        load = transformers_library().AutoConfig.from_pretrained
        with self._reading():
            return load(self._folder, local_files_only=True, **options)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say which folder it is that cannot be read.

        Raises:
            TaskError: The folder cannot be read.
        """
        try:
            yield
        except Exception as error:
            if out_of_memory(error) or isinstance(error, ThriftyError):
                raise
            said = error_text(error).split("\n")[0]
            if isinstance(error, pickle.UnpicklingError):  # torch advises to read it all the same
                said = "its file holds more than weights, and may run code when it is read"
            raise TaskError(
                f"FineTune: the model in {str(self._source)!r} cannot be read ({said}); write it "
                "there again with save_pretrained, or give another folder"
            ) from error

    def _by_configuration(self, head: Head) -> Any:
        config: Any = deepcopy(self._source)
        for name, value in head.options.items():
            setattr(config, name, value)
        return head.auto.from_config(config)


def _implementations(config: Any) -> dict[str, Any]:
    """Return which functions for attention and experts a configuration names.

    ``to_dict`` leaves them out. Their results differ by rounding, and where one of them leaves out
    what another one does, such as a soft cap.
    """
    out: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.endswith("_implementation_internal") and value is not None:
            out[name] = value
        elif isinstance(value, transformers_library().PretrainedConfig):
            out |= {f"{name}.{key}": inner for key, inner in _implementations(value).items()}
    return out


class KeptBase:
    """Makes a base once, and gives each model a copy of it over the same memory.

    Whatever writes into a copy gets memory of its own first, so copies stay independent. A base is
    made anew for each model if a copy of it might be something else: if it has classes of the user,
    is on a GPU or quantised, or if one of its tensors is a view of another one. So is a base that
    takes more than a quarter of the free memory.

    It is kept as long as this object, which all copies of a task share. Another process makes its
    own.

    >>> kept = KeptBase()
    >>> make = lambda: (torch.nn.Linear(2, 1), ())
    >>> (one, _), (other, _) = (kept.copy("a", make=make) for _ in range(2))
    >>> bool((one.weight == other.weight).all())
    True
    """

    def copy(self, made_from: Hashable, *, make: Callable[[], Made]) -> Made:
        """Return a copy of the base.

        Args:
            made_from: All that ``make`` depends on. It is called again when this has changed.
            make: Makes the base.
        """
        found = _MADE.get(self)
        if found is None or found.made_from != made_from:
            _MADE.pop(self, None)  # its memory is free before another one is made
            base, missing = make()
            if not _may_be_kept(base):
                return base, missing
            tensors = [keep(tensor) for tensor in (*base.parameters(), *base.buffers())]
            found = _MADE[self] = _Kept(made_from, base, missing, tensors)
        return _lent(found.base), found.missing

    def __copy__(self) -> KeptBase:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptBase:
        return self

    def __reduce__(self) -> tuple[type[KeptBase], tuple[()]]:
        return KeptBase, ()


class _Kept(NamedTuple):
    made_from: Hashable
    base: torch.nn.Module
    missing: Collection[str]
    tensors: Sequence[FrozenTensor]


# not an attribute, so that nothing that looks at a task's attributes meets the base there
_MADE: WeakKeyDictionary[KeptBase, _Kept] = WeakKeyDictionary()


def _may_be_kept(base: Any) -> bool:
    if not CAN_SHARE or not is_copyable(base):
        return False
    tensors = (*base.parameters(), *base.buffers())
    plain = all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.layout is torch.strided
        and not each.is_meta
        for each in tensors
    )
    if not plain or any(map(has_views, tensors)):
        return False
    num_bytes = sum(each.nbytes for each in tensors)
    return bool(num_bytes <= _LARGEST_SHARE * free_memory(torch.device("cpu")))


def _lent(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model over the same memory."""
    lent: dict[int, Any] = {}
    for parameter in base.parameters():
        values = torch._lazy_clone(parameter.detach())
        copied = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        vars(copied).update(vars(parameter))  # libraries note there what they have done
        lent[id(parameter)] = copied
    for buffer in base.buffers():
        lent[id(buffer)] = torch._lazy_clone(buffer)
    return deepcopy(base, lent)


def unlend_trained(model: torch.nn.Module) -> None:
    """Give the parameters that a trial trains memory of their own."""
    for parameter in model.parameters():
        if parameter.requires_grad and is_shared(parameter):
            parameter.data = parameter.detach().clone()


def stamps(folder: Path) -> tuple[Hashable, ...]:
    """Return what shows that a file in a folder has changed, without reading the files."""
    found = []
    for file in sorted(folder.iterdir()):
        status = file.stat()
        # no program can set the last one
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.append((file.name, status.st_ino, status.st_size, *times))
    return tuple(found)


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a model by name."""
    files = (file for file in sorted(folder.iterdir()) if not file.name.startswith("."))
    return {file.name: _digest(file) for file in files if file.is_file()}


def _digest(file: Path) -> str:
    stat = file.stat()
    key = (str(file.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    found = _DIGESTS.get(key)
    if found is None:
        with file.open("rb") as read:
            found = hashlib.file_digest(read, "blake2b").hexdigest()
        if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_S:
            _DIGESTS[key] = found
    return found


_DIGESTS: dict[tuple[Any, ...], str] = {}
"""Digests of files by path, inode, size and times, so that each trial may ask for them.

Programs set the time of a file's last change as they like, but not that of its entry (ctime).
"""
_SETTLED_S = 2.0
"""A file that was written so recently may be written again without another time."""


def quantizer_of(folder: Path) -> str:
    """Return the library that has quantised the model in a folder; "" if none has."""
    config = json.loads((folder / "config.json").read_bytes())
    found = config.get("quantization_config")
    return str(found.get("quant_method", "")) if isinstance(found, dict) else ""


def transformers_library() -> Any:
    """Return transformers.

    Raises:
        MissingExtraError: It is not installed.
    """
    return require("transformers", extra="huggingface")
