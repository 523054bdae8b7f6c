"""Slow imports that the fork server loads before any thread is started."""

import gc

import hypothesis
import pytest
import torch

import thrifty.cli
import thrifty.study
import thrifty.testing


# The first optimizer of a process makes torch load its compiler.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
assert thrifty.cli
assert thrifty.study
assert thrifty.testing
assert hypothesis
assert pytest

# Otherwise the first imports of each fork would look at all these objects.
gc.freeze()
