"""Whether a product is done sooner with what dropout has left of it."""

from __future__ import annotations

from dataclasses import dataclass


_MOVED = 6
"""Numbers that go to memory or come from it for each kept weight: gathered twice, a gradient made, and added to what is there; the rest finds them in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedProduct:
    """A product of a batch in parts with a weight, of which each part keeps some.

    Attributes:
        parts: of the batch.
        rows: of each part.
        inputs: features.
        outputs: features.
        inputs_kept: of them.
        outputs_kept: of them.
    """

    parts: int
    rows: int
    inputs: int
    outputs: int
    inputs_kept: int
    outputs_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingCosts:
    """Time of a layer's three products (forward, and backward for inputs and weight), in units of one floating point operation.

    Sliced, each part of the batch gathers its blocks of the weight twice and adds its gradient to them; masked, everything is multiplied. The numbers were fitted to 108 products of
    768 to 3072 features and batches of 96 to 1536 on two CPU cores: `python -m bench.bench_gyro --fit` says how well they foresee them.

    Args:
        flops_per_byte: operations that take as long as moving one byte.
        half_rows: samples in a part at which products run at half their speed.
        margin: by how much slicing has to be quicker.

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
        """Time sliced, as a share of time masked."""
        weights = product.inputs * product.outputs
        kept = product.inputs_kept * product.outputs_kept
        masked = self._products(product.parts * product.rows, weights) + self._bytes(
            3 * weights
        )
        of_part = self._products(product.rows, kept) + self._bytes(_MOVED * kept)
        return (product.parts * of_part + self._bytes(weights)) / masked

    def pays(self, product: SlicedProduct) -> bool:
        """Whether slicing is quicker."""
        return self.margin * self.share(product) < 1

    def _products(self, rows: int, weights: int) -> float:
        return 6.0 * weights * (rows + self.half_rows)

    def _bytes(self, numbers: int) -> float:
        return self.flops_per_byte * 4 * numbers
