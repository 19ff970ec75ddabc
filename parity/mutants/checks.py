"""Mutants of checkers: with one of them the framework must no longer notice a
fault that it notices without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import parity.checkers.conservation as conservation_module
import parity.checkers.ends as ends_module
import parity.checkers.identity as identity_module
import parity.checkers.noise as noise_module
import parity.run.drive as drive_module
import parity.run.judge as judge_module
import parity.run.runner as exact_runner
import scheduler.loop as loop_module
from parity.checkers.ends import EndsChecker, ReproducibilityChecker, StreamChecker
from parity.checkers.identity import Comparison
from parity.engines.exact_memory import ExactPool
from parity.engines.pool import SamplingEngine
from parity.history import Answer, Run, session_index
from parity.mutants import cases, find_mutant, sharing_cases
from parity.mutants.mutant import Complaint, Killer, Place, Plant, Reach, Trial, mutant
from parity.mutants.seam import in_method, in_source
from parity.mutants.trials import complaints_of, exact_trial, real_trial, run_real_case
from parity.records import BITS, BYTES, Case, Fault, FaultKind, Finding, Verdict
from parity.run.judge import LogitsRecorder
from scheduler.engine import Batch
from scheduler.memory import Memory
from scheduler.records import SessionView


def must_see(inner: str, killer: Killer, case: Case, *, place: Place = Place.EXACT) -> Trial:
    """The fault ``inner`` is planted in a case, and ``killer`` must complain about it."""

    def run() -> tuple[Complaint, ...]:
        with find_mutant(inner).plant(Reach()):
            outcome = (exact_runner.run_exact_case if place is Place.EXACT else run_real_case)(case)
        if any(complaint.killer is killer for complaint in complaints_of(outcome)):
            return ()
        return (Complaint(Killer.SELF_TEST, f"{inner} was not noticed by {killer.value}"),)

    return Trial(
        name=f"{inner} in {case.family} {case.layout.value}",
        family=case.family,
        place=place,
        case=case,
        run=run,
    )


def must_not_claim(mark: str, case: Case) -> Trial:
    """A case that exercises nothing of the kind must not have the mark."""

    def run() -> tuple[Complaint, ...]:
        count = exact_runner.run_exact_case(case).marks[mark]
        return (
            (Complaint(Killer.SELF_TEST, f"mark {mark} is {count} where nothing of it happened"),)
            if count
            else ()
        )

    return Trial(name=f"no {mark}", family=case.family, case=case, run=run)


def worst_verdict_wins() -> tuple[Complaint, ...]:
    """Merging keeps the worst verdict, and nothing judged is not a pass."""
    wrong = [
        parts
        for parts, merged in (
            ((Verdict.PASS, Verdict.FAIL, Verdict.UNKNOWN), Verdict.FAIL),
            ((Verdict.PASS, Verdict.UNKNOWN), Verdict.UNKNOWN),
            ((), Verdict.UNKNOWN),
        )
        if Verdict.merge(parts) is not merged
    ]
    return tuple(Complaint(Killer.SELF_TEST, f"verdicts {parts} merge wrongly") for parts in wrong)


POSITION = must_see("position_off_by_one", Killer.BITS, cases.mixed("llama"))
REPLAY = must_see("replay_without_generated_tokens", Killer.BITS, cases.preempted("llama"))


@mutant(
    in_method(identity_module, "compare_run"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(REPLAY,),
)
def checker_compares_the_first_token_only(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Only the first generated token is compared."""

    def compare_run(run: Run, expected: Any, actual: Any) -> list[Comparison]:
        reach()
        return [
            comparison if comparison.bits_step == 0 else replace(comparison, bits_step=None, bytes_step=None)
            for comparison in original(run, expected, actual)
        ]

    return compare_run


@mutant(
    in_method(identity_module, "compare_session"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_see(
            "foreign_token_after_twenty_of_its_own", Killer.BITS, cases.lockstep("llama", max_tokens=30)
        ),
        must_see(
            "foreign_token_after_twenty_of_its_own", Killer.BYTES, cases.lockstep("llama", max_tokens=30)
        ),
    ),
)
def checker_compares_sixteen_tokens(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Only the first sixteen tokens are compared."""

    def compare_session(session: int, expected: Answer, actual: Answer, *, complete: bool) -> Comparison:
        reach()
        short = [Answer(answer.tokens[:16], answer.digests[:16]) for answer in (expected, actual)]
        return original(session, *short, complete=complete)

    return compare_session


@mutant(
    in_method(identity_module, "compare_session"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("stopped_by_any_token", Killer.BYTES, cases.stopped("llama")),),
)
def stopped_sessions_compared_as_far_as_they_went(
    original: Callable[..., Any], reach: Reach
) -> Callable[..., Any]:
    """A session that ended by a stop token may end anywhere."""

    def compare_session(session: int, expected: Answer, actual: Answer, *, complete: bool) -> Comparison:
        ended_early = len(actual.tokens) < len(expected.tokens)
        if ended_early and complete:
            reach()
        return original(session, expected, actual, complete=complete and not ended_early)

    return compare_session


@mutant(
    in_method(StreamChecker, "check"),
    name="checker_of_streams_blind",
    fault="Nobody compares what a caller was given with what the session ended with.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("token_streamed_twice", Killer.STREAM, cases.preempted("llama")),),
)
@mutant(
    in_method(EndsChecker, "check"),
    name="checker_of_ends_blind",
    fault="Tokens after a cancel and unexplained failures are not looked for.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("token_after_cancel", Killer.ENDS, cases.cancelled("llama")),),
)
@mutant(
    in_method(drive_module, "find_losses"),
    name="conservation_unchecked",
    fault="Cells and ids are not counted after a step.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("cell_leaked_at_every_end", Killer.CONSERVATION, cases.mixed("llama")),),
)
@mutant(
    in_method(loop_module, "validate_result"),
    name="results_not_validated",
    fault="Whatever an engine says is applied.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("rebuild_debited_as_service", Killer.LEGALITY, cases.preempted("llama")),),
)
@mutant(
    in_method(loop_module, "validate_plan"),
    name="plans_not_validated",
    fault="Whatever a policy says is carried out.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("token_budget_not_charged", Killer.LEGALITY, cases.mixed("llama")),),
)
@mutant(
    in_method(ReproducibilityChecker, "check"),
    name="second_run_not_compared",
    fault="A case runs twice but the two are not compared.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("second_run_differs", Killer.REPRODUCIBILITY, cases.mixed("llama")),),
)
def nothing_found(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A check that never finds anything."""

    def check(*arguments: Any, **rest: Any) -> list:
        reach()
        return []

    return check


@mutant(
    in_method(identity_module, "compare_run"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("one_token_short", Killer.BYTES, cases.mixed("llama")),),
)
def checker_ignores_length(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """An answer that is too short or too long counts as equal."""

    def compare_run(run: Run, expected: Any, actual: Any) -> list[Comparison]:
        reach()
        return [
            replace(comparison, bits_step=None, bytes_step=None) if comparison.length_differs else comparison
            for comparison in original(run, expected, actual)
        ]

    return compare_run


@mutant(
    in_method(identity_module, "compare_run"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(POSITION,),
)
def checker_looks_at_one_session(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Only the first session of a case is compared."""

    def compare_run(run: Run, expected: Any, actual: Any) -> list[Comparison]:
        reach()
        return original(run, expected, actual)[:1]

    return compare_run


@mutant(
    in_method(identity_module, "compare_run"),
    name="oracle_shares_state_with_the_run",
    fault="The reference is what the run itself gave.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(POSITION,),
)
@mutant(
    in_method(identity_module, "compare_run"),
    name="oracle_shares_state_with_the_real_run",
    fault="The reference is what the run on llama.cpp itself gave.",
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("position_off_by_one", Killer.BITS, cases.mixed("llama"), place=Place.REAL),),
)
def _expected_from_the_run(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def compare_run(run: Run, expected: Any, actual: Any) -> list[Comparison]:
        reach()
        return original(run, actual, actual)

    return compare_run


@mutant(
    in_method(ends_module, "RULES"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("cancelled_session_never_reported", Killer.ENDS, cases.cancelled("llama")),),
)
def partition_unchecked(original: tuple, reach: Reach) -> tuple:
    """Nobody counts whether every session has one end."""

    reach()
    return original[1:]


@mutant(
    in_method(ExactPool, "num_used"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("idle_pool_not_cleared", Killer.MEMORY, cases.mixed("llama")),),
)
def leftovers_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Cells that are held when nothing is live go unnoticed."""

    def count(self: Any) -> int:
        reach()
        return 0

    return count


@mutant(
    in_method(judge_module, "check_all"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("session_ends_twice", Killer.ENDS, cases.mixed("llama")),),
)
def problems_do_not_count(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A case with problems but without a divergence passes."""

    def check_all(*arguments: Any) -> tuple[Finding, ...]:
        found = original(*arguments)
        kept = tuple(finding for finding in found if finding.checker in (BITS, BYTES))
        if kept != found:
            reach()
        return kept

    return check_all


@mutant(
    in_method(noise_module, "is_noise"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_see("logits_rows_swapped", Killer.NOISE, cases.mixed("llama", **cases.STOCK), place=Place.REAL),
    ),
)
def noise_explains_everything(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """In the stock layout every changed token counts as rounding."""

    def is_noise(*arguments: Any) -> bool:
        reach()
        return True

    return is_noise


@mutant(
    in_method(judge_module, "count_marks"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_not_claim("shared", cases.mixed("llama")),
        must_not_claim("preempted", cases.mixed("llama")),
    ),
)
def marks_counted_from_wishes(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A mark is counted although nothing of its kind happened."""

    def count_marks(run: Run) -> dict[str, int]:
        reach()
        return {name: max(1, count) for name, count in original(run).items()}

    return count_marks


@mutant(
    in_method(Verdict, "merge"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(Trial(name="pass with fail and unknown", run=worst_verdict_wins),),
)
def best_verdict_wins(original: Any, reach: Reach) -> Any:
    """Merged verdicts keep the best one."""

    def merge(verdicts: Any) -> Verdict:
        reach()
        verdicts = list(verdicts)
        return Verdict.PASS if Verdict.PASS in verdicts else original.__func__(verdicts)

    return staticmethod(merge)


# -- Faults that one comparison of a checker alone can see, and the checker without it.


@mutant(
    in_method(Memory, "retire"),
    part="prefix",
    killers=(Killer.CONSERVATION,),
    trials=(exact_trial(sharing_cases.shared_prefix("llama")),),
)
def entry_in_use_for_ever(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prefix goes on counting the sessions that shared it and have ended."""

    def retire(self: Memory, request_id: str) -> None:
        entry = self.residences[request_id].entry
        original(self, request_id)
        if entry is not None:
            entry.users += 1
            reach()

    return retire


@mutant(
    in_method(Memory, "keep_prefix"),
    part="prefix",
    killers=(Killer.CONSERVATION,),
    trials=(exact_trial(sharing_cases.shared_prefix("llama")),),
)
def prefix_under_an_id_that_is_free(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A kept prefix is written down under another id than the one that holds its cells."""

    def keep_prefix(self: Memory, view: SessionView) -> None:
        known = len(self.prefix.entries)
        original(self, view)
        if len(self.prefix.entries) > known:
            newest = next(reversed(self.prefix.entries.values()))
            newest.seq_ids = tuple(min(pool.free_ids) for pool in self.pools)
            reach()

    return keep_prefix


ShownRows = Callable[[Sequence[int], np.ndarray], None]


def rows_shown(changes: Callable[[Any, str, int], bool]) -> Plant:
    """A plant that moves the smallest logit of some rows by one unit in the last place; no token changes.
    ``changes(observer, request id, position)`` says of which rows.
    """

    def make(original: Callable[..., ShownRows], reach: Reach) -> Callable[..., ShownRows]:
        def sampler(self: SamplingEngine, batch: Batch, tokens: list[int | None]) -> ShownRows:
            give = original(self, batch, tokens)

            def give_changed(rows: Sequence[int], logits: np.ndarray) -> None:
                logits = logits.copy()
                for sample in batch.samples:
                    if sample.row not in rows:
                        continue
                    if changes(self.observe_logits, sample.request_id, sample.position):
                        row = logits[list(rows).index(sample.row)]
                        row[row.argmin()] = np.nextafter(row.min(), np.float32(-np.inf))
                        reach()
                give(rows, logits)

            return give_changed

        return sampler

    return in_method(SamplingEngine, "_sampler")(make)


@mutant(
    part="reproducibility",
    killers=(Killer.REPRODUCIBILITY,),
    trials=(real_trial(cases.mixed("llama")),),
)
@contextmanager
def second_run_differs_in_its_last_bit(reach: Reach) -> Iterator[None]:
    """The second run of a case has other logits than the first one, and the same tokens."""
    runs: list[Any] = []

    def is_second(observer: Any, request_id: str, position: int) -> bool:
        if not any(observer is known for known in runs):
            runs.append(observer)
        return observer is not runs[0]

    with rows_shown(is_second)(reach):
        yield


# A call is through and has shown its rows when the next one of its step fails: the step runs again.
BROKEN_OFF_AFTER_A_SAMPLE = cases.case_of(
    "llama",
    (cases.session(81, 12, 8), cases.session(80, 70, 6)),
    max_num_batched_tokens=100,
    faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0, call=2),),
    prefix_cache=False,
)


@mutant(part="recovery", killers=(Killer.BITS,), trials=(real_trial(BROKEN_OFF_AFTER_A_SAMPLE),))
@contextmanager
def row_computed_again_differs_in_its_last_bit(reach: Reach) -> Iterator[None]:
    """A row that is computed again after a step that broke off is another than before."""
    seen: dict[int, set[tuple[str, int]]] = {}
    kept: list[Any] = []  # so that no observer's number is given to another one

    def is_again(observer: Any, request_id: str, position: int) -> bool:
        kept.append(observer)
        rows = seen.setdefault(id(observer), set())
        was_seen = (request_id, position) in rows
        rows.add((request_id, position))
        return was_seen

    with rows_shown(is_again)(reach):
        yield


@mutant(
    lambda _: in_source(
        conservation_module, "breaches_of", "entry.users != sharing", "entry.users < sharing"
    ),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(must_see("entry_in_use_for_ever", Killer.CONSERVATION, sharing_cases.shared_prefix("llama")),),
)
def users_of_a_prefix_may_be_too_many() -> None:
    """Conservation asks whether a prefix counts too few users, not whether it counts others than it has."""


@mutant(
    lambda _: in_source(
        conservation_module,
        "breaches_of",
        "sorted(ids) != sorted(pool.owners)",
        "len(ids) != len(pool.owners)",
    ),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_see(
            "prefix_under_an_id_that_is_free", Killer.CONSERVATION, sharing_cases.shared_prefix("llama")
        ),
    ),
)
def owners_counted_and_not_compared() -> None:
    """Conservation counts the sequences that sessions and prefixes hold, and does not ask which they are."""


@mutant(
    in_method(Run, "signature"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_see(
            "second_run_differs_in_its_last_bit",
            Killer.REPRODUCIBILITY,
            cases.mixed("llama"),
            place=Place.REAL,
        ),
    ),
)
def second_run_compared_by_tokens_only(original: property, reach: Reach) -> property:
    """The second run of a case may have other logits."""

    def signature(self: Run) -> list[tuple]:
        reach()
        return [row[:3] for row in original.fget(self)]

    return property(signature)


@mutant(
    in_method(LogitsRecorder, "__call__"),
    part="checkers",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_see(
            "row_computed_again_differs_in_its_last_bit",
            Killer.BITS,
            BROKEN_OFF_AFTER_A_SAMPLE,
            place=Place.REAL,
        ),
    ),
)
def recorder_keeps_the_first_row(original: Callable[..., None], reach: Reach) -> Callable[..., None]:
    """Of a position that is computed twice the first row is compared, which nobody was given."""

    def record(self: LogitsRecorder, request_id: str, position: int, row: np.ndarray) -> None:
        if position in self._rows.get(session_index(request_id), {}):
            reach()
        else:
            original(self, request_id, position, row)

    return record
