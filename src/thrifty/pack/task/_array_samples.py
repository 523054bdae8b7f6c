"""The samples of data in memory: what they contain, and whether that has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thrifty.pack._frozen import digest_of


class Samples:
    """The rows of arrays of equal length, one row of each array for each sample.

    Attributes:
        arrays: The arrays.
        has_changed: Whether a call of ``look`` has found other values than there were at first.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        self.arrays = tuple(arrays)
        self.has_changed = False
        self._digests: dict[int, str] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.arrays[0])

    def digest(self, place: int) -> str:
        """Return the digest of one of the arrays, and watch it from the first call on."""
        if place not in self._digests:
            self._sums[place] = _sums(self.arrays[place])
            self._digests[place] = digest_of(self.arrays[place])
        return self._digests[place]

    def look(self) -> bool:
        """Return whether an array whose digest was asked for has changed since.

        Sums of rows and columns are compared, which takes about as long as reading the arrays
        once.

        >>> rows = torch.arange(6.0).view(3, 2)
        >>> samples = Samples([rows])
        >>> digest = samples.digest(0)
        >>> samples.look()
        False
        >>> rows.numpy()[1] += 1
        >>> samples.look()
        True
        """
        self.has_changed = self.has_changed or not all(
            torch.equal(now, before)
            for place, sums in self._sums.items()
            for now, before in zip(_sums(self.arrays[place]), sums, strict=True)
        )
        return self.has_changed


def _sums(array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of an array's bits, read as whole numbers, by row and by column."""
    rows = array.detach()
    rows = (torch.view_as_real(rows) if rows.is_complex() else rows).reshape(len(rows), -1)
    num_bytes = rows.shape[1] * rows.element_size()
    like = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if num_bytes % dtype.itemsize == 0
    )
    flat = rows.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % like.itemsize:
        flat = flat.clone()
    bits = flat.view(torch.uint8).view(like).view(len(rows), -1)
    return bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
