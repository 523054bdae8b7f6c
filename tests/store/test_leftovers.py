"""Files that killed runs leave beside the checkpoints are found, and removed when unneeded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thrifty.core import CheckpointRef
from thrifty.store import CheckpointAdded, CheckpointFolder, Lease, Store


pytestmark = pytest.mark.slow


DAY_S = 86_400.0


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/t.db"


def opened(url, **options):
    return Store.open(url, checkpoints=url.removeprefix("sqlite:///") + "-kept", **options)


def study_of(store, name="s"):
    plan = store.plans.open("identity", task="T").id
    return store.studies.find(name) or store.studies.create(name, plan=plan, spec={})


def kept(store, study, node):
    """Write a checkpoint with a row."""
    ref = write(store, node)
    store.record([CheckpointAdded(plan=study.plan, ref=ref)])
    return ref


def write(store, node, folder="identity") -> CheckpointRef:
    return store.checkpoints.write(folder, node=node, epoch=1, tensors={"x": np.ones(3)}, meta={})


def swept(url, **options):
    with opened(url) as store, store.lease(study_of(store), **options) as lease:
        return store.remove_leftovers(lease, folder="identity")


def path_of(url, name, folder="identity"):
    return Path(f"{url.removeprefix('sqlite:///')}-kept") / folder / name


WRITER = """
import sys, os
from thrifty.store import CheckpointFolder
import numpy as np
os.fsync = lambda fd: (print("writing", flush=True), sys.stdin.read())
CheckpointFolder(sys.argv[1]).write("identity", node=7, epoch=1, tensors={"x": np.ones(3)}, meta={})
"""


@pytest.fixture
def writer(url):
    """Start a process that is in the middle of writing a checkpoint."""
    root = url.removeprefix("sqlite:///") + "-kept"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    yield process
    process.kill()
    process.communicate()


def test_a_temporary_file_of_a_killed_process_is_removed(url, writer):
    swept(url)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found = swept(url)
    assert (found.num_removed, found.num_left) == (1, 0)
    assert found.removed_bytes > 100
    assert not list(path_of(url, "").glob(".*.tmp"))


def test_a_temporary_file_of_a_living_process_stays(url, writer):
    found = swept(url)
    assert (found.num_removed, found.num_left) == (0, 1)
    assert found.left_bytes > 100
    writer.communicate(b"")
    assert path_of(url, "7-1.safetensors").exists()


@pytest.mark.parametrize(
    "name", [".0-1.safetensors.4000000-1.tmp", ".0-1.safetensors.ab-1-2-3.tmp"]
)
def test_a_temporary_file_that_does_not_tell_goes_after_a_day(url, name):
    swept(url)
    path = path_of(url, name)
    path.write_bytes(b"123")
    assert swept(url).left_bytes == 3
    old = path.stat().st_mtime - DAY_S - 10
    os.utime(path, (old, old))
    assert swept(url).removed_bytes == 3


def test_a_checkpoint_without_a_row_is_removed_and_others_stay(url):
    with opened(url) as store:
        study = study_of(store)
        with store.lease(study) as lease:
            store.remove_leftovers(lease, folder="identity")
        row = kept(store, study, 0)
        write(store, 1)
        write(store, 1, folder="elsewhere")
        path_of(url, "notes.txt").write_text("mine")
    found = swept(url)
    assert (found.num_removed, found.num_left) == (1, 0)
    left = sorted(p.name for p in path_of(url, "").iterdir() if not p.name.startswith("."))
    assert left == ["0-1.safetensors", "notes.txt"]
    assert path_of(url, "1-1.safetensors", folder="elsewhere").exists()
    with opened(url) as store:
        assert store.checkpoints.read(row)


def test_rows_of_another_plan_count_too(url):
    """A plan may use a checkpoint that lies in the folder of another plan."""
    swept(url)
    with opened(url) as store:
        other = store.plans.open("other", task="T").id
        ref = write(store, 0)
        store.record([CheckpointAdded(plan=other, ref=ref)])
    assert swept(url).num_removed == 0


def test_nothing_is_removed_while_another_run_of_the_plan_lives(url):
    swept(url)
    with opened(url) as store:
        write(store, 1)
        with store.lease(study_of(store, "other"), shared=True):
            found = swept(url, shared=True)
    assert (found.num_removed, found.num_left) == (0, 1)


def test_a_checkpoint_that_another_run_records_before_it_ends_stays(url, monkeypatch):
    swept(url)
    with opened(url) as store:
        study = study_of(store, "other")
        ref = write(store, 1)
        with store.lease(study, shared=True) as held:
            is_alone = Lease.is_alone

            def after_the_other_has_ended(lease) -> bool:
                store.record([CheckpointAdded(plan=study.plan, ref=ref)])
                held.release()
                return is_alone(lease)

            monkeypatch.setattr(Lease, "is_alone", after_the_other_has_ended)
            assert swept(url, shared=True).num_removed == 0
        assert store.checkpoints.read(ref)


def test_checkpoints_of_another_database_in_the_same_folder_stay(url, tmp_path):
    swept(url)
    other = f"sqlite:///{tmp_path}/other.db"
    root = url.removeprefix("sqlite:///") + "-kept"
    with Store.open(other, checkpoints=root) as store:
        study = study_of(store)
        with store.lease(study) as lease:
            store.remove_leftovers(lease, folder="identity")
        kept(store, study, 5)
    assert swept(url).num_left == 1
    assert path_of(url, "5-1.safetensors").exists()


def test_checkpoints_from_before_the_folder_was_marked_stay(url):
    with opened(url) as store:
        write(store, 3)
    assert swept(url).num_left == 1
    assert swept(url).num_left == 1


def test_any_file_system_will_do(url):
    with (
        Store.open(url, checkpoints="memory://leftovers") as store,
        store.lease(study_of(store)) as lease,
    ):
        assert store.remove_leftovers(lease, folder="identity").num_removed == 0
        write(store, 1)
        assert store.remove_leftovers(lease, folder="identity").num_removed == 1


def test_a_folder_that_cannot_be_written_is_left_alone(url, monkeypatch):
    swept(url)
    with opened(url) as store:
        write(store, 1)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(CheckpointFolder, "remove", refuse)
    assert swept(url).num_left == 1
    monkeypatch.setattr(CheckpointFolder, "files", refuse)
    assert swept(url).num_left == 0
