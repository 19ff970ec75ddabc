"""Named policies: one file each, and nothing else in this folder; this registry is the only list of them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from inspect import Parameter, signature
from math import isfinite
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from scheduler.policy import goodput
from scheduler.policy.base import Policy
from scheduler.policy.contract import Contract
from scheduler.policy.overload import Overload
from scheduler.policy.reservation import Reservation

MEASURES = {"dist_goodput": goodput.contract}  # contracts that order no queue
SEAMS = (Reservation, Overload)
TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list",
    Mapping: "a mapping",
    Reservation: "a kind of reservation",
    Overload: "a kind of overload",
}


def policy_names() -> list[str]:
    """Names of all policies, sorted; a policy lives in the module of its name."""
    return list(_modules())


@functools.cache
def _modules() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def make_policy(name: str, **options: object) -> Policy:
    """A policy by name. Raises ValueError for an unknown name, an unknown option, or a value of another type.

    Values may come from a file: a list is as good as a tuple, and ``reservation`` and ``overload`` may be
    given as their kind or as a mapping of their fields.
    """
    kind, types = policy_class(name), option_types(name)
    for option in options:
        if option not in types:
            raise ValueError(f"policy {name}: no option {option!r}; known: {', '.join(types)}")
    values: dict[str, Any] = {}
    for option, value in options.items():
        try:
            values[option] = typed(value, types[option])
        except ValueError as error:
            raise ValueError(f"policy {name}: option {option}: {error}") from error
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"policy {name}: {error}") from error


@functools.cache
def option_types(name: str) -> Mapping[str, Any]:
    """The options of a policy and their annotated types, sorted. Raises ValueError for an unknown name."""
    types: dict[str, Any] = {}
    for base in policy_class(name).__mro__:
        made = vars(base).get("__init__")
        if made is None:
            continue
        parameters = signature(made).parameters.values()
        hints = get_type_hints(made)
        types |= {
            item.name: hints[item.name]
            for item in parameters
            if item.kind is Parameter.KEYWORD_ONLY and item.name not in types
        }
        if not any(item.kind is Parameter.VAR_KEYWORD for item in parameters):
            break
    return MappingProxyType(dict(sorted(types.items())))


def typed(value: object, kind: Any) -> Any:
    """``value`` as an option of type ``kind``. Raises ValueError when it is not one."""
    choices = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if value is None and NoneType in choices:
        return None
    kind = choices[0]
    origin = get_origin(kind) or kind
    if origin in SEAMS:
        return _seam(value, origin)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(typed(item, get_args(kind)[0]) for item in value)
    if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
        if isfinite(value):
            return float(value)
    fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
    if not fits or origin is float:
        raise ValueError(f"{value!r} is not {TYPE_WORDS[origin]}")
    return value


def _seam(value: object, record: type) -> Any:
    """A reservation or an overload from itself, its kind, or a mapping of its fields."""
    if isinstance(value, record):
        return value
    if isinstance(value, str):
        return record(kind=value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is neither {TYPE_WORDS[record]} nor a mapping of its fields")
    hints = get_type_hints(record)
    for field in value:
        if field not in hints:
            raise ValueError(f"{record.__name__.lower()} has no {field!r}; known: {', '.join(hints)}")
    return record(**{field: typed(item, hints[field]) for field, item in value.items()})


def policy_class(name: str) -> type[Policy]:
    """The class of a policy. Raises ValueError for an unknown name."""
    if name not in policy_names():
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(policy_names())}")
    module = importlib.import_module(f"scheduler.policies.{name}")
    for candidate in vars(module).values():
        if (
            isinstance(candidate, type)
            and issubclass(candidate, Policy)
            and candidate.__module__ == module.__name__
            and candidate.identity.policy_id == name
        ):
            return candidate
    raise ValueError(f"module scheduler.policies.{name} defines no policy of that name")


def contracts() -> dict[str, Contract]:
    """The declared contract of every policy and measure, by name."""
    declared = {name: policy_class(name).contract for name in policy_names()} | MEASURES
    return dict(sorted(declared.items()))
