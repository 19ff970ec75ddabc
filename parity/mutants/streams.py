"""Mutants of what a caller that streams is given: the ends are right, the way there is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import scheduler.loop as loop_module
from parity.mutants import cases
from parity.mutants.records import Killer, Mutant, Reach, replaced
from parity.mutants.trials import exact_trial
from scheduler.engine import Batch, Sample
from scheduler.loop import Scheduler


@contextmanager
def sampled_again(reach: Reach) -> Iterator[None]:
    """The last row of a rebuild is sampled again, and its token goes to the caller; the session's own output
    is kept free of it.
    """

    def composing(original: Any) -> Any:
        def compose_batch(plan: Any, views: Any, outputs: Any, stages: Any) -> Batch:
            batch = original(plan, views, outputs, stages)
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
                views = self._flight.views
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


MUTANTS = (
    Mutant(
        name="token_streamed_twice",
        part="streams",
        killers=(Killer.STREAM,),
        plant=sampled_again,
        fault="After a rebuild the last token is given to the caller once more.",
        trials=(exact_trial(cases.preempted("llama")), exact_trial(cases.preempted("qwen3next"))),
    ),
)
