"""Golden cases: per family and mode one small case over text prompts that
``golden/<family>/prompts.yaml`` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from parity.errors import UsageError
from parity.records import Case, Fault, FaultKind, Session
from parity.store import SHIPPED, own_folder, project_dir
from scheduler.limits import Layout

GOLDEN_DIR = SHIPPED / "golden"
MAX_TOKENS = 12


class GoldenMode(StrEnum):
    """What a golden's sessions go through, each of them compared with itself alone as well."""

    SHORT = "short"  # four prompts that fit one step, all at once
    LONG = "long"  # prompts many windows long, decoded beside each other
    CHUNKED = "chunked"  # prefill in pieces of seven tokens beside running decodes
    SHARED_PREFIX = "shared_prefix"  # two sessions go on from what a first one left in the pool
    PREEMPTED = "preempted"  # recompute preemption while generating, and again while rebuilding


@dataclass(frozen=True, slots=True, kw_only=True)
class ModePlan:
    """How a mode's prompts are made and which marks its run must hit.

    ``count`` sessions with prompts of at least ``min_bytes`` bytes; with ``continues_first`` all but the
    first go on from the first one's whole prompt, which every family can share, hybrids included.
    """

    count: int
    min_bytes: int
    marks: tuple[str, ...]
    continues_first: bool = False
    candidates: int = 150


PLANS: dict[GoldenMode, ModePlan] = {
    GoldenMode.SHORT: ModePlan(count=4, min_bytes=6, marks=("concurrent", "mixed_step")),
    GoldenMode.LONG: ModePlan(count=2, min_bytes=180, marks=("concurrent", "mixed_step"), candidates=60),
    GoldenMode.CHUNKED: ModePlan(count=3, min_bytes=40, marks=("chunked", "mixed_step")),
    GoldenMode.SHARED_PREFIX: ModePlan(
        count=3, min_bytes=20, marks=("shared", "concurrent"), continues_first=True
    ),
    GoldenMode.PREEMPTED: ModePlan(count=3, min_bytes=20, marks=("preempted", "resumed", "rebuilt")),
}


def golden_case(family: str, mode: GoldenMode, prompts: tuple[tuple[int, ...], ...]) -> Case:
    """The case of a mode over tokenised prompts, in ``unified``.

    Cells are float32, which counts in ``streams`` alone: flash attention casts them to float16 (see
    ``Case``).
    """
    sessions = tuple(
        Session(prompt=prompt, max_tokens=MAX_TOKENS, arrival_step=_arrival(mode, index))
        for index, prompt in enumerate(prompts)
    )
    settings: dict = {
        GoldenMode.SHORT: {"max_num_batched_tokens": 48},
        GoldenMode.LONG: {"max_num_batched_tokens": 63},
        GoldenMode.CHUNKED: {"max_num_batched_tokens": 16, "max_chunk_tokens": 7},
        GoldenMode.SHARED_PREFIX: {
            "max_num_batched_tokens": 64,
            "prefix_cache": True,
            "prefix_block_tokens": 1,
        },
        GoldenMode.PREEMPTED: {
            "max_num_batched_tokens": 24,
            "faults": tuple(
                Fault(kind=FaultKind.PREEMPT, step=step, session=session)
                for step, session in ((6, 1), (7, 1), (9, 0))
            ),
        },
    }[mode]
    return Case(
        **{
            "family": family,
            "model": family,
            "sessions": sessions,
            "layout": Layout.UNIFIED,
            "kv_type": "f32",
            "prefix_cache": False,
            **settings,
        }
    )


def _arrival(mode: GoldenMode, index: int) -> int:
    return {GoldenMode.SHARED_PREFIX: 5 * index, GoldenMode.PREEMPTED: 0}.get(mode, index)


def golden_dir_of(family: str) -> Path:
    """The folder that holds a family's goldens: that of the caller's own project if they are there or
    nowhere yet, else ours.
    """
    own = own_folder("golden")
    if own is not None and (own / family).is_dir():
        return own
    return GOLDEN_DIR if (GOLDEN_DIR / family).is_dir() else project_dir() / "golden"


def golden_path(family: str, mode: GoldenMode, directory: Path | None = None) -> Path:
    """``golden/<family>/<mode>.json``."""
    return (directory or golden_dir_of(family)) / family / f"{mode}.json"


def prompts_path(family: str, directory: Path | None = None) -> Path:
    """``golden/<family>/prompts.yaml``."""
    return (directory or golden_dir_of(family)) / family / "prompts.yaml"


def load_prompts(family: str, directory: Path | None = None) -> dict[GoldenMode, tuple[str, ...]]:
    """Text prompts of every mode. Raises ``UsageError`` when they are missing or
    not those that the modes need.
    """
    path = prompts_path(family, directory)
    todo = f"run `parity regen --family {family} --search --accept --reason ...`"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"family {family} has no golden prompts", where=str(path), why=error.strerror or "", todo=todo
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            "golden prompts are not valid YAML", where=str(path), why=str(error), todo=todo
        ) from error
    prompts = {}
    for mode, plan in PLANS.items():
        texts = content.get(mode.value) if isinstance(content, dict) else None
        if (
            not isinstance(texts, list)
            or len(texts) != plan.count
            or not all(isinstance(t, str) for t in texts)
        ):
            raise UsageError(
                "golden prompts are not valid",
                where=f"{path} at {mode}",
                why=f"needs a list of {plan.count} texts",
                todo=todo,
            )
        prompts[mode] = tuple(texts)
    return prompts
