"""Reference for the rules: K packed trials must equal K plain modules run one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import chain

import pytest
import torch
from torch import nn

import thrifty.pack.fused.rules  # noqa: F401
from tests.devices import here
from thrifty.pack._state import seed_step
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused._packed import Group, Layout
from thrifty.pack.fused._randomness import Randomness, fill
from thrifty.pack.fused._record import record
from thrifty.pack.fused._tape import bind


SIZE = 3
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Each:
    """A separate input for each trial, ``[K, ...]``; packed, trials lie along ``axis``."""

    value: torch.Tensor
    axis: int = 0


@dataclass(frozen=True)
class Shared:
    """An input shared by all trials."""

    value: torch.Tensor


def normal(*shape, seed=0, size=SIZE, axis=0, shared=False):
    """Return normally distributed numbers, one array for each trial or one for all of them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    whole = shape if shared else (size, *shape)
    value = torch.randn(whole, generator=generator, dtype=torch.float64)
    return Shared(value.to(here())) if shared else Each(value.to(here()), axis)


def integers(high, *shape, seed=0, size=SIZE, axis=0, shared=False):
    """Return random integers from 0 to ``high - 1``."""
    generator = torch.Generator().manual_seed(2000 + seed)
    whole = shape if shared else (size, *shape)
    value = torch.randint(0, high, whole, generator=generator)
    return Shared(value.to(here())) if shared else Each(value.to(here()), axis)


def group_of(size=SIZE, *, num_rows=None, batch=None, seed=0, channels_last=False):
    generators = [torch.Generator(here()).manual_seed(seed + k) for k in range(size)]
    rows = None
    if num_rows is not None:
        rows = torch.zeros(size, batch, dtype=torch.float64, device=here())
        for k, num in enumerate(num_rows):
            rows[k, :num] = 1.0 / num
    return Group(size, randomness=Randomness(generators), rows=rows, channels_last=channels_last)


def refused(match, forward, *inputs, make=nn.Module, size=SIZE, num_rows=None, batch=None):
    """Assert that ``forward`` cannot be packed and that the error matches ``match``."""
    group = group_of(size, num_rows=num_rows, batch=batch)
    module = copy.deepcopy(make()).double().to(here())
    for name, parameter in list(module.named_parameters()):
        put(module, "_parameters", name, group.pack(torch.stack([parameter.detach()] * size)))
    for name, buffer in list(module.named_buffers()):
        put(module, "_buffers", name, group.pack(torch.stack([buffer] * size)))
    with pytest.raises(UnfusableError, match=match):
        forward(module, *[_handed(group, x, x.value) for x in inputs])


def check(
    forward,
    inputs,
    *,
    make=nn.Module,
    size=SIZE,
    training=True,
    num_rows=None,
    channels_last=False,
    eager=True,
    tape=True,
    tolerance=TOLERANCE,
):
    """Compare values, gradients of parameters and inputs, and buffers with those of plain modules.

    The packed trials run eagerly as ``Packed`` tensors, and again as a tape on new data.

    Args:
        forward: ``forward(module, *tensors)`` returns a tensor or a tuple of tensors.
        inputs: ``inputs(seed)`` returns a list of ``Each`` and ``Shared``.
        num_rows: If given, rows of the batch from this index on are padding, and ``forward``
            returns a loss.
    """
    first, second = (
        _Twins(
            forward,
            inputs(s),
            make,
            size,
            training=training,
            num_rows=num_rows,
            channels_last=channels_last,
            seed=10 * s,
        )
        for s in (0, 1)
    )
    if eager:
        _compare(first.packed(), first.alone(), tolerance)
    if tape:
        _compare(second.taped(recorded_with=first), second.alone(), tolerance)


class _Twins:
    def __init__(self, forward, inputs, make, size, *, training, num_rows, channels_last, seed):
        self.channels_last = channels_last
        self.forward = forward
        self.inputs = inputs
        self.size = size
        self.seed = seed
        self.num_rows = num_rows
        seed_step(seed + 77, here())
        self.modules = [make().double().to(here()).train(training) for _ in range(size)]
        for module in self.modules:  # fresh norm layers all have the same values
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.data.add_(torch.rand_like(tensor) * 0.2)

    # -- one by one ----------------------------------------------------------------------

    def alone(self):
        outs, grads, buffers = [], [], []
        shared_grads = [torch.zeros_like(x.value) for x in self.inputs]
        for k, module in enumerate(self.modules):
            module = copy.deepcopy(module)
            seed_step(self.seed + k, here())
            leaves = [self._alone_input(x, k) for x in self.inputs]
            out = _tensors(self.forward(module, *[x * 1 if _float(x) else x for x in leaves]))
            wanted = [*module.parameters(), *[x for x in leaves if x.requires_grad]]
            found = _gradients(_total(out, k), wanted)
            grads.append(found[: len(list(module.parameters()))])
            rest = iter(found[len(list(module.parameters())) :])
            for x, leaf, total in zip(self.inputs, leaves, shared_grads, strict=True):
                if leaf.requires_grad:
                    grad = next(rest)
                    (
                        total
                        if isinstance(x, Shared)
                        else total[k][: len(grad)]
                        if grad.dim()
                        else total[k]
                    ).add_(grad)
            outs.append([t.detach() for t in out])
            buffers.append([b.clone() for b in module.buffers()])
        return (
            [torch.stack(t) for t in zip(*outs, strict=True)],
            [torch.stack(t) for t in zip(*grads, strict=True)],
            [g for g in shared_grads if g.is_floating_point()],
            [torch.stack(t) for t in zip(*buffers, strict=True)],
        )

    def _alone_input(self, x, k):
        value = x.value if isinstance(x, Shared) else x.value[k]
        if self.num_rows is not None:
            value = value[: self.num_rows[k]]
        value = value.clone()
        return value.requires_grad_() if _float(value) else value

    # -- packed --------------------------------------------------------------------------

    def packed(self):
        leaves = self._leaves()
        outs = self._compute(leaves)(self._group())
        return self._split(outs, leaves)

    def taped(self, *, recorded_with):
        leaves = recorded_with._leaves()
        group = recorded_with._group()
        draws = group.randomness.draws
        compute = recorded_with._compute(leaves)
        program, _ = record(
            lambda: compute(group), [*chain(*leaves)], draws=lambda: [d.noise for d in draws]
        )
        fresh = self._leaves()
        noises = [replace(d, noise=torch.zeros_like(d.noise)) for d in draws]
        generators = [torch.Generator(here()).manual_seed(self.seed + k) for k in range(self.size)]
        for draw in noises:
            fill(draw, generators=generators, rates=[{}] * self.size, num_rows=self.num_rows)
        tape = bind(program, [t.detach() for t in chain(*fresh)], draws=[d.noise for d in noises])
        before = [b.clone() for b in fresh[1]]
        for _ in range(2):  # a tape can run again
            for buffer, value in zip(fresh[1], before, strict=True):
                buffer.copy_(value)
            tape()
        return self._split(tape.outputs, fresh)

    def _group(self):
        batch = None
        if self.num_rows is not None:
            batch = next(x.value.shape[1] for x in self.inputs if isinstance(x, Each))
        return group_of(
            self.size,
            num_rows=self.num_rows,
            batch=batch,
            seed=self.seed,
            channels_last=self.channels_last,
        )

    def _leaves(self):
        """Return parameters as views of the flat state, buffers that need a copy, and inputs."""
        named = [list(m.named_parameters()) for m in self.modules]
        layout = Layout.of(named[0])
        flat = torch.zeros(self.size, layout.width, dtype=torch.float64, device=here())
        views = list(layout.views(flat))
        parameters = []
        for number, view in enumerate(views):
            view.copy_(torch.stack([n[number][1].detach() for n in named]))
            parameters.append(view.detach().requires_grad_())
        buffers = []
        for tensors in zip(*[m.buffers() for m in self.modules], strict=True):
            value = torch.stack(tensors)
            wide = torch.zeros(self.size, value[0].numel() + 3, dtype=value.dtype, device=here())
            buffer = wide[:, : value[0].numel()].view(value.shape)
            buffers.append(buffer.copy_(value))
        inputs = []
        for x in self.inputs:
            value = x.value.clone()
            if isinstance(x, Each):
                value = value.movedim(0, x.axis).contiguous()
            inputs.append(value.requires_grad_() if _float(value) else value)
        return parameters, buffers, inputs

    def _compute(self, leaves):
        parameters, buffers, inputs = leaves

        def compute(group):
            module = copy.deepcopy(self.modules[0])
            for (name, _), leaf in zip(list(module.named_parameters()), parameters, strict=True):
                put(module, "_parameters", name, group.pack(leaf))
            for (name, _), leaf in zip(list(module.named_buffers()), buffers, strict=True):
                put(module, "_buffers", name, group.pack(leaf))
            handed = [
                _handed(group, x, v, copied=True) for x, v in zip(self.inputs, inputs, strict=True)
            ]
            out = [group.first(t) for t in _tensors(self.forward(module, *handed))]
            total = sum(_total([t[k] for t in out], k) for k in range(group.size))
            wanted = [*parameters, *[x for x in inputs if x.requires_grad]]
            return [*out, *_gradients(total, wanted)]

        return compute

    def _split(self, outs, leaves):
        parameters, buffers, inputs = leaves
        packed = [x for x, v in zip(self.inputs, inputs, strict=True) if _float(v)]
        num = len(outs) - len(parameters) - len(packed)
        input_grads = [
            g if isinstance(x, Shared) else g.movedim(x.axis, 0)
            for x, g in zip(packed, outs[num + len(parameters) :], strict=True)
        ]
        return (
            [t.detach() for t in outs[:num]],
            list(outs[num : num + len(parameters)]),
            input_grads,
            list(buffers),
        )


def _handed(group, x, value, *, copied=False):
    value = value * 1 if copied and _float(value) else value
    return value if isinstance(x, Shared) else group.pack(value, x.axis)


def put(module, where, name, value):
    path, _, last = name.rpartition(".")
    getattr(module.get_submodule(path), where)[last] = value


def _float(x):
    return x.is_floating_point()


def _tensors(out):
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if t is not None]


def _total(out, k):
    """Return a number that depends on each output in a different way."""
    total = torch.zeros((), dtype=torch.float64, device=here())
    for i, t in enumerate(out):
        if _float(t):
            weights = torch.linspace(0.5, 1.5 + i, max(t.numel(), 2), dtype=torch.float64).to(
                here()
            )
            total = total + (t * (weights[: t.numel()].view(t.shape) + 0.1 * k)).sum()
    return total


def _gradients(total, wanted):
    if not total.requires_grad or not wanted:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def _compare(mine, theirs, tolerance):
    names = ("output", "gradient of parameter", "gradient of input", "buffer")
    for name, ours, alone in zip(names, mine, theirs, strict=True):
        assert len(ours) == len(alone)
        for i, (a, b) in enumerate(zip(ours, alone, strict=True)):
            torch.testing.assert_close(
                a.detach(), b, rtol=tolerance, atol=tolerance, equal_nan=True,
                msg=lambda text, name=name, i=i: f"{name} {i}: {text}",
            )  # fmt: skip
