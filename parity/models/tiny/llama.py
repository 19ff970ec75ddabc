"""llama: dense full attention with grouped queries (two query heads per key head)."""

from __future__ import annotations

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import add_attention, add_attention_metadata, add_feed_forward


def build_llama(size: ModelSize) -> ModelBuilder:
    model = ModelBuilder("llama", size, seed=1)
    add_attention_metadata(model)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix)
        model.ones(prefix + "ffn_norm.weight", size.width)
        add_feed_forward(model, prefix)
    model.embeddings(gain=1.0, output_gain=3.0)
    return model
