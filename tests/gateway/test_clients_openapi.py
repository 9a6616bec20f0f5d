"""The OpenAPI document: every route is in it, and what schemathesis sends by it meets no 5xx and no other answer.

A longer run by hand, over a running gateway: schemathesis run http://127.0.0.1:8000/openapi.json
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi
from jsonschema import Draft202012Validator
from promptsluice.gateway.app import create_app
from promptsluice.gateway.openapi.document import OPERATIONS
from promptsluice.policies import PolicySet

from .harness import Gateway, http

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance"
)
COLLECTIONS = {"enum": ["handbook", "notes"]}


def test_every_route_is_described() -> None:
    app = create_app(PolicySet.load(None))
    paths = get_openapi(title="", version="", routes=app.routes)["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == OPERATIONS.keys()


def test_its_schemas_are_schemas() -> None:
    told = json.loads(create_app(PolicySet.load(None)).state.openapi)
    assert told["openapi"].startswith("3.1")
    parts: dict[str, Any] = told["components"]["schemas"]
    for part in parts.values():
        Draft202012Validator.check_schema(part)
    text = json.dumps(told)
    assert "#/$defs/" not in text and all(f'"#/components/schemas/{name}"' in text for name in parts)


def test_a_wrong_method_names_the_right_ones(gateway: Gateway) -> None:
    response = http.put(f"{gateway.url}/v1/collections", content=b"x")
    assert response.status_code == 405 and response.headers["allow"] == "GET, POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert http.get(f"{gateway.url}/v1/chat/completions").headers["allow"] == "POST"


@pytest.mark.slow
def test_schemathesis_meets_no_5xx(mixed: Gateway, minilm_dir: Path, tmp_path: Path) -> None:
    told = http.get(f"{mixed.url}/openapi.json").raise_for_status().json()
    # Random names of models and collections would be 404s, all of them.
    told["components"]["schemas"]["Model"] = {"enum": ["echo", "tiny", "far", "lame", "echo:lossless"]}
    told["components"]["schemas"]["NewCollection"]["properties"]["name"] = COLLECTIONS
    for operation in (one for methods in told["paths"].values() for one in methods.values()):
        for parameter in operation.get("parameters", ()):
            parameter["schema"] = COLLECTIONS if parameter["name"] == "name" else parameter["schema"]
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(told))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", mixed.url, "--checks", CHECKS),
        *("--phases", "fuzzing", "--generation-deterministic", "--max-examples", "5", "--no-shrink", "--no-color"),
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"Operations:       {len(OPERATIONS)} selected" in ran.stdout
