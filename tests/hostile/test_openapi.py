"""The OpenAPI document that is published says what the server does, of every field and value."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hostile.test_requests import GOOD, NAMES, VALUES, client, url

__all__ = ["client", "url"]  # fixtures

# What no schema of one field can say: another model, the vocabulary's ids, room, fields that need each other.
BEYOND_A_SCHEMA = {
    *("model", "prompt", "messages", "stop_token_ids", "max_tokens", "max_completion_tokens", "top_logprobs")
}


@pytest.fixture(scope="module")
def validators(client: httpx.Client) -> dict[str, jsonschema.Draft202012Validator]:
    """By path what the document says about a body."""
    document = client.get("/openapi.json").json()
    found = {}
    for path in GOOD:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = {**content["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator.check_schema(schema)
        found[path] = jsonschema.Draft202012Validator(schema)
    return found


@settings(max_examples=200, deadline=None)
@given(path=st.sampled_from(sorted(GOOD)), name=st.sampled_from(NAMES), value=st.sampled_from(VALUES))
@example(path="/v1/completions", name="logprobs", value=False)
@example(path="/v1/completions", name="echo", value=0)
@example(path="/v1/chat/completions", name="n", value=1)
@example(path="/v1/chat/completions", name="grammar", value="x")
def test_what_the_document_says_of_a_field_is_what_the_server_does(
    client: httpx.Client,
    validators: dict[str, jsonschema.Draft202012Validator],
    path: str,
    name: str,
    value: object,
) -> None:
    data = {**GOOD[path], name: value}
    try:
        body = json.dumps(data, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return  # no JSON, or no text: no schema says anything about it
    says = validators[path].is_valid(data)
    answer = client.post(path, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 200 or 400 <= answer.status_code < 500
    if answer.status_code == 200:
        assert says, (name, value)
    elif says:
        assert answer.json()["error"]["param"] in BEYOND_A_SCHEMA, (name, value, answer.text)


def test_good_bodies_are_admitted_and_every_honoured_field_stands_in_the_document(
    client: httpx.Client, validators: dict[str, jsonschema.Draft202012Validator]
) -> None:
    document = client.get("/openapi.json").json()
    for path, validator in validators.items():
        validator.validate(GOOD[path])
        assert not validator.is_valid({**GOOD[path], "grammar": "x"})
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "slo", "n", "metadata"} <= properties.keys()


def test_errors_are_as_the_document_describes_them(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    error = jsonschema.Draft202012Validator(document["components"]["schemas"]["Error"])
    answer = client.post("/v1/completions", json={"prompt": "x", "temperature": "hot"})
    error.validate(answer.json())
    assert str(answer.status_code) in document["paths"]["/v1/completions"]["post"]["responses"]
