"""qwen3next: gated DeltaNet layers with full attention every fourth layer.

Every layer's feed-forward has experts.
"""

from __future__ import annotations

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import add_attention, add_attention_metadata, add_experts

FULL_ATTENTION_INTERVAL = 4
CONV_KERNEL, N_KEY_HEAD, N_EXPERT, N_EXPERT_USED = 4, 2, 4, 2


def build_qwen3next(size: ModelSize) -> ModelBuilder:
    """Layers 3, 7, 11, ... attend to everything; the others keep one matrix of state per value head."""
    model = ModelBuilder("qwen3next", size, seed=5)
    add_attention_metadata(model)
    expert_dim = size.width if size.width >= 256 else size.width // 4
    state_dim, n_value_head = size.head_dim, size.n_head
    writer = model.writer
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(expert_dim)
    writer.add_expert_shared_feed_forward_length(expert_dim)
    writer.add_ssm_conv_kernel(CONV_KERNEL)
    writer.add_ssm_inner_size(n_value_head * state_dim)
    writer.add_ssm_state_size(state_dim)
    writer.add_ssm_time_step_rank(n_value_head)
    writer.add_ssm_group_count(N_KEY_HEAD)
    writer.add_full_attention_interval(FULL_ATTENTION_INTERVAL)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        model.ones(prefix + "post_attention_norm.weight", size.width)
        if (layer + 1) % FULL_ATTENTION_INTERVAL == 0:
            # Query and key are normalised per head here, so their sharpness is in the norm's weight.
            add_attention(model, prefix, query_gain=1.0, key_gain=1.0, query_rows=2)
            model.ones(prefix + "attn_q_norm.weight", size.head_dim, mean=1.6)
            model.ones(prefix + "attn_k_norm.weight", size.head_dim, mean=1.6)
        else:
            _add_delta_net(model, prefix, key_dim=state_dim * N_KEY_HEAD, value_dim=state_dim * n_value_head)
        add_experts(model, prefix, n_expert=N_EXPERT, expert_dim=expert_dim)
        model.bell(prefix + "ffn_gate_inp_shexp.weight", size.width)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model


def _add_delta_net(model: ModelBuilder, prefix: str, *, key_dim: int, value_dim: int) -> None:
    width, n_value_head = model.size.width, model.size.n_head
    conv_dim = 2 * key_dim + value_dim
    model.bell(prefix + "attn_qkv.weight", conv_dim, width, gain=2.0)
    model.bell(prefix + "attn_gate.weight", value_dim, width)
    model.bell(prefix + "ssm_conv1d.weight", conv_dim, CONV_KERNEL, gain=2.0)
    model.even(prefix + "ssm_dt.bias", n_value_head, low=-0.5, high=0.5)
    model.even(prefix + "ssm_a", n_value_head, low=-0.5, high=-0.05)  # decay rates: from short to long memory
    model.bell(prefix + "ssm_ba.weight", 2 * n_value_head, width, gain=2.0)
    model.ones(prefix + "ssm_norm.weight", model.size.head_dim)
    model.bell(prefix + "ssm_out.weight", width, value_dim)
