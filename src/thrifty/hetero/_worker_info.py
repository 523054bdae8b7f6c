"""What a worker reports about itself when the workers meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.perf import Power, StepCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's report as a row of numbers; it reveals only the number of its samples.

    Attributes:
        curve: Current speed curve.
        num_private: Samples that only this worker can read.
        power: Power model; zeros if none is declared.
        new: Whether the worker has just joined.
        structure: Digest of the names, shapes and types of its model's parameters and buffers.
        trained: Digest of the parameters that it trains.
    """

    curve: StepCurve
    num_private: int
    power: Power
    new: bool
    structure: int = 0
    trained: int = 0

    NUM = 10

    def to_row(self) -> list[float]:
        """Return the report as ``NUM`` numbers."""
        most = self.curve.most
        return [
            self.curve.sample_s,
            self.curve.fixed_s,
            -1.0 if most is None else float(most),
            float(self.curve.least),
            float(self.num_private),
            self.power.idle_w,
            self.power.busy_w,
            float(self.new),
            float(self.structure),  # 48 bits are exact in double precision
            float(self.trained),
        ]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> WorkerInfo:
        """Restore a report from the row that ``to_row`` returned.

        >>> info = WorkerInfo(
        ...     curve=StepCurve(sample_s=0.5),
        ...     num_private=3,
        ...     power=Power(idle_w=0, busy_w=1),
        ...     new=True,
        ... )
        >>> WorkerInfo.from_row(info.to_row()) == info
        True
        """
        sample_s, fixed_s, most, least, num_private, idle_w, busy_w, new, *digests = row
        return cls(
            curve=StepCurve(
                sample_s=sample_s,
                fixed_s=fixed_s,
                most=None if most < 0 else int(most),
                least=int(least),
            ),
            num_private=int(num_private),
            power=Power(idle_w=idle_w, busy_w=busy_w),
            new=bool(new),
            structure=int(digests[0]),
            trained=int(digests[1]),
        )
