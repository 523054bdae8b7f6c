"""After Optuna's ``quadratic_simple``: a function of two numbers."""


def objective(trial):
    x = trial.suggest_float("x", -100, 100)
    y = trial.suggest_categorical("y", [-1, 0, 1])
    return x**2 + y


if __name__ == "__main__":
    import optuna

    study = optuna.create_study()
    study.optimize(objective, n_trials=30)
    print(study.best_params)
