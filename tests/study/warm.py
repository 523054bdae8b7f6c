"""Slow imports that the fork server loads before any thread is started."""

import torch

import thrifty.study
import thrifty.testing


# The first optimiser of a process makes torch load its compiler.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
assert thrifty.study
assert thrifty.testing
