"""One golden: its content, its text form, what in it must be equal, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from parity.checkers.identity import first_difference
from parity.errors import UsageError
from parity.plain_data import load_json, read_record
from parity.records import Tier

GOLDEN_FORMAT = 2
MIN_MARGIN = 0.2  # every generated token's top-1 leads by at least this, in every golden
MARGIN_DIGITS = 6  # of those that margins are written with
SAME_MARGIN = 1e-5  # of a margin: the last of the digits that it is written with


def content_digest(data: dict[str, Any]) -> str:
    """BLAKE2b, 128 bits, of a golden's data without format and digest, as JSON with sorted keys."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAnswer:
    """What the float64 reference says of a session's tokens, each after the golden's tokens before it.

    ``tokens``: those that it picks. ``margin``: the smallest distance from its best to its second logit.
    ``ties``: a line for each token that is another one than the golden's, with the logits too near to tell.
    """

    tokens: tuple[int, ...]
    margin: float
    ties: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSession:
    """One session: ``text`` is what ``tokens`` stand for, undecodable bytes escaped;
    ``data`` its bytes, hexadecimal.

    ``digests`` identify the logits of each generated token; ``margin`` is the
    smallest top-1 to top-2 distance.
    """

    prompt: str
    tokens: tuple[int, ...]
    text: str
    data: str
    digests: tuple[str, ...]
    margin: float
    reference: ReferenceAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenProvenance:
    """What a golden's digests hold for. ``model`` (SHA-256) is what its tokens hold for."""

    model: str
    engine: str
    build: str
    cpu: str
    numerics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The outputs of one family in one mode, and why they were last written."""

    family: str
    mode: str
    reason: str
    provenance: GoldenProvenance
    sessions: tuple[GoldenSession, ...]

    @property
    def margin(self) -> float:
        """The smallest margin of all sessions."""
        return min(session.margin for session in self.sessions)

    def to_text(self) -> str:
        """JSON, one line per list of numbers or digests, so that a diff is read line by line.

        ``digest`` is over all the rest: without it a changed provenance would only switch the comparison of
        logits off. The text is the only form that is read.
        """
        data = asdict(self)
        for session in data["sessions"]:
            for answer in (session, session["reference"]):
                answer["margin"] = float(f"{answer['margin']:.{MARGIN_DIGITS}g}")
        data = {"format": GOLDEN_FORMAT, "digest": content_digest(data), **data}
        text = json.dumps(data, indent=1, ensure_ascii=False)
        return (
            re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text)
            + "\n"
        )

    @staticmethod
    def from_text(text: str, *, where: str) -> Golden:
        """Read what ``to_text`` wrote, to the byte. Raises ``UsageError``."""
        try:
            data = load_json(text)
            if not isinstance(data, dict) or data.pop("format", None) != GOLDEN_FORMAT:
                raise ValueError(f"not a golden of format {GOLDEN_FORMAT}")
            if data.pop("digest", None) != content_digest(data):
                raise ValueError("its content is not what its digest was made of: it was edited")
            golden = read_record(Golden, data)
            if golden.to_text() != text:
                raise ValueError("it is not in the form in which it is written: it was edited")
            return golden
        except ValueError as error:
            raise UsageError(
                "golden cannot be read",
                where=where,
                why=str(error),
                todo="restore it from the repository; to replace it, remove it and run `parity regen`",
            ) from error


def are_digests_comparable(old: GoldenProvenance, new: GoldenProvenance) -> bool:
    """Whether build, numerics profile and CPU match, so that logits must be equal bit by bit."""
    return old == new


def find_differences(old: Golden, new: Golden, *, tier: Tier = Tier.BITS) -> list[str]:
    """What must be equal and is not, one readable line each; empty when the golden holds.

    Model, prompts, tokens, bytes and what the reference says always; digests where build, numerics and CPU
    match and ``tier`` asks for bits. The reason is not compared, the engine's margin follows from the logits.
    """
    lines = []
    if old.provenance.model != new.provenance.model:
        lines.append(f"model: {old.provenance.model[:12]} -> {new.provenance.model[:12]}")
    if len(old.sessions) != len(new.sessions):
        return [*lines, f"sessions: {len(old.sessions)} -> {len(new.sessions)}"]
    bits = tier is Tier.BITS and are_digests_comparable(old.provenance, new.provenance)
    for index, (was, now) in enumerate(zip(old.sessions, new.sessions, strict=True)):
        lines += [f"session {index}: {line}" for line in _session_differences(was, now, bits=bits)]
    return lines


def _session_differences(was: GoldenSession, now: GoldenSession, *, bits: bool) -> list[str]:
    lines = []
    if was.prompt != now.prompt:
        lines.append(f"prompt {was.prompt!r} -> {now.prompt!r}")
    if was.tokens != now.tokens:
        step = first_difference(was.tokens, now.tokens)
        lines += [
            f"tokens differ from generated token {step} on",
            f"  tokens {_listed(was.tokens)} -> {_listed(now.tokens)}",
            f"  text {was.text!r} -> {now.text!r}",
        ]
    elif (was.text, was.data) != (now.text, now.data):
        lines.append(f"same tokens, other bytes: {was.data} -> {now.data}")
    if (was.reference.tokens, was.reference.ties) != (now.reference.tokens, now.reference.ties):
        lines.append(f"the reference picks {_picked(was.reference)} -> {_picked(now.reference)}")
    elif not math.isclose(was.reference.margin, now.reference.margin, rel_tol=SAME_MARGIN):
        lines.append(f"the reference's margin {was.reference.margin:.6g} -> {now.reference.margin:.6g}")
    if bits and was.digests != now.digests:
        step = first_difference(was.digests, now.digests)
        lines.append(f"logits differ in bits from generated token {step} on, same build, numerics and CPU")
    return lines


def describe_context(old: Golden, new: Golden) -> list[str]:
    """What changed besides outputs: provenance and margins, one readable line each."""
    before, after = asdict(old.provenance), asdict(new.provenance)
    lines = [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
    if f"{old.margin:.4g}" != f"{new.margin:.4g}":
        lines.append(f"smallest margin: {old.margin:.4g} -> {new.margin:.4g}")
    return lines


def _picked(answer: ReferenceAnswer) -> str:
    return " ".join([_listed(answer.tokens), *(f"(tie: {tie})" for tie in answer.ties)])


def _listed(tokens: tuple[int, ...]) -> str:
    return "[" + " ".join(map(str, tokens)) + "]"
