"""How far llama.cpp is from the truth: its logits alone, in four ways of running it, beside the reference's.

``plain`` (flash attention off, float32 cells) is held to a bound at every position: that is the claim that
the model is computed rightly. ``streams`` and ``unified`` are held to theirs with the rounding of their
kernels followed. ``stock`` mixes kernels by width and is only measured.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel
from parity.engines.numerics import ROW_KERNEL_ROWS, NumericsProfile
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.facts import read_header
from parity.models.families import load_family
from parity.models.quantise import FILE_TYPES
from parity.models.tiny.variants import VARIANTS
from parity.processes import shared_worker
from parity.records import Verdict
from parity.reference import Kernel, Weights, load_weights, run_reference
from parity.reference.comparison import TruthComparison, compare_with_reference, rms
from parity.run.profiles import profile_of

PROMPT_TOKENS = (1, 7, 33, 100, 250)
FLOAT_TYPES = {"F32", "F16", "BF16"}
K_QUANT_FILES = ("q4_k_m",)
AS_STORED = NumericsProfile(name="row, weights as stored", use_extra_bufts=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of running llama.cpp. ``kernel``: whose rounding the reference follows, None: nobody's.

    ``chunks``: rows a call of two runs, whose bits are compared. ``pad``: a lone row gets a neighbour.
    """

    name: str
    kernel: Kernel | None
    flash_attention: bool
    kv_type: str
    chunks: tuple[int, int]
    pad: bool = False


WAYS = {
    way.name: way
    for way in (
        Way(name="plain", kernel=Kernel.PLAIN, flash_attention=False, kv_type="f32", chunks=(512, 37)),
        Way(name="streams", kernel=Kernel.HALF, flash_attention=False, kv_type="f16", chunks=(512, 37)),
        Way(
            name="unified",
            kernel=Kernel.ROW,
            flash_attention=True,
            kv_type="f16",
            chunks=(37, ROW_KERNEL_ROWS),
            pad=True,
        ),
        Way(name="stock", kernel=None, flash_attention=True, kv_type="f16", chunks=(512, 37)),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """One model, run one way. ``rms`` and ``worst_row_rms``: distance of its logits from the truth, over all
    positions and at the worst one, as a part of the truth's deviation. ``same_bits``: other chunks gave the
    same bits. ``worst_of_bound``: the largest distance as a part of its bound, None where there is no bound.
    """

    model: str
    way: str
    positions: int
    rms: float
    worst_row_rms: float
    other_tokens: int
    same_bits: bool
    worst_of_bound: float | None
    beyond: tuple[str, ...]
    ties: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """``pass``: no position is beyond what rounding can do. ``unknown``: nothing is claimed."""
        if self.worst_of_bound is None:
            return Verdict.UNKNOWN
        return Verdict.FAIL if self.beyond else Verdict.PASS

    @property
    def right(self) -> str:
        """The verdict as a table says it."""
        return {Verdict.PASS: "yes", Verdict.FAIL: "no", Verdict.UNKNOWN: "not claimed"}[self.verdict]

    @property
    def text(self) -> str:
        """One line for a report."""
        bound = "" if self.worst_of_bound is None else f", at most {self.worst_of_bound:.2f} of its bound"
        bits = "same" if self.same_bits else "other"
        return (
            f"{self.way}: {bits} bits in other chunks; {self.rms:.1e} of the deviation from the truth{bound};"
            f" another token at {self.other_tokens} of {self.positions} positions"
        )


def reference_prompt(n_tokens: int, n_vocab: int) -> tuple[int, ...]:
    """The prompt of a length: the same tokens every time, drawn from the whole vocabulary."""
    rng = random.Random(f"reference {n_tokens}")
    return tuple(rng.randrange(n_vocab) for _ in range(n_tokens))


def variant_models() -> tuple[str, ...]:
    """Names of all models beside the tiny ones that are made here and small: the variant rows, these
    quantised, and the 256 wide rows quantised. A K-quant block is 256 values, which no variant row has.
    """
    rows = [f"{family}:{row}" for family, variants in VARIANTS.items() for row in variants]
    return (
        *rows,
        *(f"{row}:{file_type}" for row in rows for file_type in FILE_TYPES if file_type not in K_QUANT_FILES),
        *(f"{family}:{file_type}" for family in VARIANTS for file_type in FILE_TYPES),
    )


def measure_distances(
    model: str, *, ways: Sequence[str] = tuple(WAYS), prompt_tokens: Sequence[int] = PROMPT_TOKENS
) -> list[Distance]:
    """Every way's distance for a model that ``resolve_model`` knows."""
    file = resolve_model(model)
    check_room(file.path)
    weights = load_weights(file.path)
    n_vocab = len(weights.tensors["token_embd"].values)
    prompts = [reference_prompt(count, n_vocab) for count in prompt_tokens]
    truths = [run_reference(weights, prompt).logits for prompt in prompts]
    return [measure_way(model, WAYS[name], weights, prompts, truths) for name in ways]


def measure_way(
    model: str,
    way: Way,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    truths: Sequence[np.ndarray],
) -> Distance:
    answers, again = (answers_alone(model, way, prompts, chunk_rows=rows) for rows in way.chunks)
    found, truth = (np.concatenate(rows).astype(np.float64) for rows in (answers, truths))
    compared = []
    if way.kernel is not None:
        compared = [
            compare_with_reference(weights, prompt, answer, way.kernel)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    far = rms(found - truth) / truth.std()
    return Distance(
        model=model,
        way=way.name,
        positions=len(found),
        rms=float(np.sqrt(np.mean(far * far))),
        worst_row_rms=float(far.max()),
        other_tokens=int((found.argmax(axis=-1) != truth.argmax(axis=-1)).sum()),
        same_bits=all(np.array_equal(a, b) for a, b in zip(answers, again, strict=True)),
        worst_of_bound=max((c.worst for c in compared), default=None),
        beyond=tuple(text for c in compared for text in describe_beyond(c)),
        ties=tuple(
            f"prompt of {len(c.error)}, {tie.text}" for c in compared for tie in (*c.resolved, *c.token_ties)
        ),
    )


def describe_beyond(compared: TruthComparison) -> list[str]:
    """A line for each position that is wrong."""
    prompt = f"prompt of {len(compared.error)}"
    lines = [
        f"{prompt}, position {i}: {compared.error[i]:.3g} from the reference, at most {compared.bound[i]:.3g}"
        for i in compared.beyond
    ]
    return lines + [f"{prompt}, position {i}: another token" for i in compared.wrong_tokens]


def answers_alone(
    model: str, way: Way, prompts: Sequence[Sequence[int]], *, chunk_rows: int, path: Path | None = None
) -> list[np.ndarray]:
    """llama.cpp's logits of every position, each prompt alone, in a worker
    process: float32 [tokens, n_vocab].

    ``path``: a file to load instead of the model's own, its weights as they are stored.
    """
    file = resolve_model(model)
    profile = profile_of(model).profile if path is None and not is_float(file.path) else AS_STORED
    rows = shared_worker(profile.environment).call(
        "parity.suites.truth:answers_here",
        {
            "path": str(path or file.path),
            "shadow": load_family(file.family).needs_shadow,
            "profile": profile.to_json(),
            "way": way.name,
            "prompts": [list(prompt) for prompt in prompts],
            "chunk_rows": chunk_rows,
        },
    )
    return [
        np.frombuffer(base64.b64decode(text), np.float32).reshape(len(prompt), -1)
        for text, prompt in zip(rows, prompts, strict=True)
    ]


def check_room(path: Path) -> None:
    """``UsageError`` if the model's weights, eight bytes each, don't fit into the memory that is free."""
    needed = 8 * sum(math.prod(tensor.shape) for tensor in read_header(path).tensors)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            "model is too large for the float64 reference",
            where=str(path),
            why=f"its weights need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            todo="take a smaller model of the family",
        )


def is_float(path: Path) -> bool:
    """Are all weights floats? Then there is one numerics profile, and no self-test."""
    return {tensor.type.name for tensor in read_header(path).tensors} <= FLOAT_TYPES


def answers_here(arguments: dict[str, Any]) -> list[str]:
    """In the worker: run the prompts, one after the other, in one context."""
    profile, way = NumericsProfile.from_json(arguments["profile"]), WAYS[arguments["way"]]
    longest = max(map(len, arguments["prompts"]))
    model = LlamaModel(Path(arguments["path"]), use_extra_bufts=profile.use_extra_bufts)
    ids = 2 if arguments["shadow"] else 1
    context = LlamaContext(
        model,
        ContextSettings(
            n_ctx=-(-2 * (longest + 1) // 256) * 256,
            n_seq_max=2 * ids,
            n_batch=512,
            n_ubatch=ROW_KERNEL_ROWS if way.pad else 512,
            flash_attention=way.flash_attention,
            kv_type=way.kv_type,
            n_threads=1,
        ),
        ids_per_row=ids,
    )
    try:
        return [
            base64.b64encode(
                _run_alone(context, prompt, arguments["chunk_rows"], ids=ids, pad=way.pad).tobytes()
            ).decode()
            for prompt in arguments["prompts"]
        ]
    finally:
        context.close()
        model.close()


def _run_alone(
    context: LlamaContext, prompt: Sequence[int], chunk_rows: int, *, ids: int, pad: bool
) -> np.ndarray:
    context.clear()
    own, neighbour = list(range(ids)), list(range(ids, 2 * ids))
    rows = []
    for start in range(0, len(prompt), chunk_rows):
        tokens = list(prompt[start : start + chunk_rows])
        extra = [0] if pad and len(tokens) == 1 else []
        rows.append(
            context.decode_rows(
                tokens + extra,
                [*range(start, start + len(tokens)), *extra],
                [own] * len(tokens) + [neighbour] * len(extra),
                [1] * len(tokens) + [0] * len(extra),
            )
        )
    return np.concatenate(rows)
