"""Layout of a model's tensors in a row of the flat state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ._registry import UnfusableError


ALIGNMENT = 16
"""Alignment of each tensor in a row, in elements.

For 4-byte numbers this is a 64-byte boundary, so that vector loads never straddle one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One parameter: its name, its shape and the position in a row at which it begins."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Position in a row at which it ends."""
        return self.start + self.shape.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trained parameters of a model, one after the other.

    Attributes:
        segments: The parameters, in the order of a row.
        width: P, the length of a row.
        dtype: The dtype of all parameters.
    """

    segments: tuple[Segment, ...]
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, torch.Tensor]]) -> Layout:
        """Return the layout for some parameters, given with their names.

        Raises:
            UnfusableError: The parameters differ in dtype, or have half precision.
        """
        segments, start = [], 0
        types = {parameter.dtype for _, parameter in parameters}
        if len(types) > 1:
            raise UnfusableError(
                f"its parameters have several types ({', '.join(sorted(map(str, types)))})"
            )
        if types & {torch.bfloat16, torch.float16}:
            raise UnfusableError("its parameters have half precision")
        for name, parameter in parameters:
            segments.append(Segment(name=name, shape=parameter.shape, start=start))
            start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        dtype = parameters[0][1].dtype if parameters else torch.float32
        return cls(segments=tuple(segments), width=start, dtype=dtype)

    def within(self, names: Iterable[str]) -> list[str]:
        """Return the given names that are in a row, in the order of the row."""
        wanted = set(names)
        return [segment.name for segment in self.segments if segment.name in wanted]

    def range_of(self, names: Iterable[str]) -> tuple[int, int] | None:
        """Return where adjacent parameters begin and end in a row; None if none is in it."""
        wanted = set(names)
        places = [n for n, segment in enumerate(self.segments) if segment.name in wanted]
        if not places:
            return None
        first, last = places[0], places[-1]
        assert len(places) == last - first + 1, "parameters of one group lie side by side"
        is_last = last + 1 == len(self.segments)
        return self.segments[first].start, self.width if is_last else self.segments[
            last + 1
        ].start

    def views(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each parameter, ``[K, *shape]``, as a view of ``rows``, ``[K, P]``."""
        for segment in self.segments:
            yield rows[:, segment.start : segment.stop].view(rows.shape[0], *segment.shape)

    def row_views(
        self, row: torch.Tensor, shapes: Mapping[str, torch.Size] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield each parameter as a view of one row, ``[P]``.

        Given the ``shapes`` of a narrower model, views are the leading corners of these shapes.
        """
        for segment in self.segments:
            view = row[segment.start : segment.stop].view(segment.shape)
            shape = segment.shape if shapes is None else shapes[segment.name]
            yield view if shape == segment.shape else corner(view, shape)

    def holds(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a model with these parameters fits into the corners of this layout's."""
        return all(
            segment.name in parameters
            and parameters[segment.name].dim() == len(segment.shape)
            and all(
                n <= m
                for n, m in zip(parameters[segment.name].shape, segment.shape, strict=True)
            )
            for segment in self.segments
        )


def corner(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the leading corner of a tensor: the part that belongs to a narrower model."""
    return tensor[tuple(slice(n) for n in shape)]
