"""Requests within or beyond the schema get only the answers that it names."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from thrifty.web import create_app


pytestmark = pytest.mark.slow


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MORE = {
    GenerationMode.POSITIVE: [],
    GenerationMode.NEGATIVE: [negative_data_rejection, unsupported_method],
}
PATHS = [
    "/api/revision",
    "/api/studies",
    "/api/studies/{study}",
    "/api/studies/{study}/revision",
    "/api/studies/{study}/history",
    "/api/studies/{study}/curves",
    "/api/studies/{study}/parallel",
    "/api/studies/{study}/pareto",
    "/api/studies/{study}/importance",
    "/api/studies/{study}/forest",
    "/api/studies/{study}/workers",
    "/api/studies/{study}/trials",
    "/api/studies/{study}/trials/{number}",
    "/api/studies/{study}/acts",
    "/api/studies/{study}/code",
    "/api/studies/{study}/trials/{number}/artifacts/{digest}",
    "/api/studies/{study}/trials/{number}/branch",
    "/api/deleted",
    "/api/deleted/{number}/code",
]
POSTS = [
    "/api/studies/{study}/acts",
    "/api/studies/{study}/branches",
    "/api/studies/{study}/configurations",
    "/api/studies/{study}/length",
    "/api/studies/{study}/delete",
    "/api/deleted/{number}/restore",
]
OPERATIONS = [*((path, "GET") for path in PATHS), *((path, "POST") for path in POSTS)]


@pytest.fixture(scope="module")
def schema(trained):
    app = create_app(f"sqlite:///{trained}", patience_s=0.0, local_only=False)
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_path_is_tried(schema):
    assert sorted(schema) == sorted({*PATHS, *POSTS})


@pytest.mark.sample(8)
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_those_of_the_schema(schema, path, method, mode):
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.path_parameters and not operation.query:
        return  # nothing can be wrong

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def holds(case):
        if mode is GenerationMode.POSITIVE and "study" in case.path_parameters:
            case.path_parameters["study"] %= 3  # two of three exist
        case.call_and_validate(checks=[*CHECKS, *MORE[mode]])

    holds()
