"""Catalogues of machines to rent: reading, narrowing down and writing tables."""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from importlib.resources import files

import pytest
from hypothesis import given, settings, strategies as st

from tests.counting import lines_run
from thrifty.cloud import ACCELERATORS, Offer
from thrifty.cloud._catalogue import Catalogue
from thrifty.core import CloudError


pytestmark = pytest.mark.slow


HEADER = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,"
    "Price,SpotPrice,Region,AvailabilityZone"
)
V100 = (
    "\"{'Gpus': [{'Name': 'V100', 'Manufacturer': 'NVIDIA', 'Count': 4, "
    "'MemoryInfo': {'SizeInMiB': 16384}}], 'TotalGpuMemoryInMiB': 65536}\""
)
P3 = f"p3.8xlarge,V100,4.0,32.0,244.0,{V100},12.24,3.672000,us-east-1,use1-az2"
C5 = "c5.4xlarge,,,16.0,32.0,,0.68,0.3,us-east-1,use1-az2"


@pytest.fixture
def vms(tmp_path):
    """Return a function that writes SkyPilot's file of a cloud."""

    def write(*rows, cloud="aws", header=HEADER, version="v7"):
        folder = tmp_path / version / cloud
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "vms.csv"
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        return path

    return write


def only(path):
    (offer,) = Catalogue.load(path)
    return offer


def test_a_row_of_skypilot(vms):
    assert only(vms(P3)) == Offer(
        cloud="aws",
        region="us-east-1",
        zone="use1-az2",
        instance_type="p3.8xlarge",
        accelerator="V100",
        accelerator_count=4,
        vcpus=32.0,
        memory_gib=244.0,
        accelerator_memory_gib=16.0,
        price_usd_h=12.24,
        spot_usd_h=3.672,
        baseline_gbps=10.0,
        peak_gbps=10.0,
    )


def test_columns_may_stand_in_any_order_and_some_may_lack(vms):
    header = "Price,Region,vCPUs,MemoryGiB,InstanceType,AcceleratorName,AcceleratorCount,Arch"
    offer = only(vms("0.9,eastus,6,56,Standard_NC6,K80,1,x86_64", cloud="azure", header=header))
    assert (offer.cloud, offer.zone, offer.price_usd_h) == ("azure", "", 0.9)
    assert (offer.spot_usd_h, offer.baseline_gbps) == (None, None)


def test_a_machine_without_gpus_is_one_device(vms):
    offer = only(vms(C5))
    assert (offer.accelerator, offer.accelerator_count) == ("", 1)
    assert offer.device_memory_bytes == 32 * 2**30


@pytest.mark.parametrize(
    "row",
    [
        P3.replace("12.24,3.672000", ","),
        P3.replace("12.24,3.672000", "nan,NaN"),
        P3.replace(",4.0,", ",0.5,"),
        P3.replace(",4.0,", ",1.5,"),
        P3.replace(",4.0,", ",0,"),
        ",tpu-v6e-64,1,,,tpu-v6e-64,172.8,54.9,us-east-1,use1-az2",
        "TPU-VM,TPU-v3-8,1,,,,8.8,2.6,us-east-1,use1-az2",
    ],
)
def test_what_is_left_out(vms, row):
    assert [offer.instance_type for offer in Catalogue.load(vms(row, C5))] == ["c5.4xlarge"]


def test_a_blank_field_is_unknown_or_means_one_accelerator(vms):
    assert only(vms(P3.replace(",4.0,", ",,"))).accelerator_count == 1
    spot = only(vms(P3.replace("12.24", "")))
    assert (spot.price_usd_h, spot.spot_usd_h) == (None, 3.672)
    assert only(vms(P3.replace("3.672000", "nan"))).spot_usd_h is None
    unknown = only(vms(C5.replace("16.0,32.0", ",")))
    assert str(unknown.vcpus) == str(unknown.memory_gib) == "nan"


@pytest.mark.parametrize(
    ("name", "info", "gib"),
    [
        ("V100", V100.replace("16384", "32768"), 32.0),
        ("V100", "\"{'gpus': [{'name': 'v100', 'MemoryInfo': {'sizeinmib': 8192}}]}\"", 8.0),
        ("V100", '"{""Gpus"": [{""MemoryInfo"": {""SizeInMiB"": 8192, ""ECC"": true}}]}"', 8.0),
        # use the data sheet where the list has no value, an invalid one, or GiB
        ("V100", "", 16.0),
        ("V100", "V100", 16.0),
        ("V100", "\"{'Gpus': []}\"", 16.0),
        ("V100", "\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': '8192'}}]}\"", 16.0),
        ("V100", "\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 32}}]}\"", 16.0),
        ("V100", "\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 1e999}}]}\"", 16.0),
        ("V100", "\"{'Gpus': [{'MemoryInfo': {'SizeInMiB': 1" + "0" * 400 + '}}]}"', 16.0),
        ("V100", "[" * 1000, 16.0),
        ("V100", "-" * 9000 + "1", 16.0),
        ("V100", "{[]: 1}", 16.0),
        ("V100", "__import__('os').abort()", 16.0),
        ("V1000", "V1000", None),
    ],
)
def test_the_memory_of_a_gpu(vms, name, info, gib):
    row = P3.replace(V100, info).replace(",V100,", f",{name},")
    assert only(vms(row)).accelerator_memory_gib == gib


@pytest.mark.parametrize(
    ("kind", "cloud", "gbps"),
    [
        ("p3.16xlarge", "aws", (25.0, 25.0)),
        ("g4dn.xlarge", "aws", (5.0, 25.0)),
        ("p6-b200.48xlarge", "aws", (3200.0, 3200.0)),
        ("a3-ultragpu-8g", "gcp", (3200.0, 3200.0)),
        ("Standard_NC24ads_A100_v4", "azure", (None, 20.0)),
        ("p3.17xlarge", "aws", (None, None)),
        ("g4dn.xlarge", "another", (None, None)),
    ],
)
def test_stated_networks_are_known(vms, kind, cloud, gbps):
    offer = only(vms(P3.replace("p3.8xlarge", kind), cloud=cloud))
    assert (offer.baseline_gbps, offer.peak_gbps) == gbps


@pytest.mark.parametrize(("given_gbps", "kept"), [("3,", (3.0, None)), (",9", (None, 9.0))])
def test_a_network_that_is_given_is_kept(vms, given_gbps, kept):
    path = vms(f"{P3},{given_gbps}", header=f"{HEADER},BaselineGbps,PeakGbps")
    assert (only(path).baseline_gbps, only(path).peak_gbps) == kept


@pytest.mark.parametrize(("given", "fabric"), [("yes", True), ("NO", False), ("", None)])
def test_a_fabric_that_is_given_is_kept(vms, given, fabric):
    assert only(vms(f"{P3},{given}", header=f"{HEADER},Fabric")).fabric is fabric


def test_a_stated_fabric_gives_way_to_the_one_in_the_list(vms):
    nd = P3.replace("p3.8xlarge", "Standard_ND96isr_H100_v5")
    assert only(vms(nd, cloud="azure")).fabric is True
    given = only(vms(f"{nd},no", cloud="azure", header=f"{HEADER},Fabric"))
    assert (given.fabric, given.baseline_gbps) == (False, 3200.0)


def test_a_fabric_is_there_or_not(vms):
    with pytest.raises(CloudError, match=r"line 2: Fabric is 'efa', and has to be yes, no"):
        Catalogue.load(vms(f"{P3},EFA", header=f"{HEADER},Fabric"))


def test_a_later_file_replaces_what_an_earlier_one_has(vms, tmp_path):
    mine = tmp_path / "mine.csv"
    mine.write_text(f"{HEADER},Cloud\n{P3.replace('12.24', '10')},AWS\n", encoding="utf-8-sig")
    both = Catalogue.load(vms(P3, C5), mine)
    assert {offer.instance_type: offer.price_usd_h for offer in both} == {
        "p3.8xlarge": 10.0,
        "c5.4xlarge": 0.68,
    }
    assert len(both) == 2


def test_comments_and_blank_lines(vms):
    path = vms("# mine, of today", "", P3)
    path.write_text("# Prices,\n" + path.read_text())
    assert only(path).instance_type == "p3.8xlarge"
    with pytest.raises(CloudError, match="line 5: "):
        Catalogue.load(vms("# mine", "", P3, P3.replace("12.24", "much")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (P3.replace("12.24", "$12"), r"line 3: Price is '\$12', and has to be a number"),
        (P3.replace("3.672000", "cheap"), "line 3: SpotPrice is 'cheap'"),
        (P3.replace("32.0", "many"), "line 3: vCPUs is 'many'"),
        (P3.replace("12.24", "-1"), "line 3: aws p3.8xlarge in use1-az2: price_usd_h is -1.0"),
        (P3.replace("us-east-1", ""), "line 3: Region is blank"),
        (C5.replace("c5.4xlarge", ""), "line 3: InstanceType is blank"),
        (P3 + ",1", "line 3: 11 cells, and the header has 10"),
        ("p3.8xlarge,V100", "line 3: 2 cells"),
    ],
)
def test_rows_that_make_no_sense(vms, row, message):
    path = vms(C5, row)
    with pytest.raises(CloudError, match=message) as error:
        Catalogue.load(path)
    assert str(path) in str(error.value)
    assert str(error.value).count(str(path)) == 1


def test_dates_that_are_none(vms):
    header = f"{HEADER},PricedOn"
    assert only(vms(f"{P3},2024-06-01", header=header)).priced_on == date(2024, 6, 1)
    assert only(vms(f"{P3},", header=header)).priced_on is None
    with pytest.raises(CloudError, match=r"line 2: PricedOn is '1\.6\.24', and .* 2024-06-01"):
        Catalogue.load(vms(f"{P3},1.6.24", header=header))


def test_where_a_price_was_read_is_kept(vms):
    assert only(vms(f"{P3},page", header=f"{HEADER},Source")).source == "page"
    assert only(vms(P3)).source == ""


def test_columns_that_lack(vms, tmp_path):
    with pytest.raises(CloudError, match="lacks the columns Price, Region; there are Inst"):
        Catalogue.load(vms(header=HEADER.replace(",Price", ",Cost").replace("Region", "Place")))
    mine = tmp_path / "mine.csv"
    mine.write_text(f"{HEADER}\n{P3}\n")
    with pytest.raises(CloudError, match="lacks the columns Cloud; there are"):
        Catalogue.load(mine)
    mine.write_text(f"{HEADER},Cloud\n{P3},\n")
    with pytest.raises(CloudError, match="line 2: Cloud is blank"):
        Catalogue.load(mine)


def test_files_that_are_none(tmp_path):
    with pytest.raises(CloudError, match=r"cannot read the catalogue .*none\.csv: No such file"):
        Catalogue.load(tmp_path / "none.csv")
    path = tmp_path / "mine.csv"
    path.write_text("# nothing\n")
    with pytest.raises(CloudError, match="is empty: it has to start with the columns Inst"):
        Catalogue.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CloudError, match="is no CSV file in UTF-8"):
        Catalogue.load(path)


def test_catalogues_without_offers(vms):
    for load in (Catalogue.load, lambda: Catalogue.load(vms()), lambda: Catalogue(offers=())):
        with pytest.raises(CloudError, match="a catalogue has at least one offer"):
            load()


# Google's list has GPUs and machines in separate rows.

GOOGLE = (
    "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,"
    "Region,AvailabilityZone,Price,SpotPrice"
)
A2 = "a2-highgpu-1g,12.0,85.0,,,,us-central1,us-central1-a,0.75,0.25"
N1 = "n1-standard-8,8.0,30.0,,,,us-central1,us-central1-a,0.375,0.125"


def gpu(name="A100", count=1, zone="us-central1-a", price=3.0, spot=1.0):
    return f",,,{name},{count},,us-central1,{zone},{price},{spot}"


def google(vms, *rows):
    found = Catalogue.load(vms(*rows, cloud="gcp", header=GOOGLE))
    return [
        (offer.instance_type, offer.accelerator, offer.price_usd_h, offer.spot_usd_h)
        for offer in found
    ]


def test_a_machine_of_google_costs_what_it_and_its_gpus_cost(vms):
    assert google(vms, A2, gpu()) == [("a2-highgpu-1g", "A100", 3.75, 1.25)]
    (offer,) = Catalogue.load(vms(A2, gpu(), cloud="gcp", header=GOOGLE))
    assert (offer.accelerator_count, offer.accelerator_memory_gib, offer.vcpus) == (1, 40, 12)


def test_a_machine_that_can_be_rented_without_gpus_is_offered_so_too(vms):
    wanted = [("n1-standard-8", "", 0.375, 0.125), ("n1-standard-8", "T4", 3.375, 1.125)]
    assert google(vms, N1, gpu("T4")) == wanted
    assert google(vms, N1, gpu("T4", count=2)) == wanted[:1]
    assert google(vms, N1, gpu("A100")) == wanted[:1]


def test_a_machine_that_cannot_be_rented_without_gpus_needs_those_of_its_zone(vms):
    plain = ("n1-standard-8", "", 0.375, 0.125)
    for other in (gpu(zone="us-central1-b"), gpu(count=2), gpu("A100-80GB"), gpu("T4", count=2)):
        assert google(vms, N1, A2, other) == [plain]


def test_gpus_that_have_one_price_only(vms):
    assert google(vms, A2, gpu(spot="")) == [("a2-highgpu-1g", "A100", 3.75, None)]
    assert google(vms, A2, gpu(price="")) == [("a2-highgpu-1g", "A100", None, 1.25)]
    nothing = A2.replace("0.75", "")
    assert google(vms, N1, nothing, gpu(spot="")) == [("n1-standard-8", "", 0.375, 0.125)]


def test_a_list_that_has_machines_with_their_gpus_is_left_as_it_is(vms):
    whole = "a2-highgpu-1g,12.0,85.0,A100,1,,us-central1,us-central1-a,3.67,1.1"
    assert google(vms, whole) == [("a2-highgpu-1g", "A100", 3.67, 1.1)]
    assert google(vms, whole, N1, gpu("T4"))[0] == ("a2-highgpu-1g", "A100", 3.67, 1.1)


# SkyPilot's folder


def test_the_newest_schema_counts(vms, tmp_path):
    for version, price in (("v9", "9"), ("v10", "10"), ("v8", "8")):
        vms(P3.replace("12.24", price), version=version)
    (tmp_path / "v11" / "common").mkdir(parents=True)
    (tmp_path / "vx" / "aws").mkdir(parents=True)
    (offer,) = Catalogue.from_skypilot(tmp_path)
    assert offer.price_usd_h == 10.0


def test_all_clouds_of_a_schema_count(vms, tmp_path):
    vms(P3), vms(C5, cloud="other")
    assert {offer.cloud for offer in Catalogue.from_skypilot(tmp_path)} == {"aws", "other"}


def test_prices_of_skypilot_are_of_the_day_of_the_file(vms, tmp_path):
    noon = time.mktime((2024, 6, 1, 12, 0, 0, 0, 0, -1))
    os.utime(vms(P3), (noon, noon))
    (offer,) = Catalogue.from_skypilot(tmp_path)
    assert offer.priced_on == date(2024, 6, 1)


def test_skypilots_folder_is_found(vms, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    vms(P3, version=".sky/catalogs/v8")
    assert len(Catalogue.from_skypilot()) == 1


def test_skypilot_has_stored_nothing(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CloudError, match=r"has stored no vms\.csv in .*shipped\(\)"):
            Catalogue.from_skypilot(folder)


# narrowing down


@pytest.fixture(scope="module")
def shipped():
    return Catalogue.shipped()


FIELDS = ("cloud", "region", "accelerator", "instance_type")


@given(st.data())
def test_where_is_a_filter(shipped, data):
    wanted = {}
    for name in FIELDS:
        there = sorted({getattr(offer, name) for offer in shipped})
        names = data.draw(st.none() | st.sets(st.sampled_from(there), min_size=1))
        if names is not None:
            wanted[name] = names
    spot = data.draw(st.sampled_from([None, True, False]))
    expected = [
        offer
        for offer in shipped
        if all(getattr(offer, name) in names for name, names in wanted.items())
        and (spot is None or offer.usd_h(spot=spot) is not None)
    ]
    if expected:
        assert list(shipped.where(**wanted, spot=spot)) == expected
    else:
        with pytest.raises(CloudError, match="no offer"):
            shipped.where(**wanted, spot=spot)


def test_names_are_the_same_in_upper_and_lower_case(shipped):
    assert shipped.where(cloud="AWS", accelerator="v100") == shipped.where(
        cloud=("aws",), accelerator=["V100"]
    )


def test_machines_without_gpus_can_be_asked_for(shipped):
    assert {offer.accelerator for offer in shipped.where(accelerator="")} == {""}


def test_nothing_left_says_which_filter_and_what_there_is(shipped):
    with pytest.raises(CloudError) as error:
        shipped.where(cloud="azure", accelerator="H1000")
    assert str(error.value).startswith(
        "no offer with cloud='azure' has accelerator='H1000'; did you mean 'H100'"
    )
    assert str(error.value).endswith(
        " There is 'A100', 'A100-80GB', 'H100', 'H100-NVL', 'H200', 'MI300X', 'T4'"
    )
    with pytest.raises(CloudError, match=r"^no offer has cloud='oracle': there is 'aws', 'az"):
        shipped.where(cloud="oracle")
    with pytest.raises(CloudError, match=r"cloud='azure' region='eastus' has instance_type="):
        shipped.where(cloud="azure", region="eastus", instance_type="Standard_NC7")
    with pytest.raises(CloudError, match=r"there is '.*' and \d+ more$"):
        shipped.where(instance_type="?")


def test_nothing_left_as_spot_or_on_demand(vms):
    dear, spot = vms(P3.replace("3.672000", "")), vms(P3.replace("12.24", ""), cloud="b")
    with pytest.raises(CloudError, match=r"no offer with cloud='aws' has a price as spot"):
        Catalogue.load(dear).where(cloud="aws", spot=True)
    with pytest.raises(CloudError, match=r"^no offer has a price on demand"):
        Catalogue.load(spot).where(spot=False)


def test_prices_grow_stale(vms):
    header = f"{HEADER},PricedOn"
    rows = [f"{P3.replace('az2', str(day))},2024-06-0{day}" for day in (1, 2)]
    catalogue = Catalogue.load(vms(*rows, P3 + ",", header=header))
    day = date(2024, 6, 1)
    assert [str(offer.priced_on) for offer in catalogue.stale(day)] == ["None"]
    later = catalogue.stale(day + timedelta(days=31))
    assert [str(offer.priced_on) for offer in later] == ["2024-06-01", "None"]
    assert catalogue.stale(day, days=-1) == catalogue.offers[::2]
    assert catalogue.stale(day, days=-2) == catalogue.offers


# writing

words = st.text(st.sampled_from("aZ9-_. ,\"'#"), min_size=1).map(lambda text: f"x{text}".strip())
sizes = st.floats(0, 1e6, allow_subnormal=False)
some = st.none() | sizes
offers = st.builds(
    Offer,
    cloud=words.map(str.lower),
    region=words,
    zone=st.just("") | words,
    instance_type=words,
    accelerator=st.just("") | words,
    vcpus=st.floats(0.5, 1e3) | st.just(8.0),
    memory_gib=st.floats(0.5, 1e5),
    price_usd_h=sizes,
    spot_usd_h=some,
    baseline_gbps=some,
    peak_gbps=some,
    fabric=st.sampled_from([None, True, False]),
    priced_on=st.none() | st.dates(),
    source=st.just("") | words,
)


@given(st.lists(offers, min_size=1, max_size=4), st.integers(1, 16), st.none() | st.floats(1, 1e4))
@settings(max_examples=60)
def test_what_is_saved_is_loaded(tmp_path_factory, rows, count, gib):
    rows = [
        replace(row, accelerator_count=count, accelerator_memory_gib=gib)
        if row.accelerator
        else row
        for row in rows
    ]
    catalogue = Catalogue(offers=tuple(dict.fromkeys(rows)))
    path = tmp_path_factory.mktemp("saved") / "mine.csv"
    catalogue.save(path)
    places = {
        (row.cloud, row.region, row.zone, row.instance_type, row.accelerator): row
        for row in catalogue  # not of the drawn rows, of which equal ones count once, the first
    }
    assert set(Catalogue.load(path)) == set(places.values())


def test_what_is_saved_has_skypilots_columns(shipped, tmp_path):
    shipped.save(str(tmp_path / "mine.csv"))
    text = (tmp_path / "mine.csv").read_text()
    header = next(csv.reader(io.StringIO(text)))
    assert set(HEADER.split(",")) <= set(header)
    assert Catalogue.load(tmp_path / "mine.csv") == shipped
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


def test_a_save_puts_a_new_file_in_place_of_the_old_one(shipped, tmp_path):
    path, old = tmp_path / "mine.csv", tmp_path / "old.csv"
    path.write_text("old")
    old.hardlink_to(path)
    shipped.save(path)
    assert old.read_text() == "old"


def test_a_save_that_fails_leaves_the_old_file(shipped, tmp_path, monkeypatch):
    path = tmp_path / "mine.csv"
    path.write_text("old")

    def full(self, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    with pytest.raises(CloudError, match=r"cannot write the catalogue .*: No space left"):
        shipped.save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.csv"]
    assert path.read_text() == "old"
    with pytest.raises(CloudError, match="cannot write the catalogue"):
        shipped.save(path / "below")


# the table in the package


def test_the_shipped_table_has_todays_machines(shipped):
    clouds = {"aws", "azure", "gcp", "lambda", "nebius", "runpod", "verda"}
    assert {offer.cloud for offer in shipped} == clouds
    types = {offer.instance_type for offer in shipped}
    families = "g4dn. g5. g6. g6e. g7e. p4d. p4de. p5. p5en. p6-b200. p6-b300. c5. m5."
    for family in (*families.split(), "a2-", "a3-", "g2-", "g4-", "Standard_NC", "Standard_ND"):
        assert any(each.startswith(family) for each in types), family
    gpus = {offer.accelerator for offer in shipped}
    assert {"A100", "A10G", "B200", "H100", "H200", "L4", "L40S", "MI300X"} <= gpus
    assert {offer.cloud for offer in shipped if offer.spot_usd_h is not None} >= {"aws", "gcp"}


def test_every_shipped_price_has_a_day_and_a_source(shipped):
    path = files("thrifty.cloud") / "catalogue.csv"
    explained = re.findall(r"^# ([a-z-]+)(?:, [a-z-]+)*:", path.read_text(), flags=re.M)
    for offer in shipped:
        assert offer.priced_on is not None, offer
        assert date(2026, 1, 1) <= offer.priced_on <= datetime.now(UTC).date(), offer
        assert offer.source in explained, offer


def test_the_shipped_table_is_complete(shipped):
    for offer in shipped:
        assert offer.vcpus > 0
        assert offer.device_memory_bytes is not None
        assert offer.accelerator in {"", *ACCELERATORS}
        if offer.cloud == "aws":
            assert offer.baseline_gbps is not None
        if offer.price_usd_h is not None and offer.spot_usd_h is not None:
            assert offer.spot_usd_h < offer.price_usd_h


def test_shipped_prices_grow_with_the_machine(shipped):
    """A GPU of a larger type costs about as much as one of a smaller type: a typo shows."""
    by_gpu = defaultdict(list)
    for offer in shipped:
        if offer.accelerator and offer.price_usd_h is not None:
            key = offer.cloud, offer.region, offer.accelerator
            by_gpu[key].append(offer.price_usd_h / offer.accelerator_count)
    for key, prices in by_gpu.items():
        # Types with many processors for one GPU cost up to four times as much as the smallest.
        assert max(prices) < 4.5 * min(prices), (key, sorted(prices))


def test_shipped_prices(shipped):
    def price(kind, region="us-east-1"):
        (offer,) = shipped.where(instance_type=kind, region=region)
        return offer.price_usd_h, offer.spot_usd_h

    assert price("g4dn.xlarge") == (0.526, None)
    assert price("p5.48xlarge") == (55.04, None)
    assert price("p5en.48xlarge", "us-west-2") == (63.296, 26.9369)
    assert price("a3-highgpu-1g", "us-central1") == (None, 6.3262)
    assert price("Standard_ND96isr_MI300X_v5", "eastus2") == (48.0, None)


def test_the_work_grows_with_the_rows(vms):
    def lines_of(num):
        rows = (P3.replace("use1-az2", f"zone-{index}") for index in range(num))
        path = vms(*rows, version=f"v{num}")
        return lines_run(lambda: catalogues.append(Catalogue.load(path)))

    catalogues = []
    few, many = lines_of(500), lines_of(5000)
    assert [len(each) for each in catalogues] == [500, 5000]
    assert many < 11 * few
    assert many < 5000 * 200
