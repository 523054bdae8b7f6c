"""Where each tensor of a model lies in a row of the flat state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ._registry import UnfusableError


ALIGNMENT = 16
"""Elements: each tensor begins at a 64-byte boundary (for 4-byte numbers), so that vector loads never straddle one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One parameter: its name, shape, and where it begins in a row."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.shape.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trained parameters of a model, one after the other; ``width`` is P, the length of a row."""

    segments: tuple[Segment, ...]
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, torch.Tensor]]) -> Layout:
        """The layout for some parameters.

        Raises:
            UnfusableError: they have different types, or one of half precision.
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
        """Those of some parameters that are in a row, in its order."""
        wanted = set(names)
        return [segment.name for segment in self.segments if segment.name in wanted]

    def range_of(self, names: Iterable[str]) -> tuple[int, int] | None:
        """Where parameters that lie side by side begin and end in a row; None if none is in it."""
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
        """Each parameter as a view of ``rows``, ``[K, P]``: shape ``[K, *shape]``."""
        for segment in self.segments:
            yield rows[:, segment.start : segment.stop].view(rows.shape[0], *segment.shape)

    def row_views(
        self, row: torch.Tensor, shapes: Mapping[str, torch.Size] | None = None
    ) -> Iterator[torch.Tensor]:
        """Each parameter as a view of one row, ``[P]``; of a narrower model (``shapes``) the leading corner."""
        for segment in self.segments:
            view = row[segment.start : segment.stop].view(segment.shape)
            shape = segment.shape if shapes is None else shapes[segment.name]
            yield view if shape == segment.shape else corner(view, shape)

    def holds(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether a model of these parameters fits into the corners of this one's."""
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
    """The part of a wider tensor that is a narrower model's own."""
    return tensor[tuple(slice(n) for n in shape)]
