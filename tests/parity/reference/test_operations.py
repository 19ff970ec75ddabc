"""The reference's parts against numbers worked out by hand, and against other code for the same thing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from parity.errors import UsageError
from parity.models import resolve_model
from parity.reference import EXACT, Arithmetic, Kernel, Weights, load_weights, run_reference
from parity.reference.arithmetic import ULP, as_half
from parity.reference.forward import latent_attention, latent_scale
from parity.reference.operations import (
    Forward,
    attend,
    choose_experts,
    convolve,
    experts,
    gated_delta_net,
    mamba2,
    rms_norm,
    rotary_angles,
    rotate,
    softmax,
)
from parity.reference.weights import Layer, Tensor

RNG = np.random.default_rng(7)


def weights_of(architecture: str = "llama", tensors: dict | None = None, **metadata: Any) -> Weights:
    values = {"attention.layer_norm_rms_epsilon": 0.0, "context_length": 4096}
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    return Weights(
        architecture=architecture,
        metadata=values,
        tensors={name: Tensor(np.asarray(value, float)) for name, value in (tensors or {}).items()},
    )


def forward_of(n_tokens: int, arithmetic: Arithmetic = EXACT, **metadata: Any) -> Forward:
    return Forward(weights=weights_of(**metadata), arithmetic=arithmetic, n_tokens=n_tokens)


def layer_of(**tensors: Any) -> Layer:
    return Layer({name.replace("__", "."): Tensor(np.asarray(v, float)) for name, v in tensors.items()})


def test_rms_norm_by_hand() -> None:
    f = forward_of(1, attention__layer_norm_rms_epsilon=2.5)
    # mean square of 3, 4 is 12.5; with 2.5 the root is of 15
    expected = np.array([[3 * 2, 4 * 1]]) / math.sqrt(15)
    assert np.abs(rms_norm(f, np.array([[3.0, 4.0]]), np.array([2.0, 1.0])) - expected).max() < 1e-15


def test_rotation_turns_neighbours_or_halves() -> None:
    # Two pairs: the first turns by 1 a position, the second by 10000^(-1/2) = 0.01.
    f = forward_of(3, rope__dimension_count=4)
    x = np.zeros((3, 1, 5))
    x[:, 0, 0] = 1  # the first value of the first pair, whatever the kind; the fifth value never turns
    x[:, 0, 4] = 7
    for neighbours, partner in ((True, 1), (False, 2)):
        turned = rotate(f, x, neighbours=neighbours)[:, 0]
        assert np.abs(turned[:, 0] - np.cos([0, 1, 2])).max() < 1e-15
        assert np.abs(turned[:, partner] - np.sin([0, 1, 2])).max() < 1e-15
        assert (turned[:, 4] == 7).all()
    x = np.zeros((3, 1, 4))
    x[:, 0, 3] = 1  # the second value of the slow pair
    assert np.abs(rotate(f, x, neighbours=True)[:, 0, 2] + np.sin([0, 0.01, 0.02])).max() < 1e-15


def test_linear_scaling_and_frequency_factors_slow_the_turns() -> None:
    plain = weights_of(rope__dimension_count=4, rope__freq_base=100.0)
    assert rotary_angles(plain, 3, 100.0)[2].tolist() == pytest.approx([2.0, 0.2], rel=1e-15)
    scaled = weights_of(rope__dimension_count=4, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert rotary_angles(scaled, 3, 100.0)[2].tolist() == pytest.approx([0.5, 0.05], rel=1e-15)
    factors = weights_of(rope__dimension_count=4, tensors={"rope_freqs": [1.0, 8.0]})
    assert rotary_angles(factors, 3, 100.0)[2].tolist() == pytest.approx([2.0, 0.025], rel=1e-15)


def test_yarn_by_hand() -> None:
    """Base 10000, 8 values, 64 tokens of context: pairs turn 64/(2 pi), and 10 times less each."""
    weights = weights_of(
        rope__dimension_count=8,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
    )
    # Nobody turns 32 times, so the ramp begins at pair 0; that which turns once is 4 log10(64/2pi)/4 = 1.008,
    # so it ends at pair 2. Pair 0 is left alone, pair 1 is half scaled, pairs 2 and 3 are scaled by 4.
    expected = [1.0, 0.1 * (0.5 / 4 + 0.5), 0.01 / 4, 0.001 / 4]
    assert rotary_angles(weights, 2, 10000.0)[1].tolist() == pytest.approx(expected, rel=1e-14)


def test_yarn_temperature_is_on_the_scores_of_deepseek2() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 40.0}
    weights = weights_of("deepseek2", rope__scaling__yarn_log_multiplier=0.0707, **yarn)
    # DeepSeek-V2-Lite: mscale_all_dim 0.707, factor 40
    assert latent_scale(weights, 192) == pytest.approx(
        192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-15
    )
    assert latent_scale(weights_of("deepseek2"), 192) == 192**-0.5


def test_attention_sees_a_window_and_shares_heads() -> None:
    f = forward_of(4)
    query, key = np.zeros((4, 4, 2)), np.zeros((4, 2, 2))  # equal scores: the mean of what is seen
    value = np.arange(4.0)[:, None, None] + np.array([0.0, 100.0])[None, :, None]
    out = attend(f, query, key, value, scale=1.0, window=3)[..., 0]
    assert np.abs(out[:, 0] - [0, 0.5, 1, 2]).max() < 1e-14
    assert np.abs(out[:, 1] - out[:, 0]).max() == 0  # neighbours share a key head
    assert np.abs(out[:, 2:] - out[:, :2] - 100).max() < 1e-12


def test_row_kernel_is_attention_but_for_float16_sums() -> None:
    query, key, value = (as_half(RNG.normal(size=(40, heads, 16))) for heads in (4, 2, 2))
    settings = {"scale": 0.25, "window": 30, "cap": 20.0}
    exact = attend(forward_of(40), query, key, value, **settings)
    row = attend(forward_of(40, Arithmetic(Kernel.ROW)), query, key, value, **settings)
    away = np.abs(row - exact)
    assert 0 < away.max() < 40 * 2.0**-11 * np.abs(value).max()
    assert away[0].max() == 0  # one cell: its value itself


def test_latent_attention_with_matrices_absorbed_is_the_one_with_full_keys_and_values() -> None:
    weights = load_weights(resolve_model("deepseek2:v3").path)
    layer, n, n_head = weights.layer(1), 30, weights["attention.head_count"]
    f = Forward(weights=weights, arithmetic=EXACT, n_tokens=n)
    h = RNG.normal(size=(n, weights["embedding_length"]))

    def v(name: str) -> np.ndarray:
        return layer.values(name)

    # DeepSeek-V2, equations 37 to 47: keys and values of every head from the latent.
    query = (rms_norm(f, h @ v("attn_q_a").T, v("attn_q_a_norm")) @ v("attn_q_b").T).reshape(n, n_head, -1)
    n_rot, n_latent = weights["rope.dimension_count"], weights["attention.kv_lora_rank"]
    turned = rotate(f, query[..., -n_rot:], neighbours=True)
    query = np.concatenate([query[..., :-n_rot], turned], axis=-1)
    down = h @ v("attn_kv_a_mqa").T
    latent = rms_norm(f, down[:, :n_latent], v("attn_kv_a_norm"))
    key = np.einsum("nc,hcp->nhp", latent, v("attn_k_b"))
    shared = np.repeat(rotate(f, down[:, None, n_latent:], neighbours=True), n_head, axis=1)
    key = np.concatenate([key, shared], axis=-1)
    value = np.einsum("nc,hvc->nhv", latent, v("attn_v_b"))
    full = attend(f, query, key, value, scale=latent_scale(weights, query.shape[-1]))
    assert np.abs(full.reshape(n, -1) @ v("attn_output").T - latent_attention(f, layer, h)).max() < 1e-12


def test_experts_are_chosen_by_hand() -> None:
    scores = np.array([[0.5, 0.1, 0.4, 0.39, 0.0, 0.45]])
    assert choose_experts(weights_of(expert_used_count=2), scores).tolist() == [[0, 5]]
    # Groups (0.5, 0.1), (0.4, 0.39), (0, 0.45): by their two best together the second is best, then the
    # first.
    grouped = weights_of(expert_used_count=2, expert_group_count=3, expert_group_used_count=1)
    assert choose_experts(grouped, scores).tolist() == [[2, 3]]
    grouped = weights_of(expert_used_count=2, expert_group_count=3, expert_group_used_count=2)
    assert choose_experts(grouped, scores).tolist() == [[0, 2]]


def test_experts_by_a_loop_over_tokens() -> None:
    router, gate, up = (RNG.normal(size=s) for s in ((4, 6), (4, 5, 6), (4, 5, 6)))
    down, bias, h = RNG.normal(size=(4, 6, 5)), np.array([0.0, 3.0, 0.0, 0.0]), RNG.normal(size=(9, 6))
    layer = layer_of(
        ffn_gate_inp=router, ffn_gate_exps=gate, ffn_up_exps=up, ffn_down_exps=down, exp_probs_b__bias=bias
    )
    f = forward_of(9, expert_used_count=2)
    found = experts(f, layer, 0, h, normalise=True, scale=2.5)
    for x, out in zip(h, found, strict=True):
        chances = softmax(router @ x)
        chosen = np.argsort(-(chances + bias))[:2]
        assert 1 in chosen  # the bias decides ...
        expected = np.zeros(6)
        for i in chosen:  # ... and does not weigh
            hidden = gate[i] @ x
            hidden = hidden / (1 + np.exp(-hidden)) * (up[i] @ x)
            expected += 2.5 * chances[i] / chances[chosen].sum() * (down[i] @ hidden)
        assert np.abs(out - expected).max() < 1e-12


def test_convolution_is_causal() -> None:
    x = np.array([[1.0], [10.0], [100.0]])
    out = convolve(forward_of(3), x, np.array([[3.0, 2.0, 1.0]]), bias=-5.0)[:, 0]
    plain = np.array([1.0, 10 + 2, 100 + 20 + 3]) - 5
    assert np.abs(out - plain / (1 + np.exp(-plain))).max() < 1e-13


def test_mamba2_is_the_sum_over_the_past_that_its_recurrence_unrolls_to() -> None:
    n, inner, size, n_head, n_group = 7, 8, 3, 4, 2
    numbers = {"inner_size": inner, "state_size": size, "time_step_rank": n_head, "group_count": n_group}
    f = forward_of(n, **{f"ssm__{key}": value for key, value in numbers.items()})
    mixed = inner + 2 * n_group * size
    h = RNG.normal(size=(n, 5))
    t = {
        "ssm_in": RNG.normal(size=(inner + mixed + n_head, 5)),
        "ssm_conv1d": RNG.normal(size=(mixed, 4)),
        "ssm_dt__bias": RNG.normal(size=n_head),
        "ssm_a": -RNG.random(size=(n_head, 1)),
        "ssm_d": RNG.normal(size=(n_head, 1)),
        "ssm_out": np.eye(inner),
    }
    gate, xbc, dt = np.split(h @ t["ssm_in"].T, [inner, inner + mixed], axis=1)
    xbc = convolve(f, xbc, t["ssm_conv1d"])
    dt = np.log1p(np.exp(dt + t["ssm_dt__bias"]))
    expected = np.zeros((n, inner))
    for head in range(n_head):
        own = slice(head * inner // n_head, (head + 1) * inner // n_head)
        group = head // (n_head // n_group)
        x = xbc[:, own]
        b, c = (xbc[:, start + group * size :][:, :size] for start in (inner, inner + n_group * size))
        for to in range(n):
            for at in range(to + 1):
                faded = np.exp(t["ssm_a"][head, 0] * dt[at + 1 : to + 1, head].sum())
                expected[to, own] += faded * dt[at, head] * x[at] * (c[to] @ b[at])
            expected[to, own] += t["ssm_d"][head, 0] * x[to]
    expected *= gate / (1 + np.exp(-gate))
    assert np.abs(mamba2(f, layer_of(**t), h) - expected).max() < 1e-12


def test_delta_rule_moves_what_is_stored_under_a_key_to_the_new_value() -> None:
    """Nothing fades and beta is a half: each unit key's value is moved half the way to the new one."""
    n, size = 5, 2
    f = forward_of(n, ssm__state_size=size, ssm__group_count=1, ssm__time_step_rank=1)
    keys = np.array([[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]], float)
    values, queries = RNG.normal(size=(n, size)), np.roll(keys, 1, axis=0)
    layer = layer_of(
        attn_qkv=np.eye(6),
        ssm_conv1d=np.ones((6, 1)),
        ssm_ba=np.zeros((2, 6)),  # beta is sigmoid(0), and alpha 0
        ssm_a=np.zeros(1),  # no fading
        ssm_dt__bias=np.zeros(1),
        attn_gate=np.zeros((size, 6)),
        ssm_norm=np.ones(size),
        ssm_out=np.eye(size),
    )
    outputs = _before_the_norm(f, layer, np.concatenate([queries, keys, values], axis=1))
    stored = np.zeros((size, size))
    for t, value in enumerate(values / (1 + np.exp(-values))):  # silu, behind the convolution
        slot, asked = int(keys[t].argmax()), int(queries[t].argmax())
        stored[slot] += (value - stored[slot]) / 2
        assert np.abs(outputs[t] - stored[asked] / math.sqrt(size)).max() < 1e-12


def _before_the_norm(f: Forward, layer: Layer, h: np.ndarray) -> np.ndarray:
    """What a delta rule layer reads from its states: [tokens, values] of its one head."""
    seen: list[np.ndarray] = []

    def spy(forward: Forward, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        seen.append(x[:, 0].copy())
        return np.ones_like(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parity.reference.operations.rms_norm", spy)
        gated_delta_net(f, layer, h)
    return seen[0]


# -- what rounds


def test_activations_are_quantised_as_the_gguf_package_does_it() -> None:
    rows = RNG.normal(size=(5, 96)).astype(np.float32)
    theirs = dequantize(quantize(rows, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    ours = Arithmetic(Kernel.PLAIN).activations(rows.astype(np.float64), "Q4_0")
    assert np.abs(ours - theirs).max() <= 2.0**-11 * np.abs(rows).max()  # scales may differ by a rounding
    assert (ours == theirs).mean() > 0.9


def test_block_of_nothing_stays_nothing_and_float_weights_round_nothing() -> None:
    arithmetic = Arithmetic(Kernel.PLAIN)
    assert not arithmetic.activations(np.zeros((1, 256)), "Q4_K").any()
    x = RNG.normal(size=(2, 256))
    assert arithmetic.activations(x, "F32") is x
    with pytest.raises(UsageError, match="weights of type IQ2_XS have no reference"):
        arithmetic.activations(x, "IQ2_XS")


def test_gelu_is_a_half_table_between_minus_ten_and_ten() -> None:
    x = np.array([-11.0, -10.0, 0.3, 10.0, 70000.3])
    exact, table = (Arithmetic(kernel).gelu(x) for kernel in (Kernel.EXACT, Kernel.PLAIN))
    assert table[[0, 1, 3, 4]].tolist() == [0, 0, 10.0, 70000.3]
    assert table[2] == float(np.float16(table[2])) and 0 < abs(table[2] - exact[2]) < 1e-3
    assert exact[2] == pytest.approx(
        0.3 * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (0.3 + 0.044715 * 0.027)))
    )


def test_shaken_value_moves_by_one_ulp_and_the_same_way_every_time() -> None:
    x = RNG.normal(size=1000)
    moved = Arithmetic(Kernel.PLAIN, shake=3).settle(x) / x - 1
    assert np.abs(np.abs(moved) - ULP).max() < 1e-15
    assert 400 < (moved > 0).sum() < 600
    assert (Arithmetic(Kernel.PLAIN, shake=3).settle(x) / x - 1 == moved).all()
    assert Arithmetic(Kernel.PLAIN).settle(x) is x


def test_flip_takes_the_value_nearest_to_the_middle_to_its_other_side() -> None:
    step = 2.0**-10  # of float16 from 1 to 2
    x = np.array([[1 + 0.4 * step, 1 + 0.1 * step], [1 - 0.1 * step / 2, 1 + 0.6 * step]])
    assert Arithmetic(Kernel.ROW).half(x).tolist() == [[1, 1], [1, 1 + step]]
    flipped = Arithmetic(Kernel.ROW, flips=True).half(x)
    assert flipped.tolist() == [[1 + step, 1], [1, 1]]


# -- whole models


def test_prefix_of_a_sequence_has_the_logits_of_the_prefix() -> None:
    for family in ("llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next"):
        weights = load_weights(resolve_model(family).path)
        tokens = RNG.integers(0, 256, 40)
        long, short = (run_reference(weights, tokens[:n]).logits for n in (40, 25))
        assert long.shape == (40, 264)
        assert np.abs(long[:25] - short).max() < 1e-11, family


def test_gemma2_caps_logits_at_30_unless_it_says_otherwise() -> None:
    weights = load_weights(resolve_model("gemma2").path)
    assert weights["final_logit_softcapping"] == 30.0
    silent = {key: value for key, value in weights.metadata.items() if "final" not in key}
    tokens = [5, 6, 7]
    said, unsaid = (
        run_reference(replace(weights, metadata=data), tokens).logits for data in (weights.metadata, silent)
    )
    assert (said == unsaid).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.scaling.type", "longrope"), ("attention.temperature_scale", 0.1), ("rope.freq_base_swa", 1e4)],
)
def test_metadata_that_the_reference_does_not_follow_is_refused(key: str, value: object) -> None:
    weights = load_weights(resolve_model("llama").path)
    with pytest.raises(UsageError, match="has no reference"):
        run_reference(replace(weights, metadata={**weights.metadata, key: value}), [1])


def test_unknown_architecture_and_missing_data_cost_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'mamba' has no reference: known are llama"):
        run_reference(weights_of("mamba", block_count=1), [1])
    with pytest.raises(UsageError, match="no llama.block_count"):
        run_reference(weights_of(tensors={"token_embd": np.ones((2, 2))}), [1])
    (tmp_path / "x.gguf").write_bytes(b"no model")
    with pytest.raises(UsageError, match="cannot be read in .*x.gguf"):
        load_weights(tmp_path / "x.gguf")
