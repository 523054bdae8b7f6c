"""Modules and data that LightningCLI makes from its configuration, as a task of a study."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from thrifty.core import TaskError, plain_logger, require
from thrifty.pack import HyperParameters

from ._lightning import _OURS, LightningTrainable


logger = plain_logger(__name__)

_HOOKS = ("instantiate_trainer", "before_fit", "after_fit", "fit", "_run_subcommand")
"""Methods of a CLI that concern what the study does instead."""

Config = str | Path | Mapping[str, Any]


def lightning_cli(
    module: Callable[..., Any],
    data: Callable[..., Any] | None = None,
    *,
    config: Config | Iterable[Config] = (),
    cli: type | None = None,
    **options: Any,
) -> LightningTrainable:
    """Make a task of what ``LightningCLI(module, data)`` runs, with its configuration.

    Hyper-parameters are named as in the configuration, with dots: ``model.lr``,
    ``data.batch_size``, ``optimizer.lr``, ``model.init_args.width``. They replace what the
    configuration has. Module, data and their options are made by LightningCLI, links of arguments
    included. Options of the trainer that a study controls are left out, and a log line names them.

    Args:
        module: The LightningModule, or a function that makes it, as for ``LightningCLI``.
        data: The LightningDataModule; None if the module has loaders itself.
        config: YAML files or dictionaries, of which later ones count more; those of ``fit`` if they
            have sections of subcommands. Files are read now, once.
        cli: A subclass of ``LightningCLI`` with arguments of its own.
        options: Other options of ``LightningTrainable``, such as ``monitor``.

    What concerns the trainer is in the configuration alone: a subclass that sets or links its
    options, adds callbacks, or has hooks around the training is refused.

    Raises:
        MissingExtraError: Lightning or jsonargparse is not installed.
        TaskError: A file cannot be read, the configuration does not fit, or ``cli`` changes the
            trainer.
    """
    pytorch = _pytorch(module)
    require("jsonargparse", extra="lightning")
    whole = pytorch.cli.LightningCLI
    for name in _HOOKS:
        if cli is not None and getattr(cli, name, None) is not getattr(whole, name, None):
            raise TaskError(
                f"lightning_cli(cli={cli.__name__}): it has a {name} of its own, which a study "
                "does not call; give what concerns the trainer in config"
            )
    base: dict[str, Any] = {}
    for each in [config] if isinstance(config, str | Path | Mapping) else config:
        _merge(base, _section(_read(each)))
    trainer = base.pop("trainer", {})
    for name in ("seed_everything", "ckpt_path", "config"):
        base.pop(name, None)
    dropped = sorted(name for name in trainer if name in {*_OURS, "max_epochs"})
    if dropped:
        logger.info("the study says instead of the trainer's options: %s", ", ".join(dropped))
    kept = {name: value for name, value in trainer.items() if name not in dropped}
    made = partial(_made, module, data, cli=cli or whole, base=base, trainer=pytorch.Trainer)
    return LightningTrainable(
        partial(_module, made),
        None if data is None else partial(_data, made),
        trainer=_trainer_options(pytorch, kept),
        **options,
    )


def _pytorch(module: Any) -> Any:
    """Return the package of Lightning that a module is of, with its ``cli``.

    Raises:
        MissingExtraError: Lightning is not installed.
    """
    kinds = {kind.__module__.partition(".")[0] for kind in getattr(module, "__mro__", ())}
    name = "pytorch_lightning" if "pytorch_lightning" in kinds else "lightning.pytorch"
    require(name.partition(".")[0], extra="lightning")
    import_module(f"{name}.cli")
    return import_module(name)


def _read(config: Config) -> dict[str, Any]:
    """Return a configuration as nested dictionaries.

    Raises:
        TaskError: There is no such file, or it is no YAML.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    yaml = require("yaml", extra="lightning")
    try:
        found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TaskError(f"lightning_cli(config={str(config)!r}): {error}") from None
    if not isinstance(found, dict):
        raise TaskError(f"lightning_cli(config={str(config)!r}): the file has no options")
    return found


def _section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``fit``, where there are sections of subcommands."""
    fit = config.get("fit")
    return fit if isinstance(fit, dict) else config


def _merge(into: dict[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


def _trainer_options(pytorch: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a Trainer with the objects that they describe, such as callbacks.

    Raises:
        TaskError: They do not fit.
    """
    jsonargparse = import_module("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        pytorch.Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True
    )
    # Its older versions have the longer name only.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    try:
        parsed = instantiate(parser.parse_object({"trainer": dict(given)}))
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise TaskError(f"lightning_cli: the trainer's options do not fit: {error}") from None
    return {name: parsed.trainer[name] for name in given}


def _made(
    module: Callable[..., Any],
    data: Callable[..., Any] | None,
    values: Mapping[str, Any],
    *,
    cli: type,
    base: Mapping[str, Any],
    trainer: type,
) -> Any:
    """Return a LightningCLI that has made module and data, and no trainer.

    Raises:
        TaskError: The configuration does not fit.
    """
    config = copy.deepcopy(dict(base))
    for name, value in values.items():
        if name.startswith("trainer."):
            raise TaskError(
                f"{name!r} cannot be a hyper-parameter: all trials have the same trainer; give it "
                "in config, or make studies of their own"
            )
        _put(config, name, list(value) if isinstance(value, tuple) else value)
    own = type(cli.__name__, (cli,), {"instantiate_trainer": _nothing, "_set_seed": _nothing})
    jsonargparse = import_module("jsonargparse")
    try:
        with warnings.catch_warnings():
            # Lightning uses what newer versions of jsonargparse call deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = own(
                module,
                data,
                run=False,
                args=config,
                save_config_callback=None,
                seed_everything_default=False,
                parser_kwargs={"exit_on_error": False},
            )
    except (jsonargparse.ArgumentError, SystemExit) as error:
        raise TaskError(
            f"LightningCLI takes no such configuration: {error}; hyper-parameters are named as "
            "its options, such as model.lr"
        ) from None
    _check_trainer(found, trainer)
    return found


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    """Set an option by its name with dots; a class may be given by its name alone.

    >>> config = {"optimizer": "SGD"}
    >>> _put(config, "optimizer.lr", 0.1)
    >>> config
    {'optimizer': {'class_path': 'SGD', 'init_args': {'lr': 0.1}}}
    """
    *parents, last = name.split(".")
    place = config
    for parent in parents:
        inner = place.get(parent)
        if isinstance(inner, str):
            inner = {"class_path": inner}
        place[parent] = place = {} if inner is None else inner
        if "class_path" in place and not name.partition(f"{parent}.")[2].startswith("init_args."):
            place = place.setdefault("init_args", {})
    place[last] = value


def _check_trainer(made: Any, trainer: type) -> None:
    """Refuse a CLI that sets options of the trainer by itself.

    Raises:
        TaskError: It does.
    """
    usual = {n: p.default for n, p in inspect.signature(trainer).parameters.items()}
    given = dict(made.config.get("trainer") or {})
    changed = [f"trainer.{n}" for n, v in given.items() if n in usual and v != usual[n]]
    changed += list(getattr(made.parser, "callback_keys", ()))
    if changed:
        raise TaskError(
            f"{type(made).__name__} sets {', '.join(changed)}, which a study does not take from "
            "it; give what concerns the trainer in config"
        )


def _nothing(*_: Any, **__: Any) -> None:
    """Take the place of what the study does."""


def _module(made: Callable[..., Any], hp: HyperParameters) -> Any:
    return made({name: hp[name] for name in hp}).model


def _data(made: Callable[..., Any], hp: HyperParameters) -> Any:
    # All values are read: arguments may be linked, and the model may need some of them.
    return made({name: hp[name] for name in hp}).datamodule
