"""deepseek2: multi-head latent attention, one latent KV head per layer.

Two dense layers lead, then experts ("lite").
"""

from __future__ import annotations

from gguf import ExpertGatingFuncType

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import SHARP, add_experts, add_feed_forward

N_LEADING_DENSE, N_EXPERT, N_EXPERT_USED = 2, 4, 2


def build_deepseek2(size: ModelSize) -> ModelBuilder:
    """The cache holds ``latent_dim + rope_dim`` values per cell and layer.

    No value cache, keys and values are the latent.
    """
    model = ModelBuilder("deepseek2", size, seed=3)
    # The latent is as wide as a quantisation block (256) in the 256-wide variant and half the width in the
    # tiny one.
    latent_dim = 256 if size.width >= 256 else size.width // 2
    rope_dim, plain_dim, value_dim = size.head_dim // 2, size.head_dim, size.head_dim
    expert_dim = size.width if size.width >= 256 else size.width // 2
    _add_metadata(
        model,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        value_dim=value_dim,
        expert_dim=expert_dim,
    )
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        model.bell(prefix + "attn_q.weight", size.n_head * (plain_dim + rope_dim), size.width, gain=SHARP)
        model.bell(prefix + "attn_kv_a_mqa.weight", latent_dim + rope_dim, size.width, gain=SHARP)
        model.ones(prefix + "attn_kv_a_norm.weight", latent_dim)
        model.bell(prefix + "attn_k_b.weight", size.n_head, latent_dim, plain_dim)
        model.bell(prefix + "attn_v_b.weight", size.n_head, value_dim, latent_dim)
        model.bell(prefix + "attn_output.weight", size.width, size.n_head * value_dim)
        model.ones(prefix + "ffn_norm.weight", size.width)
        if layer < N_LEADING_DENSE:
            add_feed_forward(model, prefix)
        else:
            add_experts(model, prefix, n_expert=N_EXPERT, expert_dim=expert_dim)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model


def _add_metadata(
    model: ModelBuilder, *, latent_dim: int, rope_dim: int, plain_dim: int, value_dim: int, expert_dim: int
) -> None:
    writer, size = model.writer, model.size
    writer.add_head_count(size.n_head)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(size.ffn)
    writer.add_leading_dense_block_count(N_LEADING_DENSE)
    writer.add_q_lora_rank(0)  # llama.cpp guesses "lite" from the layer count; this says it
    writer.add_kv_lora_rank(latent_dim)
    writer.add_key_length(latent_dim + rope_dim)
    writer.add_value_length(latent_dim)
    writer.add_key_length_mla(plain_dim + rope_dim)
    writer.add_value_length_mla(value_dim)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_expert_feed_forward_length(expert_dim)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX)
