"""Mutants of cells and ids: each fault of ``parity.mutants.placement`` with its cases and its checkers."""

from __future__ import annotations

import scheduler.cells as cells_module
from parity.engines.numerics import NumericsProfile
from parity.mutants import cases, placement, sharing_cases
from parity.mutants.records import Killer, Mutant
from parity.mutants.rows import everywhere
from parity.mutants.seam import batch_plant, method_plant
from parity.mutants.trials import exact_trial, real_trial
from scheduler.cells import CellPool
from scheduler.loop import Scheduler
from scheduler.memory import Memory

ANY_DAMAGE = (Killer.BITS, Killer.CRASH, Killer.ENGINE, Killer.MEMORY)

MUTANTS = (
    Mutant(
        name="cell_below_the_last_one",
        part="cells",
        killers=(Killer.BITS,),
        plant=method_plant(CellPool, "_allocate", placement.lowest_available),
        fault="A session gets the lowest available cell, also below its last one.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="freed_cells_kept_by_the_engine",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(placement.dropped_removals),
        fault="Cells of a finished session are never given back to the engine.",
        trials=everywhere(cases.refilled, ("llama", "deepseek2", "gemma2")),
    ),
    Mutant(
        name="retired_cells_freed_too_early",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(placement.early_removals),
        fault="All cells of a retired id are freed when the first of them is needed.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="retired_cells_freed_too_late",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(placement.late_removals),
        fault="Retired cells are freed after the call whose rows needed them.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="retired_id_used_while_it_has_cells",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "retire", placement.id_freed_with_cells),
        fault="An id is free for use while it still keeps retired cells, which its next owner would see.",
        trials=tuple(exact_trial(cases.refilled(family)) for family in cases.FAMILIES),
    ),
    Mutant(
        name="shared_cells_freed_with_one_owner",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "others_mask", placement.owners_ignored),
        fault="Cells are available again although another owner still uses them.",
        trials=tuple(exact_trial(sharing_cases.publisher_cancelled(family)) for family in cases.ATTENTION),
    ),
    Mutant(
        name="cell_leaked_at_every_end",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "retire", placement.leaked_cell),
        fault="One cell of every finished session is lost.",
        trials=(exact_trial(cases.mixed("llama")),),
    ),
    Mutant(
        name="id_released_twice",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(Memory, "retire", placement.released_twice),
        fault="The id of a session is given back twice.",
        trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("gemma2", **cases.STREAMS))),
    ),
    Mutant(
        name="cancel_leaves_cells_behind",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(Scheduler, "_end", placement.cancel_keeps_cells),
        fault="A cancelled session's cells and id stay taken.",
        trials=tuple(exact_trial(cases.cancelled(family)) for family in cases.FAMILIES),
    ),
    Mutant(
        name="padding_row_never_removed",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(placement.growing_padding),
        fault="Padding rows pile up in the pool.",
        trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("falcon_h1"))),
    ),
    Mutant(
        name="lone_row_not_padded",
        part="cells",
        killers=(Killer.CRASH, Killer.BITS),
        plant=batch_plant(placement.lone_rows),
        fault="A lone row runs through the kernel for one row.",
        trials=(
            *(exact_trial(cases.mixed(family)) for family in cases.FAMILIES),
            real_trial(cases.long_and_alone("llama")),
            real_trial(cases.long_and_alone("gemma2")),
        ),
    ),
    Mutant(
        name="call_wider_than_the_kernel",
        part="cells",
        killers=(Killer.ENGINE, Killer.BITS),
        plant=method_plant(cells_module, "split_rows", placement.one_wide_call),
        fault="All rows of a step go into one call.",
        trials=(exact_trial(cases.wide("llama")), exact_trial(cases.wide("gemma2"))),
    ),
    Mutant(
        name="micro_batch_wider_than_the_row_kernel",
        part="cells",
        killers=(Killer.BITS,),
        plant=method_plant(NumericsProfile, "for_layout", placement.wide_micro_batches),
        fault="Micro-batches of more than 63 rows run through the tiled attention kernel.",
        trials=tuple(real_trial(cases.wide(family, kv_type="f32")) for family in cases.FAMILIES),
    ),
    Mutant(
        name="partial_copy_between_streams",
        part="cells",
        killers=(Killer.CRASH,),
        plant=method_plant(CellPool, "share", placement.partial_stream_copy),
        fault="A share between private streams asks for a partial range, which aborts llama.cpp.",
        trials=(
            exact_trial(sharing_cases.shared_prefix("llama", **cases.STREAMS)),
            real_trial(sharing_cases.shared_prefix("llama", **cases.STREAMS)),
        ),
    ),
)
