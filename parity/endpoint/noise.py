"""How far rounding moves a known-good server's answers, and what is too far for it.

A sample is one question: how far its answers moved at most, in nats, and whether any of them parted.
Questions are what two runs draw alike; answers to one question are not independent of each other. Largest
values over a high threshold have an exponential tail (peaks over threshold; Pickands 1975, with shape 0), so
the limit that ``n`` questions of a correct server pass with probability ``ALARM_RATE`` is u + s ln(k n / (N
ALARM_RATE)) for N samples of which k are above u, by s in the mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from parity.endpoint.answers import Choice, choice_from_data, choice_to_data
from parity.endpoint.case import Question
from parity.errors import UsageError
from parity.store import save_text

ALARM_RATE = 1e-3  # probability that one rule calls a correct server at fault in one run
TAIL_SHARE = 0.1
FLOOR = 0.02  # nats; below this nothing is called a fault: a half-precision cache alone moves that much
WITHOUT_BASELINE = 1.0  # nats; more than twice what any correct server was seen to move
FEWEST_SAMPLES = 20
BASELINE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of one run. ``scope`` is ``warm`` (alone, against alone and cold) or ``load`` (against the
    nearest answer that the server gave alone); ``chooses`` as in ``Question``. ``distance`` and ``margin``
    are the largest, in nats; ``parted`` says whether any answer's output did, ``compared`` after how many
    tokens at the earliest, else how many were compared.
    """

    scope: str
    chooses: str
    distance: float
    margin: float
    parted: bool
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineKey:
    """What noise is the same for. ``settings`` are the options that decide what is asked and how much at
    once.
    """

    model: str
    kind: str
    cache: str
    slots: int | None
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloAnswer:
    """What a known-good server answered to a question, alone and cold."""

    question: Question
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Noise of a known-good server. ``version`` is the build that it was measured on."""

    key: BaselineKey
    version: str
    samples: tuple[Sample, ...]
    solo: tuple[SoloAnswer, ...] = ()
    runs: int = 1

    def merged(self, other: Baseline) -> Baseline:
        """Both runs' samples. Raises ``UsageError`` for another key."""
        if difference := self.differs_from(other.key):
            raise UsageError("the baseline cannot be added to", why=difference, todo="name another file")
        known = {item.question for item in self.solo}
        return replace(
            self,
            samples=self.samples + other.samples,
            solo=self.solo + tuple(item for item in other.solo if item.question not in known),
            runs=self.runs + other.runs,
        )

    def differs_from(self, key: BaselineKey) -> str:
        """Why the noise is not that of ``key``; empty if it is."""
        for name in ("model", "kind", "cache", "slots", "settings"):
            mine, other = getattr(self.key, name), getattr(key, name)
            if mine != other:
                return f"it was measured with {name} {mine!r}, this is {other!r}"
        return ""

    def limit(self, n: int) -> Limit:
        """What ``n`` questions of a correct server do not pass."""
        moved = sorted((s.distance for s in self.samples), reverse=True)
        margins = sorted((s.margin for s in self.samples if s.parted), reverse=True)
        distance = tail_limit(moved, n)
        # A token gives way to another when both moved: by no more than twice what one moves.
        return Limit(
            distance=distance,
            margin=2 * distance,
            source=f"{self.runs} runs of a known-good server ({len(self.samples)} questions; moved "
            f"{_middle(moved):.2g} in the median, {moved[0] if moved else 0:.2g} at most; "
            f"margins to {margins[0] if margins else 0:.2g})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest distance and margin, in nats, that are still put down to rounding, and where they come
    from.
    """

    distance: float
    margin: float
    source: str
    is_measured: bool = True


UNMEASURED = Limit(
    distance=WITHOUT_BASELINE,
    margin=WITHOUT_BASELINE,
    source="no baseline: what no server was seen to reach by rounding",
    is_measured=False,
)


def tail_limit(values: Sequence[float], n: int, rate: float = ALARM_RATE) -> float:
    """The limit of the module's first lines for ``values`` in falling order; at least ``FLOOR``.

    The mean excess of few values is uncertain by its square root and is taken larger by twice that.
    """
    if not values or values[0] <= 0:
        return FLOOR
    count = min(len(values) - 1, max(5, math.ceil(TAIL_SHARE * len(values))))
    if count < 1:
        return max(FLOOR, 2 * values[0])
    threshold = values[count]
    excess = sum(value - threshold for value in values[:count]) / count
    reach = math.log(max(math.e, count * n / (len(values) * rate)))
    return max(FLOOR, threshold + excess * (1 + 2 / math.sqrt(count)) * reach)


def is_more_often(
    hits: int, tokens: int, known_hits: int, known_tokens: int, rate: float = ALARM_RATE
) -> bool:
    """Would ``hits`` in ``tokens`` be rarer than ``rate``, where ``known_hits`` in ``known_tokens`` were seen
        before?

    Answers part at a rate per token that has Jeffreys' prior, updated by what was seen: hits then have a
    negative binomial distribution.
    """
    if hits == 0 or known_tokens == 0:
        return False
    shape, share = known_hits + 0.5, known_tokens / (known_tokens + max(tokens, 1))

    def log_share(k: int) -> float:
        ways = math.lgamma(k + shape) - math.lgamma(shape) - math.lgamma(k + 1)
        return ways + shape * math.log(share) + k * math.log1p(-share)

    return 1 - sum(math.exp(log_share(k)) for k in range(hits)) < rate


def is_larger_all_over(values: Sequence[float], known: Sequence[float]) -> bool:
    """Are the values as a whole larger: more than 2.5 times the median, and by rank beyond chance?

    Mann and Whitney's rank sum by its normal approximation, at 4 standard deviations.
    """
    if len(values) < 8 or len(known) < FEWEST_SAMPLES or _middle(values) <= max(FLOOR, 2.5 * _middle(known)):
        return False
    above = sum((a > b) + 0.5 * (a == b) for a in values for b in known)
    n, m = len(values), len(known)
    return (above - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12) > 4


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


# -- as a file


def save_baseline(baseline: Baseline, path: Path) -> None:
    data = {
        "format": BASELINE_FORMAT,
        "key": asdict(baseline.key),
        "version": baseline.version,
        "runs": baseline.runs,
        "samples": [asdict(sample) for sample in baseline.samples],
        "solo": [
            {"question": asdict(item.question), "choices": [choice_to_data(c) for c in item.choices]}
            for item in baseline.solo
        ],
    }
    save_text(path, json.dumps(data, indent=1) + "\n")


def load_baseline(path: Path) -> Baseline:
    """What ``save_baseline`` wrote. Raises ``UsageError``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != BASELINE_FORMAT:
            raise ValueError(f"its format is {data['format']}, not {BASELINE_FORMAT}")
        return Baseline(
            key=BaselineKey(**data["key"]),
            version=data["version"],
            runs=data["runs"],
            samples=tuple(Sample(**item) for item in data["samples"]),
            solo=tuple(
                SoloAnswer(
                    question=_question(item["question"]),
                    choices=tuple(choice_from_data(choice) for choice in item["choices"]),
                )
                for item in data["solo"]
            ),
        )
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "no baseline", where=str(path), why=str(error), todo="write one with --calibrate FILE"
        ) from error


def _question(data: dict[str, Any]) -> Question:
    prompt = data["prompt"]
    return Question(
        **{
            **data,
            "prompt": prompt if isinstance(prompt, str) else tuple(prompt),
            "stop": tuple(data["stop"]),
            "logit_bias": tuple((token, bias) for token, bias in data["logit_bias"]),
        }
    )
