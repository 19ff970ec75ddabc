"""What a gate run consists of: which checks are to run, and what is unknown before anything ran."""

from __future__ import annotations

from dataclasses import dataclass

from parity.cases.policy_options import PolicyOptions
from parity.errors import UsageError
from parity.gate.result import CheckKind, GateCheck, GateOptions
from parity.models import resolve_model
from parity.models.families import Family, KvClass, RowSource, load_families
from parity.models.splits import load_splits
from parity.records import Tier, Verdict
from scheduler.limits import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GateJob:
    """One check to run in a process of the pool; everything in it can be sent there."""

    kind: CheckKind
    name: str
    family: str = ""
    layout: Layout | None = None
    split: str = ""
    shards: int = 1
    model: str = ""
    tier: Tier = Tier.BITS
    sessions: int = 0
    seed: int | None = None
    policy: str = "fcfs"
    policy_options: PolicyOptions = ()


def parse_required(words: tuple[str, ...], *, known: list[str], chosen: tuple[str, ...]) -> dict[str, Tier]:
    """``llama=bits`` for any family, or ``bytes`` for every chosen one. Raises ``UsageError``."""
    required: dict[str, Tier] = {}
    tiers = [tier.value for tier in Tier]
    for word in words:
        family, has_family, tier = word.rpartition("=")
        if tier not in tiers:
            raise UsageError(
                f"unknown tier {tier!r}",
                where="--require",
                why=f"tiers are {', '.join(tiers)}",
                todo="write for instance --require llama=bits",
            )
        if has_family and family not in known:
            raise UsageError(
                f"unknown family {family!r}", where="--require", why=f"families are {', '.join(known)}"
            )
        required.update({name: Tier(tier) for name in ([family] if has_family else chosen)})
    return required


# What is asked of the scheduler alone, whatever the families are.
OF_THE_SCHEDULER = (
    CheckKind.POLICIES,
    CheckKind.HUNT,
    CheckKind.SMALL_POOLS,
    CheckKind.TEMPLATES,
    CheckKind.MACHINE,
)


IN_SHARDS = ((Layout.UNIFIED, 2), (Layout.UNIFIED, 4), (Layout.STREAMS, 2))


def plan_jobs(options: GateOptions) -> list[GateJob]:
    """Everything that a gate run consists of, family by family; whether it can run is another question."""
    families = load_families()
    jobs = [job for name in options.families for job in _family_jobs(families[name], options)]
    if options.row == "tiny" and options.families:
        jobs += [GateJob(kind=kind, name=kind.value.replace("_", " ")) for kind in OF_THE_SCHEDULER]
        jobs += _mutant_jobs(options)
    return jobs


def plan_gate(options: GateOptions) -> tuple[list[GateJob], list[GateCheck], dict[str, str]]:
    """Jobs to run, family by family; checks that are decided already; and the models' digests by family."""
    planned = plan_jobs(options)
    decided: list[GateCheck] = []
    digests: dict[str, str] = {}
    families = load_families()
    for name in options.families:
        found = check_model(families[name], options.row)
        decided.append(found)
        if found.verdict is Verdict.PASS:
            digests[name] = resolve_model(_model(name, options.row)).sha256
        else:
            needing = [job for job in planned if job.model and job.family == name]
            decided += [_not_run(job, f"no model: {found.reason}") for job in needing]
        if options.frozen:
            decided += check_rows_are_locked(families[name])
    decided += check_selection(options, families)
    jobs = [job for job in planned if not job.model or job.family in digests]
    if options.only:
        decided += [
            _left_out(kind) for kind in dict.fromkeys(job.kind for job in jobs) if kind not in options.only
        ]
        jobs = [job for job in jobs if job.kind in options.only]
    return jobs, decided, digests


def _left_out(kind: CheckKind) -> GateCheck:
    """What somebody chose not to run is as unknown as what could not run."""
    name = f"{kind.value} left out"
    return GateCheck(kind=kind, name=name, verdict=Verdict.UNKNOWN, reason=f"--only leaves {kind.value} out")


def _model(family: str, row: str) -> str:
    return family if row == "tiny" else f"{family}:{row}"


def _family_jobs(family: Family, options: GateOptions) -> list[GateJob]:
    """Suites, shards, splits, goldens and truth of one family. Goldens are those of the tiny models; the
    float64 reference is for small ones.
    """
    model, tier = _model(family.name, options.row), options.tier_of(family.name)
    settings = {"family": family.name, "model": model, "tier": tier, "seed": options.seed}
    jobs = [
        GateJob(
            kind=CheckKind.SUITE,
            name=f"{family.name} {layout.value}",
            layout=layout,
            sessions=options.sessions,
            policy=options.policy,
            policy_options=options.policy_options,
            **settings,
        )
        for layout in Layout
    ]
    jobs += [
        GateJob(
            kind=CheckKind.SHARDS,
            name=f"{family.name} {layout.value} in {shards} shards",
            layout=layout,
            shards=shards,
            sessions=max(1, options.sessions // 4),
            **settings,
        )
        for layout, shards in IN_SHARDS
    ]
    jobs += [
        GateJob(
            kind=CheckKind.SPLIT,
            name=f"{family.name} split {split}",
            layout=Layout.UNIFIED,
            split=split,
            sessions=options.split_sessions,
            **settings,
        )
        for split in _split_names(family.name, options.row)
    ]
    if options.row == "tiny":
        jobs.append(GateJob(kind=CheckKind.GOLDEN, name=f"{family.name} goldens", **settings))
        jobs.append(GateJob(kind=CheckKind.TRUTH, name=f"{family.name} truth", **settings))
        jobs.append(GateJob(kind=CheckKind.STATES, name=f"{family.name} states", **settings))
    return jobs


def _split_names(family: str, row: str) -> list[str]:
    """Pinned splits of a row; where they cannot be read one name remains, whose check will say why."""
    try:
        return [split.name for split in load_splits(family) if split.row == row] or ["none pinned"]
    except UsageError:
        return ["unreadable"]


def _mutant_jobs(options: GateOptions) -> list[GateJob]:
    """All mutants at once, or for a selection of families those that have trials there."""
    if not options.is_selection:
        return [GateJob(kind=CheckKind.MUTANTS, name="mutants")]
    return [GateJob(kind=CheckKind.MUTANTS, name=f"{name} mutants", family=name) for name in options.families]


def _not_run(job: GateJob, reason: str) -> GateCheck:
    return GateCheck(
        kind=job.kind,
        name=job.name,
        family=job.family,
        layout=job.layout.value if job.layout else "",
        split=job.split,
        verdict=Verdict.UNKNOWN,
        reason=reason,
    )


def check_model(family: Family, row: str) -> GateCheck:
    """Is the family's model here and what it is pinned to be? Unknown says what is missing."""
    name = f"{family.name} model {row}"
    try:
        resolve_model(f"{family.name}:{row}")
    except UsageError as error:
        return GateCheck(
            kind=CheckKind.MODEL, name=name, family=family.name, verdict=Verdict.UNKNOWN, reason=error.line
        )
    return GateCheck(kind=CheckKind.MODEL, name=name, family=family.name, verdict=Verdict.PASS)


def check_rows_are_locked(family: Family) -> list[GateCheck]:
    """With ``--frozen``: every row that others publish must be pinned."""
    return [
        GateCheck(
            kind=CheckKind.MODEL,
            name=f"{family.name} row {row.name} locked",
            family=family.name,
            verdict=Verdict.PASS if row.locked else Verdict.UNKNOWN,
            reason=""
            if row.locked
            else f"row {row.name} is unlocked: its digest was never "
            f"looked up; run `parity lock --family {family.name}`",
        )
        for row in family.rows.values()
        if row.source is not RowSource.GENERATED
    ]


def check_selection(options: GateOptions, families: dict[str, Family]) -> list[GateCheck]:
    """What was required or is expected but is not part of the run is unknown, by name."""
    checks = [
        GateCheck(
            kind=CheckKind.MODEL,
            name=f"{name} required",
            family=name,
            verdict=Verdict.UNKNOWN,
            reason=f"--require names {name}, but the run leaves it out",
        )
        for name in options.required
        if name not in options.families
    ]
    if not options.is_selection:
        present = {family.kv_class for family in families.values()}
        checks += [
            GateCheck(
                kind=CheckKind.MODEL,
                name=f"class {kv_class.value}",
                verdict=Verdict.UNKNOWN,
                reason=f"no manifest is of class {kv_class.value}: a family is missing",
            )
            for kv_class in KvClass
            if kv_class not in present
        ]
    return checks
