"""Cost model that decides whether to slice a product by its dropout mask."""

from __future__ import annotations

import math
from dataclasses import dataclass


_MOVED = 6
"""Numbers that move to or from memory for each kept weight.

The weight is gathered twice, and its gradient is computed and added to the existing one. All other
accesses hit the cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedProduct:
    """Product of a batch in parts with a weight matrix, of which each part keeps a block.

    Attributes:
        parts: number of parts of the batch.
        rows: samples in each part.
        inputs: input features.
        outputs: output features.
        inputs_kept: input features that a part keeps.
        outputs_kept: output features that a part keeps.
    """

    parts: int
    rows: int
    inputs: int
    outputs: int
    inputs_kept: int
    outputs_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingCosts:
    """Time of a layer's three products, in units of one floating-point operation.

    The products are the forward one, and the backward ones for inputs and weight. With slicing,
    each part of the batch gathers its blocks of the weight twice and adds its gradient to them.
    With masking, everything is multiplied.

    The numbers were fitted to 108 products of 768 to 3072 features and batches of 96 to 1536 on two
    CPU cores. `python -m bench.bench_gyro --fit` prints how well they predict them.

    Args:
        flops_per_byte: floating-point operations that take as long as moving one byte.
        half_rows: samples in a part at which products run at half their speed.
        margin: factor by which slicing must be faster.

    >>> wide = {"inputs": 4096, "outputs": 4096, "inputs_kept": 2048, "outputs_kept": 2048}
    >>> costs = SlicingCosts()
    >>> costs.pays(SlicedProduct(parts=4, rows=64, **wide))
    True
    >>> costs.pays(SlicedProduct(parts=64, rows=4, **wide))
    False
    """

    flops_per_byte: float = 25.0
    half_rows: float = 8.0
    margin: float = 1.05

    def share(self, product: SlicedProduct) -> float:
        """Return the time with slicing as a share of the time with masking."""
        weights = product.inputs * product.outputs
        kept = product.inputs_kept * product.outputs_kept
        masked = self._products(product.parts * product.rows, weights) + self._bytes(3 * weights)
        of_part = self._products(product.rows, kept) + self._bytes(_MOVED * kept)
        return (product.parts * of_part + self._bytes(weights)) / masked

    def pays(self, product: SlicedProduct) -> bool:
        """Return whether slicing is faster, by at least the margin."""
        return self.margin * self.share(product) < 1

    def _products(self, rows: int, weights: int) -> float:
        return 6.0 * weights * (rows + self.half_rows)

    def _bytes(self, numbers: int) -> float:
        return self.flops_per_byte * 4 * numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingKernelCosts(SlicingCosts):
    """Time of a layer's three products on a GPU whose kernels read kept blocks in place.

    Nothing is gathered: each part reads its blocks of the weight twice, mostly from the cache, and
    the gradient of the whole weight is written once. Loads and operations overlap.

    Speeds and overhead are those of an H200 in float32 (`python -m bench.gyro.kernels` and
    `python -m bench.bench_gyro --device cuda`); the other numbers are guesses.

    Args:
        flops_per_byte: floating-point operations that take as long as moving one byte to or from
            memory.
        half_rows: samples in a part at which products run at half their speed; kernels adapt their
            tiles, so there is none.
        margin: factor by which slicing must be faster.
        flops_per_cached_byte: floating-point operations that take as long as reading one byte from
            the cache.
        speed: operations a second of the kernels, as a share of those of a dense product.
        large_speed: the same for parts of ``large_rows`` samples or more.
        large_rows: see ``large_speed``.
        tile_rows: rows of a part that read a block of the weight once.
        overhead: operations that take as long as the launches that slicing adds. They are 0.6 ms
            of Python for a layer; in a CUDA graph, a hundredth of that.

    >>> wide = {"inputs": 4096, "outputs": 4096, "inputs_kept": 2048, "outputs_kept": 2048}
    >>> costs = SlicingKernelCosts()
    >>> costs.pays(SlicedProduct(parts=16, rows=256, **wide))
    True
    >>> costs.pays(SlicedProduct(parts=16, rows=16, **wide))  # launches take longer
    False
    >>> narrow = {"inputs": 256, "outputs": 256, "inputs_kept": 128, "outputs_kept": 128}
    >>> costs.pays(SlicedProduct(parts=16, rows=16, **narrow))
    False
    """

    flops_per_byte: float = 17.0
    half_rows: float = 0.0
    margin: float = 1.05
    flops_per_cached_byte: float = 10.0
    speed: float = 0.6
    large_speed: float = 0.9
    large_rows: int = 128
    tile_rows: int = 64
    overhead: float = 3e10

    def share(self, product: SlicedProduct) -> float:
        """Return the time with slicing as a share of the time with masking."""
        weights = product.inputs * product.outputs
        kept = product.inputs_kept * product.outputs_kept
        masked = self._products(product.parts * product.rows, weights) + self._bytes(3 * weights)
        # A tile has at least 16 rows.
        rows = max(product.rows, 16)
        speed = self.large_speed if product.rows >= self.large_rows else self.speed
        operations = product.parts * self._products(rows, kept) / speed
        reads = 2 * product.parts * math.ceil(product.rows / self.tile_rows)
        cached = self.flops_per_cached_byte * 4 * kept * reads
        return (max(operations, cached) + self._bytes(weights) + self.overhead) / masked
