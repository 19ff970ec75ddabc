"""Regeneration: run a family's golden cases, say how they differ from the files, write them when told why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from parity.errors import UsageError
from parity.golden.cases import GoldenMode, golden_path, load_prompts, prompts_path
from parity.golden.extension import save_golden
from parity.golden.record import MIN_MARGIN, Golden, describe_context, find_differences
from parity.golden.run import run_golden, search_prompts
from parity.processes import WorkerDied
from parity.records import Tier, Verdict
from parity.run.profiles import engine_fingerprint
from parity.store import SHIPPED, save_text

PROMPTS_HEADER = """\
# Prompts of this family's goldens, by mode. Found by `parity regen --search`: of the texts tried, those whose
# smallest distance from the first to the second logit is largest, so that tokens hold on every processor.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """What regeneration found for one file. ``golden`` is None when the run
    itself was wrong (``problems``).
    """

    family: str
    mode: GoldenMode
    path: Path
    golden: Golden | None
    is_new: bool
    differences: tuple[str, ...]
    context: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Fail: outputs differ or the run was wrong. Unknown: there is no golden yet."""
        if self.problems or self.differences:
            return Verdict.FAIL
        return Verdict.UNKNOWN if self.is_new else Verdict.PASS

    @property
    def must_be_written(self) -> bool:
        return self.golden is not None and bool(self.is_new or self.differences or self.context)

    def describe(self) -> str:
        """Readable, several lines."""
        lines = [
            f"{self.family} {self.mode}: "
            + (
                "wrong, nothing to accept"
                if self.problems
                else "new"
                if self.is_new
                else "differs"
                if self.differences
                else "holds" + (", other provenance" if self.context else "")
            )
        ]
        if self.golden is not None and self.is_new:
            lines += [
                f"  session {i}: {s.prompt!r} gives {s.text!r}, margin {s.margin:.4g}"
                for i, s in enumerate(self.golden.sessions)
            ]
        return "\n".join(
            [*lines, *(f"  {line}" for line in (*self.problems, *self.differences, *self.context))]
        )


def locked_engine_version(requirements: Path = SHIPPED / "requirements" / "llama.txt") -> str:
    """The version of llama-cpp-python that the lock pins. Raises ``UsageError``."""
    try:
        pinned = re.search(r"^llama-cpp-python==([\w.]+)", requirements.read_text(), re.MULTILINE)
    except OSError as error:
        raise UsageError(
            "locked engine unknown", where=str(requirements), why=error.strerror or "", todo="run `make lock`"
        ) from error
    if pinned is None:
        raise UsageError(
            "locked engine unknown",
            where=str(requirements),
            why="it pins no llama-cpp-python",
            todo="run `make lock`",
        )
    return pinned[1]


def check_engine_is_locked(why_not: str, *, locked: str | None = None) -> str:
    """What to add to the reason: nothing, or that another engine ran and why. Raises ``UsageError``.

    ``why_not`` is what the user said; ``locked`` the pinned version, read from the lock if None.
    """
    locked, running = locked or locked_engine_version(), engine_fingerprint()["version"]
    if running == locked:
        return ""
    if not why_not.strip():
        raise UsageError(
            f"llama-cpp-python {running} is running, {locked} is locked",
            where="requirements/llama.txt",
            why="goldens are written by the locked engine",
            todo='run `make setup`, or say why with --engine-differs "..."',
        )
    return f" (engine {running} instead of the locked {locked}: {why_not.strip()})"


def find_changes(
    family: str,
    *,
    search: bool,
    tier: Tier = Tier.BITS,
    directory: Path | None = None,
    on_mode: Callable[[ModeChange], None] = lambda change: None,
) -> tuple[list[ModeChange], dict[GoldenMode, tuple[str, ...]]]:
    """Run every mode of a family and compare it with its file; also returns the prompts that ran."""
    prompts = search_prompts(family) if search else load_prompts(family, directory)
    changes = []
    for mode, texts in prompts.items():
        changes.append(_find_change(family, mode, texts, directory, tier))
        on_mode(changes[-1])
    return changes, prompts


def _find_change(
    family: str, mode: GoldenMode, texts: tuple[str, ...], directory: Path | None, tier: Tier
) -> ModeChange:
    path = golden_path(family, mode, directory)
    old = Golden.from_text(path.read_text(encoding="utf-8"), where=str(path)) if path.exists() else None
    golden, problems = None, ()
    try:
        run = run_golden(family, mode, texts, tier=tier)
        golden, problems = run.golden, run.problems
        if golden.margin < MIN_MARGIN:
            problems += (
                f"margin {golden.margin:.4g} is below {MIN_MARGIN}: find other prompts with --search",
            )
    except WorkerDied as death:
        problems = (f"crash: {death.reason}",)
    compared = old is not None and golden is not None
    return ModeChange(
        family=family,
        mode=mode,
        path=path,
        golden=None if problems else golden,
        is_new=old is None,
        differences=tuple(find_differences(old, golden, tier=tier)) if compared else (),
        context=tuple(describe_context(old, golden)) if compared else (),
        problems=tuple(problems),
    )


def save_changes(
    changes: list[ModeChange],
    prompts: dict[GoldenMode, tuple[str, ...]],
    *,
    reason: str,
    directory: Path | None = None,
) -> list[Path]:
    """Write one family's files that changed; nothing at all when one of its modes
    is wrong. Raises ``UsageError``.
    """
    if wrong := [change for change in changes if change.problems]:
        raise UsageError(
            f"goldens of {wrong[0].family} were not written",
            where=str(wrong[0].path),
            why=wrong[0].problems[0].splitlines()[0],
            todo="repair that first",
        )
    written = [
        save_golden(change.golden, reason=reason, directory=directory)
        for change in changes
        if change.must_be_written
    ]
    path = prompts_path(changes[0].family, directory)
    if not path.exists() or load_prompts(changes[0].family, directory) != prompts:
        content = {mode.value: list(texts) for mode, texts in prompts.items()}
        save_text(
            path, PROMPTS_HEADER + yaml.safe_dump(content, sort_keys=False, width=1000, allow_unicode=True)
        )
        written.append(path)
    return written
