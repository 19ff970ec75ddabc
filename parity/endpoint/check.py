"""Parity of a whole server: what it answers under load against what it answers alone.

Every question is asked alone and cold, alone and warm, then in rounds under load; ``judge`` says what that
comes to. A fault's case is shrunk to the sessions that it needs and written as a file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from parity.endpoint.answers import Answer, choice_from_data, choice_to_data
from parity.endpoint.case import Question, SystemCase, SystemSession, save_system_case
from parity.endpoint.connect import connect
from parity.endpoint.drive import ask, run_system_case
from parity.endpoint.http_access import EndpointAccess
from parity.endpoint.judge import Asked, Judgement, SystemTier, advice, fault_data, judge
from parity.endpoint.noise import Baseline, BaselineKey, SoloAnswer
from parity.endpoint.questions import first_questions, later_questions, load_case, prompt_sizes
from parity.endpoint.shrink import shrink_system_case
from parity.endpoint.system import SystemFacts, SystemUnderTest
from parity.errors import UsageError
from parity.records import Verdict
from parity.store import save_text

PROBE_WORDS = "river stone lamp paper green seven winter door"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """What is asked and how. ``tier`` None takes the strongest that the server keeps. Rounds under load go on
    for at least ``duration_s``. ``results`` is a file of JSON lines: what is in it is not asked again.
    ``baseline`` is the noise that answers are held against. ``shrink_runs`` bounds how often a failing case
    is run to make it small.
    """

    concurrency: int = 16
    prompts: int = 24
    max_tokens: int = 24
    prompt_tokens: int | None = None
    rounds: int = 2
    temperature: float = 0.0
    seed: int = 0
    tier: SystemTier | None = None
    disconnects: int = 4
    api_key: str = ""
    timeout_s: float = 120.0
    retries: int = 2
    requests_per_s: float | None = None
    chat: bool = False
    stream: bool = True
    duration_s: float = 0.0
    results: Path | None = None
    kind: str = "auto"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    baseline: Baseline | None = None
    cases: Path | None = None
    shrink_runs: int = 40

    def access(self, url: str, model: str) -> EndpointAccess:
        return EndpointAccess(
            url=url,
            model=model,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            requests_per_s=self.requests_per_s,
            chat=self.chat,
            extra_body=self.extra_body,
        )

    def settings(self) -> dict[str, Any]:
        """What noise depends on, beside the server: what is asked, and how much at once."""
        names = (
            "concurrency",
            "prompts",
            "max_tokens",
            "prompt_tokens",
            "rounds",
            "temperature",
            "disconnects",
        )
        return {name: getattr(self, name) for name in (*names, "chat", "stream")}

    def cache(self) -> str:
        """The cache mode, as far as a request decides it."""
        return (
            json.dumps(dict(self.extra_body), sort_keys=True) if self.extra_body else "as the server has it"
        )


@dataclass(slots=True)
class Results:
    """Answers as they come, kept on disk line by line so that an interrupted check goes on where it was."""

    path: Path | None
    identity: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)
    _known: dict[tuple[Any, ...], Asked] = field(default_factory=dict)

    def load(self) -> None:
        """Read an earlier run's lines. Raises ``UsageError`` when they answer other questions."""
        if self.path is None or not self.path.exists():
            self._append({"check": self.identity})
            return
        lines = self.path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut off
        try:
            head, *rest = [json.loads(line) for line in whole] or [None]
            if head != json.loads(json.dumps({"check": self.identity})):
                raise ValueError("it answers other questions, or another server's")
            found = [_asked_from_data(item) for item in rest]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "results cannot be continued", where=str(self.path), why=str(error), todo="name another file"
            ) from error
        self._known = {_key(item): item for item in found if not item.answer.error}
        if len(whole) != len(lines):
            save_text(self.path, "".join(whole))

    def add(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._append(_asked_to_data(asked))

    def take(self, *, scope: str, question: int) -> Answer | None:
        """An answer alone that an earlier run got; it counts as asked now."""
        item = self._known.get((scope, 0, question, None))
        if item is not None:
            self.asked.append(item)
        return None if item is None else item.answer

    def take_round(self, number: int, sessions: Iterable[int]) -> bool:
        """A whole round of an earlier run; a round that was interrupted is run again."""
        found = [item for key, item in self._known.items() if key[:2] == ("load", number)]
        if {item.session for item in found} != set(sessions):
            return False
        self.asked += found
        return True

    def _append(self, data: dict[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(data) + "\n")


def _key(item: Asked) -> tuple[Any, ...]:
    return item.scope, item.round, item.question, item.session


def _asked_to_data(item: Asked) -> dict[str, Any]:
    answer = asdict(item.answer)
    answer["choices"] = [choice_to_data(choice) for choice in item.answer.choices]
    return {
        "question": item.question,
        "scope": item.scope,
        "round": item.round,
        "session": item.session,
        "answer": answer,
    }


def _asked_from_data(data: dict[str, Any]) -> Asked:
    answer = data["answer"]
    choices = tuple(choice_from_data(choice) for choice in answer["choices"])
    kept = Answer(**{**answer, "choices": choices, "statuses": tuple(answer["statuses"])})
    return Asked(**{**data, "answer": kept})


Report = Callable[[int, int], None]  # requests done, requests in all


class EndpointCheck:
    """One check of one server, in parts that a pair of servers can take in turns; ``report`` hears of every
    answer.
    """

    def __init__(
        self, system: SystemUnderTest, options: EndpointOptions, report: Report = lambda done, total: None
    ) -> None:
        self.system, self.options, self._report = system, options, report
        self.facts = SystemFacts(kind="")
        self.questions: list[Question] = []
        self.left: dict[int, int] = {}
        self.cases: list[tuple[SystemCase, list[int | None]]] = []
        self.results = Results(None, {})
        self.left_early = 0
        self.proof = ""
        self._done = 0

    async def open(self, url: str, model: str) -> None:
        """Learn what the server is, and choose the first questions. Raises ``UsageError``."""
        options = self.options
        self.facts = await self.system.open()
        probe = Question(prompt=PROBE_WORDS, max_tokens=1)
        answer = await ask(self.system, probe, stream=False, retries=options.retries)
        if answer.error:
            raise UsageError("the server does not answer", where=url, why=answer.error)
        words = len(PROBE_WORDS.split())
        sizes = prompt_sizes(
            self.facts,
            tokens_per_word=max(1.0, (answer.prompt_tokens or 2 * words) / words),
            max_tokens=options.max_tokens,
            prompt_tokens=options.prompt_tokens,
        )
        self.questions = first_questions(
            options.prompts,
            seed=options.seed,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            facts=self.facts,
            sizes=sizes,
        )
        asked = [asdict(question) for question in self.questions]
        identity = {"url": url, "model": model, "questions": asked, "settings": options.settings()}
        self.results = Results(options.results, identity)
        self.results.load()

    async def ask_alone(self) -> None:
        """Every question alone, cold and warm; the later ones are made of the answers to the first."""
        answers = [await self._ask_alone("cold", index) for index in range(len(self.questions))]
        ids: list[tuple[int, ...] | None] = []
        for question in self.questions:
            text = question.prompt
            known = self.facts.takes_token_prompts and isinstance(text, str)
            ids.append(await self.system.tokenize(text) if known else None)
        if self.options.temperature == 0:
            later, left = later_questions(self.questions, answers, seed=self.options.seed, ids=ids)
            first = len(self.questions)
            self.left = {first + index: origin for index, origin in left.items()}
            self.questions += later
            for index in range(first, len(self.questions)):
                await self._ask_alone("cold", index)
        for index in reversed(range(len(self.questions))):
            await self._ask_alone("warm", index)

    async def _ask_alone(self, scope: str, index: int) -> Answer:
        answer = self.results.take(scope=scope, question=index)
        if answer is None:
            cold = scope == "cold" and self.facts.can_ask_cold
            # Whole where the server can: a stream may hold tokens back.
            stream = self.options.stream and not self.facts.holds_back
            answer = await ask(
                self.system, self.questions[index], stream=stream, retries=self.options.retries, cold=cold
            )
            self.results.add(Asked(question=index, scope=scope, answer=answer))
        self._count()
        return answer

    async def load_round(self, number: int) -> None:
        """All questions together, in a new order; what is left early is not compared."""
        options = self.options
        case, asks = load_case(
            self.questions,
            self.left,
            seed=options.seed,
            number=number,
            concurrency=options.concurrency,
            disconnects=options.disconnects,
            facts=self.facts,
            chat=options.chat,
            stream=options.stream,
        )
        self.cases.append((case, asks))
        if self.results.take_round(number, [i for i, q in enumerate(asks) if q is not None]):
            return

        def note(index: int, answer: Answer) -> None:
            question = asks[index]
            if question is None:
                self.left_early += answer.left and not answer.error
                return
            self.results.add(
                Asked(question=question, scope="load", answer=answer, round=number, session=index)
            )
            self._count()

        run = await run_system_case(self.system, case, retries=options.retries, on_answer=note)
        self.proof = self.proof or run.ran_together

    def judge(self) -> Judgement:
        return judge(
            self.questions,
            self.results.asked,
            demanded=self.options.tier,
            baseline=self.options.baseline,
            ran_together=self.proof,
            load_rounds=len(self.cases),
            may_hold_back=self.facts.holds_back,
        )

    def key(self) -> BaselineKey:
        """What the noise of this server holds for."""
        return BaselineKey(
            model=self.facts.model,
            kind=self.facts.kind,
            cache=self.options.cache(),
            slots=self.facts.slots,
            settings=self.options.settings(),
        )

    def baseline(self, found: Judgement) -> Baseline:
        """This run as noise of a known-good server."""
        cold = {item.question: item.answer for item in self.results.asked if item.scope == "cold"}
        return Baseline(
            key=self.key(),
            version=self.facts.version,
            samples=tuple(found.samples),
            solo=tuple(
                SoloAnswer(question=self.questions[index], choices=answer.choices)
                for index, answer in sorted(cold.items())
                if answer.is_whole
            ),
        )

    async def shrink(self, found: Judgement) -> tuple[SystemCase, int] | None:
        """The smallest case found for the first fault that came from one session, and how often it was
        run.
        """
        fault = next((f for f in found.faults if f.session is not None or f.scope == "warm"), None)
        if fault is None or fault.question is None or not self.options.shrink_runs:
            return None
        if fault.session is not None:
            case, session = self.cases[fault.round][0], fault.session
        else:
            case, session = self._one_after_the_other(fault.question)
        return await shrink_system_case(
            self.system, case, session, limit=found.limit, max_runs=self.options.shrink_runs
        )

    def _one_after_the_other(self, question: int) -> tuple[SystemCase, int]:
        """What was asked alone and warm up to a question, and the session that asks it."""
        asked = [self.questions[index] for index in reversed(range(question, len(self.questions)))]
        sessions = tuple(
            SystemSession(question=one, after=place - 1 if place else None, stream=not self.facts.holds_back)
            for place, one in enumerate(asked)
        )
        return SystemCase(sessions=sessions, chat=self.options.chat), len(sessions) - 1

    def _count(self) -> None:
        self._done += 1
        expected = (2 + self.options.rounds) * len(self.questions)
        self._report(self._done, max(self._done, expected))


async def run_check(
    url: str, model: str, options: EndpointOptions, report: Report
) -> tuple[Judgement, dict[str, Any], Baseline]:
    """Check one server from the first question to the written case."""
    system = await connect(url, options.access(url, model), kind=options.kind)
    try:
        check = EndpointCheck(system, options, report)
        await check.open(url, model)
        if options.baseline is not None and (why := options.baseline.differs_from(check.key())):
            raise UsageError("the baseline is not this server's", why=why, todo="write one with --calibrate")
        await check.ask_alone()
        begin_s, number = monotonic(), 0
        while number < options.rounds or monotonic() - begin_s < options.duration_s:
            await check.load_round(number)
            number += 1
        found = check.judge()
        shrunk = await check.shrink(found)
    finally:
        await system.close()
    data = report_data(check, found, url=url)
    if shrunk is not None:
        data["case"] = describe_case(*shrunk)
        if options.cases is not None:
            data["case"]["file"] = str(save_system_case(shrunk[0], options.cases))
    return found, data, check.baseline(found)


def check_endpoint(
    url: str, model: str, options: EndpointOptions, report: Report = lambda done, total: None
) -> tuple[Verdict, dict[str, Any]]:
    """Check a server. Raises ``UsageError`` when it cannot be asked at all.

    Verdict: fail for a fault, unknown when something was not proved, else pass (see ``judge``). The
    dictionary
    is the report.
    """
    found, data, _ = check_and_calibrate(url, model, options, report)
    return found.verdict, data


def check_and_calibrate(
    url: str, model: str, options: EndpointOptions, report: Report = lambda done, total: None
) -> tuple[Judgement, dict[str, Any], Baseline]:
    """``check_endpoint`` with the run as a baseline."""
    for name in ("concurrency", "prompts", "rounds", "max_tokens"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}", todo="use at least 1")
    return asyncio.run(run_check(url, model, options, report))


# -- the report


def report_data(check: EndpointCheck, found: Judgement, *, url: str) -> dict[str, Any]:
    """Everything that was found, as JSON data."""
    sizes = [sample.distance for sample in found.samples]
    return {
        "format": 2,
        "endpoint": url,
        "model": check.facts.model,
        "facts": asdict(check.facts),
        "verdict": found.verdict.value,
        "tier": found.tier.value if found.tier else None,
        "demanded": found.demanded.value if found.demanded else None,
        "limit": asdict(found.limit),
        **found.counts,
        "concurrency": check.options.concurrency,
        "load_rounds": len(check.cases),
        "disconnects": check.left_early,
        "ran_together": check.proof,
        "logprobs": found.logprobs,
        "largest_distance": max(sizes, default=0.0),
        "canaries": {name: list(seen) for name, seen in found.canaries.items()},
        "faults": [fault_data(fault) for fault in found.faults[:50]],
        "unproved": found.unproved[:20],
        "divergences": [
            {
                "prompt": diff.asked.question,
                "kind": check.questions[diff.asked.question].kind,
                "scope": diff.asked.scope,
                "round": diff.asked.round,
                "position": diff.comparison.position,
                "expected": diff.comparison.expected,
                "actual": diff.comparison.actual,
                "margin": diff.comparison.margin,
                "distance": diff.comparison.distance,
            }
            for diff in sorted(found.differences, key=lambda d: -d.comparison.size)[:50]
        ],
        "advice": advice(found, kind=check.facts.kind),
    }


def describe_case(case: SystemCase, runs: int) -> dict[str, Any]:
    """A shrunk case in a few words."""
    return {"sessions": len(case.sessions), "runs": runs, "kinds": [s.question.kind for s in case.sessions]}


def summary_lines(report: dict[str, Any]) -> Iterable[str]:
    """The report as text, most important first."""
    facts = report["facts"]
    together = report["ran_together"] or "nothing shows that sessions ran together"
    yield (
        f"{facts['kind']} {facts['version']}: {report['prompts']} prompts, {report['compared']} compared "
        f"under load at concurrency {report['concurrency']} ({together}; {report['disconnects']} left early)"
    )
    yield (
        f"other output alone: {report['differ_alone']}, under load: {report['differ_under_load']}; "
        f"other log probabilities alone: {report['moved_alone']}, under load: {report['moved_under_load']}; "
        f"failed requests: {report['failed']}, retries: {report['retries']}; "
        + (
            f"prefix hits: {report['cached_tokens']} tokens"
            if facts["shows_cached_tokens"] and report["cached_tokens"]
            else "prefix hits: not seen"
        )
    )
    limit = report["limit"]
    for fault in report["faults"][:5]:
        where = "" if fault["question"] is None else f"prompt {fault['question']}, {fault['scope']}: "
        yield f"fault: {where}{fault['text']}"
    if len(report["faults"]) > 5:
        yield f"and {len(report['faults']) - 5} more faults"
    if report["largest_distance"] and not report["faults"]:
        words = (
            "compatible with rounding" if limit["is_measured"] else "no baseline says what rounding is here"
        )
        yield (
            f"{words}: {report['largest_distance']:.2g} nats at most, limit {limit['distance']:.2g} from "
            f"{limit['source']}"
        )
    for text in report["unproved"][:5]:
        yield f"not proved: {text}"
    if "case" in report:
        case = report["case"]
        yield f"smallest case: {case['sessions']} sessions ({', '.join(case['kinds'])})" + (
            f"; replay: parity replay {case['file']} --endpoint {report['endpoint']} --model MODEL"
            if "file" in case
            else ""
        )
    for text in report["advice"]:
        yield f"to reach a stronger tier: {text}"
    if not limit["is_measured"] and report["largest_distance"]:
        yield "--calibrate FILE on a known-good server, then --baseline FILE, tells rounding from faults"
