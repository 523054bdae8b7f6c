"""A frozen base is stored once beside the checkpoints, and read where the task makes another."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.study.helpers import StopAfter
from thrifty.core import CheckpointError, StateError, StoreWriteError
from thrifty.pack import SGD, ArrayData, Task
from thrifty.pack._frozen import FrozenTensor, LoadedBase, digest_of
from thrifty.run import Local
from thrifty.run._running_chain import BaseFiles, StoredBase
from thrifty.search import GridSearch
from thrifty.space import Choice, Space, Step
from thrifty.store import CheckpointFolder
from thrifty.study import Storage, Study


pytestmark = pytest.mark.slow


WIDTH = 160


class OnFile(Task):
    """A trained head on a base that a file outside of the task's identity holds."""

    optimizer = SGD(lr="lr")
    batch_size = 8

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def data(self, hp):
        x = torch.linspace(-1, 1, 16 * 6).reshape(16, 6)
        return ArrayData(train=(x, x.sum(1, keepdim=True)), valid=(x, x.sum(1, keepdim=True)))

    def model(self, hp):
        base = nn.Linear(6, WIDTH * 20)
        held = torch.from_numpy(np.load(self.file)).float()
        base = nn.Linear(6, len(held))
        base.weight.data = held[:, :6].contiguous()
        base.bias.data = held[:, 6].contiguous()
        base.requires_grad_(False)
        return nn.Sequential(base, nn.Tanh(), nn.Linear(len(held), 1))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


def write_base(file, *, seed, rows=4 * WIDTH * 8):
    np.save(file, np.random.default_rng(seed).normal(size=(rows, 7)))
    return file


def study_of(folder, *, epochs=4, **options):
    return Study(
        OnFile(folder / "base.npy"),
        Space(lr=Choice([0.001, Step(0.001, [2]), Step(0.001, [3])])),
        algorithm=GridSearch(max_epochs=epochs),
        metric="mse",
        mode="min",
        storage=Storage(
            url=f"sqlite:///{folder}/t.db", checkpoints=str(folder / "kept"), **options
        ),
        name="s",
    )


def run(study, **options):
    return study.run(progress=False, executor=Local(threads=1), **options)


def bases_in(folder):
    return sorted((folder / "kept").rglob("base-*.safetensors"))


def curves(study):
    return {trial.number: trial.curve for trial in study.trials}


# -- studies -------------------------------------------------------------------------------


def test_a_study_stores_its_base_once(tmp_path):
    write_base(tmp_path / "base.npy", seed=0)
    study = run(study_of(tmp_path))
    (file,) = bases_in(tmp_path)
    held = load_file(file)
    assert set(held) == {"0.weight", "0.bias"}
    assert torch.equal(held["0.weight"], study.best_trial.load_model()[0].weight)
    checkpoints = [p for p in (tmp_path / "kept").rglob("*.safetensors") if p != file]
    assert checkpoints
    assert max(p.stat().st_size for p in checkpoints) < file.stat().st_size / 2


def test_a_study_goes_on_where_its_base_has_changed_since(tmp_path, caplog):
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
        write_base(tmp_path / name / "base.npy", seed=0)
    whole = run(study_of(tmp_path / "whole"))
    halves = tmp_path / "halves"
    run(study_of(halves), observers=[StopAfter(2)])
    write_base(halves / "base.npy", seed=1)
    again = run(study_of(halves))
    assert curves(again) == curves(whole)
    assert "have changed since a checkpoint was written" in caplog.text
    assert len(bases_in(halves)) == 1, "checkpoints name the stored base, not the changed one"
    stored = load_file(bases_in(halves)[0])["0.weight"]
    for trial in again.trials:
        assert torch.equal(trial.load_model()[0].weight, stored)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "the stored base .* cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "is damaged"),
        (lambda file: file.write_bytes(b"\xff" * 40), "is damaged"),
    ],
    ids=["gone", "short", "other"],
)
def test_a_base_that_is_nowhere_is_refused(tmp_path, damage, said):
    write_base(tmp_path / "base.npy", seed=0)
    study = run(study_of(tmp_path))
    damage(bases_in(tmp_path)[0])
    study.best_trial.load_model()  # the task makes the same base
    write_base(tmp_path / "base.npy", seed=1)
    with pytest.raises(StateError, match=said):
        study_of(tmp_path).best_trial.load_model()


def test_a_base_of_another_shape_is_refused(tmp_path):
    write_base(tmp_path / "base.npy", seed=0)
    run(study_of(tmp_path))
    write_base(tmp_path / "base.npy", seed=0, rows=4 * WIDTH)
    with pytest.raises(StateError, match="no parameter of this name, shape and type now"):
        study_of(tmp_path).best_trial.load_model()


def test_a_base_over_the_limit_is_not_stored(tmp_path):
    write_base(tmp_path / "base.npy", seed=0)
    study = run(study_of(tmp_path, max_base_bytes=1000))
    assert not bases_in(tmp_path)
    assert "max_base_bytes=1000" in repr(study_of(tmp_path, max_base_bytes=1000).storage)
    study.best_trial.load_model()
    write_base(tmp_path / "base.npy", seed=1)
    with pytest.raises(StateError, match=r"the stored base .* cannot be read"):
        study.best_trial.load_model()


def test_a_base_goes_with_the_last_checkpoint_that_names_it(tmp_path):
    write_base(tmp_path / "base.npy", seed=0)
    run(study_of(tmp_path), observers=[StopAfter(2)])
    (file,) = bases_in(tmp_path)
    other = file.with_name(f"base-{'0' * 32}.safetensors")
    other.write_bytes(file.read_bytes())
    run(study_of(tmp_path))
    assert bases_in(tmp_path) == [file]


def test_a_base_counts_for_the_disk_budget(tmp_path, caplog):
    write_base(tmp_path / "base.npy", seed=0)
    run(study_of(tmp_path, disk_budget_bytes=100_000))
    assert "bytes of bases" in caplog.text


# -- files ---------------------------------------------------------------------------------


def base_of(**tensors):
    return LoadedBase({name: FrozenTensor(tensor) for name, tensor in tensors.items()})


def files(folder, max_bytes=1e9):
    checkpoints = CheckpointFolder(str(folder))
    return checkpoints, BaseFiles(checkpoints, folder="p", max_bytes=max_bytes)


@pytest.mark.parametrize("root", ["", "memory://bases"])
def test_types_and_tied_names_come_back(tmp_path, root):
    tied = FrozenTensor(torch.arange(12.0).reshape(3, 4).bfloat16())
    scalar, empty = FrozenTensor(torch.tensor(3, dtype=torch.int8)), torch.rand(5).double()
    base = LoadedBase({"b.in": tied, "a.out": tied, "n": scalar, "d": FrozenTensor(empty)})
    checkpoints, bases = files(root or tmp_path)
    bases.keep(base)
    stored = StoredBase(checkpoints, folder="p", digest=base.digest)
    for name, each in base.tensors.items():
        found = stored.tensor(name, digest=each.digest)
        assert found.dtype == each.tensor.dtype
        assert torch.equal(found, each.tensor)
    with pytest.raises(CheckpointError, match="is not what was written"):
        stored.tensor("d", digest="0" * 32)
    with pytest.raises(CheckpointError, match="is damaged"):
        stored.tensor("c", digest="0" * 32)
    with pytest.raises(CheckpointError, match="has another 'c'"):
        base.tensor("c", digest="0" * 32)


def test_a_damaged_file_is_written_again(tmp_path, caplog):
    base = base_of(w=torch.rand(40))
    files(tmp_path)[1].keep(base)
    (file,) = (tmp_path / "p").glob("base-*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    files(tmp_path)[1].keep(base)
    assert file.read_bytes() == whole
    assert "it is written again" in caplog.text


def test_an_intact_file_is_left_alone(tmp_path, monkeypatch):
    base = base_of(w=torch.rand(40))
    files(tmp_path)[1].keep(base)
    monkeypatch.setattr(CheckpointFolder, "write_file", None)
    files(tmp_path)[1].keep(base)


def test_writers_at_one_time_leave_one_file(tmp_path):
    base = base_of(w=torch.rand(40_000))
    threads = [threading.Thread(target=files(tmp_path)[1].keep, args=(base,)) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    (file,) = (tmp_path / "p").iterdir()
    digest = digest_of(base.tensors["w"].tensor)
    stored = StoredBase(files(tmp_path)[0], folder="p", digest=base.digest)
    assert torch.equal(stored.tensor("w", digest=digest), base.tensors["w"].tensor)
    assert file.name == f"base-{base.digest}.safetensors"


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreWriteError, match=r"No space left.*max_base_bytes"):
        files(tmp_path)[1].keep(base_of(w=torch.rand(4)))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_type_without_a_name_is_not_stored(tmp_path):
    files(tmp_path)[1].keep(base_of(w=torch.rand(4, dtype=torch.complex128)))
    assert not [*tmp_path.iterdir()]
