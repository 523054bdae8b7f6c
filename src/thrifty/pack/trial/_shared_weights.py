"""The weights of a trial: trials share the frozen ones, and checkpoints leave them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from thrifty.core import StateError, plain_logger
from thrifty.pack._frozen import Base, FrozenTensor, FrozenTensors, LoadedBase, digest_of, written
from thrifty.pack._quantized import quantized_entries
from thrifty.pack._state import fill_in, leave_out

from ._saved_model import load_model, plain_state


logger = plain_logger(__name__)

MIN_LEFT_OUT_BYTES = 2**16
"""The size of all frozen parameters from which checkpoints leave them out."""


class SharedWeights:
    """The weights of a model, which lets the frozen ones lie in memory that trials share.

    Args:
        model: A fresh model.
        known: The frozen weights of the task on this device.
        name: The task, for messages.

    Attributes:
        frozen: The frozen parameters and buffers that are shared, with a fresh model's values.
    """

    def __init__(self, model: torch.nn.Module, known: FrozenTensors, *, name: str) -> None:
        self._model, self._known, self._name = model, known, name
        self._fresh: Mapping[str, FrozenTensor] = known.adopt(model)
        self.frozen = self._fresh

    def adopt(self, *, only: Collection[str] | None = None) -> None:
        """Let the model share again what a fresh model shares, where its values are still those.

        Args:
            only: The names to which this is limited; None for no limit.
        """
        found, fresh = self._known.adopt(self._model, only=only), self._fresh
        self.frozen = {name: each for name, each in found.items() if fresh.get(name) is each}

    def check(self) -> None:
        """Check that nothing has changed the memory that trials share.

        Raises:
            StateError: Something has, in this trial or in another one.
        """
        if names := written(self.frozen):
            why = (
                "on a GPU, PyTorch's functions for lists of tensors, such as torch._foreach_mul_, "
                "write into it without a copy; write with copy_ or mul_"
            )
            if names[0] in quantized_entries(self._model):
                why = "code may not write to weights in 8 or 4 bits, or to their scales"
            raise StateError(
                f"the frozen {names[0]!r} of {self._name}.model has changed in "
                f"memory that several trials share: {why}"
            )

    # -- checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model; views, not copies.

        Frozen parameters that a fresh model has, too, are named with their digests only.
        """
        state, own = plain_state(self._model), self._that_may_be_left_out()
        same = {
            name: each
            for name, each in self._fresh.items()
            if name in own and name in state and each.equals(own[name])
        }
        if sum(each.tensor.nbytes for each in same.values()) < MIN_LEFT_OUT_BYTES:
            return {"model": state}
        return {
            "model": leave_out(state, same),
            "frozen": {name: each.digest for name, each in same.items()},
        }

    def base(self) -> LoadedBase:
        """Return the weights that ``state`` has left out."""
        own = self._that_may_be_left_out()
        return LoadedBase({name: each for name, each in self._fresh.items() if name in own})

    def load(
        self, held: Mapping[str, Any], digests: Mapping[str, str], *, base: Base | None
    ) -> None:
        """Load what ``state`` has returned.

        Args:
            held: The weights that a checkpoint holds.
            digests: The digests of those that it has left out.
            base: Those, for a model whose frozen weights have changed since.

        Raises:
            StateError: A frozen parameter is not what it was, and the base cannot be read.
        """
        restored = self._load(held, digests, base=base)
        if base is not None and restored:
            self._note_restored(restored, base)
        self.adopt()  # loading copies values, the frozen ones included

    def _load(
        self, held: Mapping[str, Any], digests: Mapping[str, str], *, base: Base | None
    ) -> frozenset[str]:
        """Load the model's state, and return the names of what comes from ``base``."""
        known, own = self._fresh, self._model.state_dict()
        filled, restored = fill_in(
            held,
            digests,
            fresh={**own, **{name: each.tensor for name, each in known.items()}},
            digest_of=lambda name: known[name].digest if name in known else digest_of(own[name]),
            base=base,
            any_shape=quantized_entries(self._model),
        )
        # references to the model's tensors end with this method, so they can be shared again
        load_model(self._model, filled)
        return restored

    def _note_restored(self, names: Collection[str], base: Base) -> None:
        """Take parameters that came from a base for those of a fresh model."""
        self._fresh = {**self._fresh, **self._known.adopt(self._model, only=names)}
        if base.digest not in self._known.restored:
            self._known.restored.add(base.digest)
            logger.warning(
                "the frozen parameters that %s.model makes have changed since a checkpoint was "
                "written (%s, and perhaps others); trials that go on from it keep the stored ones, "
                "and new trials begin with the changed ones",
                self._name,
                min(names),
            )

    def _that_may_be_left_out(self) -> dict[str, torch.Tensor]:
        """Return the tensors that checkpoints leave out if a fresh model has equal ones, by name.

        These are parameters, the scales of quantised layers, and large buffers.
        """
        return {
            **dict(self._model.named_parameters(remove_duplicate=False)),
            **{
                name: buffer
                for name, buffer in self._model.named_buffers(remove_duplicate=False)
                if buffer.layout is torch.strided and buffer.nbytes >= MIN_LEFT_OUT_BYTES
            },
            **quantized_entries(self._model),
        }
