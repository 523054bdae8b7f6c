"""Files are written in whole or not at all."""

import os
from pathlib import Path

import pytest

from thrifty.core._files import replacing


def half_written(path, error, *, name=""):
    """Begin to write a file, or a folder with a file of this name; then raise an error."""
    with replacing(path) as new:
        if name:
            new.mkdir()
        (new / name if name else new).write_text("half")
        raise error


def test_a_file_is_replaced_at_the_end(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("old")
    with replacing(file) as new:
        new.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_and_no_other(error, tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("old")
    with pytest.raises(type(error)):
        half_written(file, error)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_leaves_no_half_of_a_folder(tmp_path):
    with pytest.raises(OSError, match="full"):
        half_written(tmp_path / "adapter", OSError("the disk is full"), name="weights")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_put_in_place(tmp_path):
    with replacing(tmp_path / "adapter") as new:
        new.mkdir()
        (new / "weights").write_text("whole")
    assert (tmp_path / "adapter" / "weights").read_text() == "whole"


def test_a_link_keeps_its_target(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "table.csv", tmp_path / "table.csv"
    link.symlink_to(target)
    with replacing(link) as new:
        new.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_to_itself():
    with replacing(Path(os.devnull)) as new:
        new.write_text("gone")
    assert not new.is_file()


def test_two_writers_have_names_of_their_own(tmp_path):
    file = tmp_path / "table.csv"
    with replacing(file) as one, replacing(file) as other:
        assert one != other
        one.write_text("1")
        other.write_text("2")
    assert file.read_text() == "1", "the outer one ends last"
