"""After Optuna's ``sklearn_additional_args``: an object as objective, which has its data."""

import sklearn.datasets
import sklearn.ensemble
import sklearn.model_selection
import sklearn.svm

import thrifty as th


class Objective:
    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self, trial):
        x, y = self.dataset
        name = trial.suggest_categorical("classifier", ["SVC", "GradientBoosting"])
        if name == "SVC":
            c = trial.suggest_float("svc_c", 1e-4, 1e4, log=True)
            model = sklearn.svm.SVC(C=c)
        else:
            depth = trial.suggest_int("gb_max_depth", 1, 4)
            model = sklearn.ensemble.GradientBoostingClassifier(
                max_depth=depth, n_estimators=5, random_state=0
            )
        for _ in trial.epochs():
            yield {"accuracy": sklearn.model_selection.cross_val_score(model, x, y, cv=3).mean()}


objective = th.trainable(Objective(sklearn.datasets.load_wine(return_X_y=True)).__call__)


if __name__ == "__main__":
    algorithm = th.RandomSearch(max_epochs=1, num_trials=20)
    study = th.Study(objective, algorithm=algorithm, metric="accuracy", name="with_arguments").run()
    print(study.best_trial.config)
