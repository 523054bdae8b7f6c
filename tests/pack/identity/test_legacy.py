"""The identity of a task in databases up to version 4, also of a class typed at a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from thrifty.pack.identity._digest import legacy_identity
from thrifty.testing import LineTask


TYPED = """
class Typed(LineTask):
    batch_size = 4

    @staticmethod
    def of(x):
        return x in {"a", "b", "c", "d"} and (lambda y: y + NUMBER)(1)

    @property
    def half(self):
        return self.batch_size / 2
"""


def typed(number=1, module="prompt"):
    """Return the identity of a class without a file."""
    space = {"LineTask": LineTask, "__name__": module}
    exec(TYPED.replace("NUMBER", str(number)), space)
    return legacy_identity(space["Typed"]())


def test_a_class_that_was_typed_at_a_prompt_is_known_by_its_code():
    assert typed() == typed()
    assert typed(1)["source"] != typed(2)["source"]
    assert typed()["class"] == "prompt.Typed"


PRINTED = """
from tests.pack.identity.test_legacy import typed
print(typed()["source"])
"""


def test_the_code_is_the_same_in_each_process():
    """The order of a set of texts is not."""
    found = subprocess.run(
        [sys.executable, "-c", PRINTED],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has another one
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert found == typed()["source"] + "\n"


@pytest.mark.parametrize(("file", "module"), [(True, "study_of_lines"), (False, "__main__")])
def test_a_class_of_the_running_script_is_named_after_its_file(tmp_path, monkeypatch, file, module):
    script = tmp_path / "study_of_lines.py"
    script.touch()
    main = types.ModuleType("__main__")
    if file:
        main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert typed(module="__main__")["class"] == f"{module}.Typed"
