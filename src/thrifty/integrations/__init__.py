"""Integrations with other libraries, each imported when it is first used.

Loggers (``TensorBoard``, ``MLflow``, ``WandB``) are observers:
``study.run(observers=[TensorBoard("runs")])``. ``LRScheduler`` follows a schedule in a training
loop of your own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thrifty.core import gc_paused


if TYPE_CHECKING:
    from ._huggingface import HuggingFaceTrainable as HuggingFaceTrainable
    from ._lightning import LightningTrainable as LightningTrainable
    from ._lightning_cli import lightning_cli as lightning_cli
    from ._lr_scheduler import LRScheduler as LRScheduler
    from ._trackers import MLflow as MLflow, TensorBoard as TensorBoard, WandB as WandB
    from .fine_tuning._fine_tune import FineTune as FineTune
    from .fine_tuning._lora import LoRA as LoRA
    from .fine_tuning._token_losses import pack_tokens as pack_tokens
    from .functions._loop_trial import LoopTrial as LoopTrial, Scheduled as Scheduled
    from .functions._optimize import optimize as optimize
    from .functions._ray_function import RayFunction as RayFunction
    from .functions._ray_space import ray_space as ray_space
    from .functions._trainable import trainable as trainable
    from .optuna import export_optuna as export_optuna, optuna_storage as optuna_storage
    from .sklearn._search import ThriftySearchCV as ThriftySearchCV

_HOMES = {
    "FineTune": "fine_tuning._fine_tune",
    "HuggingFaceTrainable": "_huggingface",
    "LRScheduler": "_lr_scheduler",
    "LightningTrainable": "_lightning",
    "LoRA": "fine_tuning._lora",
    "LoopTrial": "functions._loop_trial",
    "MLflow": "_trackers",
    "RayFunction": "functions._ray_function",
    "Scheduled": "functions._loop_trial",
    "TensorBoard": "_trackers",
    "ThriftySearchCV": "sklearn._search",
    "WandB": "_trackers",
    "export_optuna": "optuna",
    "lightning_cli": "_lightning_cli",
    "optimize": "functions._optimize",
    "optuna_storage": "optuna",
    "pack_tokens": "fine_tuning._token_losses",
    "ray_space": "functions._ray_space",
    "trainable": "functions._trainable",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with gc_paused():
            value = getattr(import_module(f"thrifty.integrations.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'thrifty.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
