"""The training state as one tensor of bytes, to send to a worker that has to catch up."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from thrifty.pack import State, pack_state, unpack_state


def to_bytes(value: Any) -> Tensor:
    """Serialise nested dicts and lists of tensors and plain values to bytes, without pickle.

    >>> from_bytes(to_bytes({"weight": torch.ones(2), "step": 3}))["step"]
    3
    """
    state = pack_state(value)
    tensors = {
        f"{i}": t.detach().cpu().contiguous() for i, t in enumerate(state.tensors.values())
    }
    tree = json.dumps({"keys": list(state.tensors), "tree": state.tree}).encode()
    body = save(tensors) if tensors else b""
    return torch.frombuffer(
        bytearray(len(tree).to_bytes(8, "little") + tree + body), dtype=torch.uint8
    )


def from_bytes(data: Tensor) -> Any:
    """Return the value that ``to_bytes`` serialised."""
    raw = data.cpu().numpy().tobytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    body = raw[8 + size :]
    tensors = load(body) if body else {}
    named = {key: tensors[f"{i}"] for i, key in enumerate(head["keys"])}
    return unpack_state(State(tensors=named, tree=head["tree"]))
