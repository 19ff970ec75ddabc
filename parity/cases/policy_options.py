"""Options of a policy from the command line: the one place where ``NAME=VALUE`` becomes a typed value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import click

from parity.errors import UsageError
from scheduler.policies import SEAMS, make_policy, option_types

PolicyOptions = tuple[tuple[str, Any], ...]
WHERE = "--policy-option"
_BOOLEANS = {"true": True, "false": False}

policy_option = click.option(
    "--policy-option",
    "policy_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the policy: true or false, a number, a list as 2,1, a mapping as JSON or @FILE "
    "(repeatable).",
)


def parse_policy_options(policy: str, texts: Sequence[str]) -> PolicyOptions:
    """Options of ``policy`` as a case keeps them: (name, value) of JSON types.

    A list is written ``2,1`` or as JSON, a mapping as JSON or ``@FILE`` with JSON in it, ``reservation`` and
    ``overload`` also as their kind, no value of an option that may have none as ``none``. Raises
    ``UsageError`` for an unknown policy or option, and for a value that the policy does not take.
    """
    try:
        types = option_types(policy)
    except ValueError as error:
        raise UsageError("policy cannot be made", where="--policy", why=str(error)) from error
    made: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                f"policy option {text!r} has no value", where=WHERE, todo="write it as NAME=VALUE"
            )
        if name not in types:
            known = ", ".join(types)
            raise UsageError(f"policy {policy} has no option {name!r}", where=WHERE, todo=f"known: {known}")
        if name in made:
            raise UsageError(f"policy option {name} is given twice", where=WHERE, todo="give it once")
        made[name] = _value(value, types[name], name)
    try:
        make_policy(policy, **made)
    except ValueError as error:
        raise UsageError("policy cannot be made", where=WHERE, why=str(error)) from error
    return tuple(made.items())


def _value(text: str, kind: Any, name: str) -> Any:
    """A value of JSON types from its text; what cannot be read as ``kind`` stays text,
    for the policy to refuse by name.
    """
    choices = get_args(kind) if NoneType in get_args(kind) else (kind,)
    if NoneType in choices and text == "none":
        return None
    origin = get_origin(choices[0]) or choices[0]
    if origin is bool:
        return _BOOLEANS.get(text.lower(), text)
    if origin in (int, float):
        return _read(origin, text)
    if origin is tuple:
        inner = text.strip().removeprefix("[").removesuffix("]")
        return [_read(get_args(choices[0])[0], item.strip()) for item in inner.split(",")]
    if origin is Mapping or origin in SEAMS:
        return _mapping(text, name) if text[:1] in ("{", "@") else text
    return text


def _read(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _mapping(text: str, name: str) -> Any:
    """JSON, here or in the file after ``@``. Raises ``UsageError``."""
    try:
        return json.loads(Path(text[1:]).read_text(encoding="utf-8") if text[0] == "@" else text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"policy option {name} cannot be read", where=WHERE, why=str(error)) from error
