"""Mutants of what a caller that streams is given: the ends are right, the way there is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import scheduler.loop as loop_module
from parity.mutants import cases
from parity.mutants.mutant import Killer, Reach, mutant, replaced
from parity.mutants.seam import in_method
from parity.mutants.trials import exact_trial
from parity.records import Fault, FaultKind
from scheduler.engine import Batch, Sample
from scheduler.loop import Scheduler
from scheduler.records import FinishReason, Request, SessionView
from scheduler.sessions import SessionTable

ASKED_AGAIN = cases.mixed("llama", faults=(Fault(kind=FaultKind.RESUBMIT, step=6, session=1),))


@mutant(
    in_method(SessionTable, "apply_submission"),
    part="generations",
    killers=(Killer.STREAM, Killer.BYTES, Killer.BITS),
    trials=(exact_trial(ASKED_AGAIN),),
)
def output_of_the_last_generation_kept(original: Any, reach: Reach) -> Any:
    """A request that comes again under its id begins with what it was given before."""

    kept: dict[str, list[int]] = {}

    def apply_submission(self: SessionTable, request: Request, now_ms: float) -> SessionView:
        view = original(self, request, now_ms)
        if request.generation and kept.get(request.request_id):
            reach()
            self.outputs[request.request_id] = kept[request.request_id]
        kept[request.request_id] = self.outputs[request.request_id]
        return view

    return apply_submission


@mutant(
    in_method(SessionTable, "apply_end"),
    part="generations",
    killers=(Killer.ENDS,),
    trials=(exact_trial(ASKED_AGAIN),),
)
def generation_forgotten_at_the_end(original: Any, reach: Reach) -> Any:
    """An end is reported for the first request of its id, whichever it was."""

    def apply_end(self: SessionTable, name: str, reason: FinishReason, error: str = "") -> None:
        original(self, name, reason, error)
        if self.completions[-1].generation:
            reach()
            self.completions[-1] = replace(self.completions[-1], generation=0)

    return apply_end


@mutant(
    part="streams",
    killers=(Killer.STREAM,),
    trials=(exact_trial(cases.preempted("llama")), exact_trial(cases.preempted("qwen3next"))),
)
@contextmanager
def token_streamed_twice(reach: Reach) -> Iterator[None]:
    """After a rebuild the last token is given to the caller once more.

    The last row of a rebuild is sampled again, and its token goes to the caller; the session's own output
    is kept free of it.
    """

    def composing(original: Any) -> Any:
        def compose_batch(plan: Any, views: Any, *rest: Any) -> Batch:
            batch = original(plan, views, *rest)
            again = []
            for index, chunk in enumerate(plan.chunks):
                view = views[chunk.request_id]
                if chunk.start < view.committed == chunk.stop and view.emitted:
                    row = batch.offsets[index + 1] - 1
                    again.append(Sample(row, chunk.request_id, chunk.stop, view.request.sampling))
                    reach()
            return replace(batch, samples=(*batch.samples, *again))

        return compose_batch

    def finishing(original: Any) -> Any:
        def finish(self: Scheduler, result: Any, now_ms: float) -> Any:
            if result is not None:
                views = self._flights[0].views
                own = tuple(
                    item._replace(token=None) if item.before < views[item.request_id].committed else item
                    for item in result.chunks
                )
                result = replace(result, chunks=own)
            return original(self, result, now_ms)

        return finish

    with ExitStack() as stack:
        stack.enter_context(replaced(loop_module, "compose_batch", composing))
        stack.enter_context(replaced(Scheduler, "finish", finishing))
        yield
