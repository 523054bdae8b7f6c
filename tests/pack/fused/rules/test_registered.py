"""Importing the package is enough for all rules to be there, in a process that imports no more."""

import subprocess
import sys

import pytest


pytestmark = pytest.mark.slow


CODE = """
import pkgutil
import thrifty.pack
from thrifty.pack.fused import _fusable, rules

families = {family.__name__.rpartition(".")[2] for family in rules.FAMILIES}
assert families == {module.name for module in pkgutil.iter_modules(rules.__path__)}
homes = {rule.__module__ for rule in _fusable.RULES.values()}
lacking = {family.__name__ for family in rules.FAMILIES} - homes
assert not lacking, f"no rule is registered by {sorted(lacking)}"
"""


def test_each_module_of_rules_has_registered_some():
    run = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
