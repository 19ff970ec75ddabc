"""Small models that switch on what the five tiny ones lack, two a family: rows of the manifests.

Each is as plain as its family's tiny model but for the traits in its docstring. Weights are scaled so that
each trait shows in the logits: ``tests/parity/reference`` turns them off one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gguf import ExpertGatingFuncType, RopeScalingType

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import SHARP, add_attention, add_attention_metadata, add_feed_forward

# An original context of 32 tokens is passed by every longer prompt, so that scaling is at work in small
# tests.
SHORT_CONTEXT = 32
N_EXPERT, N_EXPERT_USED = 16, 4
MILD = 1.5  # router gain: the chosen experts weigh about the same


def llama_scaled(size: ModelSize) -> ModelBuilder:
    """Own ``freq_base``, linear rope scaling, biases, tied embeddings, heads of 24 that are wider in all than
    the model, four query heads to a key head.
    """
    size = replace(size, n_head=4, n_head_kv=1, head_values=24)
    model = ModelBuilder("llama", size, seed=101)
    add_attention_metadata(model)
    model.writer.add_rope_freq_base(500000.0)
    model.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    model.writer.add_rope_scaling_factor(4.0)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix)
        _add_attention_biases(model, prefix)
        _bias(model, prefix + "attn_output.bias", size.width)
        model.ones(prefix + "ffn_norm.weight", size.width)
        add_feed_forward(model, prefix)
        _add_feed_forward_biases(model, prefix)
    _add_tied_embeddings(model)
    return model


def llama_experts(size: ModelSize) -> ModelBuilder:
    """16 experts of which 4 are used, YaRN, ``rope_freqs``, heads of 32."""
    size = replace(size, head_values=32)
    model = ModelBuilder("llama", size, seed=102)
    add_attention_metadata(model)
    _add_yarn(model)
    model.writer.add_expert_count(N_EXPERT)
    model.writer.add_expert_used_count(N_EXPERT_USED)
    model.even("rope_freqs.weight", size.head_dim // 2, low=1.0, high=8.0)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix)
        model.ones(prefix + "ffn_norm.weight", size.width)
        _add_routed_experts(model, prefix, expert_dim=size.ffn)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model


def deepseek2_v3(size: ModelSize) -> ModelBuilder:
    """DeepSeek-V3's: compressed queries, YaRN with ``mscale``, sigmoid gating with a selection bias, groups
    of experts, two shared experts, normalised weights and their scale.
    """
    model = _deepseek2(size, seed=103, log_multiplier=0.1, n_shared=2)
    model.writer.add_expert_group_count(4)
    model.writer.add_expert_group_used_count(2)
    model.writer.add_expert_weights_scale(2.5)
    model.writer.add_expert_weights_norm(True)
    model.writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    for layer in range(1, size.n_layer):
        model.even(f"blk.{layer}.exp_probs_b.bias", N_EXPERT, low=-0.2, high=0.2)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model


def deepseek2_v2(size: ModelSize) -> ModelBuilder:
    """DeepSeek-V2's: compressed queries, YaRN with another ``mscale``, softmax gating whose weights are
    scaled and not normalised, three shared experts; tied embeddings.
    """
    model = _deepseek2(size, seed=104, log_multiplier=0.0707, n_shared=3)
    model.writer.add_expert_weights_scale(4.0)
    model.writer.add_expert_weights_norm(False)
    model.writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX)
    _add_tied_embeddings(model)
    return model


def gemma2_capped(size: ModelSize) -> ModelBuilder:
    """Both soft caps at work, own ``freq_base``, linear rope scaling, a listed pattern of windows, heads of
    32.
    """
    size = replace(size, head_values=32)
    model = ModelBuilder("gemma2", size, seed=105)
    add_attention_metadata(model)
    model.writer.add_attn_logit_softcapping(4.0)
    model.writer.add_final_logit_softcapping(5.0)
    model.writer.add_sliding_window(24)
    model.writer.add_sliding_window_pattern([layer % 3 != 1 for layer in range(size.n_layer)])
    model.writer.add_rope_freq_base(50000.0)
    model.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    model.writer.add_rope_scaling_factor(2.0)
    for layer in range(size.n_layer):
        _add_gemma2_layer(model, f"blk.{layer}.", norm_mean=1.0, sharpness=SHARP)
    model.embeddings(gain=4.0 / size.width, output_gain=None, norm_mean=0.75 * math.sqrt(size.width))
    return model


def gemma2_deep(size: ModelSize) -> ModelBuilder:
    """As many layers as the 27B model, which is how llama.cpp knows that queries are scaled by the width that
    a head would have; heads of 64, wider in all than the model.
    """
    size = replace(size, n_head=2, n_head_kv=1, head_values=64)
    model = ModelBuilder("gemma2", size, seed=106)
    add_attention_metadata(model)
    model.writer.add_attn_logit_softcapping(50.0)
    model.writer.add_final_logit_softcapping(30.0)
    model.writer.add_sliding_window(16)
    for layer in range(size.n_layer):
        # Mild: sharp attention in 46 layers would grow rounding to the size of the logits.
        _add_gemma2_layer(model, f"blk.{layer}.", norm_mean=0.3, sharpness=1.0)
    model.embeddings(gain=4.0 / size.width, output_gain=None, norm_mean=0.75 * math.sqrt(size.width))
    return model


def falcon_h1_groups(size: ModelSize) -> ModelBuilder:
    """Two groups of mamba channels, states that fade slowly, an inner size that is not the width, own
    ``freq_base``, linear rope scaling, tied embeddings, heads of 32.
    """
    model = _falcon_h1(
        replace(size, head_values=32),
        seed=107,
        n_group=2,
        inner_dim=96,
        decay=(-0.05, -0.005),
        has_norm=True,
    )
    model.writer.add_rope_freq_base(1e6)
    model.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    model.writer.add_rope_scaling_factor(2.0)
    _add_tied_embeddings(model)
    return model


def falcon_h1_bare(size: ModelSize) -> ModelBuilder:
    """No mamba norm, states that fade fast, four groups, biases in attention and feed-forward, heads of
    64.
    """
    model = _falcon_h1(
        replace(size, n_head=4, n_head_kv=2, head_values=64),
        seed=108,
        n_group=4,
        inner_dim=64,
        decay=(-4.0, -1.0),
        has_norm=False,
    )
    for layer in range(size.n_layer):
        _add_attention_biases(model, f"blk.{layer}.")
        _add_feed_forward_biases(model, f"blk.{layer}.")
    model.embeddings(gain=1.0, output_gain=3.0)
    return model


def qwen3next_partial(size: ModelSize) -> ModelBuilder:
    """A quarter of each head turns, 16 experts of which 4 are used, states that fade fast, four value heads
    to a key head, attention in every other layer, heads of 32.
    """
    return _qwen3next(
        replace(size, head_values=32),
        seed=109,
        n_key_head=2,
        n_value_head=8,
        decay=(-4.0, -1.0),
        interval=2,
        rope_dims=8,
    )


def qwen3next_slow(size: ModelSize) -> ModelBuilder:
    """States that fade slowly, as many key as value heads, own ``freq_base``, linear rope scaling, heads of
    64 of which half turns; tied embeddings.
    """
    model = _qwen3next(
        replace(size, head_values=64),
        seed=110,
        n_key_head=4,
        n_value_head=4,
        decay=(-0.02, -0.002),
        interval=4,
        rope_dims=32,
        tied=True,
    )
    model.writer.add_rope_freq_base(1e7)
    model.writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    model.writer.add_rope_scaling_factor(2.0)
    return model


VARIANTS: dict[str, dict[str, Callable[[ModelSize], ModelBuilder]]] = {
    "llama": {"scaled": llama_scaled, "experts": llama_experts},
    "deepseek2": {"v3": deepseek2_v3, "v2": deepseek2_v2},
    "gemma2": {"capped": gemma2_capped, "deep": gemma2_deep},
    "falcon_h1": {"groups": falcon_h1_groups, "bare": falcon_h1_bare},
    "qwen3next": {"partial": qwen3next_partial, "slow": qwen3next_slow},
}


# -- what they share


def _bias(model: ModelBuilder, name: str, rows: int) -> None:
    model.even(name, rows, low=-0.3, high=0.3)


def _add_attention_biases(model: ModelBuilder, prefix: str) -> None:
    size = model.size
    for name, count in (("attn_q", size.n_head), ("attn_k", size.n_head_kv), ("attn_v", size.n_head_kv)):
        _bias(model, f"{prefix}{name}.bias", count * size.head_dim)


def _add_feed_forward_biases(model: ModelBuilder, prefix: str) -> None:
    size = model.size
    for name, rows in (("ffn_gate", size.ffn), ("ffn_up", size.ffn), ("ffn_down", size.width)):
        _bias(model, f"{prefix}{name}.bias", rows)


def _add_tied_embeddings(model: ModelBuilder) -> None:
    """Output head and embedding are one; scaled as in the tiny gemma2, so that the layers decide."""
    width = model.size.width
    model.embeddings(gain=4.0 / math.sqrt(width), output_gain=None, norm_mean=0.75)


def _add_yarn(model: ModelBuilder) -> None:
    model.writer.add_rope_scaling_type(RopeScalingType.YARN)
    model.writer.add_rope_scaling_factor(8.0)
    model.writer.add_rope_scaling_orig_ctx_len(SHORT_CONTEXT)


def _add_routed_experts(model: ModelBuilder, prefix: str, *, expert_dim: int) -> None:
    width = model.size.width
    model.bell(prefix + "ffn_gate_inp.weight", N_EXPERT, width, gain=MILD)
    model.bell(prefix + "ffn_gate_exps.weight", N_EXPERT, expert_dim, width, gain=2.0)
    model.bell(prefix + "ffn_up_exps.weight", N_EXPERT, expert_dim, width, gain=2.0)
    model.bell(prefix + "ffn_down_exps.weight", N_EXPERT, width, expert_dim)


def _add_shared_expert(model: ModelBuilder, prefix: str, *, expert_dim: int) -> None:
    width = model.size.width
    model.bell(prefix + "ffn_gate_shexp.weight", expert_dim, width)
    model.bell(prefix + "ffn_up_shexp.weight", expert_dim, width)
    model.bell(prefix + "ffn_down_shexp.weight", width, expert_dim)


def _deepseek2(size: ModelSize, *, seed: int, log_multiplier: float, n_shared: int) -> ModelBuilder:
    """All but the embeddings and what says how experts are chosen; the first layer is dense."""
    model = ModelBuilder("deepseek2", size, seed=seed)
    latent_dim, query_dim, expert_dim = 32, 24, 16
    rope_dim, plain_dim, value_dim = 8, 16, 24
    writer = model.writer
    writer.add_head_count(size.n_head)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(size.ffn)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(query_dim)
    writer.add_kv_lora_rank(latent_dim)
    writer.add_key_length(latent_dim + rope_dim)
    writer.add_value_length(latent_dim)
    writer.add_key_length_mla(plain_dim + rope_dim)
    writer.add_value_length_mla(value_dim)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_expert_feed_forward_length(expert_dim)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_shared_count(n_shared)
    _add_yarn(model)
    writer.add_rope_scaling_yarn_log_mul(log_multiplier)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        model.bell(prefix + "attn_q_a.weight", query_dim, size.width)
        model.ones(prefix + "attn_q_a_norm.weight", query_dim)
        model.bell(prefix + "attn_q_b.weight", size.n_head * (plain_dim + rope_dim), query_dim, gain=2.0)
        model.bell(prefix + "attn_kv_a_mqa.weight", latent_dim + rope_dim, size.width, gain=2.0)
        model.ones(prefix + "attn_kv_a_norm.weight", latent_dim)
        model.bell(prefix + "attn_k_b.weight", size.n_head, latent_dim, plain_dim)
        model.bell(prefix + "attn_v_b.weight", size.n_head, value_dim, latent_dim)
        model.bell(prefix + "attn_output.weight", size.width, size.n_head * value_dim)
        model.ones(prefix + "ffn_norm.weight", size.width)
        if layer == 0:
            add_feed_forward(model, prefix)
        else:
            _add_routed_experts(model, prefix, expert_dim=expert_dim)
            _add_shared_expert(model, prefix, expert_dim=n_shared * expert_dim)
    return model


def _add_gemma2_layer(model: ModelBuilder, prefix: str, *, norm_mean: float, sharpness: float) -> None:
    size = model.size
    model.ones(prefix + "attn_norm.weight", size.width)
    add_attention(model, prefix, query_gain=sharpness, key_gain=sharpness)
    model.ones(prefix + "post_attention_norm.weight", size.width, mean=norm_mean)
    model.ones(prefix + "ffn_norm.weight", size.width)
    add_feed_forward(model, prefix)
    model.ones(prefix + "post_ffw_norm.weight", size.width, mean=norm_mean)


def _falcon_h1(
    size: ModelSize, *, seed: int, n_group: int, inner_dim: int, decay: tuple[float, float], has_norm: bool
) -> ModelBuilder:
    """All but the embeddings."""
    model = ModelBuilder("falcon-h1", size, seed=seed)
    add_attention_metadata(model)
    taps, state_dim, n_ssm_head = 4, 16, 8
    model.writer.add_ssm_conv_kernel(taps)
    model.writer.add_ssm_inner_size(inner_dim)
    model.writer.add_ssm_state_size(state_dim)
    model.writer.add_ssm_time_step_rank(n_ssm_head)
    model.writer.add_ssm_group_count(n_group)
    conv_dim = inner_dim + 2 * n_group * state_dim
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix, query_gain=2.0, key_gain=2.0)
        model.bell(prefix + "ssm_in.weight", inner_dim + conv_dim + n_ssm_head, size.width, gain=2.0)
        model.bell(prefix + "ssm_conv1d.weight", conv_dim, taps, gain=2.0)
        model.even(prefix + "ssm_conv1d.bias", conv_dim, low=-0.3, high=0.3)
        model.even(prefix + "ssm_dt.bias", n_ssm_head, low=-0.5, high=0.5)
        model.even(prefix + "ssm_a", n_ssm_head, 1, low=decay[0], high=decay[1])
        model.ones(prefix + "ssm_d", n_ssm_head, 1)
        if has_norm:
            model.ones(prefix + "ssm_norm.weight", n_group, inner_dim // n_group)
        model.bell(prefix + "ssm_out.weight", size.width, inner_dim, gain=1.0 if has_norm else 0.5)
        model.ones(prefix + "ffn_norm", size.width)
        add_feed_forward(model, prefix)
    return model


def _qwen3next(
    size: ModelSize,
    *,
    seed: int,
    n_key_head: int,
    n_value_head: int,
    decay: tuple[float, float],
    interval: int,
    rope_dims: int,
    tied: bool = False,
) -> ModelBuilder:
    model = ModelBuilder("qwen3next", size, seed=seed)
    add_attention_metadata(model, rope_dims=rope_dims)
    taps, state_dim, expert_dim, writer = 4, 16, 16, model.writer
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(expert_dim)
    writer.add_expert_shared_feed_forward_length(2 * expert_dim)
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(n_value_head * state_dim)
    writer.add_ssm_state_size(state_dim)
    writer.add_ssm_time_step_rank(n_value_head)
    writer.add_ssm_group_count(n_key_head)
    writer.add_full_attention_interval(interval)
    key_dim, value_dim = n_key_head * state_dim, n_value_head * state_dim
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        model.ones(prefix + "post_attention_norm.weight", size.width)
        if (layer + 1) % interval == 0:
            add_attention(model, prefix, query_gain=1.0, key_gain=1.0, query_rows=2)
            model.ones(prefix + "attn_q_norm.weight", size.head_dim, mean=1.3)
            model.ones(prefix + "attn_k_norm.weight", size.head_dim, mean=1.3)
        else:
            model.bell(prefix + "attn_qkv.weight", 2 * key_dim + value_dim, size.width, gain=2.0)
            model.bell(prefix + "attn_gate.weight", value_dim, size.width)
            model.bell(prefix + "ssm_conv1d.weight", 2 * key_dim + value_dim, taps, gain=2.0)
            model.even(prefix + "ssm_dt.bias", n_value_head, low=-0.5, high=0.5)
            model.even(prefix + "ssm_a", n_value_head, low=decay[0], high=decay[1])
            model.bell(prefix + "ssm_ba.weight", 2 * n_value_head, size.width, gain=2.0)
            model.ones(prefix + "ssm_norm.weight", state_dim)
            model.bell(prefix + "ssm_out.weight", size.width, value_dim)
        _add_routed_experts(model, prefix, expert_dim=expert_dim)
        _add_shared_expert(model, prefix, expert_dim=2 * expert_dim)
        model.bell(prefix + "ffn_gate_inp_shexp.weight", size.width)
    if tied:
        _add_tied_embeddings(model)
    else:
        model.embeddings(gain=1.0, output_gain=3.0)
    return model
