"""The grouped-query attention and the gated feed-forward block that four of the five families share."""

from __future__ import annotations

from parity.models.builder import ModelBuilder

SHARP = 3.0  # query and key gain: sharp enough that single tokens matter, soft enough that all of them do


def add_attention_metadata(model: ModelBuilder, *, rope_dims: int | None = None) -> None:
    size = model.size
    model.writer.add_head_count(size.n_head)
    model.writer.add_head_count_kv(size.n_head_kv)
    model.writer.add_key_length(size.head_dim)
    model.writer.add_value_length(size.head_dim)
    model.writer.add_rope_dimension_count(rope_dims or size.head_dim)
    model.writer.add_feed_forward_length(size.ffn)


def add_attention(
    model: ModelBuilder,
    prefix: str,
    *,
    query_gain: float = SHARP,
    key_gain: float = SHARP,
    query_rows: int = 1,
) -> None:
    """Query, key, value and output weights of one layer.

    ``query_rows`` 2 adds an output gate to the query rows.
    """
    size = model.size
    n_query, n_key = size.n_head * size.head_dim, size.n_head_kv * size.head_dim
    model.bell(prefix + "attn_q.weight", query_rows * n_query, size.width, gain=query_gain)
    model.bell(prefix + "attn_k.weight", n_key, size.width, gain=key_gain)
    model.bell(prefix + "attn_v.weight", n_key, size.width)
    model.bell(prefix + "attn_output.weight", size.width, n_query)


def add_feed_forward(model: ModelBuilder, prefix: str) -> None:
    size = model.size
    model.bell(prefix + "ffn_gate.weight", size.ffn, size.width)
    model.bell(prefix + "ffn_up.weight", size.ffn, size.width)
    model.bell(prefix + "ffn_down.weight", size.width, size.ffn)


def add_experts(model: ModelBuilder, prefix: str, *, n_expert: int, expert_dim: int) -> None:
    """A router, ``n_expert`` routed experts and one shared expert, each ``expert_dim`` wide."""
    width = model.size.width
    model.bell(prefix + "ffn_gate_inp.weight", n_expert, width, gain=4.0)
    for name, rows, columns in (
        ("gate", expert_dim, width),
        ("up", expert_dim, width),
        ("down", width, expert_dim),
    ):
        model.bell(f"{prefix}ffn_{name}_exps.weight", n_expert, rows, columns)
        model.bell(f"{prefix}ffn_{name}_shexp.weight", rows, columns)
