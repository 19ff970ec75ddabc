"""gemma2: layers alternate between a sliding window of 16 tokens and full attention.

Soft-capped scores and logits.
"""

from __future__ import annotations

import math

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.attention import add_attention, add_attention_metadata, add_feed_forward

WINDOW_TOKENS = 16


def build_gemma2(size: ModelSize) -> ModelBuilder:
    """Even layers see a window, odd ones everything.

    The output head is the embedding (gemma2 always ties them).
    """
    model = ModelBuilder("gemma2", size, seed=2)
    add_attention_metadata(model)
    model.writer.add_attn_logit_softcapping(50.0)
    model.writer.add_final_logit_softcapping(30.0)
    model.writer.add_sliding_window(WINDOW_TOKENS)
    for layer in range(size.n_layer):
        prefix = f"blk.{layer}."
        model.ones(prefix + "attn_norm.weight", size.width)
        add_attention(model, prefix)
        model.ones(prefix + "post_attention_norm.weight", size.width)
        model.ones(prefix + "ffn_norm.weight", size.width)
        add_feed_forward(model, prefix)
        model.ones(prefix + "post_ffw_norm.weight", size.width)
    # A tied head favours the token just read by (its share of the hidden state) x width x gain: with gain 4 /
    # width that is about the noise of the other logits, so the layers decide. The last norm brings the logits
    # back to a deviation of about 3.
    model.embeddings(gain=4.0 / size.width, output_gain=None, norm_mean=0.75 * math.sqrt(size.width))
    return model
