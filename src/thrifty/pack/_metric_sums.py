"""Means of metrics over a validation set, with the same arithmetic for one trial and for many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._outputs import as_number


class MetricSums:
    """Sums of metrics in double precision, each batch weighted by its number of samples.

    A value is a number, a tensor of one element, or a tensor with one element per trial. Equal
    values of the batches give means that are equal to the last bit, in any of these forms.

    >>> sums = MetricSums()
    >>> sums.add({"accuracy": 0.5}, num=3)
    >>> sums.add({"accuracy": torch.tensor(1.0)}, num=1)
    >>> sums.means()
    {'accuracy': 0.625}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._nums: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Any], *, num: int) -> None:
        """Add the metrics of a batch with ``num`` samples."""
        for name, value in metrics.items():
            # keep a tensor on its device: reading it would wait for the device at each batch
            weighted = _double(value) * num
            known = self._sums.get(name)
            self._sums[name] = weighted if known is None else known + weighted
            self._nums[name] = self._nums.get(name, 0) + num

    def means(self) -> dict[str, float]:
        """Return the means of one trial."""
        return {name: float(total) / self._nums[name] for name, total in self._sums.items()}

    def rows(self, size: int) -> list[dict[str, float]]:
        """Return the means of the first ``size`` of several trials."""
        table = {name: total.tolist() for name, total in self._sums.items()}
        return [
            {name: values[row] / self._nums[name] for name, values in table.items()}
            for row in range(size)
        ]


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return as_number(value)
    value = value.detach()
    # MPS devices have no double precision
    return (value.cpu() if value.device.type == "mps" else value).double()
