"""The recipe for KubeRay has only fields that a RayJob has, and its study runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import runpy
from pathlib import Path

import jsonschema
import pytest
import yaml

import thrifty as th


FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"


def closed(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
AMOUNTS = {"type": "object", "additionalProperties": {"type": "string"}}
NAMED = {"type": "array", "minItems": 1, "items": closed(["name"], name=TEXT, mountPath=TEXT)}
CONTAINER = closed(
    ["name", "image", "resources"],
    name=TEXT,
    image=TEXT,
    envFrom={
        "type": "array",
        "items": closed(["secretRef"], secretRef=closed(["name"], name=TEXT)),
    },
    resources=closed(["requests", "limits"], requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=NAMED,
)
POD = closed(
    ["containers"],
    terminationGracePeriodSeconds=COUNT,
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    volumes={
        "type": "array",
        "items": closed(["name", "configMap"], name=TEXT, configMap=closed(["name"], name=TEXT)),
    },
)
GROUP = {"rayStartParams": AMOUNTS, "template": closed(["spec"], spec=POD)}
# The fields of KubeRay's RayJob, ray.io/v1, that the recipe uses. The recipe was also held against
# the whole definition of KubeRay (`ray-operator/config/crd/bases/ray.io_rayjobs.yaml`).
RAYJOB = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(["name"], name=TEXT),
    spec=closed(
        ["entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"],
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"const": True},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=closed(
            ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=closed(["rayStartParams", "template"], **GROUP),
            workerGroupSpecs={
                "type": "array",
                "minItems": 1,
                "items": closed(
                    ["groupName", "replicas", "minReplicas", "maxReplicas", "template"],
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    **GROUP,
                ),
            },
        ),
    ),
)


@pytest.fixture
def recipe():
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text())


def test_the_recipe_is_a_rayjob(recipe):
    jsonschema.validate(recipe, RAYJOB)
    recipe["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(recipe, RAYJOB)


def test_what_must_agree_does(recipe):
    spec = recipe["spec"]
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    pods = [each["template"]["spec"] for each in (head, workers)]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert len(images) == 1, "Ray must have the same version everywhere"
    assert spec["entrypoint"] == "python /study/study.py"
    for pod in pods:
        (container,), (volume,) = pod["containers"], pod["volumes"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"]]
        assert container["volumeMounts"][0]["mountPath"] == "/study"
        assert container["resources"]["requests"] == container["resources"]["limits"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        assert cluster["rayVersion"] == importlib.metadata.version("ray")


def test_its_study_asks_for_what_a_worker_has(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_DB", f"sqlite:///{tmp_path}/t.db")
    monkeypatch.setenv("THRIFTY_CHECKPOINTS", str(tmp_path / "states"))
    names = runpy.run_path(str(FOLDER / "study.py"), run_name="study")
    study = names["study"](num_trials=3, max_epochs=20)
    assert study.run(progress=False, executor=th.Local()).best_trial.value > 0.5
    (group,) = recipe["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    wanted = container["resources"]["limits"]
    text = (FOLDER / "study.py").read_text()
    asked = f"num_cpus={wanted['cpu']}, num_gpus={wanted['nvidia.com/gpu']}"
    assert asked in text
