"""Chains in other layouts, operations that reach every stage, and stage files that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engines.numerics import ROW
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.families import load_family
from parity.models.slice import LayerRange
from parity.models.splits import load_splits
from parity.plugin import family_params
from parity.records import Case, Verdict
from parity.run.chains import stage_file
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.runner import Runner, known_model
from parity.suites.suite import crowd_case, pinned_splits
from scheduler.limits import Layout


def crowd(family: str) -> Case:
    return crowd_case(family, pinned_splits(family)[-1], 0, sessions=10)


@pytest.mark.parametrize("family", family_params())
def test_streams_are_exact_across_stages(family: str) -> None:
    case = replace(crowd(family), layout=Layout.STREAMS, stage_cells=(), pool_cells=200)

    outcome = run_case(case, profile=ROW)

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions >= 8


@pytest.mark.parametrize("family", family_params())
def test_memory_operations_reach_every_stage_or_none(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing, retiring and dropping happen equally often in every stage; after
    a failed step all are cleared.
    """
    case = crowd(family)
    runner, known, file = Runner(), load_family(family), known_model(case.model)
    engine = runner.engine(case, file, known, ROW)
    counts: list[dict[str, int]] = [{} for _ in engine.stages]
    for stage, seen in zip(engine.stages, counts, strict=True):

        def apply(ops: Any, original: Callable[..., Any] = stage.pool.apply, seen: Any = seen) -> None:
            for op in ops:
                seen[op.kind.value] = seen.get(op.kind.value, 0) + 1
            original(ops)

        monkeypatch.setattr(stage.pool, "apply", apply)
    run = runner.attempt(case, engine, known, ROW, file)
    engine.close()

    assert not run.problems
    kinds = ("copy", "drop_state", "clear") if known.is_hybrid else ("copy", "clear")
    for kind in kinds:
        assert counts[0].get(kind, 0) > 0
        assert len({seen.get(kind, 0) for seen in counts}) == 1, (kind, counts)


@pytest.mark.family_llama
def test_stage_file_is_kept_and_a_changed_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = resolve_model("llama")
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path))
    layers = load_splits("llama")[0].stages[1]
    path = stage_file(file, layers)
    before = path.stat().st_mtime_ns

    assert stage_file(file, LayerRange(start=layers.start, stop=layers.stop)) == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match="stage file has changed"):
        stage_file(file, layers)
