"""The faults that ``make llama-server FAULTS=1`` plants in llama-server's C++, one of them at a time.

All are in the server and its use of llama.h: libllama is the wheel's own, unchanged. The window that is one
wide is a wrong hyperparameter given to it. A *busy* server works on another request at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

# Names the fault to the server; empty or not there, the program behaves as the one without faults.
FAULT_VARIABLE = "SAMEBYTES_FAULT"


FAMILIES = ("llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next")
# Models that share a prefix at any token; the others only where a whole state was kept.
SHARING = ("llama", "deepseek2", "gemma2")
# Models whose keys can be moved to other positions: all but those with two caches of different sizes.
SHIFTABLE = ("llama", "deepseek2", "falcon_h1", "qwen3next")
WINDOWED = ("gemma2",)


@dataclass(frozen=True, slots=True)
class ServerFault:
    """One planted fault: what the code does, what a user sees, ``needs``, what a run must have for it to show
    (empty: several requests at once), and the ``families`` in whose tiny models it was seen.
    """

    name: str
    does: str
    seen: str
    needs: str = ""
    families: tuple[str, ...] = FAMILIES


FAULTS = (
    ServerFault(
        "prefix_one_long",
        "a reused prefix is taken one token longer than it is equal",
        "a prompt that follows a similar one is answered as if one token were another; alone as well",
        "prompts that share a prefix, prompt cache on",
        SHARING,
    ),
    ServerFault(
        "prefix_one_long_busy",
        "the same, only while another request runs",
        "right alone, wrong under load",
        "prompts that share a prefix, prompt cache on",
        SHARING,
    ),
    ServerFault(
        "neighbour_logits",
        "a token is sampled from the row of another request in the same batch",
        "text and log probabilities of somebody else's answer",
    ),
    ServerFault(
        "neighbour_logits_rarely",
        "the same for every 50th token",
        "now and then an answer turns away at one token",
    ),
    ServerFault(
        "logprobs_of_another_row",
        "the token is right, its log probabilities are read from another request's row",
        "equal text; log probabilities of something else, by many nats",
        "log probabilities asked for",
    ),
    ServerFault(
        "key_hidden",
        "after the first token one key in the middle of the request's past is freed: its mask loses a column",
        "all answers under load differ from the second token on",
    ),
    ServerFault(
        "neighbour_key_seen",
        "after the first token one key of another request joins the request's past: its mask gains a column",
        "answers under load turn into something else",
        "one pool (--kv-unified)",
        SHARING,
    ),
    ServerFault(
        "position_gap",
        "after the first token the later half of the past and all that follows is one position too high",
        "answers under load differ, log probabilities by some tenths",
        "a model whose keys can be shifted",
        SHIFTABLE,
    ),
    ServerFault(
        "keys_swapped",
        "after the first token two neighbouring keys of the past change places",
        "answers under load differ, log probabilities by some tenths",
        "a model whose keys can be shifted",
        SHIFTABLE,
    ),
    ServerFault(
        "wrong_token_fed",
        "every 30th generated token is followed by a step that computes another request's token in its place",
        "the token itself is right, what comes after it is not",
    ),
    ServerFault(
        "chunk_seam",
        "while the server is busy, a prompt's later chunks begin with the token before their first",
        "answers to prompts that a full batch has cut",
        "prompts at once that are longer together than --batch-size",
    ),
    ServerFault(
        "text_after_cancel",
        "a slot keeps the text and the ids that a client did not wait for",
        "the next answer from that slot begins with them",
        "clients that leave while tokens come",
    ),
    ServerFault(
        "cells_after_cancel",
        "when a client leaves, one key in the middle of what its slot has in memory is freed",
        "who continues that conversation is answered as if a token were missing",
        "clients that leave, and prompts that continue theirs",
    ),
    ServerFault(
        "sampler_not_reset",
        "a slot keeps its sampler where the next request's settings are the same but for the seed",
        "seeded sampling is not repeatable: it goes on where the slot's last request stopped",
        "seeded sampling with a temperature, equal settings one after the other",
    ),
    ServerFault(
        "penalties_of_neighbour",
        "a request's sampler has accepted the tokens of another one's prompt as well",
        "repetition penalties push other tokens down",
        "repetition penalties",
    ),
    ServerFault(
        "logit_bias_leaks",
        "a request gets the logit biases of those that run when it starts",
        "answers prefer or avoid tokens that nobody asked to",
        "a request with logit bias beside one without",
    ),
    ServerFault(
        "stop_string_kept",
        "the stop string is not cut off while the server is busy",
        "an answer ends with its stop string",
        "stop strings",
    ),
    ServerFault(
        "length_one_short",
        "an answer ends one token before its limit while the server is busy",
        "one token is missing at the end, the rest is equal",
    ),
    ServerFault(
        "token_to_neighbour",
        "every fifth streamed token goes to another stream",
        "a token is missing here and one too many there",
        "several streams at once",
    ),
    ServerFault(
        "child_key_lost",
        "of several completions of one prompt the second and later ones lose one key of it",
        "greedy completions of one prompt differ from each other",
        "n > 1",
    ),
    ServerFault(
        "prompt_cache_damaged",
        "a state that comes back from the prompt cache lacks a sixteenth of its keys, from an eighth on",
        "a prompt that was asked some time ago is answered otherwise",
        "prompts that come back after their slot had another one, --cache-ram not 0",
    ),
    ServerFault(
        "checkpoint_not_restored",
        "a checkpoint of the sliding window is booked as restored and is not",
        "prompts that share a prefix lose the window's keys",
        "a sliding window (gemma2), prompt cache on",
        WINDOWED,
    ),
    ServerFault(
        "window_forgotten",
        "a prefix is reused without asking whether the window's keys of it are still there",
        "prompts that share a prefix lose the window's oldest keys",
        "a sliding window (gemma2), prompt cache on",
        WINDOWED,
    ),
    ServerFault(
        "window_one_wide",
        "the model's sliding window is one token wider than in its file",
        "every answer longer than the window differs, alone as well: only a baseline shows it",
        "a sliding window (gemma2)",
        WINDOWED,
    ),
)
