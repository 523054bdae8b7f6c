"""Documents about files, pages, this machine and machines to rent."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic takes that of Python from 3.12 on only

from ._database_documents import Document


class WrittenDocument(Document):
    """Printed by ``thrifty plot`` and ``thrifty export``."""

    study: str
    """Name of the study."""
    written: list[str]
    """Files that were written."""


class DashboardDocument(Document):
    """Printed by ``thrifty dashboard`` when the page can be opened; it runs until Ctrl-C."""

    storage: str
    """Address of the database, without its password."""
    address: str
    """Address of the page, with its token if it needs one."""


class CompletionDocument(Document):
    """Printed by ``thrifty completion``."""

    shell: str
    """Name of the shell."""
    script: str
    """The script that it evaluates."""


class CheckDocument(TypedDict):
    """The result of one check of ``thrifty doctor``."""

    section: str
    """What the check belongs to: "versions", "devices", ..."""
    name: str
    """Name of what was checked."""
    state: Literal["ok", "absent", "warning", "broken"]
    """The result."""
    detail: str
    """What was found, and how to mend it."""
    needed: bool
    """Whether every study or a given option needs it."""


class DoctorDocument(Document):
    """Printed by ``thrifty doctor``; the exit code is 1 if it is not ok."""

    ok: bool
    """Whether every required check passed."""
    checks: list[CheckDocument]
    """The checks, in order."""


class OfferDocument(TypedDict):
    """A machine that can be rented."""

    cloud: str
    """Name of the cloud."""
    region: str
    """Region, and zone if prices differ between zones."""
    instance_type: str
    """The cloud's name of the machine."""
    accelerator: str
    """Name of the GPU; empty for none."""
    accelerator_count: float
    """How many of them."""
    price_usd_h: float | None
    """Price of an hour on demand; null if it is not offered."""
    spot_usd_h: float | None
    """Price of an hour as a spot machine; null if it is not offered."""
    baseline_gbps: float | None
    """Network rate that it can always have; null if it is not known."""
    peak_gbps: float | None
    """Highest network rate; null if it is not known."""
    priced_on: str | None
    """Date of the price."""


class CatalogueDocument(Document):
    """Printed by ``thrifty catalogue show``."""

    source: str
    """Where the prices are from."""
    offers: list[OfferDocument]
    """All offers, the cheapest first."""


class CloudPrices(TypedDict):
    """How old the prices of a cloud are."""

    cloud: str
    """Name of the cloud."""
    num_offers: int
    """Its offers."""
    oldest: str | None
    """Date of the oldest price; null if no price has a date."""
    newest: str | None
    """Date of the newest price."""


class RefreshDocument(Document):
    """Printed by ``thrifty catalogue refresh``."""

    clouds: list[CloudPrices]
    """One row for each cloud."""


class Forecast90(TypedDict):
    """A forecast with its interval of 90 %."""

    low: float
    """Low end."""
    median: float
    """Median."""
    high: float
    """High end."""


class MachineDocument(TypedDict):
    """Some equal machines of a fleet."""

    cloud: str
    """Name of the cloud."""
    region: str
    """Region."""
    zone: str
    """Zone; empty if any will do."""
    instance_type: str
    """The cloud's name of the machine."""
    accelerator: str
    """Name of the GPU; empty for none."""
    accelerator_count: float
    """GPUs of each machine."""
    num: int
    """How many machines."""
    device_batch: int
    """Samples of a step on each device."""
    micro_batches: int
    """Parts of a step, one after the other."""
    precision: str | None
    """Precision of the training; null for that of the profile."""
    spot: bool
    """Whether they are spot machines."""
    usd_h: float
    """Price of an hour of one of them."""


class FleetDocument(TypedDict):
    """A fleet, and what training on it takes."""

    machines: list[MachineDocument]
    """Its machines."""
    step_s: Forecast90
    """Seconds of a step."""
    time_s: Forecast90
    """Seconds of the whole training."""
    cost_usd: Forecast90
    """Its cost."""
    checkpoint_s: float | None
    """Seconds between checkpoints; null if none are needed."""
    why: str
    """What limits it."""


class CloseCallDocument(TypedDict):
    """Another choice that is about as good."""

    factor: float
    """Factor of the profile's error at which the choice changes."""
    fleet: FleetDocument | None
    """The other choice; null for none."""


class ProbeDocument(TypedDict):
    """A measurement that is worth its price."""

    instance_type: str
    """The machine to rent."""
    where: str
    """The region, and the zone, if one is chosen."""
    num: int
    """How many of them."""
    spot: bool
    """Whether as spot machines."""
    finds: list[str]
    """What it measures."""
    usd: float
    """What it costs."""
    seconds: float
    """How long it takes."""
    gain: float
    """What it is expected to save, in dollars or seconds."""
    why: str
    """Why it is worth it."""


class RentDocument(Document):
    """Printed by ``thrifty rent``."""

    best: FleetDocument | None
    """The choice; null without ``--deadline`` or ``--budget``."""
    front: list[FleetDocument]
    """All fleets that no other is cheaper and faster than."""
    num_considered: int
    """Fleets that were considered."""
    close_calls: list[CloseCallDocument]
    """Choices that are about as good."""
    notes: list[str]
    """What the choice rests on."""
    probes: list[ProbeDocument]
    """What is worth measuring first, in order; empty without ``--probe``."""
    probes_ended: str
    """Why there are no further probes."""
