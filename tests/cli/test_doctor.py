"""``thrifty doctor``: every check reports, and none stops another."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.study.helpers import make_study
from thrifty.cli import _demo, _doctor
from thrifty.cli._doctor import doctor_command, extras_of
from thrifty.store import Store


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_installed(monkeypatch):
    """Use the extras of this source, whatever version is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    lines = [f'{each}; extra == "{name}"' for name, several in extras for each in several]
    monkeypatch.setattr(_doctor.metadata, "requires", lambda _: lines)
    return {name: len(several) for name, several in extras}


def doctor(*args, code=0):
    result = CliRunner().invoke(doctor_command, [*args, "--json"])
    assert code in (None, result.exit_code), result.output
    found = json.loads(result.output)
    assert found["ok"] == (result.exit_code == 0)
    return {(each["section"], each["name"]): each for each in found["checks"]}


def a_database(folder):
    url = f"sqlite:///{folder}/t.db"
    with Store.open(url) as store:
        store.studies.create("mine", plan=store.plans.open("x", task="T").id, spec={})
    return url


def alter(folder, statement):
    with sqlite3.connect(folder / "t.db") as connection:
        connection.execute(statement)
    connection.close()


def test_a_table_for_people(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(doctor_command, [])
    assert result.exit_code == 0
    for word in ("versions", "extras", "devices", "back-ends", "kernels", "drivers", " ok"):
        assert word in result.output
    assert "storage" not in result.output


def test_what_there_is():
    found = doctor()
    assert torch.__version__ in found["versions", "torch"]["detail"]
    assert "cores usable" in found["devices", "cpu"]["detail"]
    assert "numba" in found["extras", "graph"]["detail"]
    assert ("extras", "test") not in found
    assert found["kernels", "numba"]["state"] in ("ok", "warning")
    for name, trials in (("solo", "1 trial "), ("concatenated", "2 trials"), ("fused", "2 trials")):
        backend = found["back-ends", name]
        assert backend["state"] == "ok"
        assert trials in backend["detail"]


def test_a_database_is_read_and_not_changed(tmp_path):
    url = a_database(tmp_path)
    found = doctor("--storage", url)
    assert found["storage", url]["detail"].endswith("1 studies, writable")
    assert "GiB free" in found["storage", "disk"]["detail"]
    alter(tmp_path, "UPDATE thrifty_version SET version_num = '0001'")
    old = doctor("--storage", url)["storage", url]
    assert old["state"] == "warning"
    assert "the next command brings it up" in old["detail"]
    assert "schema 0001" in doctor("--storage", url)["storage", url]["detail"]


def test_a_newer_database(tmp_path):
    url = a_database(tmp_path)
    alter(tmp_path, "UPDATE thrifty_version SET version_num = '9999'")
    assert "newer thrifty" in doctor("--storage", url, code=1)["storage", url]["detail"]


def test_a_database_that_cannot_be_written(tmp_path, monkeypatch):
    url = a_database(tmp_path)
    monkeypatch.setattr(_doctor.os, "access", lambda *_: False)
    assert "cannot be written" in doctor("--storage", url, code=1)["storage", url]["detail"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:///{folder}/none.db", "there is no file"),
        ("sqlite:///{folder}/other.db", "cannot be read as a database of thrifty: no such table"),
        ("sqlite:///{folder}/text.db", "file is not a database"),
        ("nonsense", "not a database address"),
        ("oracle+none://x", "NoSuchModuleError"),
        ("postgresql://nobody@localhost:1/x", "cannot be read"),
    ],
)
def test_a_storage_that_is_none(tmp_path, url, message):
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    (tmp_path / "text.db").write_text("this is a text and not a database" * 100)
    url = url.format(folder=tmp_path)
    before = sorted(tmp_path.iterdir())
    (check,) = (
        c
        for (s, n), c in doctor("--storage", url, code=1).items()
        if s == "storage" and n not in ("disk", "checkpoints")
    )
    assert message in check["detail"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_storage_in_memory():
    found = doctor("--storage", "sqlite://")
    assert found["storage", "sqlite://"]["state"] == "warning"


def test_a_password_is_not_shown():
    url = "postgresql+psycopg://me:secret@localhost:1/x"
    result = CliRunner().invoke(doctor_command, ["--storage", url, "--json"])
    assert "secret" not in result.output


def test_little_disk_is_a_warning(tmp_path, monkeypatch):
    url = a_database(tmp_path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(_doctor.shutil, "disk_usage", lambda _: usage)
    assert doctor("--storage", url)["storage", "disk"]["state"] == "warning"


def test_an_extra_that_was_asked_for_has_to_be_there(monkeypatch):
    assert doctor("--extra", "graph")["extras", "graph"]["needed"]
    assert "there is no such extra" in doctor("--extra", "tea", code=1)["extras", "tea"]["detail"]


def test_what_is_absent_is_optional_unless_it_is_needed(monkeypatch):
    monkeypatch.setattr(_doctor.metadata, "requires", lambda _: ["tea-leaves>=1; extra == 'tea'"])

    def said(*args):
        result = CliRunner().invoke(doctor_command, args, env={"COLUMNS": "200"})
        assert "absent" not in result.stdout
        return result.stdout

    assert "tea  not installed (optional)  tea-leaves" in re.sub("  +", "  ", said())
    assert "tea  not installed  tea-leaves" in re.sub("  +", "  ", said("--extra", "tea"))
    assert ", 1 not installed" in said("--extra", "tea").splitlines()[-1]


def test_extras_that_are_absent_or_old(monkeypatch):
    monkeypatch.setattr(
        _doctor.metadata,
        "requires",
        lambda _: ["tea-leaves>=1; extra == 'kitchen'", "click>=9999.1; extra == 'shell'"],
    )
    found = doctor()
    assert found["extras", "kitchen"]["state"] == "absent"
    assert (
        "tea-leaves is not installed; "
        "in the checkout: pip install -c constraints.txt -e '.[kitchen]'"
        in found["extras", "kitchen"]["detail"]
    )
    assert found["extras", "shell"]["state"] == "warning"
    assert "(needs 9999.1)" in found["extras", "shell"]["detail"]
    doctor("--extra", "kitchen", code=1)
    doctor("--extra", "shell")


def test_the_extras_of_this_project_are_all_found(as_installed):
    known = extras_of(metadata.requires("thrifty"))
    assert {name: len(packages) for name, packages in known.items()} == as_installed
    assert dict(known["graph"])["numba"]


def test_a_check_that_fails_stops_no_other(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such\nluck")

    monkeypatch.setattr(_doctor, "_cpu", broken)
    monkeypatch.setitem(_demo._BACKENDS, "fused", broken)
    monkeypatch.setattr(_doctor.metadata, "requires", broken)
    result = CliRunner().invoke(doctor_command, ["--json"])
    found = {each["name"]: each for each in json.loads(result.output)["checks"]}
    assert result.exit_code == 0
    assert found[""]["detail"].startswith("what they are is not known: RuntimeError")
    assert found["cpu"]["detail"] == found["fused"]["detail"] == "RuntimeError: no such"
    assert found["solo"]["state"] == "ok"


def test_what_every_study_needs_has_to_work(monkeypatch):
    class Wrong(_demo.SoloBackend):
        def step(self, plans):
            return {slot: ValueError("wrong") for slot in plans}

    monkeypatch.setitem(_demo._BACKENDS, "solo", Wrong)
    assert doctor(code=1)["back-ends", "solo"]["detail"] == "ValueError: wrong"

    class Nowhere(_demo.SoloBackend):
        def step(self, plans):
            return {slot: {"mse": float("nan")} for slot in plans}

    monkeypatch.setitem(_demo._BACKENDS, "solo", Nowhere)
    assert "gave nan" in doctor(code=1)["back-ends", "solo"]["detail"]


def test_a_device_that_was_asked_for_has_to_be_there():
    assert "on cpu" in doctor("--device", "cpu")["back-ends", "fused"]["detail"]
    found = doctor("--device", "cuda:99", code=1)
    assert {found["back-ends", b]["state"] for b in ("solo", "fused")} == {"broken"}


def test_gpus_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    found = {each.name: each for each in _doctor._accelerators()}
    assert found["cuda:0"].detail == "A GPU, compute capability 9.0, 1.0 GiB of 2.0 GiB free"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "mps" in {each.name for each in _doctor._accelerators()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    (only,) = _doctor._accelerators()
    assert only.state == "broken"


@pytest.mark.parametrize(("package", "check"), [("psycopg", "drivers"), ("numba", "kernels")])
def test_what_is_not_installed_is_absent(monkeypatch, package, check):
    monkeypatch.setitem(sys.modules, package, None)
    assert doctor()[check, package]["state"] == "absent"


def test_ray_is_looked_for_without_being_imported(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    assert doctor()["drivers", "ray"]["state"] in ("ok", "absent")
    monkeypatch.setattr(_doctor.metadata, "version", unknown)
    assert doctor()["drivers", "ray"]["state"] == "absent"


def test_a_driver_that_is_needed_for_the_storage(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    found = doctor("--storage", "postgresql://localhost:1/x", code=1)
    assert found["drivers", "psycopg"]["needed"]


def test_a_kernel_that_is_wrong(monkeypatch):
    import thrifty.graph.kernels as kernels  # noqa: PLC0415

    monkeypatch.setattr(kernels, "COMPILED", True)
    monkeypatch.setattr(kernels, "mix", lambda word: word)
    assert "wrong answer" in doctor("--extra", "graph", code=1)["kernels", "numba"]["detail"]
    monkeypatch.setattr(kernels, "COMPILED", False)
    assert "does not compile" in doctor()["kernels", "numba"]["detail"]


def test_what_killed_runs_left_is_counted(tmp_path):
    study = make_study(tmp_path).run(progress=False)
    url = study.storage.url
    found = doctor("--storage", url)["storage", "checkpoints"]
    assert found["state"] == "ok"
    num = len(list(tmp_path.rglob("*.safetensors")))
    assert found["detail"].startswith(f"{num} files, ")
    folder = next(tmp_path.rglob("*.safetensors")).parent
    (folder / ".9-9.safetensors.x-1-2-3.tmp").write_bytes(b"x" * 3_000_000)
    (folder / "99-9.safetensors").write_bytes(b"x")
    found = doctor("--storage", url)["storage", "checkpoints"]
    assert found["state"] == "warning"
    assert "2 more files (2.9 MiB) that no study knows" in found["detail"]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///nowhere.db", "sqlite:///{folder}/text.db"])
def test_where_there_are_no_checkpoints(tmp_path, url):
    (tmp_path / "text.db").write_text("this is a text and not a database" * 100)
    found = doctor("--storage", url.format(folder=tmp_path), code=None)
    assert found["storage", "checkpoints"]["state"] == "absent"
