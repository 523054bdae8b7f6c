"""Offers as rows of a CSV file in SkyPilot's schema: reading and writing."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

from thrifty.core import CloudError

from ._accelerators import ACCELERATORS, attached
from ._networks import bandwidth_of
from ._offer import Offer


SKYPILOT_FILE = "vms.csv"
"""Name of the file that may lack the column Cloud: its folder is named after the cloud."""

_NEEDED = (
    "InstanceType",
    "AcceleratorName",
    "AcceleratorCount",
    "vCPUs",
    "MemoryGiB",
    "Price",
    "Region",
)
_OPTIONAL = (
    "SpotPrice",
    "GpuInfo",
    "AvailabilityZone",
    "Cloud",
    "BaselineGbps",
    "PeakGbps",
    "Fabric",
    "PricedOn",
    "Source",
)
_MIB_PER_GIB = 1024
_UNREADABLE = (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)


def read_offers(path: Path, *, priced_on: date | None = None) -> list[Offer]:
    """Read the offers of one file.

    Args:
        path: the CSV file.
        priced_on: date for prices that have none in the file.

    Raises:
        CloudError: the file cannot be read, lacks a column, or has an invalid row.
    """
    cloud = path.resolve().parent.name if path.name == SKYPILOT_FILE else ""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            offers = [_read(line, cloud, priced_on) for line in _lines(file, path)]
    except OSError as error:
        raise CloudError(f"cannot read the catalogue {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CloudError(f"{path} is no CSV file in UTF-8: {error}") from error
    return attached(offer for offer in offers if offer is not None)


def write_offers(path: Path, offers: Iterable[Offer]) -> None:
    """Write a file that ``read_offers`` can read, atomically: either all of it or nothing.

    Raises:
        CloudError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*_NEEDED, *_OPTIONAL), lineterminator="\n")
            writer.writeheader()
            writer.writerows(_cells(offer) for offer in offers)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise CloudError(f"cannot write the catalogue {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Line:
    """One row, with its file and line number for error messages."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def error(self, message: str) -> CloudError:
        return CloudError(f"{self.path}, line {self.number}: {message}")

    def text(self, column: str) -> str:
        return self.cells.get(column, "").strip()

    def needed(self, column: str) -> str:
        text = self.text(column)
        if not text:
            raise self.error(f"{column} is blank")
        return text

    def value(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise self.error(f"{column} is {text!r}, and has to be a number") from None
        return None if math.isnan(value) else value

    def yes_or_no(self, column: str) -> bool | None:
        text = self.text(column).lower()
        if text not in {"", "yes", "no"}:
            raise self.error(f"{column} is {text!r}, and has to be yes, no or blank")
        return None if not text else text == "yes"

    def day(self, column: str) -> date | None:
        text = self.text(column)
        try:
            return date.fromisoformat(text) if text else None
        except ValueError:
            raise self.error(
                f"{column} is {text!r}, and has to be a date such as 2024-06-01"
            ) from None


def _lines(file: Iterable[str], path: Path) -> Iterator[_Line]:
    """Yield the rows below the header, without blank rows and those that start with #."""
    rows = csv.reader(file)
    header: list[str] | None = None
    for row in rows:
        if not row or row[0].startswith("#"):
            continue
        if header is None:
            header = _checked([name.strip() for name in row], path)
            continue
        line = _Line(path, rows.line_num, dict(zip(header, row, strict=False)))
        if len(row) != len(header):
            raise line.error(f"{len(row)} cells, and the header has {len(header)}")
        yield line
    if header is None:
        raise CloudError(f"{path} is empty: it has to start with the columns {_list(_NEEDED)}")


def _checked(header: list[str], path: Path) -> list[str]:
    needed = _NEEDED if path.name == SKYPILOT_FILE else (*_NEEDED, "Cloud")
    missing = [name for name in needed if name not in header]
    if missing:
        raise CloudError(
            f"{path} lacks the columns {_list(missing)}; there are {_list(header)}. They are "
            f"those of SkyPilot's {SKYPILOT_FILE}, besides Cloud"
        )
    return header


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _read(line: _Line, cloud: str, priced_on: date | None) -> Offer | None:
    """Return the row's offer; None if it cannot be rented or has only a part of a GPU."""
    name = line.text("AcceleratorName")
    count = line.value("AcceleratorCount") if name else None
    count = 1.0 if count is None else count
    price, spot = line.value("Price"), line.value("SpotPrice")
    if (price is None and spot is None) or name.lower().startswith("tpu") or count < 1 or count % 1:
        return None
    kind = line.text("InstanceType") if name else line.needed("InstanceType")
    cloud = (line.text("Cloud") or cloud or line.needed("Cloud")).lower()
    baseline, peak = line.value("BaselineGbps"), line.value("PeakGbps")
    fabric = line.yes_or_no("Fabric")
    if baseline is None and peak is None:
        stated = bandwidth_of(cloud, kind)
        baseline, peak = stated.baseline_gbps, stated.peak_gbps
        fabric = stated.fabric if fabric is None else fabric
    vcpus, memory = line.value("vCPUs"), line.value("MemoryGiB")
    fields: dict[str, Any] = {
        "cloud": cloud,
        "region": line.needed("Region"),
        "zone": line.text("AvailabilityZone"),
        "instance_type": kind,
        "accelerator": name,
        "accelerator_count": int(count),
        "vcpus": math.nan if vcpus is None else vcpus,
        "memory_gib": math.nan if memory is None else memory,
        "accelerator_memory_gib": _gpu_gib(name, line.text("GpuInfo")),
        "price_usd_h": price,
        "spot_usd_h": spot,
        "baseline_gbps": baseline,
        "peak_gbps": peak,
        "fabric": fabric,
        "priced_on": line.day("PricedOn") or priced_on,
        "source": line.text("Source"),
    }
    try:
        return Offer(**fields)
    except CloudError as error:
        raise line.error(str(error)) from None


@lru_cache(maxsize=1024)
def _gpu_gib(accelerator: str, info: str) -> float | None:
    """Return the memory of one GPU in GiB, by its GpuInfo or else by its data sheet."""
    for parse in (json.loads, ast.literal_eval):
        with suppress(*_UNREADABLE):
            size = _size_mib(parse(info))
            # Some lists give GiB in this field. No GPU has so little memory in MiB, so skip them.
            if size is not None and _MIB_PER_GIB <= size < math.inf:
                return size / _MIB_PER_GIB
    known = ACCELERATORS.get(accelerator)
    return known.memory_gib if known else None


def _size_mib(info: Any) -> float | None:
    """Return Gpus[0].MemoryInfo.SizeInMiB, ignoring the case of the keys."""
    for key in ("gpus", "memoryinfo", "sizeinmib"):
        if isinstance(info, list) and info:
            info = info[0]
        if not isinstance(info, dict):
            return None
        info = {str(name).lower(): value for name, value in info.items()}.get(key)
    return float(info) if isinstance(info, int | float) else None


def _cells(offer: Offer) -> dict[str, str]:
    info = ""
    if offer.accelerator and offer.accelerator_memory_gib is not None:
        size = {"SizeInMiB": offer.accelerator_memory_gib * _MIB_PER_GIB}
        info = json.dumps({"Gpus": [{"Name": offer.accelerator, "MemoryInfo": size}]})
    return {
        "InstanceType": offer.instance_type,
        "AcceleratorName": offer.accelerator,
        "AcceleratorCount": _number(offer.accelerator_count if offer.accelerator else None),
        "vCPUs": _number(offer.vcpus),
        "MemoryGiB": _number(offer.memory_gib),
        "GpuInfo": info,
        "Price": _number(offer.price_usd_h),
        "SpotPrice": _number(offer.spot_usd_h),
        "Region": offer.region,
        "AvailabilityZone": offer.zone,
        "Cloud": offer.cloud,
        "BaselineGbps": _number(offer.baseline_gbps),
        "PeakGbps": _number(offer.peak_gbps),
        "Fabric": "" if offer.fabric is None else "yes" if offer.fabric else "no",
        "PricedOn": offer.priced_on.isoformat() if offer.priced_on else "",
        "Source": offer.source,
    }


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(value)
