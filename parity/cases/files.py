"""Case files: what a failing run writes, and ``parity replay`` and its like read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.catalogue import MID_FROM
from parity.models.facts import read_facts
from parity.models.families import Family, RowSource, family_names, load_families, load_family
from parity.records import Case
from parity.schemas import load_checked_json
from parity.store import save_text

MAX_FILE_BYTES = 32 << 20
MAX_WORK_TOKENS = 2_000_000  # prompts and outputs of all sessions: hours, even for a small model


def load_case(path: Path) -> Case:
    """The case in a file (UTF-8). Raises ``UsageError`` that names the file and what is wrong."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise OSError(f"it has more than {MAX_FILE_BYTES} bytes")
        if not path.is_file():
            raise OSError("it is no file")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # the second: not UTF-8, or a name that holds a null
        raise UsageError(
            "case file cannot be read", where=str(path), why=str(error), todo="name a case file"
        ) from error
    return read_case(text, where=str(path))


def read_case(text: str, *, where: str) -> Case:
    """The case in a text from outside: by the schema, and as far as one value must fit
    another. Raises ``UsageError``.
    """
    case = Case.from_data(load_checked_json(text, schema="case", where=where), where=where)
    work = sum(len(session.prompt) + session.max_tokens for session in case.sessions)
    if work > MAX_WORK_TOKENS:
        raise UsageError(
            f"case of {work} tokens", where=where, why=f"prompts and outputs may have {MAX_WORK_TOKENS}"
        )
    for fault in case.faults:
        if fault.session >= len(case.sessions):
            raise UsageError(
                f"fault of session {fault.session}", where=where, why=f"there are {len(case.sessions)}"
            )
    for index, session in enumerate(case.sessions):
        if session.hidden_output_tokens is not None and not session.stop_token_ids:
            raise UsageError(
                f"hidden length of session {index}", where=where, why="it has no stop token to end by"
            )
    names = family_names()
    if case.family not in names:
        raise UsageError(
            f"unknown family {case.family!r}", where=where, why=f"families are {', '.join(names)}"
        )
    check_model(case, load_family(case.family), where=where)
    return case


def check_model(case: Case, family: Family, *, where: str) -> None:
    """The model must be one of the family's, and know every token. Raises ``UsageError``."""
    own = family_of(case.model)
    if own is not None and own.name != family.name:
        raise UsageError(
            f"case of family {family.name}",
            where=where,
            why=f"its model {case.model} is of family {own.name}",
        )
    row = family.rows.get(case.model.partition(":")[2] or "tiny")
    if own is None or row is not None and row.source is not RowSource.GENERATED:
        return  # a file from elsewhere: its vocabulary is known when it is opened
    n_vocab = read_facts(resolve_model(family.name).path).n_vocab
    for index, session in enumerate(case.sessions):
        # A hidden length is for the exact engine alone, which ends it by a stop token of no model.
        own = () if session.hidden_output_tokens is not None else session.stop_token_ids
        for token in (*session.prompt, *own):
            if token >= n_vocab:
                raise UsageError(
                    f"token {token} of session {index}", where=where, why=f"{case.model} knows {n_vocab}"
                )


def family_of(model: str) -> Family | None:
    """The family that a model specification names; None where only the model's file says it."""
    if Path(model).is_file():
        return load_family(resolve_model(model).family)
    head = model.partition(":")[0]
    if head == MID_FROM:
        return load_family("llama")
    if head in family_names():
        return load_family(head)
    return next((family for family in load_families().values() if model in family.rows), None)


def brought_parts(path: Path) -> dict[str, str]:
    """What the case in a file ran with instead of our scheduler and engine, by field of ``Brought``. The file
    is one that ``load_case`` reads.
    """
    return json.loads(path.read_text(encoding="utf-8")).get("brought", {})


def save_failing_case(
    case: Case, folder: Path, *, stderr: str = "", brought: Mapping[str, str] | None = None
) -> Path:
    """Write a failing case under a name that says what it is, with the parts that were brought, and beside
    it what its worker said.

    Returns the path of the case.
    """
    text = case.to_json()
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    path = folder / f"{case.family}-{case.layout.value}-{digest}.json"
    if brought:
        text = json.dumps({**json.loads(text), "brought": dict(brought)}, indent=1) + "\n"
    save_text(path, text)
    if stderr:
        save_text(path.with_suffix(".stderr.txt"), stderr)
    return path
