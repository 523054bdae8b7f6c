"""What an identity may not confuse: namesakes, hidden attributes, caches of earlier code."""

from __future__ import annotations

import pytest

from thrifty.pack import task_identity
from thrifty.pack.identity import note_moves

from ._projects import project


TASK = """
import functools
import typing

import torch
from torch import nn

import thrifty as th

{code}


class T(th.Task):
    optimizer = th.SGD(lr="lr")

    def data(self, hp):
        rows = torch.linspace(-1, 1, 8)[:, None]
        return th.ArrayData(train=(rows, rows), valid=(rows, rows))

    def model(self, hp):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        return weighed((model(batch[0]) - batch[1]) ** 2).mean()

    def metrics(self, model, batch):
        return {{"loss": self.loss(model, batch)}}


def train():
    weighed(torch.ones(4, 1))
"""
EDITS = {
    "classes of one name in a dict": (
        """
class Base:
    k = 0.0

    def __call__(self, errors):
        return errors * self.k

LOSSES = {"main": type("Loss", (Base,), {"k": ONE}), "aux": type("Loss", (Base,), {"k": OTHER})}

def weighed(errors):
    return LOSSES["main"]()(errors)
"""
    ),
    "classes of one name in two places": (
        """
class Base:
    k = 0.0

MAIN, AUX = type("Loss", (Base,), {"k": ONE}), type("Loss", (Base,), {"k": OTHER})

def weighed(errors):
    return errors * (MAIN.k - 2 * AUX.k)
"""
    ),
    "overloads of one name": (
        """
class Overloads:
    def __init__(self):
        self.known = {}

    def on(self, key):
        def note(function):
            self.known[key] = function
            return self
        return note

weighed_by = Overloads()

@weighed_by.on("ONE")
def weighed_by(errors):
    return errors.abs()

@weighed_by.on("OTHER")
def weighed_by(errors):
    return errors.square()

def weighed(errors):
    return weighed_by.known["1.0"](errors)
"""
    ),
    "what pickling leaves out": (
        """
class Rows:
    def __init__(self, k):
        self.k, self.lock = k, __import__("threading").Lock()

    def __getstate__(self):
        return {}

ROWS = Rows(ONE)

def weighed(errors):
    return errors * ROWS.k
"""
    ),
    "an object that is pickled by name": (
        """
class Rows:
    def __init__(self, k):
        self.k = k

    def __reduce__(self):
        return "ROWS"

ROWS = Rows(ONE)

def weighed(errors):
    return errors * ROWS.k
"""
    ),
    "an attribute of a scripted module": (
        """
class Scale(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, errors):
        return errors * self.k

SCALE = torch.jit.script(Scale(ONE))

def weighed(errors):
    return SCALE(errors)
"""
    ),
    "a constant of a traced function": (
        """
class Scale(nn.Module):
    def forward(self, errors):
        return errors * torch.tensor([ONE, 2.0])[:1]

SCALE = torch.jit.trace(Scale(), torch.ones(4, 1))

def weighed(errors):
    return SCALE(errors)
"""
    ),
    "another method of a scripted module": (
        """
class Scale(nn.Module):
    def forward(self, errors):
        return self.scaled(errors)

    @torch.jit.export
    def scaled(self, errors):
        return errors * ONE

SCALE = torch.jit.script(Scale())
del Scale

def weighed(errors):
    return SCALE(errors)
"""
    ),
}


def made(tmp_path, monkeypatch, code, one="1.0", other="0.5"):
    code = code.replace("ONE", one).replace("OTHER", other)
    return project(tmp_path, monkeypatch, apart=TASK.format(code=code))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("code", EDITS.values(), ids=EDITS)
def test_an_edit_is_seen_and_the_same_code_is_the_same(code, tmp_path, monkeypatch):
    one, again, other = (
        task_identity(made(tmp_path, monkeypatch, code, *values).T()).training_digest
        for values in (("1.0", "0.5"), ("1.0", "0.5"), ("0.5", "1.0"))
    )
    assert one == again
    assert one != other


def test_a_class_that_follows_a_protocol(tmp_path, monkeypatch):
    code = """
class Weighing(typing.Protocol):
    def of(self, errors): ...

class Own(Weighing):
    def of(self, errors):
        return errors * ONE

def weighed(errors):
    return Own().of(errors)
"""
    one, other = (
        task_identity(made(tmp_path, monkeypatch, code, value).T()).training_digest
        for value in ("1.0", "0.5")
    )
    assert one != other


def test_a_model_of_pydantic_is_the_same_in_each_process(tmp_path, monkeypatch):
    code = """
import pydantic

class Options(pydantic.BaseModel):
    k: float = ONE

OPTIONS = Options()

def weighed(errors):
    return errors * OPTIONS.k
"""
    one, again, other = (
        task_identity(made(tmp_path, monkeypatch, code, value).T()).training_digest
        for value in ("1.0", "1.0", "0.5")
    )
    assert one == again
    assert one != other


CACHES = {
    "a global": """
SLOPE = 1.0
ROWS = None

def weighed(errors):
    global ROWS
    if ROWS is None:
        ROWS = torch.ones(4, 1) * SLOPE
    return ROWS * errors
""",
    "a memo": """
SLOPE = 1.0
ROWS = {}

def weighed(errors):
    return ROWS.setdefault(len(errors), torch.ones(len(errors), 1) * SLOPE) * errors
""",
    "a cached function": """
SLOPE = 1.0

@functools.lru_cache
def rows(num):
    return torch.ones(num, 1) * SLOPE

def weighed(errors):
    return rows(len(errors)) * errors
""",
}


@pytest.mark.parametrize("code", CACHES.values(), ids=CACHES)
def test_results_that_earlier_code_has_kept_are_not_those_of_a_fresh_process(
    code, tmp_path, monkeypatch
):
    fresh = made(tmp_path, monkeypatch, code.replace("SLOPE = 1.0", "SLOPE = 2.0"))
    wanted = task_identity(fresh.T()).training_digest
    module = made(tmp_path, monkeypatch, code)
    before = task_identity(module.T())
    module.train()
    note_moves(module.T(), before)
    assert task_identity(module.T()).training_digest == before.training_digest
    module.SLOPE = 2.0
    assert task_identity(module.T()).training_digest != wanted, "its cache has another slope"
    if hasattr(module, "rows"):
        module.rows.cache_clear()
    else:
        module.ROWS = {} if "setdefault" in code else None
    assert task_identity(module.T()).training_digest == wanted
