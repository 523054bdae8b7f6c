"""LoRA adapters of a base, by peft, and the layers that are trained whole."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from thrifty.core import TaskError, require
from thrifty.pack._quantized import quantized_layers

from ._attention_masks import says_causal


if TYPE_CHECKING:
    import peft


Kind = Literal["causal", "classification"]

ALL_LINEAR = "all-linear"
"""What peft calls all linear layers but the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Low-rank adapters: ``W x + (alpha / r) B A dropout(x)`` in the target layers.

    Each field is a value, or the name of a hyper-parameter: ``LoRA(r="rank")``.

    Attributes:
        r: Rank of the adapters.
        alpha: Numerator of their factor.
        targets: Names of the layers that get one, such as ``("q_proj", "v_proj")``, or
            ``"all-linear"`` for all; a head that is trained whole gets none. Any other text is
            the name of a hyper-parameter; a pattern is not taken.
        dropout: Probability with which an input of an adapter is dropped.
        layers: Numbers of the blocks that get adapters; None for all. Blocks below the first one
            are computed once for all trials of a pack.
        rslora: Whether the factor is ``alpha / sqrt(r)`` (``True`` or ``False``).
        all_targets: All layers that any trial of the study adapts. Given these, trials with other
            ``targets`` may train in one pack, if one of them has the layers of the others: a trial
            holds adapters of rank 0 where it has none, which add nothing. ``load_model`` and
            exports leave them out.
        all_layers: The same for ``layers``.

    >>> LoRA(r=8, alpha="alpha", targets=("q_proj", "v_proj")).values({"alpha": 32})["alpha"]
    32

    Raises:
        TaskError: ``r`` is neither a whole number of at least 1 nor a name; ``layers`` are no
            numbers of blocks.

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
        Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
    """

    r: int | str = 8
    alpha: float | str = 16
    targets: Sequence[str] | str = (ALL_LINEAR,)
    dropout: float | str = 0.0
    layers: Sequence[int] | str | None = None
    rslora: bool | str = False
    all_targets: Sequence[str] = ()
    all_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Put ``"all-linear"``, which is no hyper-parameter, into a tuple."""
        for name in ("targets", "all_targets"):
            if getattr(self, name) == ALL_LINEAR:
                object.__setattr__(self, name, (ALL_LINEAR,))
        if not isinstance(self.r, str):
            _check_rank(self.r)
        if not isinstance(self.layers, str):
            _check_layers(self.layers)
        if self.all_layers:
            _check_layers(self.all_layers, name="all_layers")

    def values(self, hp: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, with hyper-parameters in place of their names.

        Raises:
            TaskError: There is no such hyper-parameter.
        """
        out = asdict(self)
        for name, value in out.items():
            if not isinstance(value, str):
                continue
            if value not in hp:
                mend = "add it to the space"
                if name == "targets":
                    mend += f', or give a tuple of names of layers, such as ("{value}",)'
                elif name == "rslora":
                    mend += ", or give True or False"
                else:
                    mend += ", or give a value"
                known = ", ".join(hp) or "none"
                raise TaskError(
                    f"LoRA: {name}={value!r} is taken for the name of a hyper-parameter, and there "
                    f"is none of this name (there are: {known}); {mend}"
                )
            out[name] = hp[value]
        return out

    @property
    def may_idle(self) -> bool:
        """Whether trials hold adapters of rank 0 where others have one."""
        return bool(self.all_targets or self.all_layers)

    def everywhere(self) -> LoRA:
        """Return adapters in all layers that any trial adapts.

        Raises:
            TaskError: ``all_targets`` or ``all_layers`` is missing.
        """
        for own, every in (("targets", "all_targets"), ("layers", "all_layers")):
            if isinstance(getattr(self, own), str) and not getattr(self, every):
                raise TaskError(
                    f"LoRA: {own} is the hyper-parameter {getattr(self, own)!r}, so give {every}, "
                    "too: what any trial of the study adapts"
                )
        return replace(
            self,
            r=1,
            alpha=1.0,
            dropout=0.0,
            targets=tuple(self.all_targets) or self.targets,
            layers=tuple(self.all_layers) or self.layers,
            all_targets=(),
            all_layers=(),
        )

    def config(self, hp: Mapping[str, Any], *, kind: Kind, **options: Any) -> peft.LoraConfig:
        """Return the adapters as peft's configuration.

        Args:
            hp: The hyper-parameters.
            kind: As ``FineTune(kind=)``.
            **options: Other options of the configuration.

        Raises:
            TaskError: A value is invalid.
        """
        found = self.values(hp)
        rank, targets, layers = found["r"], found["targets"], found["layers"]
        _check_rank(rank)
        _check_layers(layers)
        if not 0.0 <= found["dropout"] < 1.0:
            raise TaskError(f"LoRA: dropout must be in [0, 1), got {found['dropout']!r}")
        if not isinstance(found["rslora"], bool):
            raise TaskError(f"LoRA: rslora must be True or False, got {found['rslora']!r}")
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names:
            raise TaskError('LoRA: targets is empty; name layers, such as ("q_proj", "v_proj")')
        if ALL_LINEAR in names and (len(names) > 1 or layers is not None):
            beside = f"layers={tuple(layers)}" if len(names) == 1 else "other targets"
            raise TaskError(
                f'LoRA: "all-linear" is for all layers of all blocks, and cannot stand beside '
                f'{beside}; name the layers, such as targets=("q_proj", "v_proj", "up_proj")'
            )
        made: peft.LoraConfig = peft_library().LoraConfig(
            r=rank,
            lora_alpha=found["alpha"],
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
            lora_dropout=float(found["dropout"]),
            layers_to_transform=None if layers is None else list(layers),
            use_rslora=found["rslora"],
            task_type="CAUSAL_LM" if kind == "causal" else "SEQ_CLS",
            **options,
        )
        return made


def _check_rank(rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TaskError(f"LoRA: r must be a whole number of at least 1, got {rank!r}")


def _check_layers(layers: object, *, name: str = "layers") -> None:
    if layers is None:
        return
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise TaskError(
            f"LoRA: {name} must be the numbers of some blocks, such as (4, 5), or None for all; "
            f"got {layers!r}"
        )
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TaskError(f"LoRA: {name} must be numbers of blocks from 0, got {number!r}")


def check_blocks(layers: Sequence[int] | int | None, base: Any) -> None:
    """Check that a model has the blocks that get adapters, if its configuration says how many.

    Raises:
        TaskError: It has fewer.
    """
    num = getattr(getattr(base, "config", None), "num_hidden_layers", None)
    last = layers if isinstance(layers, int) else max(layers or [0])
    if isinstance(num, int) and last >= num > 0:
        raise TaskError(
            f"LoRA: layers names block {last}, and {type(base).__name__} has {num} blocks; "
            f"give numbers from 0 to {num - 1}"
        )


_NAME = "default"
"""The name that peft gives an adapter."""


def described(adapter: LoRA) -> LoRA | dict[str, Any]:
    """Return the fields of adapters, or those of the user's own class whole, with its code.

    Fields for idle ones are left out where they are not set, so that identities in earlier
    databases still match.
    """
    if type(adapter) is not LoRA:
        return adapter
    fields = asdict(adapter)
    return {name: v for name, v in fields.items() if v or not name.startswith("all_")}


def adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the paths and layers of a model that have an adapter."""
    for path, module in model.named_modules():
        if _NAME in getattr(module, "lora_A", ()):
            yield path, module


def without_idle(model: torch.nn.Module) -> torch.nn.Module:
    """Take the adapters of rank 0 out of a model, and return it."""
    for path, layer in list(adapted(model)):
        if not layer.lora_A[_NAME].weight.numel():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.base_layer)
    return model


def skeleton_of(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model without values."""
    empty: dict[int, Any] = {}
    for layer in quantized_layers(base).values():
        layer.note_copies(empty, empty=True)
    for tensor in (*base.parameters(), *base.buffers()):
        if id(tensor) in empty:
            continue
        empty[id(tensor)] = made = tensor.to("meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty[id(tensor)] = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return deepcopy(base, empty)


def add_idle(model: torch.nn.Module, everywhere: torch.nn.Module) -> None:
    """Add adapters of rank 0 to the layers of a model that have none, but have one ``everywhere``.

    Raises:
        TaskError: A layer has an adapter that is not ``everywhere``.
    """
    own, others = dict(adapted(model)), dict(adapted(everywhere))
    if unknown := own.keys() - others.keys():
        raise TaskError(
            f"LoRA: {sorted(unknown)[0]} gets an adapter, but all_targets and all_layers do not "
            "name it; add it to them"
        )
    if not own:
        return
    example = next(iter(own.values()))
    drops = isinstance(example.lora_dropout[_NAME], torch.nn.Dropout)
    for path, layer in others.items():
        if path in own:
            continue
        base = model.get_submodule(path)
        like = example.lora_A[_NAME].weight  # a base may be in a lower precision, or in 4 bits
        for factors, dim in ((layer.lora_A, 0), (layer.lora_B, 1)):
            shape = list(factors[_NAME].weight.shape)
            shape[dim] = 0
            factors[_NAME].weight = torch.nn.Parameter(like.new_empty(shape))
        if drops:  # of the same kind, though it drops nothing
            layer.lora_dropout[_NAME] = torch.nn.Dropout(0.0)
        parent, _, name = path.rpartition(".")
        layer.base_layer = base
        setattr(model.get_submodule(parent), name, layer)


def peft_library() -> Any:
    """Return peft, or say how to install it."""
    return require("peft", extra="huggingface")


# -- heads, and what else is new ------------------------------------------------------------------


_BY_PEFT = ("classifier", "score")
"""The ends of the names of heads that peft trains by itself in classification."""

_HEADS = ("classification_head", "logits_proj", "sequence_summary")
"""The other names of heads in transformers, as of BART, T5 and XLNet."""


def trained_whole(
    base: torch.nn.Module, *, classifies: bool, missing: Collection[str] = ()
) -> list[str]:
    """Return the modules that are new in a model, beside those that peft trains by itself.

    Frozen, they would stay random, and who loads the adapter onto the base would get other ones.

    Args:
        base: A model without adapters.
        classifies: Whether it has a head for classification.
        missing: Names of parameters that its folder lacks.
    """
    by_peft = _BY_PEFT if classifies else ()
    heads = {name for name, _ in base.named_children() if classifies and name in _HEADS}
    found, parameters = set(heads), {name for name, _ in base.named_parameters()}
    for name in sorted(parameters.intersection(missing)):
        path = name.rpartition(".")[0]
        if any(part in heads or part.endswith(by_peft) for part in _above(path)):
            continue
        if not path or next(base.get_submodule(path).children(), None) is not None:
            warnings.warn(
                "FineTune: give a folder that has all parameters of the base; this one stays "
                f"random and is not exported with the adapter, because the folder lacks it: {name}",
                stacklevel=2,
            )
            continue
        found.add(path)
    return sorted(found)


def not_adapted(base: torch.nn.Module, *, classifies: bool, whole: Collection[str]) -> list[str]:
    """Return the modules that peft would both adapt and train whole, which it refuses.

    It knows its own heads by their whole names, but trains modules whose names end like theirs.
    """
    ends = (*whole, *(_BY_PEFT if classifies else ()))
    return [
        path
        for path, module in base.named_modules()
        if path.endswith(ends) and path.rpartition(".")[2] not in ends and path not in whole
        if next(module.children(), None) is None
    ]


def _above(path: str) -> Iterator[str]:
    """Yield a path and those of the modules that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def with_adapters(
    base: Any, adapter: LoRA, hp: Mapping[str, Any], *, kind: Kind, missing: Collection[str]
) -> torch.nn.Module:
    """Return the base with new adapters; what is neither adapted nor a head is frozen.

    Args:
        base: The model.
        adapter: The adapters.
        hp: Hyper-parameters that their fields may name.
        kind: What the model does.
        missing: Names of parameters that the base's folder lacks.

    Raises:
        TaskError: The adapters do not fit the base.
    """
    classifies = kind == "classification"
    if (
        classifies
        and hasattr(base, "score")
        and says_causal(base)
        and base.config.pad_token_id is None
    ):
        raise TaskError(
            f"FineTune: {type(base).__name__} judges a sequence by its last token that is not "
            "padding, and its configuration names no pad_token_id; set it there (in the "
            "folder: in config.json)"
        )
    whole = trained_whole(base, classifies=classifies, missing=missing)
    options: dict[str, Any] = {"modules_to_save": whole} if whole else {}
    if apart := not_adapted(base, classifies=classifies, whole=whole):
        options["exclude_modules"] = apart  # older versions of peft do not know it
    config = adapter.config(hp, kind=kind, **options)
    check_blocks(config.layers_to_transform, base)
    try:
        with warnings.catch_warnings():
            # peft asks transformers for an attribute by the name that it had before
            old_name = "`is_gradient_checkpointing` is deprecated"
            warnings.filterwarnings("ignore", message=old_name, category=FutureWarning)
            # and says that it does the right thing for the layers of GPT-2
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            skeleton = skeleton_of(base) if adapter.may_idle else None
            model: torch.nn.Module = peft_library().get_peft_model(base, config)
            if skeleton is not None:
                every = adapter.everywhere().config(hp, kind=kind, **options)
                add_idle(model, peft_library().get_peft_model(skeleton, every))
    except ValueError as error:
        raise TaskError(f"FineTune: the adapters do not fit the model: {error}") from error
    return model
