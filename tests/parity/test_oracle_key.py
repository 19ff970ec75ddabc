"""What the oracle's memory tells apart: everything that an answer alone depends on, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.run.oracle import Question
from scheduler.records import SamplingParams

SEEDED = Question(
    prompt=(5, 6, 7),
    max_tokens=4,
    sampling=SamplingParams(temperature=1.0, seed=3, top_k=40, top_p=0.9),
    stop_token_ids=(2, 9),
    request_id="s1",
)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": (5, 6, 8)},
        {"max_tokens": 5},
        {"stop_token_ids": ()},
        {"stop_token_ids": (2,)},
        {"request_id": "s2"},
        {"sampling": replace(SEEDED.sampling, temperature=0.5)},
        {"sampling": replace(SEEDED.sampling, seed=4)},
        {"sampling": replace(SEEDED.sampling, top_k=0)},
        {"sampling": replace(SEEDED.sampling, top_p=1.0)},
        {"sampling": replace(SEEDED.sampling, key="one")},
        {"sampling": SamplingParams()},
    ],
    ids=str,
)
def test_questions_with_other_answers_have_other_keys(changes: dict) -> None:
    assert replace(SEEDED, **changes).key() != SEEDED.key()


def test_a_greedy_answer_does_not_depend_on_the_name() -> None:
    greedy = replace(SEEDED, sampling=SamplingParams())
    assert greedy.key() == replace(greedy, request_id="s2").key()
