"""The structures of trials, which dry runs find out, and how trials of several widths fit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from thrifty.core import derive_seed, error_text, fingerprint, freed_at_once
from thrifty.pack._backend import EpochPlan, no_exits, out_of_memory
from thrifty.pack._frozen import FrozenContents
from thrifty.pack._state import seed_everything
from thrifty.pack.fused._dry_run import NUM_ROWS, SETTLES, dry_run, fits_inside, settle
from thrifty.pack.fused._fusable import (
    UnfusableError,
    dropout_rates,
    family,
    number_values,
    settings,
)
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.fused._structure import Structure
from thrifty.pack.identity import is_own_module, mentions, reach
from thrifty.pack.task._data import train_batches


Structures = dict[Hashable, Structure | str]
"""The tested structure, or why there is none, by what its trials have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    """A tested structure, and what trials that differ from it in widths at most have in common."""

    structure: Structure
    likeness: Hashable


class DryRuns:
    """The dry runs of a back-end: which structure a trial has, and which wider ones it fits into.

    Args:
        structures: The results of earlier dry runs.
        refused: Why some structures are not fused, by ``refusal_key``. Others may add to it.
        making_room: Returns a context that a dry run is in, such as one that frees memory.

    Attributes:
        structures: The results of dry runs so far.
    """

    def __init__(
        self,
        structures: Structures,
        refused: Mapping[str, str],
        *,
        making_room: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.structures = structures
        self._refused = refused
        self._making_room = making_room
        self._fits: dict[tuple[Hashable, Structure], bool] = {}
        self._tested: list[_Tested] = []
        self._built_in: dict[Hashable, tuple[str, ...]] = {}
        """Paths of dropout rates and numbers that are built into programs.

        They belong to the structure.
        """
        self._refusal_keys: dict[Hashable, str] = {}
        self._contents = FrozenContents()
        """By the key of a structure."""

    def key(self, trial: FusedTrial) -> Hashable:
        """Return what trials of one structure have in common."""
        key = (trial.signature, trial.source_number)
        paths = self._built_in.get(key, ())
        if not paths:
            return key
        rates = {**dropout_rates(trial.model), **number_values(trial.model)}
        return (*key, *[(path, rates[path]) for path in paths])

    def structure(
        self, trial: FusedTrial, values: Mapping[str, Any], *, channels_last: bool = False
    ) -> Structure:
        """Return the tested structure of a prepared trial.

        Raises:
            UnfusableError: It cannot be fused; the message says why.
        """
        if self._refused and (reason := self._refused.get(self.refusal_key(trial))):
            raise UnfusableError(reason)
        key = self.key(trial)
        if key not in self.structures:
            key = self._test(trial, values)
        known = self.structures[key]
        if isinstance(known, str) and known.endswith(SETTLES) and _settled(trial, values):
            return self.structure(trial, values, channels_last=channels_last)
        if isinstance(known, Structure) and known.held and self._differ(trial, key):
            key = ("nothing held", key)
            if key not in self.structures:
                with self._making_room():
                    self.structures[key] = _found_out(trial, values, holding=False)
            known = self.structures[key]
        if isinstance(known, str):
            raise UnfusableError(known)
        groups = trial.followed.partition
        if len(groups) == 1 and not channels_last:
            return known
        key = ("channels last" if channels_last else "", groups, key)
        if key not in self.structures:
            self.structures[key] = known.arranged(groups, channels_last=channels_last)
        found = self.structures[key]
        assert isinstance(found, Structure)
        return found

    def refusal_key(self, trial: FusedTrial) -> str:
        """Name a trial's structure for all processes, by the content of its model, task and data.

        Raises:
            UnfusableError: The model has hooks.
        """
        key = (trial.signature, rows_of(trial))
        if key not in self._refusal_keys:
            self._refusal_keys[key] = fingerprint([repr(part) for part in key])
        return self._refusal_keys[key]

    def fits_into(self, trial: FusedTrial, values: Mapping[str, Any], structure: Structure) -> bool:
        """Return whether a trial, padded to the width of a structure, has its own step in it."""
        pair = (self.key(trial), structure)
        if pair not in self._fits:
            try:
                num_bytes = sum(p.nbytes for p in trial.model.parameters())
                with self._making_room(), no_exits(), freed_at_once(num_bytes):
                    batch = next(_few_rows(trial, values))
                    self._fits[pair] = fits_inside(structure, trial.model, batch)
            except Exception as error:
                if out_of_memory(error):
                    raise
                # if training meets the error too, it becomes the outcome of the trial there
                self._fits[pair] = False
        return self._fits[pair]

    def note_placed(self, trial: FusedTrial) -> None:
        """Record what a trial that has been put into a block has frozen."""
        if trial.frozen:
            self._contents.note(self.key(trial), trial, trial.frozen_content())

    @property
    def have_built_in(self) -> bool:
        """Whether a structure has dropout rates or numbers built into its programs."""
        return bool(self._built_in)

    def clear(self) -> None:
        """Discard all results, since values built into programs may differ from those of today."""
        self.structures.clear()
        self._fits.clear()
        self._tested.clear()

    def _test(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable:
        """Find out the structure of a trial, or why it has none; return its key."""
        key = self.key(trial)
        with self._making_room():
            known = self._narrowed(trial, values) or _found_out(trial, values)
        if isinstance(known, Structure):
            self._tested.append(_Tested(structure=known, likeness=likeness(trial)))
            if known.built_in:
                self._built_in[key] = tuple(sorted(known.built_in))
                key = self.key(trial)
        self.structures[key] = known
        return key

    def _differ(self, trial: FusedTrial, key: Hashable) -> bool:
        """Return whether trials of a structure mostly differ in what is frozen in them.

        Each would be in a block of its own if the block held these tensors for all of its trials.
        """
        content = trial.frozen_content()
        if self._contents.mostly_differ(key, trial, content):
            return True
        # a trial does not move into a block that it would have for itself
        return trial.is_apart and self._contents.num_equal(key, trial, content) < 2

    def _narrowed(self, trial: FusedTrial, values: Mapping[str, Any]) -> Structure | None:
        """Return the structure of a trial whose adapters are narrower than those of a tested one.

        It is the same code with other widths, so the dry run of the wider one counts for both. Each
        program is checked when it first trains, whatever it was derived from. None if there is no
        wider one.
        """
        if not trial.frozen:
            return None
        own = likeness(trial)
        for tested in self._tested:
            known = tested.structure
            if (
                tested.likeness == own
                and self._is_narrower(trial, known)
                and self.fits_into(trial, values, known)
            ):
                return known.narrowed(trial.model)
        return None

    def _is_narrower(self, trial: FusedTrial, structure: Structure) -> bool:
        parameters = dict(trial.model.named_parameters())
        if not structure.held or not structure.layout.holds(parameters):
            return False
        with suppress(UnfusableError):  # one of these tensors is no longer a fresh model's
            trial.frozen_key(structure.held)
            return True
        return False


def likeness(trial: FusedTrial) -> Hashable:
    """Return a key that is equal for trials whose code and data differ in widths at most."""
    return trial.source_number, family(trial.model), settings(vars(trial.task))


def _found_out(
    trial: FusedTrial, values: Mapping[str, Any], *, holding: bool = True
) -> Structure | str:
    """Return the structure of a trial's model by a dry run, or why there is none.

    Args:
        trial: The trial.
        values: Its hyper-parameters.
        holding: Whether frozen tensors may be one for all trials of a block.
    """
    try:
        batch = next(_few_rows(trial, values))
        seed_everything(derive_seed(trial.seed, "dry run"))
        # a copy, so that later changes of the trial's task do not affect what was recorded
        with no_exits(), freed_at_once(sum(t.nbytes for t in trial.model.parameters())):
            return dry_run(
                copy(trial.task), trial.model, batch, frozen=trial.frozen if holding else ()
            )
    except UnfusableError as error:
        return str(error)
    except Exception as error:
        if out_of_memory(error):
            raise
        return f"its dry run failed with {error_text(error)}"


def _settled(trial: FusedTrial, values: Mapping[str, Any]) -> bool:
    """Settle a trial's model, and return whether that has changed it."""
    seed_everything(derive_seed(trial.seed, "dry run"))
    with no_exits():
        changed = settle(copy(trial.task), trial.model, next(_few_rows(trial, values)))
    trial.look_again()
    return changed


def rows_of(trial: FusedTrial) -> Hashable:
    """Return shapes and dtypes of the rows of a trial's data, if these are in memory."""
    arrays = trial.source.arrays
    return arrays and tuple((tuple(a.shape[1:]), str(a.dtype)) for a in arrays)


def _few_rows(trial: FusedTrial, values: Mapping[str, Any]) -> Iterator[Any]:
    """Return batches for a dry run; those that have to be made for it are small."""
    if trial.source.arrays is not None:
        return trial.batches(EpochPlan(epoch=0, values=values))
    size = min(trial.batch_size(values), NUM_ROWS)
    return train_batches(trial.source, seed=trial.seed, epoch=0, batch_size=size)


# -- files that a dry run could leave behind -------------------------------------------------------

_PURE = frozenset({
    "_operator", "builtins", "collections", "dataclasses", "einops", "enum", "functools",
    "itertools", "math", "numpy", "operator", "peft", "thrifty", "torch", "transformers", "types",
    "typing",
})  # fmt: skip
"""Modules whose functions and objects touch no files, besides those of these names."""

_OF_FILES = frozenset({
    "__import__", "cpp_extension", "ctypes", "dump", "eval", "exec", "fromfile", "from_file",
    "from_pretrained", "genfromtxt", "getattr", "hub", "import_module", "load", "loadtxt", "memmap",
    "open", "open_memmap", "save", "save_file", "save_pretrained", "savetxt", "savez",
    "savez_compressed", "tofile",
})  # fmt: skip

_PREPARING = ("data", "model", "optimizer")
"""Methods of a task that run in preparation; making a trial once more runs them, too."""
_ENTRIES = frozenset({"adapt", "forward", "loss", "loss_weight", "metrics"})


def may_use_files(trial: FusedTrial) -> bool:
    """Return whether the code of steps and evaluations may read or write files, as far as one sees.

    A file that the first batch leaves behind, such as a cache or a statistic, makes steps that are
    tried out before the first epoch change that epoch. So nothing is tried out so early unless all
    data are in memory, and the code names nothing but PyTorch and the like.
    """
    if trial.source.arrays is None:
        return True
    roots = {"task": trial.task, "model": trial.model}
    reached = [reach({name: root}, without=_PREPARING) for name, root in roots.items()]
    functions: list[FunctionType] = [each.value for found in reached for each in found.functions]
    # a variable or a method that nothing names is not used; whatever else is held may be
    named = {id(function.__globals__) for function in functions}
    held = [
        place.get()
        for found in reached
        for place in found.places
        if id(place.holder) not in named and not isinstance(place.holder, type)
    ]
    if not all(map(_is_pure, held)):
        return True
    begins = {id(value) for value in held}
    waiting = [f for f in functions if id(f) in begins or _is_called_unnamed(f.__name__)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        mentioned = mentions(function.__code__)
        names = mentioned.globals | mentioned.attributes
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        imports = [each.module for each in mentioned.imports]
        if names & _OF_FILES or not all(map(_is_pure, values)) or not all(map(_is_known, imports)):
            return True
        begins = {id(value) for value in values}
        waiting += [f for f in functions if f.__name__ in names or id(f) in begins]
        waiting += [method for value in values for method in _methods_of(value)]
    return False


def _methods_of(kind: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class of the user's, which code that names it may call."""
    for each in kind.__mro__ if isinstance(kind, type) else ():
        if is_own_module(each.__module__):
            yield from (m for m in vars(each).values() if isinstance(m, FunctionType))


def _is_called_unnamed(name: str) -> bool:
    """Return whether code of this name runs although the user's code does not name it."""
    return name in _ENTRIES or name == "<lambda>" or (name[:2] == "__" and name != "__init__")


def _is_pure(value: Any) -> bool:
    """Return whether a value is a module, or of one, that touches no files."""
    if isinstance(value, ModuleType):
        return _is_known(value.__name__)
    if callable(value):
        return _is_known(getattr(value, "__module__", None) or type(value).__module__)
    return _is_known(type(value).__module__)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _PURE or is_own_module(module)
