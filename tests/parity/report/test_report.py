"""Reports of a gate run: each says the verdict, names what failed and how to
see it again, and is well-formed.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as Xml

import pytest

from parity.gate.result import GateCheck
from parity.records import Verdict
from parity.report.annotations import annotations_of, escape_property
from parity.report.data import check_against_schema, result_to_data, result_to_json
from parity.report.history import Bar, History, Lane, TraceView
from parity.report.html import result_to_html
from parity.report.junit import result_to_junit
from parity.report.markdown import result_to_markdown
from parity.report.timeline import distance_picture, placements, timeline_picture
from tests.parity.gate.gate_results import FAILED, NOISE, TRUTH, UNKNOWN, gate_result

REPLAY = "parity replay reports/failures/llama-streams-1234.json"


def bar(
    step: int, session: int, rows: tuple[int, int], phase: str, cells: tuple[int, ...], parity: str
) -> Bar:
    return Bar(
        step=step,
        session=session,
        start=rows[0],
        stop=rows[1],
        phase=phase,
        emitted=bool(parity),
        completed=True,
        cells=cells,
        parity=parity,
    )


def lane(session: int, end: int, reason: str) -> Lane:
    return Lane(
        session=session,
        client_id="c",
        priority=0,
        prompt_tokens=3,
        max_tokens=3,
        arrival=0,
        first=0,
        end=end,
        reason=reason,
        outputs=0,
        suspensions=(),
    )


VIEW = TraceView(
    title="x",
    engine="x",
    policy="fcfs",
    budget=8,
    lanes=(lane(0, 6, "length"), lane(1, 1, "cancelled")),
    bars=(
        bar(0, 0, (0, 3), "prefill", (0, 1, 2), "identical"),
        bar(1, 0, (3, 4), "decode", (5,), "bits"),
        bar(1, 1, (0, 2), "prefill", (3, 4), ""),
        bar(5, 0, (0, 4), "rebuild", (6, 8), ""),
        bar(6, 0, (4, 5), "decode", (9,), "token"),
    ),
    marks=(),
    gauges=(),
    notes=(),
)
HISTORY = History(title="llama <unified>", check="llama unified", view=VIEW)


# -- JSON


def test_json_report_satisfies_its_schema_and_says_everything() -> None:
    data = json.loads(result_to_json(gate_result(FAILED, UNKNOWN)))
    assert data["verdict"] == "fail"
    assert data["counts"] == {"pass": 4, "unknown": 1, "fail": 1}
    failure = data["checks"][4]["failure"]
    assert (failure["session"], failure["step"], failure["replay"]) == (3, 7, REPLAY)
    assert data["families"]["llama"] == {"verdict": "fail", "required": "bits", "model_sha256": "ab" * 32}
    assert data["checks"][2]["noise"]["counts"] == list(NOISE.counts)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"format": 2}, "format"),
        ({"verdict": "green"}, "verdict"),
        ({"surprise": 1}, "top level"),
        ({"families": {"llama": {"verdict": "pass"}}}, "families.llama"),
    ],
)
def test_json_report_that_breaks_its_schema_is_never_written(change: dict, where: str) -> None:
    data = {**result_to_data(gate_result()), **change}
    with pytest.raises(ValueError, match=f"breaks its schema at {re.escape(where)}"):
        check_against_schema(data)


def test_a_check_without_a_verdict_breaks_the_schema() -> None:
    data = result_to_data(gate_result())
    del data["checks"][0]["verdict"]
    with pytest.raises(ValueError, match="'verdict' is a required property"):
        check_against_schema(data)


# -- verdicts


@pytest.mark.parametrize(
    ("more", "verdict"),
    [((), "pass"), ((UNKNOWN,), "unknown"), ((FAILED,), "fail"), ((FAILED, UNKNOWN), "fail")],
)
def test_worst_check_decides(more: tuple, verdict: str) -> None:
    assert gate_result(*more).verdict.value == verdict


def test_empty_run_is_unknown_in_every_report() -> None:
    empty = gate_result(checks=())
    assert empty.verdict is Verdict.UNKNOWN
    assert "nothing was selected" in annotations_of(empty)[0]
    assert "Nothing was selected" in result_to_markdown(empty)
    assert "Nothing was selected" in result_to_html(empty, [])
    assert Xml.fromstring(result_to_junit(empty).encode()).find(".//error").get("type") == "unknown"


# -- JUnit


def test_junit_counts_unknown_as_error_and_never_as_skipped() -> None:
    root = Xml.fromstring(result_to_junit(gate_result(FAILED, UNKNOWN)).encode())
    suite = root.find("testsuite[@name='llama']")
    assert (root.get("failures"), root.get("errors"), suite.get("tests")) == ("1", "1", "5")
    assert root.find(".//skipped") is None
    assert REPLAY in root.find(".//failure").get("message")
    assert "unlocked" in root.find(".//error").get("message")


# -- annotations and Markdown


def test_annotation_points_at_the_test_and_names_session_step_and_replay() -> None:
    (line,) = annotations_of(gate_result(FAILED))
    assert line.startswith(
        "::error file=tests/a%2Cb%3Ac.py,line=4,title=llama streams::llama streams: fail; "
    )
    assert "family llama, session 3, generated token 7 (scheduler step 19)" in line
    assert f"replay: {REPLAY}" in line
    assert "100%25 wrong%0A" in line
    assert "\n" not in line


def test_annotation_properties_cannot_break_out() -> None:
    assert escape_property("a,b:c\nd%") == "a%2Cb%3Ac%0Ad%25"


def test_markdown_names_family_session_step_and_replay() -> None:
    text = result_to_markdown(gate_result(FAILED, UNKNOWN))
    assert text.startswith("# Parity gate: fail\n")
    assert "family `llama`, layout `streams`" in text
    assert "session 3, generated token 7, scheduler step 19: token 66 instead of 65" in text
    assert f"replay: `{REPLAY}`" in text
    assert "no model: model llama:real is unlocked" in text
    assert "| llama | bits | ✅ pass 20/20 bits | ❌ **fail** 8/9 bits | " in text


def test_markdown_explanation_cannot_end_its_fence() -> None:
    text = result_to_markdown(gate_result(FAILED))
    assert text.count("\n~~~") == 2


# -- HTML


class References(HTMLParser):
    """Everything that makes a browser load something or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href", "background"):
                self.found.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.found.append(f"{tag} {name}")


def page(*more: GateCheck, histories: tuple[History, ...] = (HISTORY,)) -> str:
    return result_to_html(gate_result(*more), list(histories))


def test_page_loads_nothing_and_runs_nothing() -> None:
    text, references = page(FAILED, UNKNOWN), References()
    references.feed(text)
    assert references.found == ["link href=data:,"]
    assert not references.tags & {"script", "iframe", "object", "embed", "img", "video", "audio", "base"}
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?:", text)


def test_page_escapes_what_engines_and_files_say() -> None:
    text = page(FAILED)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a &lt;cpu&gt;" in text
    assert "llama &lt;unified&gt;" in text


def test_page_shows_verdict_failure_and_replay() -> None:
    text = page(FAILED)
    assert "<b>fail</b>" in text
    assert re.search(r"session <b>3</b> differs first at its generated token <b>7</b>", text)
    assert REPLAY in text
    for heading in (
        "Verdicts by family",
        "Marks",
        "Noise",
        "Divergence timelines and cell maps",
        "Every check",
    ):
        assert heading in text


def test_page_marks_a_missing_mark_and_a_history_that_could_not_be_run() -> None:
    missing = replace(
        gate_result().checks[1], marks={"shared": 0}, missing_marks=("shared",), verdict=Verdict.FAIL
    )
    text = result_to_html(gate_result(missing), [replace(HISTORY, view=None, problem="ended by SIGILL")])
    assert '<td class="num missing">0</td>' in text
    assert "no picture: ended by SIGILL" in text


def test_page_has_a_picture_of_noise_timeline_and_cells() -> None:
    text = page()
    titles = re.findall(r'aria-label="([^"]*)"', text)
    assert titles == [
        "noise of llama stock",
        "timeline: llama &lt;unified&gt;",
        "cell map: llama &lt;unified&gt;",
    ]


# -- exact to itself, and right


def test_distances_from_the_truth_are_in_every_report() -> None:
    result = gate_result(TRUTH)
    (rows,) = (check["distances"] for check in result_to_data(result)["checks"] if check["kind"] == "truth")
    assert [(row["way"], row["same_bits"], row["worst_of_bound"]) for row in rows] == [
        ("plain", True, 0.25),
        ("unified", True, 1.5),
        ("stock", False, None),
    ]
    lines = result_to_markdown(result).splitlines()
    start = lines.index("| model | run | exact to itself | right | worst of bound | rms from truth |")
    assert lines[start + 2 : start + 5] == [
        "| llama | plain | yes | yes | 0.25 | 1.0e-05 |",
        "| llama | unified | yes | no | 1.50 | 1.0e-05 |",
        "| llama | stock | no | not claimed |  | 1.0e-05 |",
    ]
    text = result_to_html(result, [])
    assert "<td>stock</td><td>no</td><td>not claimed</td>" in text
    assert 'aria-label="distance from the truth"' in text
    assert "exact to itself" not in result_to_html(gate_result(), [])


def test_distance_picture_is_logarithmic_and_shows_what_is_not_right() -> None:
    svg = distance_picture(TRUTH.distances)
    bars = [e.attrib for e in Xml.fromstring(svg).iter() if e.tag.endswith("rect")]
    # 1e-5 is two of seven decades from 1e-7, 1e-3 four.
    assert [float(bar["width"]) for bar in bars[::2]] == pytest.approx([100, 100, 100])
    assert [float(bar["x"]) for bar in bars[1::2]] == pytest.approx([150 + 200] * 3)
    assert [bar["class"] for bar in bars[::2]] == ["moved", "token", "unmoved"]


# -- pictures


def test_timeline_colours_tokens_by_what_became_of_them() -> None:
    svg = timeline_picture(VIEW, title="x")
    Xml.fromstring(svg)
    assert [svg.count(f'class="{css}"') for css in ("prefill", "identical", "bits", "token")] == [2, 1, 1, 1]
    assert "another token than the session alone" in svg


def test_rebuilt_session_keeps_its_earlier_cells_only_until_the_rebuild() -> None:
    runs = placements(VIEW)
    assert (0, 0, 0, 3, 1) in runs  # cells 0 to 2, kept until step 1: at step 5 the session begins again
    assert (1, 1, 3, 2, 1) in runs
    assert [(first, count) for step, _, first, count, _ in runs if step == 5] == [(6, 1), (8, 1)]
    assert all(until == 6 for step, session, _, _, until in runs if session == 0 and step >= 5)
