"""The server's OpenAPI document, made of the tables that read requests, so that it says what it does."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from parity.serve.requests import NEUTRAL, WITHOUT_EFFECT, ChatFields, CompletionFields

ERRORS = {
    "400": "a field is wrong, or not honoured: `param` names it",
    "401": "the API key is missing or wrong",
    "404": "another model is served",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "429": "the queue is full; `Retry-After` says when to come again",
    "500": "the request failed in the engine",
    "503": "the server is shutting down, or its engine has stopped",
}
REFERENCE = "#/components/schemas/{model}"


def openapi_document() -> dict[str, Any]:
    """The document, OpenAPI 3.1, as JSON data."""
    schemas: dict[str, Any] = {"Error": ERROR}
    for name, fields, required in (
        ("CompletionRequest", CompletionFields, "prompt"),
        ("ChatCompletionRequest", ChatFields, "messages"),
    ):
        schema = fields.model_json_schema(ref_template=REFERENCE)
        schemas |= schema.pop("$defs", {})
        for field, value in NEUTRAL.items():
            schema["properties"][field] = {"enum": [value, None], "description": "Changes nothing."}
        for field in sorted(WITHOUT_EFFECT):
            schema["properties"][field] = {"description": "Without effect by nature."}
        schema["additionalProperties"] = {"type": "null"}  # null is the same as absent, whatever the name
        schemas[name] = {**schema, "title": name, "required": [required]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "samebytes", "version": importlib.metadata.version("samebytes")},
        "paths": {
            "/health": {"get": _operation("Whether requests can be taken.", errors=("503",))},
            "/metrics": {"get": _operation("Prometheus metrics.", media="text/plain")},
            "/v1/models": {"get": _operation("The model that is served.")},
            "/v1/completions": {"post": _generation("CompletionRequest")},
            "/v1/chat/completions": {"post": _generation("ChatCompletionRequest")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(
    summary: str, *, media: str = "application/json", errors: tuple[str, ...] = ("401",)
) -> dict[str, Any]:
    answer = (
        {"application/json": {"schema": {"type": "object"}}} if media == "application/json" else {media: {}}
    )
    return {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": answer}}
        | {status: {"description": ERRORS[status]} for status in errors},
    }


def _generation(request: str) -> dict[str, Any]:
    reference = {"schema": {"$ref": REFERENCE.format(model=request)}}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    operation = _operation("One answer: whole, or with `stream` as server-sent events.", errors=())
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    operation["responses"] |= {
        status: {"description": said, "content": error} for status, said in ERRORS.items()
    }
    return {**operation, "requestBody": {"required": True, "content": {"application/json": reference}}}
