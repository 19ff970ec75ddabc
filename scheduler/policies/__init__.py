"""Named policies: one file each; this registry is the only list of them."""

from __future__ import annotations

import importlib
import pkgutil

from scheduler.policies.base import Policy

_NOT_POLICIES = ("base", "contract")


def policy_names() -> list[str]:
    """Names of all policies, sorted; a policy lives in the module of its name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NOT_POLICIES)


def make_policy(name: str, **options: object) -> Policy:
    """A policy by name. Raises ValueError for an unknown name or option."""
    if name not in policy_names():
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(policy_names())}")
    module = importlib.import_module(f"scheduler.policies.{name}")
    for candidate in vars(module).values():
        if isinstance(candidate, type) and issubclass(candidate, Policy) and candidate.identity.policy_id == name \
                and candidate.__module__ == module.__name__:
            try:
                return candidate(**options)
            except TypeError as error:
                raise ValueError(f"policy {name}: {error}") from error
    raise ValueError(f"module scheduler.policies.{name} defines no policy of that name")
