"""Shared helpers for tests of adapters.

They train one trial epoch by epoch, also from a state that went through a file.
"""

from __future__ import annotations

import json

from thrifty.pack import EpochPlan, Member, SoloBackend
from thrifty.run import state_from_arrays, state_to_arrays


def train(task, values, *, epochs, start=0, state=None, seed=3):
    """Return metrics after each epoch from ``start`` on, and the state after the last one.

    ``values(epoch)`` are the hyper-parameters.
    """
    backend = SoloBackend(task)
    backend.put(0, Member(values=values(start), seed=seed, epoch=start, state=state))
    metrics = []
    for epoch in range(start, epochs):
        outcome = backend.step({0: EpochPlan(epoch=epoch, values=values(epoch))})[0]
        if isinstance(outcome, Exception):
            raise outcome
        metrics.append(dict(outcome))
    return metrics, backend.state(0)


def stored(state):
    """Return a state as it comes back from a checkpoint."""
    arrays, meta = state_to_arrays(state)
    return state_from_arrays(arrays, json.loads(json.dumps(meta)))


def resumed(make, values, *, epochs):
    """Return metrics of a trial that a new task resumes after each epoch from a stored state."""
    state, found = None, []
    for epoch in range(epochs):
        metrics, state = train(make(), values, epochs=epoch + 1, start=epoch, state=state)
        found += metrics
        state = stored(state)
    return found


def assert_a_resumed_trial_is_the_same(make, values, *, epochs=4):
    """Assert that a trial resumed by a new task after each epoch has the same bits as in one go."""
    alone, last = train(make(), values, epochs=epochs)
    state, resumed = None, []
    for epoch in range(epochs):
        metrics, state = train(make(), values, epochs=epoch + 1, start=epoch, state=state)
        resumed += metrics
        state = stored(state)
    assert resumed == alone
    assert set(state.tensors) == set(last.tensors)
    for name, tensor in last.tensors.items():
        assert (state.tensors[name] == tensor).all(), name


def made_again_only(of, *, make, **options):
    """Make a model again, and never take a copy of it."""
    return make(), False
