"""Black-box parity of any OpenAI-compatible server: the same question must have the
same answer alone and under load.

Each prompt is asked alone, twice; then all at once, staggered, with shared prefixes, mixed lengths and
clients that leave, several times. "Differs from itself when alone" and "differs under load" are kept apart.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from parity.endpoint.client import EndpointAccess, EndpointAnswer, EndpointClient
from parity.endpoint.judge import Asked, judge
from parity.errors import UsageError
from parity.records import Tier, Verdict
from parity.store import save_text

ALONE_ROUNDS = 2
WORDS = (
    "river stone lamp paper green seven winter door music table cloud engine north copper garden window "
    "market letter island yellow bridge silver mountain number question answer harbour needle candle forest"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """What is asked and how. ``tier`` None compares what the server gives: log probabilities, if it
    gives any. Rounds under load go on for at least ``duration_s``. ``results`` is a file of JSON lines:
    what is in it is not asked again.
    """

    concurrency: int = 16
    prompts: int = 24
    max_tokens: int = 24
    rounds: int = 2
    temperature: float = 0.0
    seed: int = 0
    tier: Tier | None = None
    disconnects: int = 4
    stagger_s: float = 0.5
    api_key: str = ""
    timeout_s: float = 120.0
    retries: int = 2
    requests_per_s: float | None = None
    chat: bool = False
    stream: bool = False
    duration_s: float = 0.0
    results: Path | None = None

    def access(self, url: str, model: str) -> EndpointAccess:
        return EndpointAccess(
            url=url,
            model=model,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            retries=self.retries,
            requests_per_s=self.requests_per_s,
            chat=self.chat,
            stream=self.stream,
        )


def make_prompts(count: int, seed: int) -> list[str]:
    """Prompts of 1 to 120 words, each different; every second one begins with the same 40 words."""
    rng = random.Random(f"endpoint {seed}")
    shared = " ".join(rng.choice(WORDS) for _ in range(40))
    prompts = []
    for index in range(count):
        own = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 4, 16, 40, 120))))
        prompts.append(f"{shared} {own} {index}" if index % 2 else f"{own} {index}")
    return prompts


def questions(options: EndpointOptions) -> list[dict[str, Any]]:
    """Request bodies, without the model's name. Sampled ones carry a seed of their own."""
    common = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    prompts = make_prompts(options.prompts, options.seed)
    if options.temperature == 0:
        return [{"prompt": prompt, **common} for prompt in prompts]
    return [{"prompt": prompt, **common, "seed": options.seed + i} for i, prompt in enumerate(prompts)]


@dataclass(slots=True)
class Results:
    """Answers as they come, kept on disk line by line so that an interrupted check goes on where it was."""

    path: Path | None
    identity: dict[str, Any]
    asked: list[Asked] = field(default_factory=list)
    _known: set[tuple[str, int]] = field(default_factory=set)

    def load(self) -> None:
        """Read an earlier run's lines. Raises ``UsageError`` when they answer other questions."""
        if self.path is None or not self.path.exists():
            self._append({"check": self.identity})
            return
        lines = self.path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut off
        try:
            head, *rest = [json.loads(line) for line in whole] or [None]
            if head != {"check": self.identity}:
                raise ValueError("it answers other questions, or another server's")
            self.asked = [
                Asked(item["round"], item["prompt"], EndpointAnswer.from_data(item["answer"]))
                for item in rest
                if not item["answer"]["error"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "results cannot be continued", where=str(self.path), why=str(error), todo="name another file"
            ) from error
        self._known = {(item.round, item.prompt) for item in self.asked}
        if len(whole) != len(lines):
            save_text(self.path, "".join(whole))

    def add(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._append({"round": asked.round, "prompt": asked.prompt, "answer": asdict(asked.answer)})

    def has(self, round_name: str, prompt: int) -> bool:
        return (round_name, prompt) in self._known

    def _append(self, data: dict[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(data) + "\n")


Report = Callable[[int, int], None]  # requests done, requests in all


class EndpointCheck:
    """One check of one server; ``report`` hears of every answer."""

    def __init__(self, url: str, model: str, options: EndpointOptions, report: Report) -> None:
        self.url, self.model, self.options, self._report = url, model, options, report
        self.questions = questions(options)
        identity = {"url": url, "model": model, "questions": self.questions, "chat": options.chat}
        self.results = Results(options.results, identity)
        self.left_early = 0
        self._done = 0

    async def run(self) -> tuple[Verdict, dict[str, Any]]:
        self.results.load()
        options = self.options
        async with EndpointClient(options.access(self.url, self.model)) as client:
            await client.find_extras(self.questions[0])
            for number in range(ALONE_ROUNDS):
                for prompt in range(len(self.questions)):
                    await self._ask(client, f"alone {number}", prompt)
            client.most_in_flight = 0
            begin_s, number = monotonic(), 0
            while number < options.rounds or monotonic() - begin_s < options.duration_s:
                await self._load_round(client, number)
                number += 1
            most = client.most_in_flight
            extras = sorted(client.extras)
        verdict, report = judge(
            self.results.asked,
            prompts=len(self.questions),
            tier=options.tier,
            most_in_flight=most,
            alone_rounds=ALONE_ROUNDS,
            load_rounds=number,
        )
        return verdict, {
            "endpoint": self.url,
            "model": self.model,
            "concurrency": options.concurrency,
            "disconnects": self.left_early,
            "extras": extras,
            **report,
        }

    async def _ask(self, client: EndpointClient, round_name: str, prompt: int) -> None:
        if not self.results.has(round_name, prompt):
            self.results.add(Asked(round_name, prompt, await client.ask(self.questions[prompt])))
        self._done += 1
        expected = (ALONE_ROUNDS + self.options.rounds) * len(self.questions)
        self._report(self._done, max(self._done, expected))

    async def _load_round(self, client: EndpointClient, number: int) -> None:
        """All prompts in a new order: the even rounds as fast as the lanes allow, the odd ones staggered."""
        options = self.options
        rng = random.Random(f"load {options.seed} {number}")
        jobs: list[int | None] = [*range(len(self.questions)), *(None,) * options.disconnects]
        rng.shuffle(jobs)
        delays = [rng.random() * options.stagger_s if number % 2 else 0.0 for _ in jobs]
        lanes = asyncio.Semaphore(options.concurrency)

        async def one(job: int | None, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            async with lanes:
                if job is None:
                    leaver = self.questions[rng.randrange(len(self.questions))]
                    left = await client.leave_early(leaver)
                    self.left_early += left
                else:
                    await self._ask(client, f"load {number}", job)

        async with asyncio.TaskGroup() as group:
            for job, delay_s in zip(jobs, delays, strict=True):
                group.create_task(one(job, delay_s))


def check_endpoint(
    url: str, model: str, options: EndpointOptions, report: Report = lambda done, total: None
) -> tuple[Verdict, dict[str, Any]]:
    """Check a server. Raises ``UsageError`` when it cannot be asked at all.

    Verdict: fail when an answer differs (alone or under load), unknown when requests failed for good or
    nothing overlapped, else pass. The dictionary is the report: counts, distinct answers, first divergences.
    """
    for name, value in (
        ("concurrency", options.concurrency),
        ("prompts", options.prompts),
        ("rounds", options.rounds),
        ("max_tokens", options.max_tokens),
    ):
        if value < 1:
            raise UsageError(f"{name} is {value}", todo="use at least 1")
    return asyncio.run(EndpointCheck(url, model, options, report).run())


def summary_lines(report: dict[str, Any]) -> Iterable[str]:
    """The report as text, most important first."""
    yield (
        f"{report['prompts']} prompts: {report['stable_alone']} the same alone, "
        f"{report['compared']} compared under load at concurrency {report['concurrency']} "
        f"(at most {report['most_in_flight']} in flight, {report['disconnects']} left early)"
    )
    yield (
        f"differ from themselves alone: {report['differ_alone']}; "
        f"differ under load: {report['differ_under_load']}; "
        f"same text, other log probabilities: {report['differ_in_logprobs']}; "
        f"failed requests: {report['failed']}"
    )
    if report["most_distinct_answers"] > 1:
        yield f"most distinct answers to one question: {report['most_distinct_answers']}"
    for item in report["divergences"][:5]:
        yield (
            f"prompt {item['prompt']} in round {item['round']!r}: {item['kind']} at {item['unit']} "
            f"{item['index']}: "
            f"{item['expected']!r} alone, {item['actual']!r} there; margin {item['margin']}"
        )
    for error in report["errors"][:3]:
        yield f"error: {error}"
