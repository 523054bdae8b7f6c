"""SkyPilot: its price lists, offers as rows of CSV files in its schema, and its job files."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

from thrifty.core import CloudError, require
from thrifty.core._files import replacing

from ._hardware import HardwareEstimates
from ._networks import bandwidth_of
from ._offer import ACCELERATORS, ANYWHERE, Fleet, MachineGroup, Offer, attached


_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
"""Pattern of names that SkyPilot accepts."""

_RENDEZVOUS_PORT = 29500
_CLOUDS = ("aws", "azure", "gcp")


def to_skypilot(
    fleet: Fleet,
    *,
    name: str,
    run: str,
    setup: str | None = None,
    workdir: str | None = None,
    envs: Mapping[str, str] | None = None,
    mounts: Mapping[str, str] | None = None,
) -> str:
    """Return a SkyPilot task that rents the fleet and starts one process on each device.

    The script finds its part of the plan in the environment: ``THRIFTY_DEVICE_BATCH`` is the number
    of samples of a step on one device. Where they do not fit together, ``THRIFTY_MICRO_BATCHES`` is
    the number of equal parts in which the device trains them, one after the other. Where the plan
    has mixed precision, ``THRIFTY_PRECISION`` is the data type for autocast. For a fleet of
    spot machines, ``THRIFTY_CHECKPOINT_S`` is the number of seconds between two checkpoints.

    Args:
        fleet: Fleet of equal machines.
        name: Name of the task.
        run: The script and its arguments, as ``torchrun`` takes them.
        setup: Commands that run on each machine first.
        workdir: Folder that is copied to each machine.
        envs: Further environment variables.
        mounts: Further files that are copied to each machine, local paths by remote ones.

    Returns:
        YAML, for ``launch``, ``sky launch`` or ``sky jobs launch``.

    Raises:
        CloudError: The machines are not equal, or SkyPilot does not accept the name.
        MissingExtraError: PyYAML is not installed.

    >>> from thrifty.cloud import Fleet, Interval, Offer, MachineGroup
    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> some = Interval(median=1.0, low=1.0, high=1.0)
    >>> fleet = Fleet(
    ...     machines=(MachineGroup(offer=offer, num=2, batch=64),),
    ...     step_s=some,
    ...     time_s=some,
    ...     cost_usd=some,
    ... )
    >>> print(to_skypilot(fleet, name="digits", run="train.py").split("envs")[0], end="")
    name: digits
    num_nodes: 2
    resources:
      infra: aws/us-east-1
      instance_type: p3.2xlarge
      use_spot: false
    """
    if not _NAME.fullmatch(name):
        raise CloudError(
            "SkyPilot takes letters and digits with single dots, dashes or underscores "
            f"between them as a name, not {name!r}"
        )
    rented = _only(fleet)
    task: dict[str, Any] = {
        "name": name,
        "num_nodes": sum(each.num for each in fleet.machines),
        "resources": _resources(rented),
        "envs": {**_plan(fleet, rented), **(envs or {})},
        "run": _run(run, rented.offer.accelerator_count),
    }
    if workdir is not None:
        task["workdir"] = workdir
    if mounts:
        task["file_mounts"] = dict(mounts)
    if setup is not None:
        task["setup"] = setup
    text: str = _yaml().safe_dump(task, sort_keys=False, width=math.inf)
    return text


def time_estimator(
    offers: Iterable[Offer], seconds: Callable[[Offer, int, bool], float], *, num: int = 1
) -> Callable[[Any], int]:
    """Return a function for ``sky.Task.set_time_estimator``.

    With it, SkyPilot compares places by the cost of the training.

    Args:
        offers: Known offers, such as a catalogue.
        seconds: Function from an offer, a number of its machines, and whether they are spot, to the
            seconds of the training.
        num: Number of machines: the task's ``num_nodes``.

    Returns:
        Function from ``sky.Resources`` to whole seconds. It raises CloudError for machines that are
        not among the offers.

    >>> from types import SimpleNamespace
    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> estimator = time_estimator([offer], lambda offer, num, spot: 3600 / num, num=2)
    >>> estimator(
    ...     SimpleNamespace(
    ...         cloud="AWS",
    ...         region=None,
    ...         instance_type="p3.2xlarge",
    ...         use_spot=False,
    ...         accelerators=None,
    ...     )
    ... )
    1800
    """
    known: defaultdict[tuple[str, str], list[Offer]] = defaultdict(list)
    for offer in offers:
        known[offer.cloud.casefold(), offer.instance_type].append(offer)

    def estimate(resources: Any) -> int:
        spot = bool(resources.use_spot)
        cloud, kind = str(resources.cloud), resources.instance_type
        priced = [
            (price, offer)
            for offer in _matching(known.get((cloud.casefold(), kind), []), resources)
            if (price := offer.usd_h(spot=spot)) is not None
        ]
        if not priced:
            raise CloudError(
                f"the catalogue has no {cloud} {kind} in "
                f"{resources.region or 'any region'}{' as spot' if spot else ''}; restrict "
                "the task's resources to what it lists, or load another catalogue"
            )
        _, offer = min(priced, key=lambda pair: pair[0])
        return math.ceil(seconds(offer, num, spot))

    return estimate


def launch(task: str) -> str:
    """Let SkyPilot rent the machines of a task and start it; they are released when it ends.

    The task becomes a managed job, which SkyPilot starts again after an eviction or when machines
    fail. It goes on from the study's checkpoints.

    Args:
        task: Task from ``to_skypilot``.

    Returns:
        SkyPilot's request ID, for ``sky.stream_and_get``.

    Raises:
        CloudError: The text is not a task.
        MissingExtraError: SkyPilot is not installed.
    """
    sky, yaml = require("sky", package="skypilot", extra="sky"), _yaml()
    try:
        config = yaml.safe_load(task)
    except yaml.YAMLError as error:
        raise CloudError(f"the task is no YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("resources"), dict):
        raise CloudError("the task has no resources; write it by to_skypilot")
    name = config.get("name")
    asked = sky.Task.from_yaml_config(config)  # it takes entries out of its argument
    return str(require("sky.jobs", package="skypilot", extra="sky").launch(asked, name=name))


def refresh_skypilot(clouds: Iterable[str] = ()) -> None:
    """Let SkyPilot download its price lists again, whatever their age; files you edited stay.

    Args:
        clouds: Names of the clouds' folders; if empty: AWS, Azure and GCP.

    Raises:
        MissingExtraError: SkyPilot is not installed.
    """
    common = require("sky.catalog.common", package="skypilot", extra="sky")
    for cloud in tuple(clouds) or _CLOUDS:
        # SkyPilot downloads a list when it is accessed.
        _ = common.read_catalog(f"{cloud}/{SKYPILOT_FILE}", pull_frequency_hours=0).columns


def _only(fleet: Fleet) -> MachineGroup:
    """Return one of the machines if all are equal, and raise CloudError otherwise."""
    kinds = {_kind(each) for each in fleet.machines}
    if not kinds:
        raise CloudError("the fleet has no machines")
    if len(kinds) > 1:
        raise CloudError(
            "SkyPilot rents one VM type, in one region, with one batch and either as spot or "
            f"not, for a task, and this fleet is {fleet}; about as fast is {_equal(fleet)}, "
            "or plan without mixed VM types"
        )
    return fleet.machines[0]


def _kind(rented: MachineGroup) -> tuple[Any, ...]:
    offer = rented.offer
    place = offer.cloud, offer.region
    return (
        *place,
        offer.instance_type,
        offer.accelerator,
        rented.spot,
        rented.batch,
        rented.num_micro,
        rented.precision,
    )


def _equal(fleet: Fleet) -> str:
    """Return the cheapest fleet of one of the types that has the speed of all devices together."""
    try:
        speeds = [1 / HardwareEstimates().compute(each.offer).median for each in fleet.machines]
    except CloudError:
        speeds = [1.0] * len(fleet.machines)
    speeds = [
        speed * each.offer.accelerator_count
        for speed, each in zip(speeds, fleet.machines, strict=True)
    ]
    whole = sum(speed * each.num for speed, each in zip(speeds, fleet.machines, strict=True))
    ways = []
    for speed, each in zip(speeds, fleet.machines, strict=True):
        # Subtract a little, so that rounding errors do not add one more machine.
        num = math.ceil(whole / speed - 1e-9)
        cost = each.usd_h / each.num * num
        ways.append((cost, each.offer.spell(num, spot=each.spot)))
    cost, way = min(ways)
    return f"{way} at ${cost:.2f} an hour"


def _resources(rented: MachineGroup) -> dict[str, Any]:
    offer = rented.offer
    resources: dict[str, Any] = {
        # No zone, so that SkyPilot searches the whole region for capacity.
        "infra": offer.cloud if offer.region == ANYWHERE else f"{offer.cloud}/{offer.region}",
        "instance_type": offer.instance_type,
        "use_spot": rented.spot,
    }
    if offer.cloud == "gcp" and offer.accelerator:
        # On other clouds the VM type implies the GPUs.
        resources["accelerators"] = {offer.accelerator: offer.accelerator_count}
    if rented.spot:
        resources["job_recovery"] = "FAILOVER"
    return resources


def _plan(fleet: Fleet, rented: MachineGroup) -> dict[str, str]:
    plan = {"THRIFTY_DEVICE_BATCH": str(rented.batch)}
    if rented.num_micro > 1:
        plan["THRIFTY_MICRO_BATCHES"] = str(rented.num_micro)
    if rented.precision != "float32":
        plan["THRIFTY_PRECISION"] = rented.precision
    if fleet.checkpoint_s is not None:
        plan["THRIFTY_CHECKPOINT_S"] = f"{fleet.checkpoint_s:.0f}"
    return plan


def _run(script: str, devices: int) -> str:
    return (
        'torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK"'
        f" --nproc-per-node={devices}"
        ' --master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
        f" --master-port={_RENDEZVOUS_PORT} {script}\n"
    )


def _matching(offers: Iterable[Offer], resources: Any) -> list[Offer]:
    """Return the offers in the region with the requested GPUs."""
    region = resources.region
    here = [each for each in offers if region is None or each.region in {region, ANYWHERE}]
    wanted = resources.accelerators
    if wanted is not None:
        return [each for each in here if wanted == {each.accelerator: each.accelerator_count}]
    # Google's VM types are the same with and without GPUs; elsewhere the VM type implies them.
    return [each for each in here if not each.accelerator] or here


def _yaml() -> Any:
    return require("yaml", package="pyyaml", extra="cloud")


# -- offers as rows of CSV files -------------------------------------------------------------------


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
        path: The CSV file.
        priced_on: Date for prices that have none in the file.

    Raises:
        CloudError: The file cannot be read, lacks a column, or has an invalid row.
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
        CloudError: The file cannot be written.
    """
    try:
        with replacing(path) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, (*_NEEDED, *_OPTIONAL), lineterminator="\n")
            writer.writeheader()
            writer.writerows(_cells(offer) for offer in offers)
    except OSError as error:
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
