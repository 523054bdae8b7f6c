"""Code that acts at few steps, out of a recorded program's sight, counts in packs as it does alone.

One training sample is far off, so most steps (and the sampled checks of a pack) show nothing.
"""

import contextlib
import cProfile
import logging
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import thrifty as th
from thrifty.core._determinism import STREAMS, Streams
from thrifty.pack import UnfusableError
from thrifty.pack.fused._step import train_alone
from thrifty.pack.identity._settings import (
    allows_tf32,
    matmul_precision,
    set_matmul_precision,
    unusual_precisions,
)


def sample():
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :1].sin()
    y[77] = 300.0
    return th.ArrayData(train=(x[:128], y[:128]), valid=(x[128:], y[128:]))


class Far(th.Task):
    optimizer = th.SGD(lr="lr")
    batch_size = 4

    def data(self, hp):
        return sample()

    def model(self, hp):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model, batch):
        return {"mse": Far.loss(self, model, batch)}


def clamped(gradient):
    return gradient.clamp(-20, 20)


class Hooked(Far):
    def model(self, hp):
        model = super().model(hp)
        for parameter in model.parameters():
            parameter.register_hook(clamped)
        return model


def clamp_in_place(parameter):
    parameter.grad.clamp_(-20, 20)


class HookedAfter(Far):
    def model(self, hp):
        model = super().model(hp)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_in_place)
        return model


class HookedLater(Far):
    """Hooks come with the first epoch; being hooks of the model, each epoch has them once."""

    def adapt(self, model, hp):
        for parameter in model.parameters():
            if not parameter._backward_hooks:
                parameter.register_hook(clamped)


class Clamped(nn.Parameter):
    @property
    def grad(self):
        found = super().grad
        return None if found is None else found.clamp(-20, 20)

    @grad.setter
    def grad(self, value):
        nn.Parameter.grad.__set__(self, value)


class OwnParameters(Far):
    def model(self, hp):
        model = super().model(hp)
        model[0].weight = Clamped(model[0].weight.detach())
        return model


class Careful(Far):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        try:
            is_far = bool(loss > 100)
        except Exception:  # noqa: BLE001
            is_far = False
        return loss / 1000 if is_far else loss


class Careless(Far):
    def loss(self, model, batch):
        loss, factor = super().loss(model, batch), 1.0
        with contextlib.suppress(Exception):
            factor = 1.0 if loss.item() < 100 else 1e-3
        return factor * loss


class OwnStream(Far):
    def loss(self, model, batch):
        mine = random.Random(torch.initial_seed())
        factor = 0.0 if mine.random() < 0.05 else 1.0
        return factor * super().loss(model, batch)


class StateOfStream(Far):
    def loss(self, model, batch):
        number = int(torch.get_rng_state()[:8].view(torch.int64))
        factor = 0.0 if number % 20 == 0 else 1.0
        return factor * super().loss(model, batch)


class Denormal(Far):
    """Numbers below 1e-38, which some processors and settings take for zero."""

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x * 1e-39 * 1e38 * 10), y.clamp(max=1))


def curves(task, path, *, pack):
    study = th.Study(
        task(),
        th.Space(lr=th.Choice([0.003, 0.01, 0.03])),
        algorithm=th.GridSearch(max_epochs=2),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{path}/{pack}.db",
        name="rare",
        seed=0,
    )
    study.run(executor=th.Local(workers=1, threads=1, pack=pack), progress=False)
    assert not any(trial.error for trial in study.trials)
    weights = [[*trial.load_model().state_dict().values()] for trial in study.trials]
    return [list(trial.curve) for trial in study.trials], weights


def check(task, path):
    """Check that trials in packs have the results of the same trials alone."""
    (found, weights), (wanted, alone) = (curves(task, path, pack=p) for p in ("fused", "solo"))
    assert found == [pytest.approx(each, rel=1e-4) for each in wanted]
    for own, others in zip(weights, alone, strict=True):
        for one, other in zip(own, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("task", [Hooked, HookedAfter, OwnParameters])
def test_hooks_and_classes_of_parameters_act(task, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "thrifty"):
        check(task, tmp_path)
    assert "not fused: its 0.weight" in caplog.text


def test_a_hook_that_comes_with_an_epoch_acts(tmp_path):
    check(HookedLater, tmp_path)


def test_hooks_of_all_optimizers_act(tmp_path):
    def before(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-20, 20)

    handle = register_optimizer_step_pre_hook(before)
    try:
        check(Far, tmp_path)
    finally:
        handle.remove()


def test_a_replaced_backward_acts(tmp_path, monkeypatch):
    plain = torch.Tensor.backward

    def backward(self, *args, **kwargs):
        return plain(self.clamp(max=100), *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    check(Far, tmp_path)


@pytest.mark.parametrize("task", [Careful, Careless])
def test_code_that_catches_all_errors_does_what_it_does_alone(task, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "thrifty"):
        check(task, tmp_path)
    assert "it goes on after an error: it reads the value of a tensor" in caplog.text


@pytest.mark.parametrize("task", [OwnStream, StateOfStream])
def test_the_seed_of_a_step_is_its_own(task, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "thrifty"):
        check(task, tmp_path)
    assert "it reads the seed or the state of a random stream" in caplog.text


def test_denormal_numbers_are_what_they_are_alone(tmp_path):
    check(Denormal, tmp_path)


def test_pack_heeds_hooks():
    models = [nn.Linear(3, 1) for _ in range(2)]
    for model in models:
        model.weight.register_hook(torch.zeros_like)
    before = [model.weight.detach().clone() for model in models]
    pack = th.pack(
        models,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=th.SGD(lr=0.1),
    )
    for _ in range(3):
        pack.step((torch.randn(4, 3), torch.randn(4, 1)))
    assert not pack.fused
    assert all(torch.equal(m.weight, w) for m, w in zip(models, before, strict=True))


# -- threads -------------------------------------------------------------------------------


def test_one_thread_trains_at_a_time():
    streams, answers = Streams(), []

    def other():
        try:
            streams.take("another study")
        except th.UsageError as error:
            answers.append(str(error))
        else:
            streams.give_back()
            answers.append("begun")

    def ask():
        thread = threading.Thread(target=other, name="the other one")
        thread.start()
        thread.join()
        return answers[-1]

    streams.take("a study")
    streams.take("a study within it")
    assert "another study cannot begin in this thread while a study trains" in ask()
    streams.give_back()
    assert "MainThread" in ask()
    streams.give_back()
    assert ask() == "begun"


def test_a_thread_that_has_ended_holds_nothing():
    streams = Streams()
    thread = threading.Thread(target=streams.take, args=("a study",))
    thread.start()
    thread.join()
    streams.take("another study")
    streams.give_back()


def test_a_thread_waits_for_short_uses():
    streams, done = Streams(), threading.Event()
    with streams.used("a check"):
        thread = threading.Thread(target=lambda: (streams.take("a study"), done.set()))
        thread.start()
        assert not done.wait(0.05)
    assert done.wait(60)
    thread.join()


def test_studies_in_two_threads_are_refused(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def train():
        STREAMS.take("a study")
        begun.set()
        go_on.wait(60)
        STREAMS.give_back()

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)
    try:
        with pytest.raises(th.UsageError, match="run one after the other"):
            curves(Far, tmp_path, pack="solo")
    finally:
        go_on.set()
        thread.join()
    assert curves(Far, tmp_path, pack="solo")[0]
    STREAMS.take("a study")  # it has been given back
    STREAMS.give_back()


# -- precisions ----------------------------------------------------------------------------


def test_the_newer_interface_of_precisions_is_no_error(tmp_path):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    check(Far, tmp_path)
    before = matmul_precision()
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert matmul_precision() == "highest"
    set_matmul_precision(before)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_a_precision_of_convolutions_is_another_identity():
    before = Far().identity()
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    assert unusual_precisions() == (("mkldnn.conv", "bf16"),)
    assert Far().identity() != before


def test_whether_a_part_may_round_to_tf32():
    assert allows_tf32("cudnn.conv")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not allows_tf32("cuda.matmul")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert allows_tf32("cuda.matmul")


def refused_for(task):
    batch = task().data(None).train
    model = task().model(None)
    with pytest.raises(UnfusableError, match="reads the seed"):
        train_alone(task(), model, [part[:4] for part in batch], seed=0)
    return True


def test_profilers_go_on():
    calls = []

    def note(frame, event, arg):
        calls.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        assert refused_for(OwnStream)
        assert sys.getprofile() is note
    finally:
        sys.setprofile(before)
    assert calls
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        assert refused_for(OwnStream)
        assert sys.getprofile() is profiler
    finally:
        profiler.disable()


def test_settings_of_cudnn_are_no_other_identity(monkeypatch):
    before = Far().identity()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    assert Far().identity() == before
