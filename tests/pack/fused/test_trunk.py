"""Activations of a frozen trunk are kept by sample, and never change a result."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.pack import AutoBackend, FusedBackend, UnverifiedError
from thrifty.pack.fused._activations import ActivationFolder, Activations, ActivationStore
from thrifty.pack.fused._block import Block
from thrifty.space import Step


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


DOUBLE = 1e-10
WIDTH = 160
RATES = tuple(Trial(config={"lr": lr}) for lr in (0.01, 0.02, 0.03))


class Net(nn.Module):
    """A frozen trunk and a trained head."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            for n, parameter in enumerate(trunk.parameters()):
                parameter.copy_(0.1 * normal(*parameter.shape, seed=n))
        trunk.requires_grad_(False)

    def forward(self, x):
        return self.head(self.trunk(x))


def layers(between=None):
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), between or nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)
    )


class Headed(Toy):
    dtype = torch.float64

    def network(self, hp):
        return Net(layers())


class Counting(ActivationStore):
    """Counts what is kept and what is read."""

    def __init__(self, limit_bytes=10**6, folder=None):
        super().__init__(limit_bytes=limit_bytes, folder=folder)
        self.saved = self.loaded = 0

    def open(self, *args, **kwargs):
        found = super().open(*args, **kwargs)
        if found is not None and not hasattr(found, "counted"):
            found.counted = True
            save, load = found.save, found.load

            def saving(index, values):
                self.saved += len(index)
                save(index, values)

            def loading(index, values):
                self.loaded += len(index)
                load(index, values)

            found.save, found.load = saving, loading
        return found


def trained(task, *, store=None, trials=RATES):
    store = Counting() if store is None else store
    return together(FusedBackend(task, device=here(), activations=store), trials), store


def test_trials_with_kept_activations_equal_trials_alone():
    found, store = trained(Headed())
    assert_same(found, alone(Headed(), RATES), tolerance=DOUBLE)
    assert store.saved == 20 + 10  # for training and for validation
    assert store.loaded >= 40 + 20


def test_trials_and_studies_share_what_is_kept():
    _, store = trained(Headed())
    found, _ = trained(Headed(), store=store, trials=RATES[:1])
    assert_same(found, alone(Headed(), RATES[:1]), tolerance=DOUBLE)
    assert store.saved == 30


def test_each_validation_sample_is_compared_once_however_many_trials_are_checked(monkeypatch):
    compared = []
    agree = Activations.agree

    def noted(self, index, values):
        compared.append((len(self._has), sorted(index.tolist())))
        return agree(self, index, values)

    monkeypatch.setattr(Activations, "agree", noted)
    _, store = trained(Headed())
    trained(Headed(), store=store)
    assert [index for num, index in compared if num == 10] == [list(range(10))]
    assert sum(num == 20 for num, _ in compared) > 2, "those of training at each checked step"


class Centering(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0)


class Ranking(nn.Module):
    """Adds a sample's place in the batch."""

    def forward(self, x):
        return x + torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None]


class Scaling(nn.Module):
    """Divides by the size of the batch, so that the last batch has other activations."""

    def forward(self, x):
        return x / len(x)


class Between(Headed):
    def __init__(self, make):
        self.make = make

    def network(self, hp):
        return Net(layers(self.make()))


def centered():
    return Centering()


def ranked():
    return Ranking()


def scaled():
    return Scaling()


def normed():
    return nn.BatchNorm1d(WIDTH)


def normed_by_batch():
    return nn.BatchNorm1d(WIDTH, track_running_stats=False)


def dropped():
    return nn.Dropout(0.3)


@pytest.mark.parametrize(
    ("between", "num_kept"),
    [(centered, 0), (ranked, 0), (normed, 0), (normed_by_batch, 0), (dropped, 10), (scaled, 30)],
)
def test_only_what_depends_on_its_own_sample_is_kept(between, num_kept):
    """What comes before the second layer takes too little time to be worth keeping.

    In evaluation there is no dropout, so the validation samples are kept.
    """
    task = Between(between)
    found, store = trained(task)
    assert_same(found, alone(task, RATES), tolerance=DOUBLE)
    assert store.saved >= num_kept
    assert bool(store.saved) == bool(num_kept)


class StillNet(Net):
    """A network whose trunk stays in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self


class Still(Between):
    def network(self, hp):
        return StillNet(layers(self.make()))


@pytest.mark.parametrize("between", [normed, dropped])
def test_a_trunk_in_evaluation_mode_is_kept(between):
    found, store = trained(Still(between))
    assert_same(found, alone(Still(between), RATES), tolerance=DOUBLE)
    assert store.saved == 30


class DroppingHead(Headed):
    def network(self, hp):
        model = Net(layers())
        model.head = nn.Sequential(nn.Dropout(0.3), model.head)
        return model


def test_what_is_random_behind_the_cut_leaves_the_trunk_kept():
    found, store = trained(DroppingHead())
    assert_same(found, alone(DroppingHead(), RATES), tolerance=DOUBLE)
    assert store.saved == 30
    assert store.loaded >= 50


def test_large_validation_batches_are_evaluated_together_if_the_head_is_small(monkeypatch):
    monkeypatch.setattr("thrifty.pack.fused._evaluation.MAX_ELEMENTS", 20)
    found, store = trained(Headed())
    assert_same(found, alone(Headed(), RATES), tolerance=DOUBLE)
    assert store.saved == 30
    monkeypatch.setattr("thrifty.pack.fused._evaluation.MAX_HEAD_ELEMENTS", 20)
    assert trained(Headed())[1].saved == 20


class Thawing(Headed):
    """A layer of its trunk is unfrozen by a schedule."""

    def adapt(self, model, hp):
        model.trunk[3].requires_grad_(hp.get("closed", 1.0) < 0.5)


class Overwriting(Headed):
    """``adapt`` writes into the frozen trunk from the third epoch on."""

    def adapt(self, model, hp):
        if hp["shift"] < 1.0:
            with torch.no_grad():
                model.trunk[0].bias.fill_(hp["shift"])


@pytest.mark.parametrize(
    ("task", "config"),
    [
        (Thawing(), {"closed": Step(1.0, [2], gamma=0.0)}),
        (Overwriting(), {"shift": Step(1.0, [2], gamma=0.5)}),
    ],
)
def test_a_trunk_that_changes_half_way(task, config):
    trials = [Trial(config={"lr": lr, **config}, epochs=4) for lr in (0.01, 0.02)]
    store = Counting()
    found = together(AutoBackend(task, device=here(), prefer="fused", activations=store), trials)
    assert_same(found, alone(task, trials), tolerance=DOUBLE)
    assert store.saved == 30


def test_results_do_not_count_after_data_have_changed_in_place(monkeypatch, caplog):
    finish = Block.finish

    def turned(self, trials):
        if trials[0].plan.epoch == 2:
            rows = trials[0].source.arrays[0].data  # past PyTorch, and after the last check
            rows.copy_(rows.flip(0))
        return finish(self, trials)

    monkeypatch.setattr(Block, "finish", turned)
    found, _ = trained(Headed())
    for each in found:
        assert len(each.metrics) == 2
        assert isinstance(each.error, UnverifiedError)
        assert "the data have changed" in str(each.error)
    assert "computed again" in caplog.text


def test_kept_values_that_are_wrong_are_found_before_they_are_used(monkeypatch):
    monkeypatch.setattr(Activations, "load", lambda *_: pytest.fail("used"))
    save = Activations.save
    monkeypatch.setattr(
        Activations, "save", lambda self, i, values: save(self, i, [v + 1e-3 for v in values])
    )
    found, _ = trained(Headed())
    assert_same(found, alone(Headed(), RATES), tolerance=DOUBLE)


def test_trials_do_not_count_if_kept_values_go_wrong_later(monkeypatch):
    load = Activations.load
    monkeypatch.setattr(
        Activations, "load", lambda self, i, v: (load(self, i, v), self._rows[0].mul_(1.01))
    )
    found, _ = trained(Headed())
    assert all(isinstance(each.error, UnverifiedError) for each in found)


def test_what_does_not_fit_is_computed_again():
    row_bytes = 8 * WIDTH
    assert trained(Headed(), store=Counting(9 * row_bytes))[1].saved == 0
    assert trained(Headed(), store=Counting(29 * row_bytes))[1].saved == 20
    store = Counting(30 * row_bytes)
    assert trained(Headed(), store=store)[1].saved == 30
    trained(Between(scaled), store=store, trials=RATES[:1])  # evicts what is not in use
    assert store.num_bytes <= 30 * row_bytes
    assert store.saved > 30


def test_memory_that_ran_out_is_given_back():
    backend = FusedBackend(Headed(), device=here(), activations=Counting())
    step = backend.step

    def tight(plans):
        if any(plan.epoch == 2 for plan in plans.values()):
            backend.activations.shrink()
            assert backend.activations.num_bytes == 0
        return step(plans)

    backend.step = tight
    assert_same(together(backend, RATES), alone(Headed(), RATES), tolerance=DOUBLE)


class TestFolder:
    """Files of activations, which another process finds."""

    @staticmethod
    def run(folder, *, limit_bytes=10**6):
        store = Counting(folder=ActivationFolder(folder, limit_bytes=limit_bytes))
        found, _ = trained(Headed(), store=store)
        assert_same(found, alone(Headed(), RATES), tolerance=DOUBLE)
        return store.saved

    def test_a_later_process_computes_no_trunk(self, tmp_path):
        assert self.run(tmp_path / "new") == 30
        assert self.run(tmp_path / "new") == 0
        assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".safetensors"] * 2

    @pytest.mark.parametrize("damage", ["cut", "text", "changed", "foreign"])
    def test_a_damaged_file_is_written_again(self, tmp_path, damage, caplog):
        self.run(tmp_path)
        one, other = sorted(tmp_path.iterdir())
        data = one.read_bytes()
        one.write_bytes({
            "cut": data[: len(data) // 2],
            "text": b"hello",
            "changed": data[:-1] + bytes([data[-1] ^ 1]),
            "foreign": other.read_bytes(),
        }[damage])  # fmt: skip
        assert self.run(tmp_path) in (10, 20)
        assert "computed again" in caplog.text
        assert self.run(tmp_path) == 0

    def test_the_oldest_files_are_removed_first(self, tmp_path):
        row_bytes = 8 * WIDTH
        self.run(tmp_path, limit_bytes=25 * row_bytes)
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size < 25 * row_bytes
        assert self.run(tmp_path / "small", limit_bytes=9 * row_bytes) == 30
        assert not (tmp_path / "small").exists()

    def test_a_full_disk_is_a_log_line(self, tmp_path, monkeypatch, caplog):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("thrifty.pack.fused._activations.save_file", full)
        assert self.run(tmp_path) == 30
        assert caplog.text.count("kept in memory only") == 1
        assert not list(tmp_path.iterdir())

    def test_abandoned_files_are_removed(self, tmp_path):
        left = tmp_path / ".x.tmp"
        left.write_bytes(b"")
        os.utime(left, (0, 0))
        self.run(tmp_path)
        assert not left.exists()
