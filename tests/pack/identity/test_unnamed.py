"""User code planted inside a package, and in other places off the usual path."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import textwrap
from types import ModuleType

import pytest
import torch
import torch.distributions.kl as kl
import torch.nn.functional as F

from tests.pack.identity._projects import project
from thrifty.core import TaskError
from thrifty.pack import task_identity
from thrifty.pack.identity import content_digest, reach
from thrifty.pack.identity._unnamed import planted_in, registered


pytestmark = pytest.mark.slow


TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from thrifty.testing import LineTask
import helpers

class Mine(LineTask):
    def loss(self, model, batch):
        x, y = batch
        return LOSS
"""

# Get these by name because `torch.optim` deletes its attribute `optimizer`.
HOOKS = tuple(sys.modules[name] for name in ("torch.nn.modules.module", "torch.optim.optimizer"))
CHANGED = (
    (F, "mse_loss"), (torch, "relu"), (torch.nn, "Linear"),
    (torch.nn.Linear, "reset_parameters"),
)  # fmt: skip
"""Places that the projects below change."""


@contextlib.contextmanager
def torch_put_back():
    """Restore PyTorch after the test, whatever the user's modules change in it."""
    tables = [
        (table, dict(table))
        for module in (*HOOKS, kl)
        for name, table in vars(module).items()
        if isinstance(table, dict) and (name.startswith("_global_") or name == "_KL_REGISTRY")
    ]
    attributes = [(holder, name, getattr(holder, name)) for holder, name in CHANGED]
    try:
        yield
    finally:
        for table, was in tables:
            table.clear()
            table.update(was)
        for holder, name, value in attributes:
            setattr(holder, name, value)


@pytest.fixture
def identity(tmp_path, monkeypatch):
    def of(helpers, loss="F.mse_loss(model(x), y)"):
        mine = TASK.replace("LOSS", loss)
        with torch_put_back():
            return task_identity(project(tmp_path, monkeypatch, mine=mine, helpers=helpers).Mine())

    return of


PLANTED = {
    "function": (
        "import torch.nn.functional as F\nF.mse_loss = lambda a, b: K * (a - b).abs().mean()"
    ),
    "what it reads": """
        import torch.nn.functional as F
        SCALE = K
        def mine(a, b):
            return SCALE * (a - b).abs().mean()
        F.mse_loss = mine
        """,
    "not named by the task": "import torch\ntorch.relu = lambda x: K * x",
    "method": "from torch import nn\nnn.Linear.reset_parameters = lambda self: K",
    "wrapped method": """
        import torch
        @torch.no_grad()
        def reset(self):
            self.weight.fill_(K)
        torch.nn.Linear.reset_parameters = reset
        """,
    "partial": """
        import functools, torch
        def mine(a, b, scale):
            return scale * (a - b).abs().mean()
        torch.nn.functional.mse_loss = functools.partial(mine, scale=K)
        """,
    "object": """
        import torch
        class Loss:
            def __call__(self, a, b):
                return K * (a - b).abs().mean()
        torch.nn.functional.mse_loss = Loss()
        """,
    "class": """
        import torch
        class Mine(torch.nn.Linear):
            scale = K
        torch.nn.Linear = Mine
        """,
    "hook of all modules": """
        import torch
        torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * K)
        """,
    "hook before all modules": """
        import torch
        SCALE = K
        def scaled(module, args):
            return tuple(SCALE * each for each in args)
        torch.nn.modules.module.register_module_forward_pre_hook(scaled)
        """,
    "hook of all parameters": """
        import torch
        torch.nn.modules.module.register_module_parameter_registration_hook(lambda m, n, p: K)
        """,
    "hook of all optimizers": """
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        register_optimizer_step_pre_hook(lambda o, a, k: K)
        """,
    "handler": """
        import torch
        class Mine(torch.distributions.Normal):
            pass
        torch.distributions.register_kl(Mine, Mine)(lambda p, q: K)
        """,
    "context variable": (
        "from contextvars import ContextVar\nV = ContextVar('v', default=K)",
        "helpers.V.get() * F.mse_loss(model(x), y)",
    ),
    "context variable that is set": (
        "from contextvars import ContextVar\nV = ContextVar('v', default=1)\nV.set([K])",
        "helpers.V.get()[0] * F.mse_loss(model(x), y)",
    ),
    "module's getattr": (
        "def __getattr__(name):\n    return K",
        "helpers.scale * F.mse_loss(model(x), y)",
    ),
    "what a module's getattr reads": (
        "_VALUES = {'scale': K}\ndef __getattr__(name):\n    return _VALUES[name]",
        "getattr(helpers, 'scale') * F.mse_loss(model(x), y)",
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", PLANTED.values(), ids=PLANTED)
def test_an_edit_is_seen_and_a_comment_is_not(identity, case):
    helpers, *loss = (case,) if isinstance(case, str) else case
    text = textwrap.dedent(helpers)
    one = identity(text.replace("K", "1.5"), *loss)
    assert identity(text.replace("K", "2.5"), *loss).training_digest != one.training_digest
    assert identity(f"# a comment\n\n{text}".replace("K", "1.5"), *loss).training == one.training


def test_nothing_is_found_where_nobody_has_put_anything():
    assert planted_in({"torch", "numpy"}) == ()
    assert registered() == {}


def test_names_say_what_was_replaced(identity):
    found = identity("import torch.nn.functional as F\ndef mine(a, b): ...\nF.mse_loss = mine")
    assert found.training["global torch.nn.functional.mse_loss"] == "<helpers.mine>"
    assert "function helpers.mine" in found.training


def test_what_is_put_back_is_no_longer_found(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(F, "mse_loss", lambda a, b: a - b)
        assert [each.name for each in planted_in({"torch"})] == ["torch.nn.functional.mse_loss"]
    assert planted_in({"torch"}) == ()


def test_code_that_moves_to_another_name_is_found_there(monkeypatch):
    def mine():
        """Do nothing."""

    for name in ("planted_first", "planted_second"):  # each is the last name of its module
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, name, mine, raising=False)
            (found,) = planted_in({"torch"})
            assert found.name == f"torch.nn.functional.{name}"
            assert planted_in({"torch"}) == (found,)


def test_code_of_a_module_that_changes_its_package_is_found(monkeypatch):
    module = ModuleType("no_package")
    module.mine = lambda: None
    for name, wanted in (("torch.planted", True), ("other.planted", False)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            for _ in range(2):
                assert bool(planted_in({"torch"})) == wanted


def test_how_a_hook_is_called_counts(identity):
    hook = "import torch\ntorch.nn.modules.module.register_module_forward_hook(lambda *a: None"
    one = identity(f"{hook})")
    assert identity(f"{hook}, with_kwargs=True)").training_digest != one.training_digest


def test_a_module_that_has_the_name_is_not_asked(identity):
    text = "scale = 1.0\ndef __getattr__(name):\n    return K"
    loss = "helpers.scale * F.mse_loss(model(x), y)"
    one = identity(text.replace("K", "1"), loss)
    assert identity(text.replace("K", "2"), loss) == one


@pytest.mark.parametrize(
    "statement", ["import helpers as h; return h.scale", "from helpers import scale; return scale"]
)
def test_a_module_that_is_imported_inside_a_function_is_asked(tmp_path, monkeypatch, statement):
    mine = project(
        tmp_path,
        monkeypatch,
        mine=f"def f():\n    {statement}\n",
        helpers="def __getattr__(name):\n    return 1\n",
    )
    names = {each.name for each in reach([mine.f]).functions}
    assert "helpers.__getattr__" in names


def test_context_variables_by_content():
    empty, one, two = (contextvars.ContextVar("v", default=d) for d in ((), (1,), (2,)))
    assert len({content_digest(each) for each in (empty, one, two)}) == 3
    nothing = contextvars.ContextVar("v")
    assert content_digest(nothing) not in {content_digest(each) for each in (empty, one)}


def test_a_context_variable_that_holds_what_has_no_content():
    held = contextvars.ContextVar("v")
    held.set(iter([1]))
    with pytest.raises(TaskError, match=r"ContextVar\.get\(\) is an iterator"):
        content_digest(held)
