"""Network bandwidth of VM types, as their vendors state it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Network of a VM type in Gbit/s.

    Args:
        baseline_gbps: bandwidth that the VM always has; None if unknown.
        peak_gbps: bandwidth that the VM has in bursts; None if unknown.
        fabric: whether the network gives remote memory access; None: judged by its bandwidth.
    """

    baseline_gbps: float | None = None
    peak_gbps: float | None = None
    fabric: bool | None = None


_UNKNOWN = Bandwidth()


def bandwidth_of(cloud: str, instance_type: str) -> Bandwidth:
    """Return the stated network of a VM type; all of it is None for a type without a figure.

    >>> bandwidth_of("aws", "g5.xlarge").baseline_gbps
    2.5
    """
    return _stated().get((cloud, instance_type), _UNKNOWN)


@cache
def _stated() -> dict[tuple[str, str], Bandwidth]:
    text = (files(__package__) / "networks.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        (row["Cloud"], row["InstanceType"]): Bandwidth(
            baseline_gbps=_gbps(row["BaselineGbps"]),
            peak_gbps=_gbps(row["PeakGbps"]),
            fabric={"yes": True, "no": False, "": None}[row["Fabric"]],
        )
        for row in rows
    }


def _gbps(text: str) -> float | None:
    return float(text) if text else None
