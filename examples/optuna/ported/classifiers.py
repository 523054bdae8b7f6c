"""After Optuna's ``sklearn_simple``: which classifier, and with which parameters?"""

import sklearn.datasets
import sklearn.ensemble
import sklearn.model_selection
import sklearn.svm

import thrifty as th


@th.trainable
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
    for _ in trial.epochs():
        yield {"accuracy": scores.mean()}


if __name__ == "__main__":
    algorithm = th.RandomSearch(max_epochs=1, num_trials=30)
    study = th.Study(objective, algorithm=algorithm, metric="accuracy", name="classifiers").run()
    print(study.best_trial.config)
