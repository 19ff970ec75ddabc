"""Schedulers that are processes: the two examples keep the laws, faulty ones are findings that quote them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import parity.protocol
from parity.cases.strategies import landmark
from parity.errors import UsageError
from parity.plugin import family_params
from parity.protocol.messages import PROTOCOL, Answer, Hello, Plan, Planned, Ready, line_of, protocol_schema
from parity.protocol.peer import Peer, PeerFailure
from parity.records import Case, Fault, FaultKind, Outcome, Tier, Verdict
from parity.run.runner import run_own_engine_case
from parity.run.under_test import Brought, Capabilities
from parity.schemas import load_schema
from parity.store import REPOSITORY
from parity.suites.suite import contradicted, required_marks, run_suite
from scheduler.limits import Layout, PoolLimits, StepLimits

EXAMPLES = Path(parity.protocol.__file__).parent / "examples"
INTERVALS = f"{sys.executable} {EXAMPLES / 'intervals.py'}"
HELLO = Hello(protocol=PROTOCOL, pools=(PoolLimits(),), steps=StepLimits())
LAYOUTS = [Layout.UNIFIED, Layout.STREAMS]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example in C, compiled; whoever compiled llama.cpp has a compiler."""
    program = tmp_path_factory.mktemp("cells") / "cells"
    compiler = shutil.which("cc")
    assert compiler is not None, "no C compiler"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(EXAMPLES / "cells.c")]
    subprocess.run([compiler, *options], check=True)
    return str(program)


@pytest.fixture(params=["intervals", "cells"])
def example(request: pytest.FixtureRequest) -> str:
    """The command of each example."""
    return INTERVALS if request.param == "intervals" else request.getfixturevalue("cells")


def run_with(command: str, case: Case) -> Outcome:
    """The case without a model: on an engine whose tokens show which rows a session saw."""
    return run_own_engine_case(
        case, Brought(engine="tests.machine.examples:make_engine", scheduler_command=command)
    )


def script(folder: Path, text: str) -> str:
    """A scheduler of these lines of Python."""
    (folder / "peer.py").write_text(text)
    return f"{sys.executable} {folder / 'peer.py'}"


def changed(folder: Path, *pairs: tuple[str, str]) -> str:
    """The example that gives intervals, with replaced text."""
    text = (EXAMPLES / "intervals.py").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return script(folder, text)


def test_schema_on_record_is_the_one_of_the_records() -> None:
    remedy = "python -m parity.protocol.messages > parity/schemas/protocol.schema.json"
    assert load_schema("protocol") == protocol_schema(), remedy


def test_a_line_is_an_object_with_its_type() -> None:
    data = json.loads(line_of(HELLO))
    assert (data["type"], data["protocol"]) == ("hello", 1)
    assert data["pools"][0]["layout"] == "unified" and data["steps"]["max_num_batched_tokens"] == 2048


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_examples_are_right_without_a_model(example: str, family: str, layout: Layout) -> None:
    faults = (
        Fault(kind=FaultKind.PREEMPT, step=4, session=0),
        *(Fault(kind=FaultKind.CANCEL, step=3, session=n, in_flight=n > 0) for n in (0, 1)),
        Fault(kind=FaultKind.DECODE_ERROR, step=9),
    )
    outcome = run_with(example, replace(landmark(family, layout), faults=faults))

    assert outcome.verdict is Verdict.PASS, (outcome.problems, outcome.divergences)
    assert outcome.byte_identical == outcome.sessions >= 8
    wanted = ("preempted", "resumed", "cancelled", "chunked", "mixed_step", "engine_failed")
    assert [mark for mark in wanted if not outcome.marks[mark]] == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_intervals_that_are_off_by_one_are_named(layout: Layout) -> None:
    outcome = run_with(f"{INTERVALS} --off-by-one", landmark("llama", layout))
    assert outcome.verdict is Verdict.FAIL
    (said,) = [text for text in outcome.problems if text.startswith("legality")]
    assert "computed frontier: session s" in said and "[" in said


def test_cells_that_are_off_by_one_are_named(cells: str) -> None:
    outcome = run_with(f"{cells} --off-by-one", landmark("llama", Layout.STREAMS))
    assert outcome.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('hello there', flush=True); input()", "with 'hello there'"),
        ("print('[1]', flush=True); input()", "it is not an object"),
        ('print(\'{"type": "answer"}\', flush=True); input()', "its type is 'answer', due is 'ready'"),
        ('print(\'{"type": "ready", "protocol": "1"}\', flush=True); input()', "at protocol"),
        (
            "import sys; print('no more', file=sys.stderr); sys.exit(3)",
            "(exit code 3); its last words: no more",
        ),
        ("import os; os.write(1, bytes([255, 10])); input()", "can't decode byte 0xff"),
        ("input(); input()", "said nothing to 'hello' for 0.2 s"),
    ],
)
def test_a_peer_that_breaks_off_is_quoted(text: str, says: str, tmp_path: Path) -> None:
    timeout_s = 0.2 if "0.2 s" in says else 20.0
    peer = Peer(script(tmp_path, text), timeout_s=timeout_s)
    with pytest.raises(PeerFailure) as caught:
        peer.ask(HELLO, Ready)
    assert says in str(caught.value)
    peer.close()
    assert peer.process.poll() is not None


def test_a_peer_that_ignores_the_end_of_its_input_ends_with_its_parent(tmp_path: Path) -> None:
    """It opened a named pipe for writing: whoever reads that is told of its end, however it ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = script(tmp_path, f"held = open({str(pipe)!r}, 'w')\nimport signal\nwhile True: signal.pause()")
    code = (
        "import os; from parity.protocol.peer import Peer\n"
        f"peer = Peer({command!r}); os.read(0, 1); os._exit(0)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=REPOSITORY)
    with open(pipe, "rb") as held:  # opens when the peer has opened it
        caller.communicate(b".", timeout=60)
        assert held.read() == b""


def test_a_command_that_is_no_program_is_bad_input() -> None:
    with pytest.raises(UsageError, match="cannot be started"):
        Brought(scheduler_command="./no-such-scheduler").why_no_bits()


def test_two_schedulers_are_bad_input() -> None:
    with pytest.raises(UsageError, match="one scheduler"):
        Brought(scheduler="a:b", scheduler_command="c")


def test_another_version_is_bad_input(tmp_path: Path) -> None:
    command = changed(tmp_path, ('"protocol": 1', '"protocol": 2'))
    with pytest.raises(UsageError, match="speaks protocol 2, this is 1"):
        Brought(scheduler_command=command).why_no_bits()


def test_death_in_the_middle_of_a_case_is_a_finding(tmp_path: Path) -> None:
    dies = 'if question["step"] == 5: sys.exit("out of luck")\n        tokens, seats'
    outcome = run_with(changed(tmp_path, ("tokens, seats", dies)), landmark("llama", Layout.UNIFIED))
    assert outcome.verdict is Verdict.FAIL
    (said,) = [text for text in outcome.problems if text.startswith("protocol")]
    assert (
        "step 4" in said and "died when it was sent 'plan' (exit code 1); its last words: out of luck" in said
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"chunks": chunks}', '"chunks": chunks + chunks}', "session planned twice"),
        (
            '{"session": live["session"], "start": start, ',
            '{"session": "s77", "start": start, ',
            "session s77",
        ),
        ('"stop": start + length}\n\n', '"stop": start + length + 99}\n\n', "token budget exceeded"),
        ('"chunks": chunks}', '"chunks": chunks, "calls": [[]]}', "whose level is intervals"),
    ],
)
def test_an_illegal_plan_is_a_finding(old: str, new: str, says: str, tmp_path: Path) -> None:
    outcome = run_with(changed(tmp_path, (old, new)), landmark("llama", Layout.UNIFIED))
    assert outcome.verdict is Verdict.FAIL
    assert any(text.startswith("legality") and says in text for text in outcome.problems), outcome.problems


def test_what_is_declared_as_absent_is_not_asked_for_and_not_required(cells: str) -> None:
    brought = Brought(scheduler_command=cells)
    assert brought.capabilities == Capabilities(prefix_cache=False)
    marks = required_marks("llama", Layout.UNIFIED, "llama", brought)
    assert "shared" not in marks and "preempted" in marks


def test_no_preemption_that_is_declared_is_held_to(tmp_path: Path) -> None:
    declares = ('"level": "intervals"', '"level": "intervals", "preemption": False')
    command = changed(tmp_path, declares)
    fault = Fault(kind=FaultKind.PREEMPT, step=4, session=0)
    outcome = run_with(command, replace(landmark("llama", Layout.UNIFIED), faults=(fault,)))
    assert outcome.verdict is Verdict.PASS and not outcome.marks["preempted"]

    lies = ('"chunks": chunks}', '"chunks": chunks[1:], "preempted": [c["session"] for c in chunks[:1]]}')
    outcome = run_with(changed(tmp_path, declares, lies), landmark("llama", Layout.UNIFIED))
    assert any("declared: no preemption, yet it preempts" in text for text in outcome.problems)


def test_sharing_in_spite_of_what_is_declared_is_a_finding() -> None:
    found = contradicted({"shared": 3}, Capabilities(prefix_cache=False))
    assert [str(finding) for finding in found] == [
        "declared: shared was seen 3 times, though the scheduler declares that it cannot"
    ]
    assert (
        contradicted({"shared": 3}, Capabilities())
        == contradicted({"shared": 0}, Capabilities(prefix_cache=False))
        == []
    )


def test_one_context_that_is_declared_refuses_stages(cells: str) -> None:
    case = replace(landmark("llama", Layout.UNIFIED), stage_cells=(300, 300))
    with pytest.raises(UsageError, match="declares one context, and the model is cut into 2 stages"):
        run_with(cells, case)


def test_messages_have_one_answer_each() -> None:
    peer = Peer(INTERVALS)
    assert peer.ask(HELLO, Ready).name == "intervals.py"
    question = Plan(step=1, now_ms=0.0, available_rows=5, sessions=())
    assert peer.ask(question, Planned) == Planned()
    with pytest.raises(PeerFailure, match="its type is 'planned', due is 'answer'"):
        peer.ask(question, Answer)
    peer.close()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("family", family_params())
def test_examples_are_bit_identical(family: str, layout: Layout, example: str, tmp_path: Path) -> None:
    brought = Brought(scheduler_command=example)
    result = run_suite(family, layout, min_sessions=200, brought=brought, failures=tmp_path)
    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.sessions >= 200


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_a_planted_off_by_one_is_red_and_explained(layout: Layout, example: str, tmp_path: Path) -> None:
    brought = Brought(scheduler_command=f"{example} --off-by-one")
    result = run_suite("llama", layout, tier=Tier.BITS, min_sessions=50, brought=brought, failures=tmp_path)
    assert result.verdict is Verdict.FAIL
    assert "session " in result.explanation and "[" in result.explanation, result.explanation
