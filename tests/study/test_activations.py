"""Studies over a frozen trunk, whose activations are kept in memory and beside the checkpoints."""

from __future__ import annotations

import pytest

from tests.pack.fused.test_trunk import Headed
from tests.study.helpers import StopAfter, make_study, records
from thrifty.core import ActivationsKept, UsageError
from thrifty.pack.fused import _activations
from thrifty.pack.fused._activations import Activations
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space


pytestmark = pytest.mark.slow


FUSED = Local(pack="fused", pack_size=3)
SPACE = Space(lr=Choice([0.01, 0.02, 0.03]))


class Seen:
    def __init__(self):
        self.news = []

    def on_event(self, event):
        if isinstance(event, ActivationsKept):
            self.news.append(event)


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Forget what earlier tests have kept in memory."""
    monkeypatch.setattr(_activations, "_STORES", {})


def run(folder, *, executor=FUSED, observers=()):
    folder.mkdir(exist_ok=True)
    study = make_study(folder, task=Headed(), space=SPACE, algorithm=GridSearch(max_epochs=4))
    return study.run(progress=False, executor=executor, observers=observers)


def curves(study):
    return {(node, epoch): found["mse"] for node, epoch, found in records(study)[2]}


def test_a_study_says_what_keeping_will_save(tmp_path):
    seen = Seen()
    study = run(tmp_path / "fused", observers=[seen])
    alone = run(tmp_path / "solo", executor=Local(pack="solo"))
    assert curves(study) == pytest.approx(curves(alone), rel=1e-8)
    training, validation = seen.news
    assert (training.num_samples, validation.num_samples) == (20, 10)
    assert training.is_training
    assert not validation.is_training
    assert training.num_bytes == 20 * 160 * 8
    assert 0.9 < training.saved < 1.0
    assert "kept for 20 training samples" in str(training)


def test_a_study_that_was_stopped_finds_its_files(tmp_path, monkeypatch):
    run(tmp_path, observers=[StopAfter(6)])
    assert len(list(tmp_path.rglob("activations/*.safetensors"))) == 2
    _activations._STORES.clear()
    monkeypatch.setattr(Activations, "save", lambda *_: pytest.fail("computed again"))
    study = run(tmp_path)
    alone = run(tmp_path / "solo", executor=Local(pack="solo"))
    assert curves(study) == pytest.approx(curves(alone), rel=1e-8)


def test_keeping_can_be_switched_off(tmp_path):
    seen = Seen()
    run(tmp_path / "a", executor=Local(pack="fused", activation_memory=0), observers=[seen])
    assert not seen.news
    run(tmp_path / "b", executor=Local(pack="fused", activation_disk=0), observers=[seen])
    assert seen.news
    assert not list(tmp_path.rglob("activations"))


@pytest.mark.parametrize("limit", [-1, 0.5, True, "2 GB"])
def test_a_limit_is_a_number_of_bytes(limit):
    for option in ("activation_memory", "activation_disk"):
        with pytest.raises(UsageError, match=f"{option}=.*number of bytes"):
            Local(**{option: limit})
