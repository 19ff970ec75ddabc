"""Each contract test says which policies it ran, so that `parity policies
--check` can count them by policy.
"""

from __future__ import annotations

import pytest

import scheduler.policies

MEASURES = {"sweep_goodput": "dist_goodput"}  # what a test calls, and whose contract that is


@pytest.fixture(autouse=True)
def _says_its_policies(request, monkeypatch, record_property):
    made: dict[str, None] = dict.fromkeys(
        measure for function, measure in MEASURES.items() if function in request.function.__code__.co_names
    )
    original = scheduler.policies.policy_class

    def noted(name: str):
        made[name] = None
        return original(name)

    monkeypatch.setattr(scheduler.policies, "policy_class", noted)
    yield
    for name in made:
        record_property("policy", name)
