"""Mutants of the scheduler: each fault of ``parity.mutants.steps`` with its cases
and the checker that must see it.
"""

from __future__ import annotations

import scheduler.loop as loop_module
import scheduler.resume as resume_module
from parity.mutants import cases, steps
from parity.mutants.records import Killer, Mutant, Trial
from parity.mutants.rows import DIFFERS, everywhere
from parity.mutants.seam import method_plant, result_plant
from parity.mutants.trials import exact_trial
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.policy.base import PlanBuilder
from scheduler.records import SessionView
from scheduler.sessions import SessionTable


def on_exact(make, families=("llama",)) -> tuple[Trial, ...]:
    """The case on the exact engine for each family."""
    return tuple(exact_trial(make(family)) for family in families)


MUTANTS = (
    Mutant(
        name="one_token_chunk_taken_for_decode",
        part="phases",
        killers=(Killer.LEGALITY,),
        plant=method_plant(loop_module, "compose_batch", steps.one_row_is_decode),
        fault="A prefill or rebuild chunk of one token is sampled like a decode.",
        trials=on_exact(cases.one_token_chunks, cases.FAMILIES),
    ),
    Mutant(
        name="resumed_session_taken_for_decoder",
        part="phases",
        killers=(Killer.LEGALITY, *DIFFERS),
        plant=method_plant(SessionView, "phase_at", steps.rebuild_emits),
        fault="The last rebuilt row of a resumed session emits a token again.",
        trials=on_exact(cases.preempted_by_rows, cases.FAMILIES),
    ),
    Mutant(
        name="stale_receipt_accepted",
        part="resume",
        killers=(Killer.LEGALITY,),
        plant=method_plant(resume_module, "issue_ticket", steps.ticket_without_checks),
        fault="A late receipt of an earlier suspension resumes the session.",
        trials=(Trial(name="receipt of epoch 10 for epoch 11", run=steps.stale_receipt),),
    ),
    Mutant(
        name="generated_tokens_not_rebuilt",
        part="resume",
        killers=(*DIFFERS, Killer.ENGINE, Killer.LEGALITY),
        plant=method_plant(SessionTable, "apply_release", steps.committed_forgotten),
        fault="A preempted session forgets how far it had come and goes on decoding from its first row.",
        trials=on_exact(cases.preempted, cases.FAMILIES),
    ),
    Mutant(
        name="preempted_session_lost",
        part="resume",
        killers=(Killer.LIVENESS,),
        plant=method_plant(SessionTable, "apply_release", steps.suspended_forgotten),
        fault="A preempted session is in no queue.",
        trials=on_exact(cases.preempted),
    ),
    Mutant(
        name="victim_left_in_the_plan",
        part="preemption",
        killers=(Killer.INTERNAL, Killer.CONSERVATION),
        plant=method_plant(loop_module, "plan_without", steps.victim_kept),
        fault="A session that gave up its cells still has rows in the step.",
        trials=on_exact(cases.crowded, ("llama", "falcon_h1")),
    ),
    Mutant(
        name="misfit_accepted",
        part="admission",
        killers=(Killer.LIVENESS,),
        plant=method_plant(Scheduler, "submit", steps.never_full),
        fault="A session that can never fit waits for ever instead of being refused.",
        trials=on_exact(cases.exactly_full, cases.FAMILIES),
    ),
    Mutant(
        name="submission_lost",
        part="admission",
        killers=(Killer.LIVENESS,),
        plant=method_plant(SessionTable, "apply_submission", steps.submission_lost),
        fault="An accepted session is in no queue.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="token_budget_not_charged",
        part="budget",
        killers=(Killer.LEGALITY,),
        plant=method_plant(PlanBuilder, "_grant", steps.budget_charged(0)),
        fault="Chunks do not reduce what is left of the step's token budget.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="budget_counted_twice",
        part="budget",
        killers=(Killer.LEGALITY,),
        plant=method_plant(PlanBuilder, "_grant", steps.budget_charged(2)),
        fault="Chunks are charged to the step's token budget twice.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="failures_forgotten_by_a_rebuild",
        part="failures",
        killers=(Killer.ENDS,),
        plant=method_plant(Scheduler, "_apply_chunk", steps.rebuild_counts_as_progress),
        fault="A session whose rebuild succeeds and whose next step fails is tried again for ever.",
        trials=on_exact(cases.rebuilt_in_vain, cases.FAMILIES),
    ),
    Mutant(
        name="session_ends_twice",
        part="ends",
        killers=(Killer.ENDS,),
        plant=method_plant(SessionTable, "apply_end", steps.ends_twice),
        fault="A finished session is reported twice.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="cancelled_session_never_reported",
        part="ends",
        killers=(Killer.ENDS,),
        plant=method_plant(SessionTable, "apply_end", steps.end_unsaid),
        fault="A cancelled session has no end.",
        trials=on_exact(cases.cancelled),
    ),
    Mutant(
        name="token_after_cancel",
        part="cancel",
        killers=(Killer.ENDS,),
        plant=method_plant(Scheduler, "finish", steps.token_after_cancel),
        fault="A token of the step in flight is delivered after the cancel was acknowledged.",
        trials=everywhere(cases.cancelled),
    ),
    Mutant(
        name="cancel_in_flight_lost",
        part="cancel",
        killers=(Killer.ENDS, Killer.LIVENESS, *DIFFERS),
        plant=method_plant(Scheduler, "_apply_late", steps.cancel_lost_in_flight),
        fault="A cancel between launch and result is forgotten, its token is dropped.",
        trials=on_exact(cases.cancelled, cases.FAMILIES),
    ),
    Mutant(
        name="stop_token_ignored",
        part="ends",
        killers=(Killer.BYTES,),
        plant=method_plant(SessionTable, "finish_reason", steps.stop_ignored),
        fault="A session goes on after its stop token.",
        trials=on_exact(cases.stopped, ("llama", "qwen3next")),
    ),
    Mutant(
        name="stopped_by_any_token",
        part="ends",
        killers=(Killer.BYTES,),
        plant=method_plant(SessionTable, "finish_reason", steps.stopped_by_any_token),
        fault="A session that has stop tokens ends at its first token, whatever it is.",
        trials=on_exact(cases.stopped, ("llama", "qwen3next")),
    ),
    Mutant(
        name="one_token_short",
        part="ends",
        killers=(Killer.BYTES,),
        plant=method_plant(SessionTable, "finish_reason", steps.one_token_short),
        fault="A session ends one token before its limit.",
        trials=everywhere(cases.mixed, ("llama",)),
    ),
    Mutant(
        name="idle_session_gets_a_token",
        part="results",
        killers=(Killer.LEGALITY,),
        plant=result_plant(steps.idle_token),
        fault="A session without rows in a step gets the token of a padding row.",
        trials=everywhere(cases.one_token_chunks, ("llama",)),
    ),
    Mutant(
        name="rebuild_debited_as_service",
        part="results",
        killers=(Killer.LEGALITY,),
        plant=result_plant(steps.planned_debits),
        fault="Rebuilt rows are charged to the client again.",
        trials=on_exact(cases.preempted),
    ),
    Mutant(
        name="clock_runs_backward",
        part="results",
        killers=(Killer.LEGALITY,),
        plant=result_plant(steps.backward_clock),
        fault="A step ends before it began.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="unplanned_progress",
        part="results",
        killers=(Killer.LEGALITY,),
        plant=result_plant(steps.unplanned_progress),
        fault="An engine claims a row that nobody planned.",
        trials=on_exact(cases.mixed),
    ),
    Mutant(
        name="failed_step_leaves_cells",
        part="failures",
        killers=(Killer.CRASH, Killer.ENGINE, *DIFFERS, Killer.MEMORY),
        plant=method_plant(Memory, "reset", steps.failure_keeps_cells),
        fault="After a failed native call the engine keeps the rows of the calls before it.",
        trials=everywhere(cases.failing),
    ),
    Mutant(
        name="failed_step_loses_a_session",
        part="failures",
        killers=(Killer.ENDS, Killer.CONSERVATION),
        plant=method_plant(Scheduler, "fail", steps.failure_loses_sessions),
        fault="A session in a failed step ends without an error.",
        trials=on_exact(cases.failing, cases.FAMILIES),
    ),
    Mutant(
        name="idle_pool_not_cleared",
        part="ends",
        killers=(Killer.MEMORY,),
        plant=method_plant(Scheduler, "_apply_pending", steps.pending_forgotten),
        fault="When nothing is live any more the engine is not told to give its cells back.",
        trials=everywhere(cases.mixed, ("llama",)),
    ),
)
