"""The offers that can be rented, and the estimates of their speed."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path

from thrifty.cloud import ACCELERATORS, Beliefs, Catalogue, SpotMarket
from thrifty.core import CloudError

from ._rent_options import Asked


_THREADS = re.compile(r"(\d+) thread\(s\)$")


def load_catalogue(asked: Asked) -> tuple[Catalogue, str]:
    """Load the selected offers, and return them with the source of their prices.

    Raises:
        CloudError: The selection is empty, or a file is invalid.
    """
    if asked.catalogue:
        found, source = Catalogue.load(*asked.catalogue), ", ".join(map(str, asked.catalogue))
    elif any(Path("~/.sky/catalogs").expanduser().glob("v*/*/vms.csv")):
        found, source = Catalogue.from_skypilot(), "SkyPilot's catalogue"
    else:
        found, source = Catalogue.shipped(), "the table that comes with thrifty"
    wanted = found.where(
        cloud=asked.cloud or None,
        region=asked.region or None,
        accelerator=asked.accelerator or None,
    )
    return wanted, source


def age_of(catalogue: Catalogue, source: str, *, today: date) -> str:
    """Describe the age of the prices."""
    days = sorted(offer.priced_on for offer in catalogue if offer.priced_on is not None)
    when = "without a date"
    if days:
        when = f"of {days[0]}" + (f" to {days[-1]}" if days[-1] != days[0] else "")
    stale = len(catalogue.stale(today))
    old = f"; {stale} of {len(catalogue)} offers are older than 30 days" if stale else ""
    return f"prices: {source}, {when}{old}"


def load_market(asked: Asked) -> SpotMarket | None:
    """Load the history of spot prices; None if no file is given.

    Raises:
        CloudError: The file is invalid.
    """
    if asked.prices is None:
        return None
    market = SpotMarket.from_aws_csv(asked.prices)
    return replace(market, unknown_evictions_per_h=asked.evictions)


def beliefs_of(device: str, *, named: str | None) -> Beliefs:
    """Return the hardware estimates for a profiled device.

    Args:
        device: Name of the device in the profile.
        named: Accelerator name given by the user; "" for CPUs, None if not given.

    Raises:
        CloudError: The device is unknown.
    """
    threads = _THREADS.search(device)
    vcpus = float(threads[1]) if threads else 1.0
    if named is not None:
        if named and named not in ACCELERATORS:
            raise CloudError(
                f"--device {named}: use one of {', '.join(sorted(ACCELERATORS))}, or an empty name "
                "for processors"
            )
        return Beliefs(profiled=named, profiled_vcpus=vcpus)
    if threads:
        return Beliefs(profiled_vcpus=vcpus)
    words = {word.upper() for word in re.split(r"[^A-Za-z0-9]+", device)}
    known = [name for name in ACCELERATORS if set(name.upper().split("-")) <= words]
    if not known:
        raise CloudError(
            f"the profile is of {device!r}, which is none of {', '.join(sorted(ACCELERATORS))}: "
            "say by --device which of them it is most like"
        )
    return Beliefs(profiled=max(known, key=len))
