"""Cases for servers: files, events, what is drawn, and how they are made small and replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.commands.replay import command as replay
from parity.endpoint.answers import Answer, Choice
from parity.endpoint.case import Question, SystemCase, SystemSession, load_system_case, save_system_case
from parity.endpoint.check import EndpointOptions, check_endpoint
from parity.endpoint.connect import connect
from parity.endpoint.drive import count_turns, run_system_case
from parity.endpoint.questions import first_questions, later_questions, load_case
from parity.endpoint.system import SystemFacts
from parity.errors import ExitCode, UsageError
from tests.parity.endpoint.conftest import SMALL
from tests.parity.endpoint.stand_in import StandIn, running
from tests.parity.endpoint.wrong_servers import NeighboursLogprobs, SwapsNeighbours

RICH = SystemFacts(kind="toy", takes_n=True, takes_penalties=True)


def questions(count: int = 24) -> list[Question]:
    return first_questions(count, seed=0, max_tokens=8, temperature=0.0, facts=RICH)


def test_questions_have_trees_twins_long_ones_and_every_setting() -> None:
    asked = questions(36)
    assert len({question.prompt for question in asked}) == 36 and asked == questions(36)
    kinds = {question.kind for question in asked}
    assert {"tree", "twin", "long", "plain", "n", "penalty", "bias", "sampled"} <= kinds
    trees = [q.prompt for q in asked if q.kind == "tree"]
    assert len({tuple(prompt.split()[:40]) for prompt in trees}) == 2
    twins = [q.prompt for q in asked if q.kind == "twin"]
    assert any(a[:-1] == b[:-1] and a != b for a in twins for b in twins)
    assert all(len(q.prompt.split()) > 256 for q in asked if q.kind == "long")
    assert all(q.seed for q in asked if q.kind == "sampled")


def test_later_questions_go_on_with_what_was_answered() -> None:
    asked = questions()
    answers = [Answer(choices=(Choice(text=f"abcdefgh{i} xyz", finish_reason="length"),)) for i in range(24)]
    later, left = later_questions(asked, answers, seed=0, ids=[None] * 24)
    turns = [question for question in later if question.kind == "turn"]
    origins = {q.prompt: i for i, q in enumerate(asked)}
    assert turns
    for turn in turns:
        origin = next(i for prompt, i in origins.items() if turn.prompt.startswith(f"{prompt}abcdefgh"))
        assert turn.prompt.startswith(f"{asked[origin].prompt}abcdefgh{origin} xyz and ")
    assert left and all(later[new].kind == "returned" for new in left)
    assert all(later[new].prompt.startswith(asked[old].prompt) for new, old in left.items())
    assert all(q.stop and q.stop[0] in "abcdefgh0123456789 xyz" for q in later if q.kind == "stop")


def test_stop_string_is_looked_for_in_every_answer() -> None:
    """A model that writes bytes seldom gives a text to stop at; one such answer is found wherever it is."""
    asked = questions()
    plain = [i for i, q in enumerate(asked) if q.n == 1 and q.kind in ("plain", "tree", "twin")]
    assert len(plain) > 6
    for wanted in plain:
        texts = ["abcdefgh xyz" if i == wanted else "\u00e9\u00df" * 6 for i in range(24)]
        answers = [Answer(choices=(Choice(text=text, finish_reason="length"),)) for text in texts]
        later, _ = later_questions(asked, answers, seed=0, ids=[None] * 24)
        assert [q.prompt for q in later if q.kind == "stop"] == [asked[wanted].prompt]


def drawn(number: int, **changed: object) -> tuple[SystemCase, list[int | None]]:
    asked = questions()
    settings = {"concurrency": 8, "disconnects": 3, "facts": RICH, "chat": False, "stream": True, **changed}
    return load_case(asked, {5: 2}, seed=0, number=number, **settings)


@pytest.mark.parametrize("number", [0, 1])
def test_round_asks_every_question_and_waits_only_for_earlier_sessions(number: int) -> None:
    case, asks = drawn(number)
    assert {index for index in asks if index is not None} == set(range(24))
    assert all(s.after is None or s.after < i for i, s in enumerate(case.sessions))
    leavers = [s for s in case.sessions if s.leave_after is not None]
    assert len(leavers) == 3 + 1 and all(s.stream for s in leavers)
    back = next(i for i, index in enumerate(asks) if index == 5)
    assert case.sessions[back - 1].leave_after == 3 and case.sessions[back].after == back - 1
    assert drawn(number) == (case, asks)


def test_case_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    case, _ = drawn(1)
    assert load_system_case(save_system_case(case, tmp_path)) == case
    for text in ("{}", '{"format": "system-1", "sessions": [], "limits": null, "chat": false}', "x"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match="no case for a system"):
            load_system_case(tmp_path / "bad.json")


def test_session_that_waits_for_a_later_one_is_refused() -> None:
    waits = SystemCase(sessions=(SystemSession(question=questions(1)[0], after=0),))
    with pytest.raises(UsageError, match="no earlier one"):
        SystemCase.from_json(waits.to_json(), where="here")


def test_events_decide_when_sessions_start_and_leave() -> None:
    """Session 1 is sent when 0 has given two tokens, 2 when 1 has left, 3 leaves before its first token."""
    seen: list[tuple[str, int]] = []

    class Watched(StandIn):
        def step_rows(self) -> Any:
            rows = super().step_rows()
            seen.extend((bytes(s.prompt).decode(), len(s.context)) for s, _, _ in rows)
            return rows

    ask = [Question(prompt=name * 3, max_tokens=200) for name in "abcd"]
    case = SystemCase(
        sessions=(
            SystemSession(question=ask[0]),
            SystemSession(question=ask[1], after=0, after_tokens=2, leave_after=3),
            SystemSession(question=ask[2], after=1),
            SystemSession(question=ask[3], leave_after=0),
        )
    )

    async def run(url: str) -> Any:
        access = EndpointOptions().access(url, "toy")
        system = await connect(url, access)
        try:
            await system.open()
            seen.clear()
            return await run_system_case(system, case)
        finally:
            await system.close()

    with running(Watched()) as url:
        found = asyncio.run(run(url))
    assert [answer.left for answer in found.answers] == [False, True, False, True]
    assert len(found.answers[0].choices[0].tokens) == 200 and len(found.answers[1].choices[0].tokens) >= 3
    first = seen.index(("bbb", 0))
    assert ("aaa", 1) in seen[:first]
    assert seen.index(("ccc", 0)) > seen.index(("bbb", 2))
    assert seen.count(("bbb", 199)) == seen.count(("ddd", 199)) == 0
    assert found.ran_together.startswith("two streams took")


@pytest.mark.parametrize(
    ("order", "turns"),
    [([0, 0, 0, 1, 1, 1], 1), ([0, 0, 1, 0, 1, 1], 3), ([0, 1, 2] * 4, 7), ([0], 0), ([], 0)],
)
def test_turns_of_streams(order: list[int], turns: int) -> None:
    assert count_turns(order) == turns


@pytest.mark.parametrize(("server", "most"), [(SwapsNeighbours, 2), (NeighboursLogprobs, 2)])
def test_fault_is_shrunk_to_few_sessions_and_replayed(
    server: type[StandIn], most: int, tmp_path: Path
) -> None:
    with running(server()) as url:
        options = EndpointOptions(
            **{**SMALL, "rounds": 1, "max_tokens": 24, "shrink_runs": 25, "cases": tmp_path}
        )
        _, report = check_endpoint(url, "toy", options)
        assert report["case"]["sessions"] <= most
        # Who shares a step with whom depends on time, so it is asked often; the first wrong answer ends it.
        arguments = [report["case"]["file"], "--endpoint", url, "--model", "toy", "--times", "100"]
        assert replay.main(arguments, standalone_mode=False) is ExitCode.FAIL
    with running(StandIn()) as url:
        arguments = [report["case"]["file"], "--endpoint", url, "--model", "toy", "--times", "1"]
        assert replay.main(arguments, standalone_mode=False) is ExitCode.PASS


def test_replay_of_a_servers_case_needs_a_server(tmp_path: Path) -> None:
    path = save_system_case(drawn(0)[0], tmp_path)
    result = CliRunner().invoke(replay, [str(path)])
    assert isinstance(result.exception, UsageError) and "--endpoint" in result.exception.line
