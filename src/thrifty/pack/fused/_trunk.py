"""The cut of a recorded program below which each sample's values depend on that sample alone.

What comes before the cut, the *trunk*, needs neither a trial's state nor random numbers nor other
samples. Its results may therefore be kept by sample and read again in later steps. What comes
after it is the *head*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ._record import VIEWS, Call, Program, Ref
from ._samplewise import Kind, PerSample, Shared, kinds_of, num_operations, size_args
from ._tape import alive, roots, writes


MIN_OPERATIONS = 30
"""The smallest number of operations that keeping a byte must save.

Reading a byte at a random place takes about as long as 30 operations.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutValue:
    """A value at the cut.

    Attributes:
        number: Its number in the program.
        kind: How samples lie in it.
        shape: The shape of one sample's part, beginning with its entries along ``kind.dim``.
        dtype: Its dtype.
    """

    number: int
    kind: PerSample
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's part."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def by_sample(self, value: torch.Tensor) -> torch.Tensor:
        """Return a view of the whole value whose first dimension counts the samples."""
        first = value.movedim(self.kind.dim, 0)
        return first.view(-1, self.kind.inner, *first.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A program in two parts.

    Attributes:
        values: The values that the trunk hands on.
        trunk: The calls that compute them; they are its outputs.
        head: All other calls. Its constants have an empty tensor in place of each value at the cut.
        head_reads: The inputs that the head reads.
        trunk_reads: The inputs and constants that the trunk reads.
        kinds: What the values of the trunk are.
        num_operations: Multiplications and additions of the trunk for one sample.
        head_operations: Those of the head for one sample and all trials.
        head_elements: Elements of the largest value of the head, for each sample.
    """

    values: tuple[CutValue, ...]
    trunk: Program
    head: Program
    head_reads: frozenset[int]
    trunk_reads: frozenset[int]
    kinds: Mapping[int, Kind | None]
    num_operations: float
    head_operations: float
    head_elements: float

    def saved(self, num_trials: int) -> float:
        """Return the share of one trial's operations that the trunk has."""
        return self.num_operations / (self.num_operations + self.head_operations / num_trials)

    @property
    def sample_bytes(self) -> int:
        """Bytes at the cut for one sample."""
        return sum(value.sample_bytes for value in self.values)

    def key(self, names: Mapping[int, str]) -> str:
        """Return a digest of what the values are, apart from the samples.

        It is the same for batches of different sizes, unless the code computes with the size.

        Args:
            names: The content of each input and constant that the trunk reads. What holds the
                batch is named by its place in the batch and by shape and dtype of a row.
        """
        known = dict(names)
        digest = hashlib.blake2b(digest_size=16)
        for place, call in enumerate(self.trunk.calls):
            kind = self.kinds.get(call.outputs[0]) if call.outputs else None
            given = size_args(call, self.trunk, kind)
            digest.update(f"{call.function} {_named(given, known)}\n".encode())
            for n, number in enumerate(call.outputs):
                known.setdefault(number, f"%{place}.{n}")
        for value in self.values:
            line = f"{known[value.number]} {value.kind} {value.shape} {value.dtype}\n"
            digest.update(line.encode())
        return digest.hexdigest()


def cuts_of(
    program: Program, *, batch: Collection[int], shared: Collection[int], num_rows: int
) -> list[Cut]:
    """Return ways to cut a program, the one that saves the most computation first.

    Later ones keep fewer bytes and compute more again. There is none if nothing that is worth
    keeping is proved to depend on one sample alone.

    Args:
        program: The program.
        batch: The inputs whose first dimension counts the samples.
        shared: The inputs that are the same at each step and in all trials.
        num_rows: Number of samples in the batch.
    """
    judged = _Judged(program, batch=batch, shared=shared, num_rows=num_rows)
    out: list[Cut] = []
    for products_again in (False, True) if judged.are_inputs_kept else ():
        cut = _Cutter(judged, products_again=products_again).cut()
        if (
            cut is not None
            and cut.num_operations >= MIN_OPERATIONS * cut.sample_bytes
            and (not out or cut.sample_bytes < out[-1].sample_bytes)
        ):
            out.append(cut)
    return out


class _Judged:
    """What is proved about each value and call of a program.

    Attributes:
        kinds: What each value is; None where nothing is proved.
        in_trunk: For each call whether its results are proved, so that it may run before all calls
            whose results are not.
        is_costly: The values per sample behind which there is a product or a convolution.
        are_inputs_kept: Whether no call writes into the batch, shared inputs or constants.
        changed: Values whose memory is written into after it was made.
    """

    def __init__(
        self, program: Program, *, batch: Collection[int], shared: Collection[int], num_rows: int
    ) -> None:
        self.program = program
        self.num_rows = num_rows
        self.root = roots(program.calls)
        self.in_trunk: list[bool] = []
        self.is_costly: set[int] = set()
        self.changed: set[int] = set()
        self.are_inputs_kept = True
        self.kinds: dict[int, Kind | None] = dict.fromkeys(range(program.num_inputs))
        self.kinds.update(dict.fromkeys(shared, Shared()))
        for number in batch:
            shape = program.meta[number][0]
            self.kinds[number] = PerSample(dim=0) if shape and shape[0] == num_rows else None
        for number in program.constants:
            self.kinds[number] = None if number in program.draws else Shared()
        self._outside = {*batch, *shared, *program.constants}
        self._read_by_head: set[int] = set()
        for call in program.calls:
            self.in_trunk.append(self._judge(call))

    def _judge(self, call: Call) -> bool:
        """Note what the results of a call are, and return whether that is proved."""
        written = {self.root_of(number) for number in writes(call)}
        self.changed |= written
        if written & self._outside:
            self.are_inputs_kept = False
        proof = None
        is_early = not written & self._read_by_head  # else what was read before would be changed
        if is_early and all(self.kinds.get(ref) is not None for ref in call.refs):
            proof = kinds_of(call, self.program, self.kinds, num_rows=self.num_rows)
        if proof is None:
            self._read_by_head |= {self.root_of(ref) for ref in call.refs}
            self.kinds.update(dict.fromkeys(call.outputs))
            for root in written:
                self._doubt(root)
            return False
        before = {number: self.kinds.get(number) for number in writes(call)}
        self.kinds.update(zip(call.outputs, proof, strict=True))
        self._note_written(call, before)
        is_costly = bool(num_operations(call, self.program)) or any(
            ref in self.is_costly for ref in call.refs
        )
        if is_costly:
            self.is_costly.update(
                number for number in call.outputs if isinstance(self.kinds[number], PerSample)
            )
            for root in written:
                self.is_costly |= self._aliases(root)
        return True

    def _note_written(self, call: Call, before: Mapping[int, Kind | None]) -> None:
        """Note what memory that a proved call has written into holds now."""
        for number, old in before.items():
            new = self.kinds[number] if number in call.outputs else None
            root = self.root_of(number)
            if isinstance(old, PerSample) and new == old:
                continue
            if isinstance(old, Shared) and isinstance(new, Shared):
                for alias in self._aliases(root):  # some of it may be another number now
                    self.kinds[alias] = Shared()
                continue
            is_only = self._aliases(root) == {number}
            self._doubt(root)
            if is_only and number == root:
                self.kinds[number] = new

    def root_of(self, number: int) -> int:
        """Return the value that owns the memory of a value."""
        return self.root.get(number, number)

    def _aliases(self, root: int) -> set[int]:
        return {number for number in self.kinds if self.root_of(number) == root}

    def _doubt(self, root: int) -> None:
        self.kinds.update(dict.fromkeys(self._aliases(root)))


class _Cutter:
    """Chooses the values to keep, and makes the two programs.

    Args:
        judged: What is proved about the program.
        products_again: Whether products are computed again if all that they need is kept anyway.
    """

    def __init__(self, judged: _Judged, *, products_again: bool) -> None:
        self._judged = judged
        self._program = judged.program
        self._products_again = products_again
        self._makers: dict[int, int] = {}
        self._touching: dict[int, list[int]] = {}
        for index, call in enumerate(self._program.calls):
            for number in call.outputs:
                self._makers.setdefault(number, index)
            if judged.in_trunk[index]:
                for root in {judged.root_of(n) for n in (*call.outputs, *writes(call))}:
                    self._touching.setdefault(root, []).append(index)
        self._kept: set[int] = set()
        self._again: set[int] = set()
        """Calls with proved results that the head runs, too."""
        self._done: set[int] = set()

    def cut(self) -> Cut | None:
        calls, in_trunk = self._program.calls, self._judged.in_trunk
        for call, early in zip(calls, in_trunk, strict=True):
            if not early:
                self._need(call.refs)
        self._need(number for number in self._program.outputs if number is not None)
        self._move_back()
        if not self._kept:
            return None
        kept = sorted(self._kept)
        trunk = replace(
            self._program,
            calls=tuple(call for call, early in zip(calls, in_trunk, strict=True) if early),
            outputs=tuple(kept),
        )
        trunk = replace(trunk, calls=_without_idle_views(alive(trunk), kept))
        places = dict.fromkeys(kept, torch.empty(0))
        head = replace(
            self._program,
            calls=tuple(c for n, c in enumerate(calls) if not in_trunk[n] or n in self._again),
            constants={**self._program.constants, **places},
        )
        head = replace(head, calls=alive(head))
        inputs = set(range(self._program.num_inputs))
        read = {ref for call in head.calls for ref in call.refs} | set(head.outputs)
        return Cut(
            values=tuple(self._value(number) for number in kept),
            trunk=trunk,
            head=head,
            head_reads=frozenset(n for n in read if n in inputs),
            trunk_reads=frozenset(ref for call in trunk.calls for ref in call.refs)
            & (inputs | self._program.constants.keys()),
            kinds=self._judged.kinds,
            num_operations=_sum_of_operations(trunk) / self._judged.num_rows,
            head_operations=_sum_of_operations(head) / self._judged.num_rows,
            head_elements=max(
                (head.meta[n][0].numel() for call in head.calls for n in call.outputs), default=0
            )
            / self._judged.num_rows,
        )

    def _value(self, number: int) -> CutValue:
        kind = self._judged.kinds[number]
        assert isinstance(kind, PerSample)
        shape, _, dtype = self._program.meta[number]
        rest = (*shape[: kind.dim], *shape[kind.dim + 1 :])
        return CutValue(number=number, kind=kind, shape=(kind.inner, *rest), dtype=dtype)

    def _need(self, numbers: Iterable[int]) -> None:
        """Give the head some values: keep them, or compute them there, too, if that is cheap."""
        queue = list(numbers)
        while queue:
            number = queue.pop()
            if number in self._done or self._judged.kinds.get(number) is None:
                continue
            self._done.add(number)
            if number in self._judged.is_costly:
                self._kept.add(number)
                continue
            for index in self._touching.get(self._judged.root_of(number), ()):
                if index not in self._again:
                    self._again.add(index)
                    queue += self._program.calls[index].refs

    def _move_back(self) -> None:
        """Replace kept values by smaller ones, or by none, from which they follow cheaply."""
        queue = sorted(self._kept, reverse=True)
        while queue:
            number = queue.pop(0)
            if number not in self._kept:
                continue
            call = self._program.calls[self._makers[number]]
            is_view = _is_view(call)
            if not is_view and self._judged.root_of(number) in self._judged.changed:
                continue
            costly = [ref for ref in call.refs if ref in self._judged.is_costly]
            fresh = {base for base in map(self._base, costly) if not self._is_at_hand(base)}
            if num_operations(call, self._program) and (fresh or not self._products_again):
                continue
            is_larger = is_view or sum(map(self._bytes, fresh)) < self._bytes(number)
            if not costly or not is_larger:
                continue
            self._kept.discard(number)
            self._again.add(self._makers[number])
            self._done.update(costly)
            self._need(ref for ref in call.refs if ref not in self._judged.is_costly)
            self._kept.update(ref for ref in costly if self._makers[ref] not in self._again)
            queue = sorted({*queue, *self._kept}, reverse=True)

    def _base(self, number: int) -> int:
        """Return the value that a value is a view of, over any number of views."""
        while _is_view(call := self._program.calls[self._makers[number]]):
            number = call.refs[0]
        return number

    def _is_at_hand(self, number: int) -> bool:
        """Return whether the head has a value."""
        return number in self._kept or self._makers[number] in self._again

    def _bytes(self, number: int) -> int:
        shape, _, dtype = self._program.meta[number]
        return shape.numel() * dtype.itemsize


def _is_view(call: Call) -> bool:
    return call.function in VIEWS or call.function.is_view


def _sum_of_operations(program: Program) -> int:
    return sum(num_operations(call, program) for call in program.calls)


def _without_idle_views(calls: Sequence[Call], outputs: Iterable[int]) -> tuple[Call, ...]:
    """Return the calls whose results something uses, and those that write."""
    used, out = set(outputs), []
    for call in reversed(calls):
        if writes(call) or not used.isdisjoint(call.outputs):
            out.append(call)
            used.update(call.refs)
    return tuple(reversed(out))


def _named(value: Any, names: Mapping[int, str]) -> str:
    """Return arguments as text, with the names of values in place of their numbers."""
    if isinstance(value, Ref):
        return names[value.value]
    if isinstance(value, list | tuple):
        return f"({', '.join(_named(each, names) for each in value)})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{k}={_named(v, names)}' for k, v in sorted(value.items()))})"
    return repr(value)
