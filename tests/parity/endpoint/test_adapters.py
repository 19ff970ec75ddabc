"""What servers send, written down by their documented fields, and what we read of it."""

from __future__ import annotations

import math

import pytest

from parity.endpoint import llama_server, sglang_api
from parity.endpoint.answers import Piece, Token
from parity.endpoint.llama_server import align_entries
from parity.endpoint.openai_api import read_tokens
from parity.endpoint.system import Refused


def test_vllm_names_tokens_by_id() -> None:
    logprobs = {
        "tokens": ["token_id:5", "token_id:7"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -1.5}, None],
    }
    first, second = read_tokens(logprobs, [5, 7], 3)
    assert (first.position, first.id, first.key, first.top) == (3, 5, 5, ((5, -0.5), (9, -1.5)))
    assert (second.id, math.isnan(second.logprob)) == (7, True)
    with pytest.raises(ValueError, match="1 token ids and 2"):
        read_tokens(logprobs, [5], 0)


def test_texts_that_hide_their_bytes_name_nothing() -> None:
    entry = {"token": "\ufffd", "logprob": -1.0, "top_logprobs": [{"token": "\ufffd", "logprob": -1.0}]}
    (hidden,) = read_tokens({"content": [entry]}, None, 0)
    assert (hidden.id, hidden.key, hidden.top) == (None, None, ())
    (known,) = read_tokens({"content": [{**entry, "bytes": [226]}]}, None, 0)
    assert (known.key, known.data) == ("b:\xe2", b"\xe2")


def sglang_event(text: str, count: int, *, repeats: bool, reason: dict | None = None) -> dict:
    entries = [[-0.5 - i, 10 + i, None] for i in range(count)]
    shown = entries if repeats else entries[-1:]
    return {
        "text": text,
        "meta_info": {
            "completion_tokens": count,
            "prompt_tokens": 4,
            "cached_tokens": 2,
            "finish_reason": reason,
            "output_token_logprobs": shown,
            "output_top_logprobs": [[entry, [-9.0, 99, None]] for entry in shown],
        },
    }


@pytest.mark.parametrize("repeats", [True, False])
def test_sglang_stream_repeats_its_text_and_adds_tokens(repeats: bool) -> None:
    last = sglang_event("ab", 2, repeats=repeats, reason={"type": "length", "length": 2})
    piece = sglang_api._read(last, Piece(text="a"), 1)
    assert (piece.text, piece.finish_reason, piece.cached_tokens) == ("b", "length", 2)
    assert [(t.position, t.id, t.logprob, t.top) for t in piece.tokens] == [
        (1, 11, -1.5, ((11, -1.5), (99, -9.0)))
    ]
    with pytest.raises(Refused, match="does not go on"):
        sglang_api._read(last, Piece(text="x"), 1)


def entry(id_: int, data: bytes) -> Token:
    return Token(position=0, id=id_, key=id_, data=data, logprob=-1.0, spelled=((id_, data[-1:]),))


def test_held_back_tokens_of_llama_server_find_their_places() -> None:
    # 226 is a part of a character: its byte came with 72's.
    entries = [entry(108, b"l"), entry(72, b"\xe2H"), entry(70, b"F")]
    tokens = align_entries([108, 226, 72, 70, 195], entries)
    assert [(t.position, t.id, t.data) for t in tokens] == [
        (0, 108, b"l"),
        (1, 226, b"\xe2"),
        (2, 72, b"H"),
        (3, 70, b"F"),
        (4, 195, None),
    ]
    assert [math.isnan(t.logprob) for t in tokens] == [False, True, False, False, True]
    with pytest.raises(ValueError, match="not among the ids"):
        align_entries([1, 2], [entry(3, b"c")])


def test_llama_servers_event_says_the_position_of_its_last_token() -> None:
    event = {
        "index": 1,
        "content": "\ufffdp}",
        "tokens": [125],
        "stop": False,
        "tokens_predicted": 4,
        "tokens_evaluated": 10,
        "completion_probabilities": [
            {
                "id": 125,
                "bytes": [243, 112, 125],
                "logprob": -1.5,
                "top_logprobs": [{"id": 125, "bytes": [125], "logprob": -1.5}],
            }
        ],
    }
    piece = llama_server._read(event, streamed=True)
    assert (piece.index, piece.tokens[0].position, piece.tokens[0].data) == (1, 3, b"\xf3p}")
    with pytest.raises(Refused, match="holds an error"):
        llama_server._read({"error": {"code": 500, "message": "x"}}, streamed=True)
