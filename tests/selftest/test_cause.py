"""What kind of fault it was, who it needs beside it, and where it begins."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.campaign.diagnose import Cause, Diagnosis, diagnose
from parity.campaign.rerun import Rerun, given_chunks
from parity.cases.shrink import first_divergence
from parity.commands.bisect import command
from parity.errors import ExitCode, UsageError
from parity.mutants import cases, find_mutant
from parity.mutants.mutant import Place
from parity.records import Case, Divergence, Outcome, Verdict
from parity.run.runner import run_exact_case

EXPECTED = [
    # mutant, place, cause, session, its token, neighbours that it needs
    ("session_ends_twice", Place.EXACT, Cause.SCHEDULING_FAULT, None, None, ()),
    ("token_after_cancel", Place.EXACT, Cause.SCHEDULING_FAULT, None, None, ()),
    ("second_run_differs", Place.EXACT, Cause.NOT_REPRODUCIBLE, None, None, ()),
    ("prefix_shared_one_token_too_far", Place.EXACT, Cause.BLEED, 1, 0, (0,)),
    ("neighbour_visible", Place.EXACT, Cause.BLEED, 1, 0, (0,)),
    ("tokens_of_two_sessions_swapped", Place.EXACT, Cause.BLEED, 0, 1, (3,)),
    ("state_lost_at_a_chunk_boundary", Place.EXACT, Cause.STATE_FAULT, 1, 0, ()),
    ("replay_without_generated_tokens", Place.EXACT, Cause.STATE_FAULT, 1, 4, ()),
    ("recurrent_share_past_the_boundary", Place.EXACT, Cause.STATE_FAULT, 1, 0, (0,)),
    ("logits_rows_swapped", Place.REAL, Cause.BLEED, 0, 2, (2,)),
    ("recurrent_state_one_token_late", Place.REAL, Cause.STATE_FAULT, 1, 0, (0,)),
    ("cell_below_the_last_one", Place.REAL, Cause.LAYOUT_NOISE, 1, 2, (5,)),
    ("micro_batch_wider_than_the_row_kernel", Place.REAL, Cause.LAYOUT_NOISE, 0, 0, ()),
    ("partial_copy_between_streams", Place.REAL, Cause.ENGINE_CRASH, None, None, ()),
]


def diagnosis_of(name: str, place: Place) -> Diagnosis:
    trial = next(trial for trial in find_mutant(name).trials if trial.place is place)
    run = runs(place)
    run.mutant = name
    return diagnose(trial.case, run)


@cache
def runs(place: Place) -> Rerun:
    """One worker for all: starting it costs more than a diagnosis."""
    return Rerun(exact=place is Place.EXACT)


@pytest.mark.parametrize(
    ("name", "place", "cause", "session", "step", "neighbours"),
    EXPECTED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cause_neighbours_and_first_bad_step_are_named(
    name: str, place: Place, cause: Cause, session: int | None, step: int | None, neighbours: tuple[int, ...]
) -> None:
    found = diagnosis_of(name, place)
    assert (found.cause, found.session, found.step, found.neighbours) == (cause, session, step, neighbours)
    assert found.evidence


@pytest.mark.parametrize(("name", "steps"), [("cell_below_the_last_one", 2), ("logits_rows_swapped", 1)])
def test_distance_over_steps_is_evidence_while_both_have_seen_the_same_text(name: str, steps: int) -> None:
    trial = next(trial for trial in find_mutant(name).trials if trial.place is Place.REAL)
    run = runs(Place.REAL)
    run.mutant = name
    first = first_divergence(run(trial.case))
    assert first.distances[0] == first.distance > 0
    assert min(len(first.distances), 2) == steps
    evidence = [text for text in diagnosis_of(name, Place.REAL).evidence if text.startswith("distance over")]
    assert len(evidence) == steps - 1
    assert all(f"{moved:.3g}" in text for text in evidence for moved in first.distances)


def test_passing_case_has_no_cause() -> None:
    assert diagnose(cases.mixed("llama"), Rerun(exact=True)) is None


def test_given_chunks_are_kept_and_change_no_answer() -> None:
    case = cases.case_of("qwen3next", (cases.session(1, 9, 3),), prefix_cache=False)
    with given_chunks(((0, 4), (4, 5), (5, 9))):
        outcome = run_exact_case(case)
    assert outcome.verdict is Verdict.PASS
    assert (outcome.marks["chunked"], outcome.marks["one_token_chunk"]) == (1, 1)


def bisect(*arguments: str) -> Any:
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_command_names_cause_neighbours_and_step(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(find_mutant("prefix_shared_one_token_too_far").trials[0].case.to_json())
    failing = bisect(str(path), "--exact", "--mutant", "prefix_shared_one_token_too_far")
    assert failing.return_value is ExitCode.FAIL
    assert "cause: cross-session bleed" in failing.output
    assert "session 1 with neighbours: 0" in failing.output
    assert "first bad step: its token 0" in failing.output
    assert bisect(str(path), "--exact").return_value is ExitCode.PASS


@pytest.mark.parametrize("content", [None, "no JSON", '{"format": 1}', b"\xff\xfe"])
def test_command_refuses_what_is_no_case(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "case.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert isinstance(bisect(str(path)).exception, UsageError)


@pytest.mark.parametrize(
    ("distance", "margin", "token", "cause"),
    [
        (8e-5, 1e-4, 4, Cause.NEAR_TIE),
        (8e-5, 1e-4, 3, Cause.LAYOUT_NOISE),  # same token: nothing was decided by the tie
        (8e-5, 0.5, 4, Cause.LAYOUT_NOISE),  # such a margin is not overcome by so little
        (0.9, 1e-4, 4, Cause.BLEED),  # a tie excuses nothing that rounding cannot do
    ],
)
def test_tie_is_named_only_where_rounding_could_decide_it(
    distance: float, margin: float, token: int, cause: Cause
) -> None:
    case = cases.mixed("llama")
    found = Divergence(
        session=0, step=2, scheduler_step=5, expected_token=3, actual_token=token, margin=margin,
        distance=distance, neighbours=(1,), chunks=((0, 5),), cells=(1, 2, 3, 4, 5),
    )  # fmt: skip

    def run(rerun: Case, chunks: object = None) -> Outcome:
        """Session 0 goes wrong exactly when it has company."""
        divergences = (found,) if len(rerun.sessions) > 1 else ()
        verdict = Verdict.FAIL if divergences else Verdict.PASS
        return Outcome(case=rerun, verdict=verdict, divergences=divergences)

    assert diagnose(case, run).cause is cause
