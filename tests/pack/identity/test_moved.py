"""Code behind a value that training changes stays a part of the identity."""

from __future__ import annotations

import pytest

from thrifty.pack import task_identity
from thrifty.pack.identity import note_moves

from ._projects import project


TASK = """
import functools

import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th


{code}


class T(th.Task):
    optimizer = th.Optimizer(Own, lr="lr") if "Own" in globals() else th.SGD(lr="lr")

    def data(self, hp):
        rows = prepared(torch.linspace(-1, 1, 8)[:, None])
        return th.ArrayData(train=(rows, rows), valid=(rows, rows))

    def model(self, hp):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        return weighed((model(batch[0]) - batch[1]) ** 2).mean()

    def metrics(self, model, batch):
        return {{"loss": F.mse_loss(model(batch[0]), batch[1])}}


{defaults}
"""
DEFAULTS = """
if "prepared" not in globals():
    prepared = abs
if "weighed" not in globals():
    weighed = abs


def train():
    task = T()
    task.data(None)
    model = task.model(None)
    task.loss(model, (torch.ones(4, 1), torch.ones(4, 1))).backward()
    if "Own" in globals():
        Own(model.parameters(), lr=0.1).step()
"""
CASES = {
    "an optimizer, whose step torch wraps": """
def moved(p, lr):
    p.data.sub_(p.grad, alpha=lr * EDITED)

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moved(p, group["lr"])
""",
    "a memo": """
class Ramp:
    def __init__(self):
        self.made = {}

    def get(self, num):
        if num not in self.made:
            self.made[num] = torch.linspace(0, EDITED, num)[:, None]
        return self.made[num]

RAMP = Ramp()

def weighed(errors):
    return RAMP.get(len(errors)) * errors
""",
    "a helper inside of an object": """
class Scale:
    def of(self, errors):
        return errors * EDITED

class Counted:
    def __init__(self):
        self.scales, self.num = [(Scale(),)], 0

    def __call__(self, errors):
        self.num += 1
        return self.scales[0][0].of(errors)

COUNTED = Counted()

def weighed(errors):
    return COUNTED(errors)
""",
    "a function by type": """
@functools.singledispatch
def weighed(errors):
    raise TypeError

@weighed.register
def _(errors: torch.Tensor):
    return errors * EDITED
""",
    "a memo that decorates": """
class Memo:
    def __init__(self, function):
        self.function, self.known = function, {}

    def __call__(self, errors):
        return self.known.setdefault(len(errors), self.function(len(errors))) * errors

@Memo
def weighed(num):
    return EDITED * num
""",
}
FITTED = """
from sklearn.preprocessing import StandardScaler

SCALER = StandardScaler()

def prepared(rows):
    return torch.tensor(SCALER.fit_transform(rows.numpy())).float() * EDITED
"""


def identified(tmp_path, monkeypatch, code, number):
    """Return identities of a task before and after it has trained, in a process of its own."""
    text = TASK.format(code=code.replace("EDITED", str(number)), defaults=DEFAULTS)
    made = project(tmp_path, monkeypatch, moving=text)
    before = task_identity(made.T())
    made.train()
    note_moves(made.T(), before)
    return before, task_identity(made.T())


@pytest.mark.parametrize("code", [*CASES.values(), FITTED], ids=[*CASES, "a fitted object"])
def test_a_task_that_has_trained_is_the_same(code, tmp_path, monkeypatch):
    before, after = identified(tmp_path, monkeypatch, code, 1.5)
    assert after.training == before.training
    assert after.evaluation == before.evaluation


@pytest.mark.parametrize("code", CASES.values(), ids=CASES)
def test_an_edit_is_seen_after_training_too(code, tmp_path, monkeypatch):
    _, one = identified(tmp_path, monkeypatch, code, 1.5)
    _, other = identified(tmp_path, monkeypatch, code, 2.5)
    changed = {name for name in one.training if one.training[name] != other.training.get(name)}
    assert [name for name in changed if name.startswith("function ")]
    assert len(changed) <= 2


def test_a_method_that_is_replaced_is_seen(tmp_path, monkeypatch):
    text = TASK.format(code=CASES["a memo"].replace("EDITED", "1.5"), defaults=DEFAULTS)
    made = project(tmp_path, monkeypatch, moving=text)
    before = task_identity(made.T())
    made.train()
    note_moves(made.T(), before)
    made.Ramp.get = lambda self, num: made.torch.linspace(0, 9, num)[:, None]
    assert task_identity(made.T()).training != before.training


def test_what_training_has_put_there_does_not_count(tmp_path, monkeypatch):
    """A fresh process has not met it yet."""
    code = """
    KNOWN = []

    class Found:
        def of(self, errors):
            return errors

    def weighed(errors):
        if not KNOWN:
            KNOWN.append(globals()["Fou" + "nd"]())
        return KNOWN[0].of(errors)
    """
    text = TASK.format(code=code.replace("\n    ", "\n"), defaults=DEFAULTS)
    made = project(tmp_path, monkeypatch, moving=text)
    before = task_identity(made.T())
    made.train()
    note_moves(made.T(), before)
    assert task_identity(made.T()).training == before.training
