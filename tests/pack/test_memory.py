"""The forecast of a trial's memory counts what the trial really holds, without training it."""

from __future__ import annotations

import pytest
import torch

from tests.pack.test_frozen import WIDTH, Headed
from thrifty.pack.trial._trial_needs import (
    MemoryForecast,
    TrialMemory,
    available_memory,
    flops_per_s,
    memory_of,
)


DOUBLE = 8
VALUES = {"lr": 0.1}
TRUNK = 6 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH
HEAD = WIDTH + 1


def test_what_a_trial_holds():
    found = memory_of(Headed(), VALUES, real=True)
    model = Headed().model({})
    assert found.base_bytes == sum(p.nbytes for p in model.trunk.parameters())
    head = sum(p.nbytes for p in model.head.parameters())
    assert found.trained_bytes == 3 * head, "parameters, gradients and momenta"
    kept = Headed.batch_size * WIDTH * model.head.weight.element_size()
    assert kept <= found.activation_bytes <= 1.1 * kept


def test_what_depends_on_base_and_batch_alone():
    trunk, head = 2 * (6 * WIDTH + WIDTH * WIDTH), 2 * WIDTH
    # the head multiplies once forward and once for the gradient of its weight
    assert memory_of(Headed(), VALUES, real=True).shared_work == pytest.approx(
        trunk / (trunk + 2 * head)
    )


def test_the_products_of_an_epoch():
    trunk, head = 2 * (6 * WIDTH + WIDTH * WIDTH), 2 * WIDTH
    (rows, _), *_ = (Headed().data({}).train,)
    steps = -(-len(rows) // Headed.batch_size)
    found = memory_of(Headed(), VALUES, real=True)
    assert found.epoch_flops == steps * Headed.batch_size * (trunk + 2 * head)


def test_the_least_time_is_that_of_the_products():
    trial = TrialMemory(
        base_bytes=0, trained_bytes=1, activation_bytes=1, shared_work=0.5, epoch_flops=100.0
    )
    unknown = TrialMemory(base_bytes=0, trained_bytes=1, activation_bytes=1, shared_work=None)
    forecast = MemoryForecast(
        trials=(trial, unknown), capacity_bytes=9, place="here", flops_per_s=10.0
    )
    assert forecast.least_seconds(3, at_once=1) == 30
    assert forecast.least_seconds(3, at_once=4) == 30 * (0.5 + 0.5 / 4)
    nothing = MemoryForecast(trials=(unknown,), capacity_bytes=9, place="here", flops_per_s=10.0)
    assert nothing.least_seconds(3, at_once=1) is None


def test_this_machine_multiplies():
    assert 1e8 < flops_per_s() < 1e16


def test_no_model_is_made_unless_it_is_asked_for():
    assert memory_of(Headed(), VALUES) is None


def test_a_step_that_reads_values():
    class Reading(Headed):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return loss * (1.0 if loss.item() > 1 else 2.0)

    found = memory_of(Reading(), VALUES, real=True)
    assert found.activation_bytes is None
    assert found.shared_work is None
    forecast = MemoryForecast(trials=(found,), capacity_bytes=2**30, place="here")
    assert "its activations are not known" in "\n".join(forecast.lines())


def test_the_random_streams_of_the_process_go_on():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    memory_of(Headed(), VALUES, real=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_how_many_trials_fit():
    trial = TrialMemory(base_bytes=1000, trained_bytes=60, activation_bytes=20, shared_work=0.5)
    forecast = MemoryForecast(trials=(trial,), capacity_bytes=2000, place="here")
    assert trial.own_bytes == (80, 100)
    assert forecast.num_trials(shared=True) == (10, 12)
    assert forecast.num_trials(shared=False) == (1, 1)
    said = "\n".join(forecast.lines())
    assert "about 10 to 12 trials fit" in said
    assert "and 1 if each had a base of its own" in said
    assert "about 50% of a step's multiplications" in said


def test_this_machine_has_memory():
    assert available_memory()[0] > 2**28
