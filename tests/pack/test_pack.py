from __future__ import annotations

import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tests import alone
from tests.devices import here
from tests.pack._drive import Trial, together
from thrifty.core import CheckpointRef, DivergedError, TaskError
from thrifty.pack import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ArrayData,
    DatasetPair,
    EpochPlan,
    FusedBackend,
    HyperParameters,
    Member,
    RMSprop,
    SoloBackend,
    borrowed_streams,
    epoch_order,
    inspect_task,
    pack_state,
    unpack_state,
)
from thrifty.run import state_from_arrays, state_to_arrays, train_alone
from thrifty.space import Linear, Timeline
from thrifty.store import CheckpointFolder
from thrifty.testing import FaultyTask, LineTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


def backend_at(task, values, *, state=None, epoch=0):
    backend = SoloBackend(task, device=here())
    backend.put(0, Member(values=values, seed=0, epoch=epoch, state=state))
    return backend


def step(backend, values, epoch):
    outcome = backend.step({0: EpochPlan(epoch=epoch, values=values)})[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


# -- hyper-parameters ----------------------------------------------------------------------


def test_a_missing_hyper_parameter_names_those_that_there_are():
    with pytest.raises(TaskError, match=r"'depth'.*it has: width.*hp\.get"):
        HyperParameters({"width": 3}).depth  # noqa: B018


def test_private_names_are_no_hyper_parameters():
    with pytest.raises(AttributeError):
        HyperParameters({})._private  # noqa: B018


# -- states --------------------------------------------------------------------------------


def test_a_state_survives_being_taken_apart():
    value = {"w": torch.ones(2), 3: [None, 1.5, ("a", True)], "deep": {"t": torch.tensor(7)}}
    back = unpack_state(pack_state(value))
    assert back[3] == value[3]
    assert torch.equal(back["w"], value["w"])
    assert torch.equal(back["deep"]["t"], value["deep"]["t"])


def test_a_state_may_be_started_from_twice():
    """Starting from a state copies it, because optimizers update their state in place."""
    values = {"lr": 0.1, "width": 4, "dropout": 0.0}
    backend = backend_at(LineTask(), values)
    step(backend, values, 0)
    state = backend.state(0)
    results = []
    for _ in range(2):
        again = backend_at(LineTask(), values, state=state, epoch=1)
        results.append(step(again, values, 1))
    assert results[0] == results[1]


@pytest.mark.parametrize("value", [object(), {1.5: 1}, {"f": lambda: 0}])
def test_a_state_that_would_need_pickle_is_refused(value):
    with pytest.raises(TaskError, match="state"):
        pack_state(value)


@pytest.mark.parametrize(
    "value",
    [
        {"a.w": 1, "a": {"w": 2}},
        {"a": {"w": 1}, "a.w": 2},
        {1: 1, "1": 2},
        {"a": [1], "a.0": 2},
        {"a#2": 1, "a": {"": 2}, "a.": 3},
        {"x.y": {"z": 1}, "x": {"y.z": 2, "y": {"z": 3}}, "x.y.z": 4},
        {"value": 1, "": {"": 2}},
    ],
)
def test_keys_that_look_alike_are_kept_apart(value):
    def as_tensors(part):
        if isinstance(part, dict):
            return {key: as_tensors(inside) for key, inside in part.items()}
        return [as_tensors(each) for each in part] if isinstance(part, list) else torch.tensor(part)

    back = unpack_state(state_from_arrays(*state_to_arrays(pack_state(as_tensors(value)))))
    assert back == as_tensors(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_travels(dtype):
    state = pack_state({"x": torch.tensor([[1, 0], [2, 3]]).to(dtype), "y": torch.tensor(1.0)})
    back = unpack_state(state_from_arrays(*state_to_arrays(state)))
    assert back["x"].dtype == dtype
    assert torch.equal(back["x"], unpack_state(state)["x"])


# -- data ----------------------------------------------------------------------------------


def test_the_order_is_a_permutation_given_by_seed_and_epoch():
    order = epoch_order(50, seed=3, epoch=4)
    assert sorted(order.tolist()) == list(range(50))
    assert not torch.equal(order, epoch_order(50, seed=3, epoch=5))
    assert not torch.equal(order, epoch_order(50, seed=4, epoch=4))


@pytest.mark.parametrize(
    "bad", [(), 3, (np.zeros(3), np.zeros(4)), (np.zeros(0),), (np.float64(1),)]
)
def test_arrays_must_fit_together(bad):
    with pytest.raises(TaskError, match="ArrayData"):
        ArrayData(train=bad, valid=(np.zeros(3),))


class Pair(LineTask):
    def data(self, hp):
        (x, y), (vx, vy) = super().data(hp).train, super().data(hp).valid
        return TensorDataset(x, y), TensorDataset(vx, vy)


def test_data_sets_give_what_arrays_give():
    timeline = Timeline({"lr": 0.1}, epochs=3)
    _, arrays = train_alone(LineTask(), timeline, seed=0, epochs=3)
    _, loaded = train_alone(Pair(), timeline, seed=0, epochs=3)
    assert arrays == loaded


@pytest.mark.parametrize("data", [None, (1, 2, 3), (1, 2)])
def test_data_of_another_kind_are_refused(data):
    class Odd(LineTask):
        def data(self, hp):
            return data

    with pytest.raises(TaskError, match=r"Task\.data returned"):
        backend_at(Odd(), {"lr": 0.1})


def test_an_empty_data_set_is_refused():
    class Empty(LineTask):
        def data(self, hp):
            return DatasetPair(
                train=TensorDataset(torch.zeros(0)), valid=TensorDataset(torch.zeros(1))
            )

    with pytest.raises(TaskError, match="empty dataset"):
        backend_at(Empty(), {"lr": 0.1})


def test_data_are_loaded_once_for_all_that_do_not_read_hyper_parameters():
    class Loads(LineTask):
        loads = 0

        def data(self, hp):
            Loads.loads += 1
            return super().data(hp)

    task = Loads()
    for lr in (0.1, 0.2):
        backend_at(task, {"lr": lr})
    assert Loads.loads == 1


def test_data_that_depend_on_a_hyper_parameter_are_loaded_for_each_value():
    class Scaled(LineTask):
        def data(self, hp):
            x = torch.linspace(-1, 1, 8)[:, None] * hp.scale
            return ArrayData(train=(x, x), valid=(x, x))

    task = Scaled()
    metrics = [step(backend_at(task, v), v, 0) for v in ({"lr": 0.1, "scale": s} for s in (1, 2))]
    assert metrics[0] != metrics[1]


# -- training ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SGD, Adam, AdamW, RMSprop, Adagrad])
def test_every_optimizer_resumes_where_it_was(make):
    class Task(LineTask):
        optimizer = make(lr="lr", weight_decay=0.01)

    timeline = Timeline({"lr": Linear(0.1), "width": 4, "dropout": 0.2}, epochs=4)
    _, whole = train_alone(Task(), timeline, seed=1, epochs=4)
    half, _ = train_alone(Task(), timeline, seed=1, epochs=2)
    state = state_from_arrays(*state_to_arrays(half.state(0)))
    _, rest = train_alone(Task(), timeline, seed=1, epochs=4, state=(2, state))
    assert rest == whole[2:]


OLD = CheckpointRef(
    node=0,
    epoch=2,
    path="checkpoints_by_number/0-2.safetensors",
    num_bytes=2396,
    digest="40a9db18a0fc487e1140be5fcfdd3986",
)
"""Checkpoint of two epochs of the task below, from before optimizer state had parameter names."""


@pytest.mark.parametrize("backend", [SoloBackend, FusedBackend])
def test_a_checkpoint_of_an_earlier_version_is_gone_on_with(backend):
    class Task(LineTask):
        optimizer = AdamW(lr="lr", weight_decay=0.01)

    timeline = Timeline({"lr": Linear(0.1), "width": 4, "dropout": 0.2}, epochs=4)
    folder = CheckpointFolder(str(Path(__file__).parent / "assets"))
    state = state_from_arrays(*folder.read(OLD))
    _, whole = train_alone(Task(), timeline, seed=1, epochs=4)
    (rest,) = together(
        backend(Task()),
        [Trial(config=timeline.config, seed=1, epochs=4, start=2, state=state, run_epochs=4)],
    )
    assert rest.metrics == [pytest.approx(each, rel=1e-4) for each in whole[2:]]


def test_solo_training_is_a_plain_loop():
    config = {"lr": Linear(0.1), "width": 4, "dropout": 0.3}
    _, ours = train_alone(LineTask(), Timeline(config, epochs=5), seed=2, epochs=5)
    assert ours == alone.train(LineTask(), config, epochs=5, run_epochs=5, seed=2)


def test_gradients_are_clipped():
    class Clipped(LineTask):
        optimizer = SGD(lr="lr", clip_norm="clip")

    free = backend_at(LineTask(), {"lr": 0.1})
    held = backend_at(Clipped(), {"lr": 0.1, "clip": 1e-9})
    before = {k: v.clone() for k, v in held.model.state_dict().items()}
    step(held, {"lr": 0.1, "clip": 1e-9}, 0)
    step(free, {"lr": 0.1}, 0)
    moved = [float((held.model.state_dict()[k] - v).abs().max()) for k, v in before.items()]
    assert max(moved) < 1e-6


def test_betas_may_be_named_one_by_one():
    spec = Adam(lr="lr", betas=("beta", 0.999))
    assert spec.names() == {"lr", "beta"}
    assert spec.resolve({"lr": 0.1, "beta": 0.8}) == {"lr": 0.1, "betas": (0.8, 0.999)}
    with pytest.raises(TaskError, match="follows hyper-parameter 'beta'"):
        spec.resolve({"lr": 0.1})


def test_batch_size_may_be_a_hyper_parameter():
    class Task(LineTask):
        batch_size = "size"

    backend = backend_at(Task(), {"lr": 0.1, "size": 5})
    assert backend.num_steps(0, {"size": 5}) == math.ceil(32 / 5)
    for bad in (0, 2.5):
        with pytest.raises(TaskError, match="positive integer"):
            backend.num_steps(0, {"size": bad})
    with pytest.raises(TaskError, match="batch_size follows"):
        backend.num_steps(0, {"lr": 0.1})


def test_a_loss_that_is_not_finite_is_divergence():
    values = {"lr": 0.1, "fault": "nan"}
    with pytest.raises(DivergedError, match="epoch 1 is nan"):
        step(backend_at(FaultyTask(), values), values, 0)


def test_metrics_are_means_over_all_samples():
    class Small(LineTask):
        eval_batch_size = 5

    values = {"lr": 0.1}
    whole = step(backend_at(LineTask(), values), values, 0)["mse"]
    assert step(backend_at(Small(), values), values, 0)["mse"] == pytest.approx(whole, rel=1e-6)


def test_training_leaves_the_callers_random_streams_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with borrowed_streams():
        torch.manual_seed(9)
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_inspection_tells_what_a_task_reads():
    report = inspect_task(LineTask(), {"lr": 0.1, "width": 4, "dropout": 0.1}, seed=0)
    assert report.metrics == {"mse"}
    assert report.structural == {"width", "dropout"}
    assert report.followed == {"lr", "dropout"}


def typed(expression: str) -> type:
    """Return a class without a source file, as if typed at a prompt."""
    names: dict[str, Any] = {"Task": LineTask, "torch": torch}
    exec(
        f"class Typed(Task):\n    def loss(self, model, batch):\n        return {expression}", names
    )
    made: type = names["Typed"]
    return made


def test_identity_of_what_was_typed_at_a_prompt():
    same, again = typed("torch.relu(batch[0]) * 2")(), typed("torch.relu(batch[0]) * 2")()
    assert same.identity() == again.identity()
    assert same.identity() != typed("torch.tanh(batch[0]) * 2")().identity()
    assert same.identity() != typed("torch.relu(batch[0]) * 3")().identity()
    assert same.identity() != typed("torch.relu(batch[0]) * (lambda x: x + 1)(2)")().identity()
    before = same.identity()
    cloudpickle.dumps(same)
    assert same.identity() == before


SCRIPT = """
from thrifty.testing import LineTask

class Mine(LineTask):
    pass

if __name__ == "__main__":
    print(Mine().identity())
"""


def test_identity_of_a_script_that_runs_is_that_of_its_file(tmp_path, monkeypatch):
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert run.stdout.strip() == str(import_module("my_script").Mine().identity())
    run = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert "'task': 'Mine'" in run.stdout


def test_identity_follows_code_attributes_and_version():
    class One(LineTask):
        pass

    class Two(LineTask):
        version = "2"

    assert LineTask().identity() == LineTask().identity()
    assert LineTask().identity() != FaultyTask().identity()
    assert Two().identity()["version"] == "2"
    assert "version" not in One().identity()
    task = One()
    task.rate = 3
    assert task.identity() != One().identity()
