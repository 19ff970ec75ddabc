"""What a gate run consists of: nothing that is missing, left out or unlocked goes unsaid."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from parity.errors import UsageError
from parity.gate.plan import parse_required, plan_gate
from parity.gate.result import CheckKind, GateOptions
from parity.models.families import family_names, manifests_dir
from parity.records import Tier, Verdict

FAMILIES = tuple(family_names())


def options(*families: str, **more: Any) -> GateOptions:
    return GateOptions(
        families=families or FAMILIES, is_selection=bool(families), **{"required": {}, "sessions": 5, **more}
    )


def unknown(checks: Any) -> dict[str, str]:
    """Reasons of the checks that are unknown before anything ran, by name."""
    assert all(check.verdict is not Verdict.FAIL for check in checks)
    return {check.name: check.reason for check in checks if check.verdict is Verdict.UNKNOWN}


@pytest.fixture
def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the manifests that a test may change."""
    folder = Path(shutil.copytree(manifests_dir(), tmp_path / "manifests"))
    monkeypatch.setattr("parity.models.families.manifests_dir", lambda: folder)
    return folder


def test_whole_gate_covers_every_family_layout_and_split() -> None:
    jobs, decided, digests = plan_gate(options())
    suites = {(job.family, job.layout.value) for job in jobs if job.kind is CheckKind.SUITE}
    assert suites == {(name, layout) for name in FAMILIES for layout in ("unified", "streams", "stock")}
    assert {job.family for job in jobs if job.kind is CheckKind.SPLIT} == set(FAMILIES)
    assert {job.family for job in jobs if job.kind is CheckKind.GOLDEN} == set(FAMILIES)
    assert {job.family for job in jobs if job.kind is CheckKind.TRUTH} == set(FAMILIES)
    assert {job.family for job in jobs if job.kind is CheckKind.STATES} == set(FAMILIES)
    of_the_scheduler = ["policies", "hunt", "small pools", "templates", "machine"]
    assert [job.name for job in jobs if not job.family] == [*of_the_scheduler, "mutants"]
    assert not unknown(decided)
    assert digests.keys() == set(FAMILIES)
    assert len({job.name for job in jobs}) == len(jobs)


def test_one_class_can_be_cut_over_alone() -> None:
    jobs, decided, _ = plan_gate(options("gemma2", required={"gemma2": Tier.BYTES}))
    assert {job.family for job in jobs} == {"gemma2", ""}
    assert {job.tier for job in jobs if job.family and job.kind is CheckKind.SUITE} == {Tier.BYTES}
    assert not unknown(decided)


def test_missing_family_is_unknown_by_class(manifests: Path) -> None:
    (manifests / "falcon_h1.yaml").unlink()
    rest = tuple(name for name in FAMILIES if name != "falcon_h1")
    jobs, decided, _ = plan_gate(GateOptions(families=rest, is_selection=False, required={}))
    assert unknown(decided) == {
        "class mamba_hybrid": "no manifest is of class mamba_hybrid: a family is missing"
    }
    assert "falcon_h1" not in {job.family for job in jobs}


def test_missing_model_makes_each_of_its_checks_unknown_with_the_reason(manifests: Path) -> None:
    path = manifests / "gemma2.yaml"
    content = yaml.safe_load(path.read_text())
    content["rows"]["tiny"]["sha256"] = "0" * 64
    path.write_text(yaml.safe_dump(content))
    jobs, decided, digests = plan_gate(options())
    reasons = unknown(decided)
    assert "gemma2" not in {job.family for job in jobs}
    assert {"gemma2 model tiny", "gemma2 unified", "gemma2 streams", "gemma2 stock", "gemma2 goldens"} <= set(
        reasons
    )
    assert any(name.startswith("gemma2 split") for name in reasons)
    assert all("has the wrong digest" in reason for reason in reasons.values())
    assert "gemma2" not in digests


def test_unlocked_rows_are_unknown_only_under_frozen(manifests: Path) -> None:
    content = yaml.safe_load((manifests / "llama.yaml").read_text())
    del content["rows"]["real"]["sha256"]
    (manifests / "llama.yaml").write_text(yaml.safe_dump(content))
    _, decided, _ = plan_gate(options("llama", frozen=True))
    reasons = unknown(decided)
    assert set(reasons) == {"llama row real locked"}
    assert "parity lock --family llama" in reasons["llama row real locked"]
    assert [check.name for check in decided if "smollm2" in check.name and check.verdict is Verdict.PASS]
    assert not unknown(plan_gate(options("llama"))[1])


def test_required_family_that_the_run_leaves_out_is_unknown() -> None:
    _, decided, _ = plan_gate(options("llama", required={"qwen3next": Tier.BITS}))
    assert unknown(decided) == {"qwen3next required": "--require names qwen3next, but the run leaves it out"}


def test_real_row_is_gated_without_goldens_of_tiny_models() -> None:
    jobs, decided, _ = plan_gate(options("llama", row="real"))
    assert jobs == []
    assert "llama model real" in unknown(decided)
    assert not any(check.kind in (CheckKind.GOLDEN, CheckKind.MUTANTS) for check in decided)


def test_tiers_are_required_by_family_or_for_all() -> None:
    known, chosen = list(FAMILIES), ("llama", "gemma2")
    assert parse_required(("bytes", "llama=bits"), known=known, chosen=chosen) == {
        "llama": Tier.BITS,
        "gemma2": Tier.BYTES,
    }
    with pytest.raises(UsageError, match="unknown tier 'bit'"):
        parse_required(("llama=bit",), known=known, chosen=chosen)
    with pytest.raises(UsageError, match="unknown family 'mamba'"):
        parse_required(("mamba=bits",), known=known, chosen=chosen)


def test_kinds_that_are_left_out_are_unknown_so_that_a_part_never_passes() -> None:
    jobs, decided, _ = plan_gate(options("llama", only=(CheckKind.SUITE,)))
    assert {job.kind for job in jobs} == {CheckKind.SUITE}
    assert unknown(decided) == {
        f"{kind} left out": f"--only leaves {kind} out"
        for kind in set(CheckKind) - {CheckKind.SUITE, CheckKind.MODEL, CheckKind.SYSTEM}
    }
