from __future__ import annotations

import importlib
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.integrations.streams import advanced, began, first_run, second_run, tell
from thrifty.integrations import TensorBoard
from thrifty.study import StudyEnded, TrialBegan


@pytest.fixture(autouse=True)
def no_warning(caplog, request):
    """Assert that loggers can write all that tests give them."""
    yield
    if "warning" not in request.node.name:
        assert "does not write" not in caplog.text


@pytest.fixture(params=["torch.utils.tensorboard", "tensorboardX"])
def package(request, monkeypatch):
    """Return each of the two libraries that can write."""
    if request.param == "tensorboardX":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    return importlib.import_module(request.param)


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder, tag="mse"):
    return {event.step: pytest.approx(event.value) for event in read(folder).Scalars(tag)}


def hparams(folder):
    content = read(folder).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def test_each_trial_has_a_folder_with_its_metrics_and_hyper_parameters(tmp_path, package):
    tell(TensorBoard(tmp_path), first_run())
    study = tmp_path / "digits-012345"
    assert sorted(f.name for f in study.iterdir()) == [f"trial-000{n}" for n in range(4)]
    assert scalars(study / "trial-0000") == {1: 0.5, 2: 0.4, 3: 0.3}
    assert scalars(study / "trial-0001") == {1: 0.9, 2: 0.8}
    assert hparams(study / "trial-0000") == {
        "lr": "Step(0.1, (3,))", "width": 64.0, "norm": 1.0, "name": "a b", "none": "None",
    }  # fmt: skip


def test_a_failure_is_text_and_no_end_of_a_session(tmp_path):
    tell(TensorBoard(tmp_path), first_run())
    ended, failed = (read(tmp_path / "digits-012345" / f"trial-000{n}") for n in (1, 2))
    assert "_hparams_/session_end_info" in ended.summary_metadata
    assert "_hparams_/session_end_info" not in failed.summary_metadata
    (text,) = failed.Tensors("failure/text_summary")
    assert text.tensor_proto.string_val == [b"it broke"]


def test_a_trial_goes_on_in_its_folder_and_has_each_epoch_once(tmp_path, package):
    for events in (first_run(), second_run()):
        tell(TensorBoard(tmp_path), events)
    found = read(tmp_path / "digits-012345" / "trial-0003").Scalars("mse")
    assert [(e.step, round(e.value, 6)) for e in found] == [
        (1, 0.5),
        (2, 0.4),
        (3, 0.3),
        (4, 0.2),
        (5, 0.1),
    ]


def test_a_study_of_the_same_name_is_another_study(tmp_path):
    for key in ("1" * 16, "2" * 16):
        tell(
            TensorBoard(tmp_path),
            [began(key=key), TrialBegan(trial=0, config={"a": 1}), StudyEnded(state="done")],
        )
    assert sorted(f.name for f in tmp_path.iterdir()) == ["digits-111111", "digits-222222"]


def test_more_trials_than_may_be_open_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.integrations._trackers.MAX_OPEN_WRITERS", 2)
    trials = range(4)
    tell(
        TensorBoard(tmp_path),
        [
            began(),
            *(TrialBegan(trial=t, config={"a": t}) for t in trials),
            *(advanced(t, epoch, [t + epoch / 10]) for epoch in (1, 2, 3) for t in trials),
            StudyEnded(state="stopped"),
        ],
    )
    for t in trials:
        assert scalars(tmp_path / "digits-012345" / f"trial-000{t}") == {
            e: t + e / 10 for e in (1, 2, 3)
        }


def test_a_logger_that_came_late_logs_what_it_hears(tmp_path):
    tell(
        TensorBoard(tmp_path),
        [began(resumed=True), advanced(5, 4, [0.1, 0.2]), StudyEnded(state="stopped")],
    )
    assert scalars(tmp_path / "digits-012345" / "trial-0005") == {4: 0.1, 5: 0.2}
