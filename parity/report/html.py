"""One self-contained HTML page: no script, no request, pictures inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jinja2

from parity.gate.result import CheckKind, GateCheck, GateResult
from parity.records import Tier, Verdict
from parity.report.history import History, Parity
from parity.report.timeline import (
    cell_picture,
    colour,
    distance_picture,
    noise_picture,
    timeline_picture,
)
from scheduler.limits import Layout


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn history: a table's worth of text and up to two pictures."""

    history: History
    timeline: str
    cells: str
    tokens: Mapping[str, int]  # how many by ``Parity``


def result_to_html(result: GateResult, histories: list[History]) -> str:
    """The page's text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("parity", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["verdict_of"] = verdict_of
    suites = [check for check in result.checks if check.kind is CheckKind.SUITE]
    return environment.get_template("gate.html").render(
        result=result,
        layouts=[layout.value for layout in Layout],
        tiers=[tier.value for tier in Tier],
        Verdict=Verdict,
        CheckKind=CheckKind,
        suites=suites,
        marks=mark_columns(suites),
        wrong=[check for check in result.checks if check.verdict is not Verdict.PASS],
        noises=[
            (check, noise_picture(check.noise, title=f"noise of {check.name}"))
            for check in suites
            if check.noise
        ],
        distances=(distances := [row for check in result.checks for row in check.distances]),
        distance_picture=distance_picture(distances),
        pictures=[draw(history) for history in histories],
        colour=colour,
        find=find_checks,
    )


def find_checks(result: GateResult, family: str, kind: str, layout: str = "") -> list[GateCheck]:
    """Checks of a family by kind and, if given, layout."""
    return [
        check
        for check in result.of_family(family)
        if check.kind.value == kind and layout in ("", check.layout)
    ]


def verdict_of(checks: list[GateCheck]) -> Verdict:
    """The worst verdict; of none, unknown."""
    return Verdict.merge(check.verdict for check in checks)


def mark_columns(suites: list[GateCheck]) -> list[str]:
    """Names of all marks, in the order in which checks list them."""
    return list(dict.fromkeys(mark for check in suites for mark in check.marks))


def draw(history: History) -> Picture:
    """The pictures of one history."""
    view = history.view
    if view is None:
        return Picture(history, "", "", {})
    return Picture(
        history,
        timeline_picture(view, title=history.title),
        cell_picture(view, title=history.title),
        {parity.value: sum(bar.parity == parity for bar in view.bars) for parity in Parity},
    )
