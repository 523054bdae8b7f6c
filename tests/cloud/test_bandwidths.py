"""Stated networks of VM types."""

from __future__ import annotations

import csv
from datetime import date
from importlib.resources import files

import pytest

from thrifty.cloud import NetworkPriors, Offer
from thrifty.cloud._networks import Bandwidth, bandwidth_of


def rows():
    text = (files("thrifty.cloud") / "networks.csv").read_text()
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@pytest.mark.parametrize(
    ("cloud", "kind", "stated"),
    [
        ("aws", "g5.xlarge", Bandwidth(baseline_gbps=2.5, peak_gbps=10.0)),
        ("azure", "Standard_NC24ads_A100_v4", Bandwidth(peak_gbps=20.0, fabric=False)),
        ("gcp", "a4-highgpu-8g", Bandwidth(baseline_gbps=3200.0, peak_gbps=3200.0, fabric=True)),
        ("gcp", "a2-highgpu-1g", Bandwidth()),
        ("lambda", "gpu_8x_h100_sxm5", Bandwidth()),
    ],
)
def test_what_is_stated_is_read(cloud, kind, stated):
    assert bandwidth_of(cloud, kind) == stated


def test_every_row_is_possible_and_its_only_one():
    keys = [(row["Cloud"], row["InstanceType"]) for row in rows()]
    assert len(keys) == len(set(keys)) > 100
    for row in rows():
        stated = bandwidth_of(row["Cloud"], row["InstanceType"])
        assert stated.peak_gbps is not None
        assert 0 < (stated.baseline_gbps or stated.peak_gbps) <= stated.peak_gbps <= 6400, row
        assert row["Source"] == row["Cloud"]
        assert not row["AsOf"] or date.fromisoformat(row["AsOf"]) >= date(2024, 1, 1), row


def test_an_unknown_network_has_the_widest_interval():
    def spread(**network):
        offer = Offer(
            cloud="c", region="r", instance_type="t", accelerator="L4", price_usd_h=1.0, **network
        )
        return NetworkPriors().spread(offer)

    known, maximum, unknown = (
        spread(baseline_gbps=10.0, peak_gbps=10.0),
        spread(peak_gbps=10.0),
        spread(),
    )
    assert known.high < maximum.high == unknown.high
    assert unknown.low < maximum.low == known.low
    assert unknown.high / unknown.low > 20 * known.high / known.low
