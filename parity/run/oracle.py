"""One session alone, in a context of its own, by code that shares nothing with the scheduler.

The truth that concurrent runs are held to: the same products and the same attention kernel, everything else
different (own context, own thread count and widths, one sequence, no neighbours). Memoised by content.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.engines.geometry import ids_of, ids_per_sequence
from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel, build_facts
from parity.engines.numerics import NumericsProfile
from parity.engines.sampling import logits_digest, sample_token, top_margin
from parity.store import cache_dir, save_text
from scheduler.records import SamplingParams

SOLO_CHUNK_ROWS = 37  # not what the scheduler uses, so that chunk boundaries differ
MEMO_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Solo:
    """What a session gives alone: per generated token its id, its logits'
    digest, and the top-1/top-2 margin.
    """

    tokens: tuple[int, ...]
    digests: tuple[str, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a solo run depends on besides model and numerics."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    request_id: str = ""

    def key(self) -> str:
        sampling = self.sampling
        named = (
            sampling.key or self.request_id if sampling.temperature else ""
        )  # greedy output does not depend on the name
        return json.dumps(
            [
                self.prompt,
                self.max_tokens,
                sampling.temperature,
                sampling.seed,
                sampling.top_k,
                sampling.top_p,
                self.stop_token_ids,
                named,
            ]
        )


class Oracle:
    """Answers questions about one model under one numerics profile. ``remember`` keeps answers on disk."""

    def __init__(
        self,
        model: LlamaModel,
        model_digest: str,
        profile: NumericsProfile,
        *,
        shadow: bool,
        kv_type: str = "f16",
        n_ctx: int = 1024,
        n_threads: int = 1,
        remember: bool = True,
    ) -> None:
        self._model, self._profile, self._shadow = model, profile, shadow
        ids = ids_per_sequence(shadow)
        self._context = LlamaContext(
            model,
            ContextSettings(
                n_ctx=n_ctx,
                n_seq_max=ids_of(2, shadow=shadow, recurrent=False),  # the session, and rows that pad
                n_batch=64,
                n_ubatch=64 if not profile.pad_lone_rows else 63,
                flash_attention=profile.flash_attention,
                kv_type=kv_type,
                n_threads=n_threads,
            ),
            ids_per_row=ids,
        )
        identity = [MEMO_FORMAT, model_digest, profile.to_json(), build_facts(), kv_type]
        self._folder = (
            hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest() if remember else None
        )
        self._recent: OrderedDict[str, tuple[Solo, np.ndarray]] = OrderedDict()

    def solo(self, question: Question) -> Solo:
        """The answer, from memory, from disk, or run now."""
        key = question.key()
        if key in self._recent:
            return self._recent[key][0]
        if self._folder is None:
            return self._answer(question)[0]
        path = (
            cache_dir("oracle", self._folder)
            / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"
        )
        try:
            stored = json.loads(path.read_text())
            if stored["key"] == key:
                return Solo(tuple(stored["tokens"]), tuple(stored["digests"]), tuple(stored["margins"]))
        except (OSError, ValueError, KeyError):
            pass  # absent or unreadable: run it and write it anew
        solo = self._answer(question)[0]
        answer = {"key": key, "tokens": solo.tokens, "digests": solo.digests, "margins": solo.margins}
        try:
            save_text(path, json.dumps(answer), durable=False)
        except OSError:
            pass  # a full disk costs the memory of the answer, not the answer
        return solo

    def logits(self, question: Question) -> np.ndarray:
        """Logits of every generated step: float32 [tokens, n_vocab]."""
        key = question.key()
        return self._recent[key][1] if key in self._recent else self._answer(question)[1]

    def _answer(self, question: Question) -> tuple[Solo, np.ndarray]:
        tokens, logits = self._run(question)
        solo = Solo(tuple(tokens), tuple(map(logits_digest, logits)), tuple(map(top_margin, logits)))
        self._recent[question.key()] = solo, logits
        if len(self._recent) > 64:
            self._recent.popitem(last=False)
        return solo, logits

    def _run(self, question: Question) -> tuple[list[int], np.ndarray]:
        self._context.clear()
        self._padding = 0
        prompt, tokens, rows = question.prompt, [], []
        for start in range(0, len(prompt), SOLO_CHUNK_ROWS):
            last = self._decode(prompt[start : start + SOLO_CHUNK_ROWS], start)
        while True:
            position = len(prompt) + len(tokens)
            rows.append(last)
            tokens.append(
                sample_token(last, question.sampling, request_id=question.request_id, position=position)
            )
            if len(tokens) == question.max_tokens or tokens[-1] in question.stop_token_ids:
                return tokens, np.stack(rows)
            last = self._decode(tokens[-1:], position)

    def _decode(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Decode consecutive tokens of the session; returns the last row's logits."""
        count = len(tokens)
        own, pad = ([0, 1], [2, 3]) if self._shadow else ([0], [1])
        tokens, positions, ids = list(tokens), list(range(start, start + count)), [own] * count
        if count == 1 and self._profile.pad_lone_rows:
            tokens, positions, ids = [*tokens, 0], [*positions, self._padding], [*ids, pad]
            self._padding += 1
        wanted = [int(i == count - 1) for i in range(len(tokens))]
        return self._context.decode_rows(tokens, positions, ids, wanted)[0]

    def close(self) -> None:
        self._context.close()
