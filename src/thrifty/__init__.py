"""Hyper-parameter tuning that never pays twice.

This module exports every public name. Each is imported when it is first used, so that
``import thrifty`` and the commands that do not train need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

if TYPE_CHECKING:
    from thrifty import (
        graph as graph,
        hetero as hetero,
        integrations as integrations,
        nn as nn,
        pack as pack,
    )
    from thrifty.core import (
        AlgorithmError as AlgorithmError,
        CheckpointError as CheckpointError,
        CloudError as CloudError,
        DivergedError as DivergedError,
        GraphError as GraphError,
        HeteroError as HeteroError,
        LayerError as LayerError,
        MissingExtraError as MissingExtraError,
        PackMismatchError as PackMismatchError,
        PeerLostError as PeerLostError,
        ScheduleError as ScheduleError,
        SpaceError as SpaceError,
        StateError as StateError,
        StoreBusyError as StoreBusyError,
        StoreError as StoreError,
        StoreUnreachableError as StoreUnreachableError,
        StoreVersionError as StoreVersionError,
        StoreWriteError as StoreWriteError,
        StudyMismatchError as StudyMismatchError,
        StudyNotFoundError as StudyNotFoundError,
        TaskError as TaskError,
        ThriftyError as ThriftyError,
        TooFewWorkersError as TooFewWorkersError,
        TrainingError as TrainingError,
        UsageError as UsageError,
        WorkerLostError as WorkerLostError,
    )
    from thrifty.integrations import (
        FineTune as FineTune,
        LoRA as LoRA,
        LRScheduler as LRScheduler,
        RayFunction as RayFunction,
        optimize as optimize,
        optuna_storage as optuna_storage,
        pack_tokens as pack_tokens,
        ray_space as ray_space,
        trainable as trainable,
    )
    from thrifty.pack import (
        EMA as EMA,
        SGD as SGD,
        SWA as SWA,
        Adagrad as Adagrad,
        Adam as Adam,
        AdamW as AdamW,
        ArrayData as ArrayData,
        DatasetPair as DatasetPair,
        HyperParameters as HyperParameters,
        Optimizer as Optimizer,
        Optimizers as Optimizers,
        RMSprop as RMSprop,
        StreamData as StreamData,
        Task as Task,
        TokenFile as TokenFile,
        Trainable as Trainable,
        times as times,
    )
    from thrifty.run import (
        External as External,
        Faults as Faults,
        Local as Local,
        Ray as Ray,
        Slurm as Slurm,
    )
    from thrifty.search import (
        ASHA as ASHA,
        BOHB as BOHB,
        BOSS as BOSS,
        Algorithm as Algorithm,
        Auto as Auto,
        CheckedASHA as CheckedASHA,
        CheckedBOSS as CheckedBOSS,
        CMAESSampler as CMAESSampler,
        Enqueued as Enqueued,
        FixedWidthSubSampling as FixedWidthSubSampling,
        FreezeThaw as FreezeThaw,
        GPSampler as GPSampler,
        GridSampler as GridSampler,
        GridSearch as GridSearch,
        Hyperband as Hyperband,
        KDESampler as KDESampler,
        MedianStopping as MedianStopping,
        NSGAIISampler as NSGAIISampler,
        PopulationBasedTraining as PopulationBasedTraining,
        QuantizedSampler as QuantizedSampler,
        RandomForestSampler as RandomForestSampler,
        RandomSampler as RandomSampler,
        RandomSearch as RandomSearch,
        Sampler as Sampler,
        StoppingASHA as StoppingASHA,
        SubSampling as SubSampling,
        SuccessiveHalving as SuccessiveHalving,
        TPESampler as TPESampler,
        WideBOSS as WideBOSS,
    )
    from thrifty.space import (
        REX as REX,
        WSD as WSD,
        Amount as Amount,
        Choice as Choice,
        Constant as Constant,
        Cosine as Cosine,
        CosineRestarts as CosineRestarts,
        Cyclic as Cyclic,
        Exponential as Exponential,
        Float as Float,
        Int as Int,
        Ladder as Ladder,
        Linear as Linear,
        MultiStep as MultiStep,
        OneCycle as OneCycle,
        Polynomial as Polynomial,
        Schedule as Schedule,
        Space as Space,
        Step as Step,
        Timeline as Timeline,
        Warmup as Warmup,
        common_prefix as common_prefix,
        cooldowns as cooldowns,
        epochs as epochs,
        schedule_for as schedule_for,
        steps as steps,
        tokens as tokens,
    )
    from thrifty.study import (
        Forecast as Forecast,
        Observer as Observer,
        Prediction as Prediction,
        Savings as Savings,
        ScalingLaw as ScalingLaw,
        Simulation as Simulation,
        StopWhen as StopWhen,
        Storage as Storage,
        Study as Study,
        TrialResult as TrialResult,
        at_least as at_least,
        at_most as at_most,
        simulate as simulate,
    )

_HOMES = {
    "core": (
        "AlgorithmError CheckpointError CloudError DivergedError GraphError HeteroError LayerError "
        "MissingExtraError PackMismatchError PeerLostError ScheduleError "
        "SpaceError StateError StoreBusyError StoreError StoreUnreachableError "
        "StoreVersionError StoreWriteError StudyMismatchError StudyNotFoundError TaskError "
        "ThriftyError TooFewWorkersError TrainingError UsageError WorkerLostError"
    ),
    "integrations": (
        "FineTune LRScheduler LoRA RayFunction optimize optuna_storage pack_tokens ray_space "
        "trainable"
    ),
    "pack": (
        "Adagrad Adam AdamW ArrayData DatasetPair EMA HyperParameters Optimizer Optimizers RMSprop "
        "SGD SWA StreamData Task TokenFile Trainable times"
    ),
    "run": "External Faults Local Ray Slurm",
    "search": (
        "ASHA Algorithm Auto BOHB BOSS CMAESSampler CheckedASHA CheckedBOSS Enqueued "
        "FixedWidthSubSampling FreezeThaw GPSampler GridSampler GridSearch QuantizedSampler "
        "Hyperband KDESampler MedianStopping NSGAIISampler PopulationBasedTraining "
        "RandomForestSampler RandomSampler "
        "RandomSearch Sampler StoppingASHA SubSampling SuccessiveHalving TPESampler WideBOSS"
    ),
    "space": (
        "Amount Choice Constant Cosine CosineRestarts Cyclic Exponential Float Int Ladder Linear "
        "MultiStep OneCycle Polynomial REX Schedule Space Step Timeline WSD Warmup "
        "common_prefix cooldowns epochs schedule_for steps tokens"
    ),
    "study": (
        "Forecast Observer Prediction Savings ScalingLaw Simulation StopWhen Storage Study "
        "TrialResult at_least at_most simulate"
    ),
}
_HOME_OF = {name: f"thrifty.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)

_ELSEWHERE = {
    "Categorical": "Choice",
    "Discrete": "Choice",
    "choice": "Choice",
    "Integer": "Int",
    "randint": "Int",
    "Real": "Float",
    "Uniform": "Float",
    "uniform": "Float",
    "LogUniform": "Float(low, high, log=True)",
    "loguniform": "Float(low, high, log=True)",
    "create_study": "Study",
    "PBT": "PopulationBasedTraining",
}
"""What other libraries call something, and the name that it has here."""


if not TYPE_CHECKING:  # else the type checker would not report unknown names

    def __getattr__(name: str) -> Any:
        from thrifty.core import gc_paused  # noqa: PLC0415 -- `import thrifty` imports nothing

        if name in {"graph", "hetero", "integrations", "nn", "pack"}:
            # These are subpackages. `pack` is also callable: thrifty.pack([...]).
            with gc_paused():
                return import_module(f"thrifty.{name}")
        if name in _HOME_OF:
            with gc_paused():
                value = getattr(import_module(_HOME_OF[name]), name)
            globals()[name] = value
            return value
        hint = f"; use thrifty.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'thrifty' has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
