"""What the families are made of, over a whole sequence at once: rows are positions, nothing is cached.

Every function takes the ``Forward`` that it is part of, for the model's numbers and for how they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from parity.reference.arithmetic import Arithmetic, Kernel, as_half
from parity.reference.weights import Layer, Tensor, Weights

Choices = Mapping[tuple[int, int], tuple[int, ...]]  # (layer, token): the experts to use there
GROUP_SCORE_EXPERTS = 2  # a group of experts is as good as its two best together
YARN_FAST_TURNS, YARN_SLOW_TURNS = 32.0, 1.0  # beta of the paper; llama.cpp reads no other for these families


@dataclass(frozen=True, slots=True)
class Routing:
    """Who was chosen in one layer. ``scores`` [tokens, experts] decide;
    ``chosen`` [tokens, used] are sorted.
    """

    layer: int
    scores: np.ndarray
    chosen: np.ndarray


@dataclass(slots=True, kw_only=True)
class Forward:
    """One pass over one sequence of ``n_tokens`` positions."""

    weights: Weights
    arithmetic: Arithmetic
    n_tokens: int
    choices: Choices = field(default_factory=dict)
    routings: list[Routing] = field(default_factory=list)
    _turns: dict[float, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        return self.weights["attention.layer_norm_rms_epsilon"]

    def settle(self, value: np.ndarray) -> np.ndarray:
        return self.arithmetic.settle(value)

    def product(self, rows: np.ndarray, layer: Layer, name: str) -> np.ndarray:
        """``rows`` [..., inputs] by a layer's weight, and its bias where the model has one."""
        return self.arithmetic.product(rows, layer[name]) + layer.bias(name)

    def turns(self, base: float) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of ``rotary_angles``; the same in every layer, so rounded (and shaken) once."""
        if base not in self._turns:
            angles = self.settle(rotary_angles(self.weights, self.n_tokens, base))
            size = rotary_size(self.weights)
            self._turns[base] = np.cos(angles) * size, np.sin(angles) * size
        return self._turns[base]


# -- norms and activations


def rms_norm(f: Forward, x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """Root mean square norm over the last axis (Zhang and Sennrich, 2019)."""
    return f.settle(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + f.epsilon) * weight)


def unit(f: Forward, x: np.ndarray) -> np.ndarray:
    """Length 1 over the last axis; epsilon is added to the square (Qwen3-Next's ``l2norm``)."""
    return f.settle(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + f.epsilon))


def softmax(x: np.ndarray) -> np.ndarray:
    grown = np.exp(x - x.max(axis=-1, keepdims=True))
    return grown / grown.sum(axis=-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def soft_cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    """Squeezed into (-cap, cap) (Gemma 2 report, section 2)."""
    return cap * np.tanh(x / cap) if cap else x


# -- rotary positions


def rotary_angles(weights: Weights, n_tokens: int, base: float) -> np.ndarray:
    """Angles of the rotated pairs: [tokens, pairs] (RoFormer, Su et al. 2021, equation 15).

    ``rope_freqs`` divides each pair's speed (Llama 3.1). A linear scaling factor divides all of them (Chen et
    al. 2023). YaRN divides the slow ones, leaves the fast ones alone, and goes from one to the other linearly
    between the pairs that turn 32 times and once within the original context (Peng et al. 2023, section 3.2).
    """
    n_rot = rotated_values(weights)
    pair = np.arange(n_rot // 2)
    factors = weights.tensors.get("rope_freqs")
    # falcon-h1 loads the factors and does not use them; gemma2, deepseek2 and qwen3next do not load them.
    use_factors = factors is not None and weights.architecture == "llama"
    speed = base ** (-2 * pair / n_rot) / (factors.values if use_factors else 1.0)
    kind, factor = weights.get("rope.scaling.type", "linear"), weights.get("rope.scaling.factor", 0.0) or 1.0
    if kind == "none":
        factor = 1.0
    slow = speed / factor
    if kind == "yarn":
        trained = weights.get("rope.scaling.original_context_length", weights["context_length"])

        def pair_that_turns(times: float) -> float:
            return n_rot * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

        first = max(0, math.floor(pair_that_turns(YARN_FAST_TURNS)))
        last = min(n_rot - 1, math.ceil(pair_that_turns(YARN_SLOW_TURNS)))
        fast = 1 - np.clip((pair - first) / max(0.001, last - first), 0, 1)
        slow = slow * (1 - fast) + speed * fast
    return np.arange(n_tokens)[:, None] * slow


def rotated_values(weights: Weights) -> int:
    return weights.get("rope.dimension_count", weights.get("attention.key_length", 0))


def rotary_size(weights: Weights) -> float:
    """Length of a rotated pair: YaRN's attention temperature, put on queries and keys (section 3.4).

    deepseek2 has it in the scale of the scores instead (``latent_scale``).
    """
    if weights.get("rope.scaling.type", "linear") != "yarn" or weights.architecture == "deepseek2":
        return weights.get("rope.scaling.attn_factor", 1.0)
    return yarn_temperature(weights, 1.0) * weights.get("rope.scaling.attn_factor", 1.0)


def yarn_temperature(weights: Weights, multiplier: float) -> float:
    factor = weights.get("rope.scaling.factor", 0.0) or 1.0
    return 1 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


def rotate(f: Forward, x: np.ndarray, *, neighbours: bool, base: float | None = None) -> np.ndarray:
    """Turn the first values of [tokens, heads, values]: neighbours are a pair, or value i of both halves."""
    n_rot = rotated_values(f.weights)
    cosine, sine = (t[:, None] for t in f.turns(base or f.weights.get("rope.freq_base", 10000.0)))
    half = n_rot // 2
    first, second = (
        (slice(0, n_rot, 2), slice(1, n_rot, 2)) if neighbours else (slice(half), slice(half, n_rot))
    )
    turned = x.copy()
    turned[..., first] = x[..., first] * cosine - x[..., second] * sine
    turned[..., second] = x[..., first] * sine + x[..., second] * cosine
    return f.settle(turned)


# -- attention


def visible(n_tokens: int, window: int | None) -> np.ndarray:
    """Who sees whom: [queries, keys], True for the past, oneself, and nothing ``window`` or more behind."""
    behind = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
    return (behind >= 0) & (behind < (window or n_tokens))


def for_each_query_head(x: np.ndarray, n_head: int) -> np.ndarray:
    """[tokens, key heads, ...] to [tokens, query heads, ...]: neighbours share (Ainslie et al. 2023)."""
    return np.repeat(x, n_head // x.shape[1], axis=1)


def attend(
    f: Forward,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> np.ndarray:
    """Attention (Vaswani et al. 2017) over [tokens, heads, values]; key heads are shared by query heads."""
    arithmetic, n_head = f.arithmetic, query.shape[1]
    query, key, value = map(arithmetic.cells, (query, key, value))
    key, value = (for_each_query_head(x, n_head).swapaxes(0, 1) for x in (key, value))
    scores = arithmetic.settle_sum(query.swapaxes(0, 1), key.swapaxes(1, 2)) * scale  # [heads, queries, keys]
    scores = f.settle(soft_cap(scores, cap))
    seen = visible(f.n_tokens, window)
    if arithmetic.kernel is Kernel.ROW:
        return row_kernel(f, scores, value, seen).swapaxes(0, 1)
    weights = f.settle(softmax(np.where(seen, scores, -np.inf)))
    return arithmetic.settle_sum(arithmetic.cells(weights), value).swapaxes(0, 1)


def row_kernel(f: Forward, scores: np.ndarray, value: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Online softmax (Milakov and Gimelshein, 2018), cell after cell, its sum of values kept in float16.

    ``scores`` [heads, queries, keys], ``value`` [heads, keys, values]; returns [heads, queries, values].
    """
    n_head, n_query, n_key = scores.shape
    top = np.full((n_head, n_query), -np.inf)
    total = np.zeros((n_head, n_query))
    sums = np.zeros((n_head, n_query, value.shape[-1]))
    for cell in range(n_key):
        seeing = np.flatnonzero(seen[:, cell])
        rows = slice(seeing[0], seeing[-1] + 1)  # who sees a cell is one range, also with a window
        score, old = scores[:, rows, cell], top[:, rows]
        new = np.maximum(score, old)
        shrink, grow = np.exp(old - new), np.exp(score - new)
        # Only a new largest score scales what is there, and only then is it rounded for it.
        kept = np.where((score > old)[..., None], as_half(sums[:, rows] * shrink[..., None]), sums[:, rows])
        added = kept + grow[..., None] * value[:, cell, None]
        sums[:, rows] = as_half(added)
        sums[:, cell] = f.arithmetic.half(added[:, 0])  # the last cell that the row ``cell`` sees
        total[:, rows] = f.settle(total[:, rows] * shrink + grow)
        top[:, rows] = new
    return f.settle(sums / total[..., None])


def grouped_query_attention(
    f: Forward,
    layer: Layer,
    h: np.ndarray,
    *,
    neighbours: bool,
    scale: float = 1.0,
    query_scale: float = 1.0,
    **kind: float | None,
) -> np.ndarray:
    """Query, key, value; rotate; attend; output. [tokens, width] to [tokens, width].

    ``scale`` is put on the scores, ``query_scale`` on the queries: the same but for how queries are rounded.
    """
    query, key, value = (
        heads(f.product(h, layer, name), count)
        for name, count in (
            ("attn_q", f.weights["attention.head_count"]),
            ("attn_k", key_heads(f.weights)),
            ("attn_v", key_heads(f.weights)),
        )
    )
    query, key = (rotate(f, x, neighbours=neighbours) for x in (query, key))
    out = attend(f, query * query_scale, key, value, scale=scale, **kind)
    return f.product(out.reshape(f.n_tokens, -1), layer, "attn_output")


def heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(len(x), count, -1)


def key_heads(weights: Weights) -> int:
    return weights.get("attention.head_count_kv", weights["attention.head_count"])


def head_values(weights: Weights) -> int:
    """Values of one key head."""
    return weights.get("attention.key_length", weights["embedding_length"] // weights["attention.head_count"])


# -- feed-forward


def feed_forward(
    f: Forward,
    layer: Layer,
    h: np.ndarray,
    *,
    suffix: str = "",
    activation: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Gated linear unit (Shazeer 2020): down(activation(gate h) * up h); SwiGLU unless told otherwise."""
    gate = f.product(h, layer, f"ffn_gate{suffix}")
    gate = f.settle(silu(gate)) if activation is None else activation(gate)
    hidden = f.settle(gate * f.product(h, layer, f"ffn_up{suffix}"))
    return f.product(hidden, layer, f"ffn_down{suffix}")


def choose_experts(weights: Weights, scores: np.ndarray) -> np.ndarray:
    """The best experts by ``scores`` [tokens, experts], sorted: [tokens, used].

    With groups only the best groups' experts stand, a group being as good as its two best experts
    (DeepSeek-V3 report, section 2.1.2). DeepSeek-V2 took a group's single best; llama.cpp takes two for both.
    """
    n_group = weights.get("expert_group_count", 0)
    if n_group > 1:
        grouped = scores.reshape(len(scores), n_group, -1)
        strength = np.sort(grouped, axis=-1)[..., -GROUP_SCORE_EXPERTS:].sum(axis=-1)
        best = np.argsort(-strength, axis=-1, kind="stable")[:, : weights["expert_group_used_count"]]
        out = np.full_like(grouped, -np.inf)
        np.put_along_axis(out, best[..., None], np.take_along_axis(grouped, best[..., None], axis=1), axis=1)
        scores = out.reshape(scores.shape)
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.sort(order[:, : weights["expert_used_count"]], axis=-1)


def experts(
    f: Forward,
    layer: Layer,
    index: int,
    h: np.ndarray,
    *,
    normalise: bool,
    gating: Callable[[np.ndarray], np.ndarray] = softmax,
    scale: float = 1.0,
) -> np.ndarray:
    """Mixture of experts (Shazeer et al. 2017): the chosen experts' outputs by their gates.

    A selection bias (``exp_probs_b``) decides who is chosen and not how much it weighs (Wang et al. 2024).
    """
    gates = f.settle(gating(f.product(h, layer, "ffn_gate_inp")))
    scores = gates + layer.bias("exp_probs_b")
    chosen = choose_experts(f.weights, scores)
    for (where, token), forced in f.choices.items():
        if where == index and token < f.n_tokens:
            chosen[token] = sorted(forced)
    f.routings.append(Routing(index, scores, chosen))
    used = np.take_along_axis(gates, chosen, axis=-1)
    if normalise:
        used = used / used.sum(axis=-1, keepdims=True)
    used = f.settle(used * scale)
    out = np.zeros_like(h)
    for expert in range(gates.shape[-1]):
        rows, place = np.nonzero(chosen == expert)
        if len(rows):
            one = Layer({f"ffn_{part}": _expert(layer, part, expert) for part in ("gate", "up", "down")})
            out[rows] += feed_forward(f, one, h[rows]) * used[rows, place, None]
    return f.settle(out)


def _expert(layer: Layer, part: str, expert: int) -> Tensor:
    stack = layer[f"ffn_{part}_exps"]
    return Tensor(stack.values[expert], stack.kind)


# -- recurrences


def convolve(f: Forward, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Causal convolution of each channel, then silu: [tokens, channels] with ``kernel`` [channels, taps]."""
    taps = kernel.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    window = np.stack([padded[i : i + len(x)] for i in range(taps)], axis=-1)  # [tokens, channels, taps]
    out = f.arithmetic.settle((window * kernel).sum(axis=-1), np.abs(window * kernel).sum(axis=-1))
    return f.settle(silu(out + bias))


def keep_state(state: np.ndarray, decay: np.ndarray, position: int) -> np.ndarray:
    """What is left of the heads' states [heads, ...] when the token at ``position`` comes."""
    return state * decay[:, None, None]


def mamba2(f: Forward, layer: Layer, h: np.ndarray) -> np.ndarray:
    """A Mamba-2 mixer (Dao and Gu 2024, section 7): [tokens, width] to [tokens, width].

    Per head the state is [values, state size]: S = exp(dt A) S + dt x B^T, y = S C + D x. Then the gate, and
    a norm over each group of channels where the model has one.
    """
    m, n = f.weights, f.n_tokens
    inner, size = m["ssm.inner_size"], m["ssm.state_size"]
    n_head, n_group = m["ssm.time_step_rank"], m["ssm.group_count"]
    shared = n_group * size
    gate, mixed, dt = np.split(f.product(h, layer, "ssm_in"), [inner, 2 * inner + 2 * shared], axis=1)
    mixed = convolve(f, mixed, layer.values("ssm_conv1d"), layer.bias("ssm_conv1d"))
    x, b, c = np.split(mixed, [inner, inner + shared], axis=1)
    x = heads(x, n_head)
    b, c = (for_each_query_head(heads(t, n_group), n_head) for t in (b, c))
    dt = f.settle(softplus(dt + layer.bias("ssm_dt")))
    decay = f.settle(np.exp(dt * layer.values("ssm_a")[:, 0]))
    state, y = np.zeros((n_head, x.shape[-1], size)), np.empty_like(x)
    for t in range(n):
        state = keep_state(state, decay[t], t) + (x[t] * dt[t, :, None])[:, :, None] * b[t][:, None]
        state = f.settle(state)
        y[t] = f.arithmetic.settle_sum(state, c[t][:, :, None])[..., 0]
    y = f.settle(f.settle(y + x * layer.values("ssm_d")).reshape(n, inner) * f.settle(silu(gate)))
    if "ssm_norm" in layer:
        y = rms_norm(f, heads(y, n_group), layer.values("ssm_norm")).reshape(n, inner)
    return f.product(y, layer, "ssm_out")


def gated_delta_net(f: Forward, layer: Layer, h: np.ndarray) -> np.ndarray:
    """A gated delta rule layer (Yang et al. 2024, equation 10) as Qwen3-Next has it.

    Per value head the state is [keys, values]: S = a S, then S += k (b (v - S^T k))^T, and the output S^T q.
    """
    m, n, size = f.weights, f.n_tokens, f.weights["ssm.state_size"]
    n_key, n_value = m["ssm.group_count"], m["ssm.time_step_rank"]
    mixed = convolve(f, f.product(h, layer, "attn_qkv"), layer.values("ssm_conv1d"))
    query, key, value = np.split(mixed, [n_key * size, 2 * n_key * size], axis=1)
    query, key = (for_each_query_head(unit(f, heads(x, n_key)), n_value) for x in (query, key))
    query, value = query * size**-0.5, heads(value, n_value)
    # Rows of the projection: for each key head the betas of its value heads, then their alphas.
    beta, alpha = (
        x.reshape(n, n_value) for x in np.split(heads(f.product(h, layer, "ssm_ba"), n_key), 2, axis=-1)
    )
    beta = f.settle(sigmoid(beta))
    fade = f.settle(layer.values("ssm_a") * softplus(alpha + layer.bias("ssm_dt")))
    decay = f.settle(np.exp(fade))
    state, out = np.zeros((n_value, size, size)), np.empty((n, n_value, size))
    for t in range(n):
        state = f.settle(keep_state(state, decay[t], t))
        recalled = f.arithmetic.settle_sum(key[t][:, None], state)[:, 0]
        error = f.settle((value[t] - recalled) * beta[t, :, None])
        state = f.settle(state + key[t][:, :, None] * error[:, None])
        out[t] = f.arithmetic.settle_sum(query[t][:, None], state)[:, 0]
    gate = f.settle(silu(heads(f.product(h, layer, "attn_gate"), n_value)))
    out = f.settle(rms_norm(f, out, layer.values("ssm_norm")) * gate)
    return f.product(out.reshape(n, -1), layer, "ssm_out")
