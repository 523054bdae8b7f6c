"""After Optuna's ``sklearn_simple``: which classifier, and with which parameters?"""

import sklearn.datasets
import sklearn.ensemble
import sklearn.model_selection
import sklearn.svm


def objective(trial):
    x, y = sklearn.datasets.load_iris(return_X_y=True)
    name = trial.suggest_categorical("classifier", ["SVC", "RandomForest"])
    if name == "SVC":
        c = trial.suggest_float("svc_c", 1e-10, 1e10, log=True)
        model = sklearn.svm.SVC(C=c, gamma="auto")
    else:
        depth = trial.suggest_int("rf_max_depth", 2, 32, log=True)
        model = sklearn.ensemble.RandomForestClassifier(
            max_depth=depth, n_estimators=10, random_state=0
        )
    scores = sklearn.model_selection.cross_val_score(model, x, y, cv=3)
    return scores.mean()


if __name__ == "__main__":
    import optuna

    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=30)
    print(study.best_params)
