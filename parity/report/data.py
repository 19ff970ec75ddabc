"""The gate's result as JSON: documented by ``parity/schemas/gate.schema.json`` and checked against it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jsonschema

from parity.gate.result import GateCheck, GateResult
from parity.records import Verdict, plain
from parity.schemas import key_path, load_schema

GATE_FORMAT = 1


def result_to_data(result: GateResult) -> dict[str, Any]:
    """JSON-able form of a gate's result. Raises ValueError when it does not satisfy the schema (a bug)."""
    options = result.options
    data = {
        "format": GATE_FORMAT,
        "verdict": result.verdict.value,
        "seconds": result.seconds,
        "counts": {verdict.value: result.count(verdict) for verdict in Verdict},
        "options": {
            "families": list(options.families),
            "row": options.row,
            "sessions": options.sessions,
            "split_sessions": options.split_sessions,
            "frozen": options.frozen,
            "only": [kind.value for kind in options.only],
            "jobs": options.jobs,
            "seed": options.seed,
            "required": {family: options.tier_of(family).value for family in options.families},
        },
        "provenance": asdict(result.provenance),
        "families": {family: family_data(result, family) for family in options.families},
        "checks": [check_to_data(check) for check in result.checks],
    }
    check_against_schema(data)
    return data


def check_against_schema(data: dict[str, Any]) -> None:
    """Raise ValueError naming the key that breaks the schema."""
    fault = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(load_schema("gate")).iter_errors(data)
    )
    if fault is not None:
        raise ValueError(f"gate report breaks its schema at {key_path(fault)}: {fault.message}")


def family_data(result: GateResult, family: str) -> dict[str, Any]:
    """One family's verdict, required tier and model."""
    return {
        "verdict": Verdict.merge(check.verdict for check in result.of_family(family)).value,
        "required": result.options.tier_of(family).value,
        "model_sha256": result.models.get(family, ""),
    }


def check_to_data(check: GateCheck) -> dict[str, Any]:
    """One check, its enums as text; ``failure`` gathers what a person needs to see it again."""
    data = asdict(check, dict_factory=plain)
    divergence, case_file = data.pop("divergence"), data.pop("case_file")
    data["failure"] = None
    if divergence is not None or case_file:
        data["failure"] = {**(divergence or {}), "case_file": case_file, "replay": check.replay}
    return data


def result_to_json(result: GateResult) -> str:
    """The JSON report's text."""
    return json.dumps(result_to_data(result), indent=1) + "\n"
