"""falcon_h1: every layer runs a Mamba-2 mixer and grouped-query attention side by side."""

from __future__ import annotations

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import add_attention, add_attention_metadata, add_feed_forward

CONV_KERNEL, N_GROUP = 4, 1


def build_falcon_h1(size: ModelSize) -> ModelBuilder:
    model = ModelBuilder("falcon-h1", size, seed=4)
    add_attention_metadata(model)
    inner_dim, state_dim, n_ssm_head = size.width, size.head_dim, size.n_head
    model.writer.add_ssm_conv_kernel(CONV_KERNEL)
    model.writer.add_ssm_inner_size(inner_dim)
    model.writer.add_ssm_state_size(state_dim)
    model.writer.add_ssm_time_step_rank(n_ssm_head)
    model.writer.add_ssm_group_count(N_GROUP)
    conv_dim = inner_dim + 2 * N_GROUP * state_dim
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix)
        model.bell(prefix + "ssm_in.weight", inner_dim + conv_dim + n_ssm_head, size.width, gain=2.0)
        model.bell(prefix + "ssm_conv1d.weight", conv_dim, CONV_KERNEL, gain=2.0)
        model.even(prefix + "ssm_conv1d.bias", conv_dim, low=-0.05, high=0.05)
        model.even(prefix + "ssm_dt.bias", n_ssm_head, low=-0.5, high=0.5)
        model.even(
            prefix + "ssm_a", n_ssm_head, 1, low=-1.2, high=-0.1
        )  # decay rates: from short to long memory
        model.ones(prefix + "ssm_d", n_ssm_head, 1)
        model.ones(prefix + "ssm_norm.weight", N_GROUP, inner_dim // N_GROUP)
        model.bell(prefix + "ssm_out.weight", size.width, inner_dim)
        model.ones(prefix + "ffn_norm", size.width)  # this architecture's name for it has no ".weight"
        add_feed_forward(model, prefix)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model
