"""``thrifty catalogue``: price lists and their age."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.documents import check
from thrifty.cli._rent._rent_options import catalogue_command, chosen_offers
from thrifty.core import CloudError


HEADER = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,"
    "AvailabilityZone,Cloud,PricedOn"
)
TODAY = datetime.now(UTC).date()
ROWS = [
    f"t4.one,T4,1,4,16,0.5,0.2,east,east-1,aws,{TODAY - timedelta(days=40)}",
    f"l4.four,L4,4,4,16,3.2,,east,,gcp,{TODAY - timedelta(days=1)}",
    "cpu.one,,,4,16,0.3,,east,,aws,",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.csv").write_text("\n".join([HEADER, *ROWS]))
    return tmp_path


@pytest.fixture
def stored(folder):
    """A list that SkyPilot has stored."""
    path = folder / ".sky/catalogs/v8/aws/vms.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([HEADER, ROWS[0].replace("0.5", "0.6")]))
    return path


def said(*args):
    result = CliRunner().invoke(catalogue_command, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return [re.sub("  +", " | ", line.strip()) for line in result.output.splitlines()]


def test_offers_are_shown_with_their_age_the_cheapest_first(folder):
    head, *rows, source = said("show", "--catalogue", "mine.csv")
    assert head == "machine | where | $/h | spot $/h | Gbit/s | price of"
    forty, one = TODAY - timedelta(days=40), TODAY - timedelta(days=1)
    assert rows == [
        f"t4.one (1 T4) | aws east-1 | 0.500 | 0.200 | ? | {forty} (40 days ago)",
        "cpu.one | aws east | 0.300 | ? | no date",
        f"l4.four (4 L4) | gcp east | 3.200 | ? | {one} (1 day ago)",
    ]
    assert source == "3 offers from mine.csv"


def test_offers_may_be_chosen(folder):
    given = ("show", "--catalogue", "mine.csv")
    assert "1 offer from mine.csv" in said(*given, "--cloud", "gcp")
    assert "1 offer from mine.csv" in said(*given, "--accelerator", "")
    with pytest.raises(CloudError, match="no offer has region=\\('west',\\)"):
        said(*given, "--region", "west")


def test_without_any_list_the_small_table_counts(folder):
    assert said("show", "--cloud", "gcp")[-1].endswith("from the table that comes with thrifty")


def test_skypilots_lists_count_where_there_are_some(stored):
    assert said("show")[-1] == "1 offer from SkyPilot's catalogue"
    assert said("show", "--catalogue", "sky")[-1] == "1 offer from SkyPilot's catalogue"


def test_a_list_of_ones_own_replaces_offers_of_skypilots(stored):
    found, source = chosen_offers(["sky", Path("mine.csv")], cloud=(), region=(), accelerator=())
    assert source == "SkyPilot's catalogue, mine.csv"
    prices = {offer.instance_type: offer.price_usd_h for offer in found}
    assert prices == {"t4.one": 0.5, "l4.four": 3.2, "cpu.one": 0.3}


def test_skypilot_has_to_have_stored_something(folder):
    with pytest.raises(CloudError, match=r"SkyPilot has stored no vms\.csv"):
        said("show", "--catalogue", "sky")


def test_a_list_that_is_not_there(folder):
    assert any("does not exist" in line for line in said("show", "--catalogue", "no.csv"))


def test_refreshed_lists_are_dated(stored, monkeypatch):
    asked = []
    monkeypatch.setattr("thrifty.cloud._catalogue.refresh_skypilot", asked.extend)
    head, row = said("refresh")
    assert asked == ["aws"]
    assert head == "cloud | offers | oldest price | newest price"
    day = TODAY - timedelta(days=40)
    assert row == f"aws | 1 | {day} (40 days ago) | {day} (40 days ago)"


def test_lists_as_documents(stored, monkeypatch):
    monkeypatch.setattr("thrifty.cloud._catalogue.refresh_skypilot", list)
    forty, one = (str(TODAY - timedelta(days=days)) for days in (40, 1))

    def document(*args):
        result = CliRunner().invoke(catalogue_command, [*args, "--json"], catch_exceptions=False)
        return check(json.loads(result.output), f"catalogue {args[0]}")

    shown = document("show", "--catalogue", "mine.csv")
    assert shown["source"] == "mine.csv"
    assert [offer["instance_type"] for offer in shown["offers"]] == ["t4.one", "cpu.one", "l4.four"]
    assert [offer["priced_on"] for offer in shown["offers"]] == [forty, None, one]
    assert [offer["spot_usd_h"] for offer in shown["offers"]] == [0.2, None, None]
    assert document("refresh")["clouds"] == [
        {"cloud": "aws", "num_offers": 1, "oldest": forty, "newest": forty}
    ]
