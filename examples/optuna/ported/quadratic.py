"""After Optuna's ``quadratic_simple``: a function of two numbers."""

import thrifty as th


@th.trainable
def objective(trial):
    x = trial.suggest_float("x", -100, 100)
    y = trial.suggest_categorical("y", [-1, 0, 1])
    for _ in trial.epochs():
        yield {"value": x**2 + y}


if __name__ == "__main__":
    algorithm = th.RandomSearch(max_epochs=1, num_trials=30)
    study = th.Study(
        objective, algorithm=algorithm, metric="value", mode="min", name="quadratic"
    ).run()
    print(study.best_trial.config)
