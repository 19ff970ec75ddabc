"""Records out of plain data (what JSON holds), by cattrs: another type is refused, never converted.

Writing is ``dataclasses.asdict``: the order of the fields is the order in the file.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import ForbiddenExtraKeysError, IterableValidationError, IterableValidationNote

Record = TypeVar("Record")
SHOWN_CHARS = 60
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
"""Of the types that are taken as they are."""


def load_json(text: str) -> Any:
    """What ``text`` holds; ``ValueError`` for what is no JSON, and for NaN, infinities, endless nesting."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{_shown(text)} is no number")
    return value


def read_record(kind: type[Record], data: Any) -> Record:
    """``data`` as a dataclass or a tuple of them; ``ValueError`` says what is wrong, at which key path."""
    try:
        return _CONVERTER.structure(data, kind)
    except cattrs.BaseValidationError as error:
        told = cattrs.transform_error(error, path="", format_exception=_explain)
        raise ValueError(told[0].replace(" @ .", " at ").removesuffix(" @ ")) from error


def _explain(error: BaseException, kind: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {_shown(sorted(error.extra_fields)[0])}"
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    if isinstance(error, ValueError):  # ours, or a record's own complaint about its values
        return str(error)
    return "is not a list of key and value"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in NAMES:
        converter.register_structure_hook(kind, _as_it_is)
    converter.register_structure_hook_func(
        lambda kind: get_origin(kind) is tuple, lambda value, kind: _tuple(converter, value, kind)
    )
    return converter


def _as_it_is(value: Any, kind: type) -> Any:
    """A scalar of exactly this type; a whole number also stands for a number."""
    if type(value) is kind or kind is float and type(value) is int:
        return value
    raise ValueError(f"{_shown(value)} is not {NAMES[kind]}")


def _tuple(converter: cattrs.Converter, value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{_shown(value)} is not a list")
    kinds = get_args(kind)
    kinds = (kinds[0],) * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(kinds):
        raise ValueError(f"{_shown(value)} does not have {len(kinds)} items")
    items = []
    for index, (item, item_kind) in enumerate(zip(value, kinds, strict=True)):
        try:
            items.append(converter.structure(item, item_kind))
        except Exception as error:
            error.add_note(IterableValidationNote(f"item {index}", index, item_kind))
            raise IterableValidationError("", [error], kind) from error
    return tuple(items)


_CONVERTER = _make_converter()
