"""Texts of the errors and warnings about state that a checkpoint does not hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from thrifty.pack.task._task import SelfDescribing, Task, Trainable
from thrifty.pack.verify import FIRST_BATCH


class WarnOnce:
    """A function that logs each warning once.

    Args:
        logger: Where it logs them.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._known: set[str] = set()

    def __call__(self, text: str) -> None:
        """Log a warning, unless it has been logged before."""
        if text not in self._known:
            self._known.add(text)
            self._logger.warning("%s", text)


def task_name(task: Task | Trainable) -> str:
    """Return the name of a task, for messages."""
    return task.name if isinstance(task, SelfDescribing) else type(task).__name__


# -- state outside of a checkpoint -----------------------------------------------------------


def incomplete(task: Task | Trainable, difference: str, outside: Sequence[str]) -> str:
    """Return a message about a restored trial that continues differently.

    Args:
        task: The task.
        difference: What differs.
        outside: The names of what is outside of the checkpoint.
    """
    places = _listed(outside) or (
        "no attribute, hook or file that thrifty can see, so look for what your code calls, such "
        "as a library with variables of its own"
    )
    return (
        f"{task_name(task)} keeps state outside of its checkpoint: restored from it, a trial goes "
        f"on differently ({difference} differs). Not in the checkpoint: {places}; "
        f"{_mend(task, outside)}"
    )


def only_one_raises(error: Exception) -> str:
    """Return the difference between two trials of which only one raises an error."""
    return f"only one of them raises {type(error).__name__}: {error}, and so what it does"


def used_later(task: Task | Trainable, found: Sequence[str]) -> str:
    """Return a message about values outside of the checkpoint whose effect may come later."""
    return (
        f"{task_name(task)} keeps values outside of its checkpoint that it uses later: "
        f"{_listed(found)}. A restored trial takes the same next steps, but may part from "
        f"the live one afterwards; {_mend(task, found)}"
        + ("" if isinstance(task, SelfDescribing) else _OR_NOT_STATE)
    )


_OR_NOT_STATE = "; or, if no result depends on them, name the attributes in not_state"


def without_effect(task: Task | Trainable, outside: Sequence[str]) -> str:
    """Return a warning about values outside of the checkpoint that change no next step."""
    return (
        f"{task_name(task)}: not in the checkpoint: {_listed(outside)}. A restored trial takes "
        "the same next steps" + ("" if isinstance(task, SelfDescribing) else _IF_MEANT)
    )


_IF_MEANT = "; if that is meant, name the attributes in not_state"


def no_time_to_train(task: Task | Trainable, outside: Sequence[str]) -> str:
    """Return a warning about values outside of the checkpoint whose effect is not checked."""
    return (
        f"{task_name(task)}: not in the checkpoint: {_listed(outside)}. epoch_timeout "
        "leaves no time to train an epoch again, so it is not checked whether that "
        "changes results; make it six times as long as an epoch"
        + ("" if isinstance(task, SelfDescribing) else ", or name these in not_state")
    )


def no_time_to_read(task: Task | Trainable, unread: Sequence[str]) -> str:
    """Return a warning about values that nothing can read, and whose effect is not checked."""
    return (
        f"{task_name(task)}: thrifty cannot read what these hold: {_listed(unread)}. epoch_timeout "
        "leaves no time to train an epoch again, so it is not checked whether they are state that "
        "the checkpoint lacks; make it six times as long as an epoch"
    )


def no_memory(task: Task | Trainable) -> str:
    """Return a warning about a comparison that did not fit into the memory."""
    return f"{task_name(task)}: there was no memory to check that its state is complete"


def cannot_be_loaded(task: Task | Trainable, error: Exception, *, into: str) -> str:
    """Return a message about a checkpoint that a new trial cannot load.

    Args:
        task: The task.
        error: The error that loading raises.
        into: What the checkpoint is loaded into.
    """
    return (
        f"a checkpoint of {task_name(task)} cannot be loaded into a new {into} "
        f"({type(error).__name__}: {error}); what it trains must be able to go on from its "
        "state"
    )


def _mend(task: Task | Trainable, outside: Sequence[str]) -> str:
    """Return what to do with state that the checkpoint does not hold."""
    carriers = {each: name for name in reversed(outside) for each in [_carrier_of(name)] if each}
    mends = [_mend_of(kind, name, task=task) for kind, name in reversed(carriers.items())]
    plain = [name for name in outside if not _carrier_of(name)]
    if plain or not mends:
        mends.insert(0, _mend_plain(task, plain))
    return "; ".join(mends)


def _mend_plain(task: Task | Trainable, outside: Sequence[str]) -> str:
    """Return what to do with attributes and variables."""
    if isinstance(task, SelfDescribing):
        return task.mend
    if isinstance(task, Trainable):
        return _mend_trainable(task, outside)
    if outside and all(name.startswith("optimizer.") for name in outside):
        return (
            "keep it in the optimizer's state of a parameter (self.state[p]), or in its "
            "param_groups"
        )
    return (
        "keep it in a buffer of the model (register_buffer), or make it follow from the "
        "hyper-parameters and the epoch in adapt"
    )


def _mend_trainable(task: Trainable, outside: Sequence[str]) -> str:
    """Return what to do with attributes of a ``Trainable``, and of the data of an adapter."""
    beginnings: tuple[str, ...] = getattr(task, "_thrifty_of_data", ())
    data = [name for name in outside if beginnings and name.startswith(beginnings)]
    in_state = "keep it in state() and load_state()"
    if not data:
        return in_state
    is_all = len(data) == len(outside)
    of_data = (
        f"the data keep {'it' if is_all else _listed(data)} since their first read, and are made "
        "anew where a trial is resumed: make it where the data set is made, in __init__ and in the "
        f"function that {task_name(task)} gets for the data, since what is drawn there has the "
        "seed of the trial; or draw it from a generator that is seeded with the index of the sample"
    )
    return of_data if is_all else f"{in_state}; {of_data}"


_CARRIERS = (
    *(" requires_grad", " hooks", " (of a network)", " (a file)", " (an optimizer)"),
    *(" (shared by trials)", " (gradients)"),
)
"""How the names end that a comparison gives to what no attribute holds."""


def _carrier_of(name: str) -> str:
    """Return the kind of thing that a name stands for; "" for an attribute or a variable."""
    return next((kind for kind in _CARRIERS if name.endswith(kind)), "")


def _mend_of(kind: str, name: str, *, task: Task | Trainable) -> str:
    """Return what to do with state that something else than an attribute carries."""
    place = name.removesuffix(kind)
    is_loop = isinstance(task, Trainable)
    if kind == " requires_grad":
        how = (
            "in each call of train, from the epoch"
            if is_loop
            else (
                "in each step, from a count in a buffer of the model, or in adapt, from a "
                "hyper-parameter with a schedule"
            )
        )
        return f"a checkpoint does not say which parameters are trained: set requires_grad {how}"
    if kind == " hooks":
        where = "setup" if is_loop else "model(hp)"
        if place.startswith("optimizer"):
            return "do in step what the hook of the optimizer does"
        return f"register the hook in {where}, and let it read from the state when to act"
    if kind == " (of a network)":
        held = place.split(".")[1].partition("[")[0]
        if is_loop:
            return f"put self.{held}.state_dict() into state(), and load it in load_state()"
        return (
            f"make self.{held} a module of the model (model.{held} = ... in model(hp), with "
            "requires_grad_(False) if it is not trained)"
        )
    if kind == " (gradients)":
        return (
            "gradients that were accumulated are lost, since load_state() does not make "
            f"{place}: make it in setup() or load_state(), or let each epoch end with step() and "
            "zero_grad()"
        )
    if kind == " (a file)":
        how = "in state()" if is_loop else "in a buffer of the model"
        return f"keep what the file holds, or the position in it, {how}"
    if kind == " (an optimizer)":
        inner = place.rpartition(".")[2]
        return (
            f"let both optimizers have one state: end the optimizer's __init__ with "
            f"self.{inner}.state = self.state, and let its load_state_dict call "
            f"super().load_state_dict(state) and then set self.{inner}.state = self.state and "
            f"self.{inner}.param_groups = self.param_groups"
        )
    return "make the module with this buffer anew in each call of model, or copy.deepcopy it"


# -- results that differ each time -----------------------------------------------------------


def not_repeatable(task: Task | Trainable, difference: str) -> str:
    """Return a message about equal trials that take different steps.

    Args:
        task: The task.
        difference: What differs between them.
    """
    if difference == FIRST_BATCH:
        return (
            f"the data of {task_name(task)} are not the same each time that an epoch is read: "
            f"{difference} differs. Draw from torch's, NumPy's or Python's global stream, "
            "which thrifty seeds for each batch, and keep nothing in the dataset that changes "
            "while it is read"
        )
    return (
        f"{task_name(task)} gives another result each time, from the same state and the same seed "
        f"({difference} differs); draw from torch's, NumPy's or Python's global stream, which "
        "thrifty seeds before each step, or from a generator that is seeded in each call"
    )


def model_not_repeatable(task: Task | Trainable, name: str) -> str:
    """Return a message about a tensor that each new model has with other values."""
    return (
        f"{task_name(task)}.model gives another {name!r} each time, for the same seed and "
        "the same hyper-parameters; draw initial values from torch's, NumPy's or Python's "
        "global stream, which thrifty seeds, and copy what several models start from"
    )


def only_rounding(task: Task | Trainable, device: torch.device) -> str:
    """Return a warning about equal steps that differ in their last bits."""
    return (
        f"{task_name(task)}: equal steps differ in their last bits on {device}, "
        "so its state cannot be checked exactly"
    )


# -- what several trials share -----------------------------------------------------------------


def shared_parameter(task: Task | Trainable, name: str) -> str:
    """Return a message about a parameter that several trials train."""
    return (
        f"{task_name(task)}.model gives the same parameter {name!r} to several trials, so one "
        "trial trains those of another; make it anew, or copy it (copy.deepcopy), in each call"
    )


def drawn_once(name: str, kept: Sequence[str]) -> str:
    """Return a message about random numbers that are drawn for one trial and kept for others.

    Args:
        name: The code that draws them.
        kept: The names of where it keeps them.
    """
    return (
        f"{name} keeps random numbers that it has drawn for one trial (in {_listed(kept)}), so the "
        "results of a trial would depend on the trials before it in the same process; draw what "
        "is made only once from a generator with a seed of its own, such as "
        "torch.Generator().manual_seed(0), or make it anew for each trial"
    )


def set_by_data(task: Task | Trainable, names: Sequence[str]) -> str:
    """Return a message about attributes of the task by which ``data`` tells ``model`` something."""
    return (
        f"{task_name(task)}.data sets {_listed(names)}, and model reads it. Trials share what data "
        "has loaded, so model would read what the trials before it have set; let model compute it "
        "from the hyper-parameters, as data does"
    )


def shifted(name: str, kept: Sequence[str], *, what: str) -> str:
    """Return a message about values that depend on whether something was kept before.

    Args:
        name: The code that makes them.
        kept: The names of what it keeps.
        what: The name of a value that depends on it.
    """
    return (
        f"{name} makes another {what!r} if {_listed(kept)} was filled before: the code that fills "
        "it draws from or seeds the global random streams, so what comes after it depends on the "
        "trials before it in the same process; wrap that code in torch.random.fork_rng(), give it "
        "a generator of its own, or fill it before the study, when its module is imported"
    )


def _listed(names: Sequence[str]) -> str:
    """Return the first few names, as a list in a sentence."""
    return ", ".join(map(repr, names[:5]))
