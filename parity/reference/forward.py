"""The five families, one function a layer, and the pass over all of them.

Each function is the family's published model, held beside llama.cpp's graph of it
(``src/models/<family>.cpp`` at the locked release), from where the names of metadata and tensors come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parity.errors import UsageError
from parity.reference.arithmetic import EXACT, Arithmetic
from parity.reference.operations import (
    Choices,
    Forward,
    Routing,
    attend,
    experts,
    feed_forward,
    gated_delta_net,
    grouped_query_attention,
    head_values,
    heads,
    key_heads,
    mamba2,
    rms_norm,
    rotate,
    rotated_values,
    sigmoid,
    soft_cap,
    softmax,
    yarn_temperature,
)
from parity.reference.weights import Layer, Weights

GEMMA2_LOGIT_CAP = 30.0  # of a file that doesn't say; 0 turns it off
# What llama.cpp would act on and nothing here does, with the values at which that makes no difference.
UNKNOWN_HERE = {"attention.temperature_scale": (0.0,), "rope.freq_base_swa": ()}
ROPE_SCALINGS = ("none", "linear", "yarn")
GEMMA2_27B_LAYERS = 46  # llama.cpp tells the 27B model, whose queries have another scale, by its layers
SIGMOID_GATING = 2  # gguf.ExpertGatingFuncType


@dataclass(frozen=True, slots=True)
class Pass:
    """``logits`` float64 [tokens, n_vocab]; ``routings``: who was chosen, a record a layer with experts."""

    logits: np.ndarray
    routings: tuple[Routing, ...]


def llama(f: Forward, layer: Layer, index: int, x: np.ndarray) -> np.ndarray:
    """Llama (Touvron et al. 2023); with experts Mixtral (Jiang et al. 2024)."""
    h = rms_norm(f, x, layer.values("attn_norm"))
    scale = head_values(f.weights) ** -0.5
    x = f.settle(x + grouped_query_attention(f, layer, h, neighbours=True, scale=scale))
    h = rms_norm(f, x, layer.values("ffn_norm"))
    if "ffn_gate_inp" in layer:
        return f.settle(x + experts(f, layer, index, h, normalise=True))
    return f.settle(x + feed_forward(f, layer, h))


def deepseek2(f: Forward, layer: Layer, index: int, x: np.ndarray) -> np.ndarray:
    """DeepSeek-V2 and V3: latent attention, then leading dense layers or routed and shared experts."""
    m = f.weights
    x = f.settle(x + latent_attention(f, layer, rms_norm(f, x, layer.values("attn_norm"))))
    h = rms_norm(f, x, layer.values("ffn_norm"))
    if index < m.get("leading_dense_block_count", 0):
        return f.settle(x + feed_forward(f, layer, h))
    gating = sigmoid if m.get("expert_gating_func", 0) == SIGMOID_GATING else softmax
    routed = experts(
        f,
        layer,
        index,
        h,
        normalise=m.get("expert_weights_norm", False),
        gating=gating,
        scale=m.get("expert_weights_scale", 0.0) or 1.0,
    )
    # Several shared experts are one wide one: their gated units add up.
    return f.settle(x + f.settle(routed + feed_forward(f, layer, h, suffix="_shexp")))


def latent_attention(f: Forward, layer: Layer, h: np.ndarray) -> np.ndarray:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), with the key's matrix absorbed by the query and
    the value's applied to what was attended, so that one latent a token is all that is seen of the past.
    """
    m, n, n_head = f.weights, f.n_tokens, f.weights["attention.head_count"]
    n_rot, n_latent = rotated_values(m), m["attention.kv_lora_rank"]
    if "attn_q_a" in layer:
        query = f.product(
            rms_norm(f, f.product(h, layer, "attn_q_a"), layer.values("attn_q_a_norm")), layer, "attn_q_b"
        )
    else:
        query = f.product(h, layer, "attn_q")
    plain, turned = np.split(heads(query, n_head), [-n_rot], axis=-1)
    absorbed = f.arithmetic.product(plain.swapaxes(0, 1), layer["attn_k_b"]).swapaxes(0, 1)
    query = np.concatenate([absorbed, rotate(f, turned, neighbours=True)], axis=-1)
    latent, key = np.split(f.product(h, layer, "attn_kv_a_mqa"), [n_latent], axis=1)
    latent = rms_norm(f, latent, layer.values("attn_kv_a_norm"))[:, None]
    key = np.concatenate([latent, rotate(f, key[:, None], neighbours=True)], axis=-1)
    out = attend(f, query, key, latent, scale=latent_scale(m, plain.shape[-1] + n_rot))
    out = f.arithmetic.product(out.swapaxes(0, 1), layer["attn_v_b"]).swapaxes(0, 1)
    return f.product(out.reshape(n, -1), layer, "attn_output")


def latent_scale(weights: Weights, n_values: int) -> float:
    """Scale of the scores: with YaRN times ``mscale_all_dim``'s temperature squared (DeepSeek-V2's model
    code; GGUF holds a tenth of the multiplier).
    """
    if weights.get("rope.scaling.type", "linear") != "yarn":
        return n_values**-0.5
    multiplier = weights.get("rope.scaling.yarn_log_multiplier", 0.0) * 10
    return yarn_temperature(weights, multiplier) ** 2 * n_values**-0.5


def gemma2(f: Forward, layer: Layer, index: int, x: np.ndarray) -> np.ndarray:
    """Gemma 2 (2024): norms before and after, capped scores, every other layer sees a window."""
    m = f.weights
    h = grouped_query_attention(
        f,
        layer,
        rms_norm(f, x, layer.values("attn_norm")),
        neighbours=False,
        query_scale=gemma2_scale(m),
        window=gemma2_window(m, index),
        cap=m.get("attn_logit_softcapping", 50.0),
    )
    x = f.settle(x + rms_norm(f, h, layer.values("post_attention_norm")))
    h = feed_forward(f, layer, rms_norm(f, x, layer.values("ffn_norm")), activation=f.arithmetic.gelu)
    return f.settle(x + rms_norm(f, h, layer.values("post_ffw_norm")))


def gemma2_scale(weights: Weights) -> float:
    """By the head's size, in the 27B model by the width that a head would
    have (``query_pre_attn_scalar``).
    """
    if weights["block_count"] == GEMMA2_27B_LAYERS:
        return (weights["embedding_length"] // weights["attention.head_count"]) ** -0.5
    return head_values(weights) ** -0.5


def gemma2_window(weights: Weights, index: int) -> int | None:
    pattern = weights.get("attention.sliding_window_pattern", 2)
    windowed = pattern[index] if isinstance(pattern, list) else index % pattern < pattern - 1
    return weights.get("attention.sliding_window", 4096) if windowed else None


def falcon_h1(f: Forward, layer: Layer, index: int, x: np.ndarray) -> np.ndarray:
    """Falcon-H1 (2025): attention and a Mamba-2 mixer read the same norm, side by side."""
    h = rms_norm(f, x, layer.values("attn_norm"))
    scale = head_values(f.weights) ** -0.5
    mixed = grouped_query_attention(f, layer, h, neighbours=False, scale=scale) + mamba2(f, layer, h)
    x = f.settle(x + f.settle(mixed))
    return f.settle(x + feed_forward(f, layer, rms_norm(f, x, layer.values("ffn_norm"))))


def qwen3next(f: Forward, layer: Layer, index: int, x: np.ndarray) -> np.ndarray:
    """Qwen3-Next (2025): gated delta rule layers, gated attention every few layers, experts in all."""
    mixer = gated_delta_net if qwen3next_is_recurrent(f.weights, index) else gated_attention
    x = f.settle(x + mixer(f, layer, rms_norm(f, x, layer.values("attn_norm"))))
    h = rms_norm(f, x, layer.values("post_attention_norm"))
    gate = sigmoid(f.arithmetic.settle_sum(h, layer.values("ffn_gate_inp_shexp")[:, None]))
    shared = f.settle(feed_forward(f, layer, h, suffix="_shexp") * f.settle(gate))
    return f.settle(x + f.settle(experts(f, layer, index, h, normalise=True) + shared))


def qwen3next_is_recurrent(weights: Weights, index: int) -> bool:
    listed = weights.get("attention.recurrent_layers", None)
    return listed[index] if listed else (index + 1) % weights.get("full_attention_interval", 4) != 0


def gated_attention(f: Forward, layer: Layer, h: np.ndarray) -> np.ndarray:
    """Attention whose output is gated, value by value; a head's rows are its query, then its gate."""
    m = f.weights
    query, gate = np.split(heads(f.product(h, layer, "attn_q"), m["attention.head_count"]), 2, axis=-1)
    key, value = (heads(f.product(h, layer, name), key_heads(m)) for name in ("attn_k", "attn_v"))
    query = rotate(f, rms_norm(f, query, layer.values("attn_q_norm")), neighbours=False)
    key = rotate(f, rms_norm(f, key, layer.values("attn_k_norm")), neighbours=False)
    out = attend(f, query, key, value, scale=head_values(m) ** -0.5)
    return f.product(f.settle(out * f.settle(sigmoid(gate))).reshape(f.n_tokens, -1), layer, "attn_output")


FAMILIES: dict[str, Callable[[Forward, Layer, int, np.ndarray], np.ndarray]] = {
    "llama": llama,
    "deepseek2": deepseek2,
    "gemma2": gemma2,
    "falcon-h1": falcon_h1,
    "qwen3next": qwen3next,
}


def check_is_known(weights: Weights) -> None:
    """``UsageError`` for an architecture, or metadata of one, that the reference does not follow."""
    if weights.architecture not in FAMILIES:
        raise UsageError(
            f"architecture {weights.architecture!r} has no reference", why=f"known are {', '.join(FAMILIES)}"
        )
    kind = weights.get("rope.scaling.type", "none")
    if kind not in ROPE_SCALINGS:
        raise UsageError(
            f"rope scaling {kind!r} has no reference", why=f"known are {', '.join(ROPE_SCALINGS)}"
        )
    for key, harmless in UNKNOWN_HERE.items():
        if key in weights.metadata and weights[key] not in harmless:
            raise UsageError(f"{weights.architecture}.{key} has no reference", why=f"it is {weights[key]}")


def run_reference(
    weights: Weights, tokens: Sequence[int], arithmetic: Arithmetic = EXACT, choices: Choices | None = None
) -> Pass:
    """Run a whole sequence. ``choices`` overrules the router for a layer and a token."""
    check_is_known(weights)
    f = Forward(weights=weights, arithmetic=arithmetic, n_tokens=len(tokens), choices=choices or {})
    table = weights.tensors["token_embd"]
    x = table.values[np.asarray(tokens)]
    cap = None
    if weights.architecture == "gemma2":
        x = x * x.shape[1] ** 0.5
        cap = weights.get("final_logit_softcapping", GEMMA2_LOGIT_CAP)
    for index in range(weights.n_layer):
        x = FAMILIES[weights.architecture](f, weights.layer(index), index, x)
    x = rms_norm(f, x, weights.tensors["output_norm"].values)
    logits = arithmetic.product(x, weights.tensors.get("output", table))
    logits = f.settle(soft_cap(logits, cap))
    return Pass(logits, tuple(f.routings))
