"""The reference beside Hugging Face transformers, both in float64: so that it is not its own judge.

Run by ``pytest -m transformers``, which the nightly workflow does, and fails where ``torch`` (its CPU wheel
is enough) and ``transformers`` are not installed. Neither is in the lock: for Linux it would lock gigabytes
of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.models import resolve_model
from parity.reference import Weights, load_weights, run_reference
from parity.suites.truth import reference_prompt

try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None

pytestmark = pytest.mark.transformers
PROMPT = reference_prompt(90, 256)
AGREEMENT = 1e-10  # of the deviation of logits: both are float64
# transformers has this number written into some norms of deepseek2 and qwen3next, where llama.cpp, and the
# reference with it, takes the model's own epsilon. The published models have this one throughout.
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wherever transformers asks for float32, it gets float64."""
    if torch is None:
        pytest.fail("torch and transformers are not installed: nothing was compared")
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self.double())
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(old)


def halves(values: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of a projection whose pairs are neighbours, as one whose pairs are in the halves of a head."""
    shape = values.shape
    return values.reshape(n_head, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


class Fill:
    """Collects a state dict from the tensors of a model, layer by layer."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.state: dict[str, np.ndarray] = {}

    def get(self, name: str) -> np.ndarray | None:
        tensor = self.weights.tensors.get(name)
        return None if tensor is None else tensor.values

    def put(self, theirs: str, ours: str, make: Callable[[np.ndarray], np.ndarray] = lambda v: v) -> None:
        """Weight, and bias where there is one; nothing if the model has no such tensor."""
        for suffix, name in (("weight", ours), ("bias", f"{ours}.bias")):
            values = self.get(name)
            if values is not None:
                self.state[f"{theirs}.{suffix}"] = make(values)

    def whole(self, norm: str = "model.norm", make: Callable[[np.ndarray], np.ndarray] = lambda v: v) -> None:
        self.put("model.embed_tokens", "token_embd")
        self.put(norm, "output_norm", make)
        self.put("lm_head", "output" if "output" in self.weights.tensors else "token_embd")

    def experts(self, theirs: str, ours: str) -> None:
        gate, up, down = (self.get(f"{ours}ffn_{part}_exps") for part in ("gate", "up", "down"))
        self.state[f"{theirs}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        self.state[f"{theirs}experts.down_proj"] = down

    def feed_forward(self, theirs: str, ours: str, suffix: str = "") -> None:
        for part in ("gate", "up", "down"):
            self.put(f"{theirs}{part}_proj", f"{ours}ffn_{part}{suffix}")

    def logits(self, model: Any) -> np.ndarray:
        """Float64 [tokens, n_vocab] of ``model`` with exactly this state."""
        state = {name: torch.tensor(np.ascontiguousarray(values)) for name, values in self.state.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and all(name.endswith("o_proj.bias") for name in missing), (missing, unexpected)
        for name in missing:
            torch.nn.init.zeros_(model.get_parameter(name))
        with torch.no_grad():
            out = model.double().eval()(torch.tensor([PROMPT])).logits[0]
        assert out.dtype is torch.float64
        return out.numpy()


def shape_of(w: Weights, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 264,
        "hidden_size": w["embedding_length"],
        "num_hidden_layers": w["block_count"],
        "num_attention_heads": w["attention.head_count"],
        "num_key_value_heads": w["attention.head_count_kv"],
        "intermediate_size": w.get("feed_forward_length", 0),
        "rms_norm_eps": w["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": w["context_length"],
        "tie_word_embeddings": "output" not in w.tensors,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "rope_parameters": rope_of(w),
        **more,
    }


def rope_of(w: Weights) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": w.get("rope.freq_base", 10000.0)}
    kind = w.get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": w["rope.scaling.factor"]}
    if kind == "yarn":
        multiplier = w["rope.scaling.yarn_log_multiplier"] * 10
        rope |= {
            "original_max_position_embeddings": w["rope.scaling.original_context_length"],
            "mscale": multiplier,
            "mscale_all_dim": multiplier,
        }
    return rope


def attention(fill: Fill, theirs: str, ours: str, *, turn: bool = False) -> None:
    m = fill.weights
    for name, count in (("q", m["attention.head_count"]), ("k", m["attention.head_count_kv"])):
        fill.put(f"{theirs}{name}_proj", f"{ours}attn_{name}", lambda v, n=count: halves(v, n) if turn else v)
    fill.put(f"{theirs}v_proj", f"{ours}attn_v")
    fill.put(f"{theirs}o_proj", f"{ours}attn_output")


def llama(w: Weights) -> np.ndarray:
    fill = Fill(w)
    fill.whole()
    for i in range(w["block_count"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        attention(fill, theirs + "self_attn.", ours, turn=True)
        fill.feed_forward(theirs + "mlp.", ours)
        fill.put(theirs + "input_layernorm", ours + "attn_norm")
        fill.put(theirs + "post_attention_layernorm", ours + "ffn_norm")
    biased = "blk.0.attn_q.bias" in w.tensors
    config = transformers.LlamaConfig(
        **shape_of(w, head_dim=w["attention.key_length"], attention_bias=biased, mlp_bias=biased)
    )
    return fill.logits(transformers.LlamaForCausalLM(config))


def deepseek2(w: Weights) -> np.ndarray:
    fill, is_v3 = Fill(w), w["expert_gating_func"] == 2
    fill.whole()
    for i in range(w["block_count"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        for a, b in (
            ("q_proj", "attn_q"),
            ("q_a_proj", "attn_q_a"),
            ("q_a_layernorm", "attn_q_a_norm"),
            ("q_b_proj", "attn_q_b"),
            ("kv_a_proj_with_mqa", "attn_kv_a_mqa"),
            ("kv_a_layernorm", "attn_kv_a_norm"),
            ("o_proj", "attn_output"),
        ):
            fill.put(f"{theirs}self_attn.{a}", ours + b)
        key, value = fill.get(ours + "attn_k_b").swapaxes(1, 2), fill.get(ours + "attn_v_b")
        fill.state[theirs + "self_attn.kv_b_proj.weight"] = np.concatenate([key, value], axis=1).reshape(
            -1, key.shape[-1]
        )
        fill.put(theirs + "input_layernorm", ours + "attn_norm")
        fill.put(theirs + "post_attention_layernorm", ours + "ffn_norm")
        if i < w["leading_dense_block_count"]:
            fill.feed_forward(theirs + "mlp.", ours)
            continue
        fill.experts(theirs + "mlp.", ours)
        fill.put(theirs + "mlp.gate", ours + "ffn_gate_inp")
        if is_v3:
            fill.state[theirs + "mlp.gate.e_score_correction_bias"] = fill.get(ours + "exp_probs_b.bias")
        fill.feed_forward(theirs + "mlp.shared_experts.", ours, "_shexp")
    n_rot, n_head = w["rope.dimension_count"], w["attention.head_count"]
    settings = shape_of(
        w,
        num_key_value_heads=n_head,
        moe_intermediate_size=w["expert_feed_forward_length"],
        n_routed_experts=w["expert_count"],
        n_shared_experts=w["expert_shared_count"],
        num_experts_per_tok=w["expert_used_count"],
        first_k_dense_replace=w["leading_dense_block_count"],
        kv_lora_rank=w["attention.kv_lora_rank"],
        q_lora_rank=w["attention.q_lora_rank"] or None,
        qk_rope_head_dim=n_rot,
        qk_nope_head_dim=w["attention.key_length_mla"] - n_rot,
        v_head_dim=w["attention.value_length_mla"],
        norm_topk_prob=w["expert_weights_norm"],
        routed_scaling_factor=w["expert_weights_scale"],
        n_group=w.get("expert_group_count", 1),
        topk_group=w.get("expert_group_used_count", 1),
    )
    if is_v3:
        return fill.logits(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings)))
    config = transformers.DeepseekV2Config(**settings, topk_method="greedy")
    return fill.logits(transformers.DeepseekV2ForCausalLM(config))


def gemma2(w: Weights) -> np.ndarray:
    fill = Fill(w)
    minus_one = lambda v: v - 1  # noqa: E731
    fill.whole(make=minus_one)
    for i in range(w["block_count"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        attention(fill, theirs + "self_attn.", ours)
        fill.feed_forward(theirs + "mlp.", ours)
        for a, b in (
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ):
            fill.put(theirs + a, ours + b, minus_one)
    pattern = w.get("attention.sliding_window_pattern", [i % 2 == 0 for i in range(w["block_count"])])
    n_head, head = w["attention.head_count"], w["attention.key_length"]
    config = transformers.Gemma2Config(
        **shape_of(
            w,
            head_dim=head,
            query_pre_attn_scalar=w["embedding_length"] // n_head if w["block_count"] == 46 else head,
            sliding_window=w["attention.sliding_window"],
            layer_types=["sliding_attention" if windowed else "full_attention" for windowed in pattern],
            attn_logit_softcapping=w["attn_logit_softcapping"],
            final_logit_softcapping=w["final_logit_softcapping"],
        )
    )
    return fill.logits(transformers.Gemma2ForCausalLM(config))


def falcon_h1(w: Weights) -> np.ndarray:
    fill = Fill(w)
    fill.whole("model.final_layernorm")
    for i in range(w["block_count"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        attention(fill, theirs + "self_attn.", ours)
        fill.feed_forward(theirs + "feed_forward.", ours)
        fill.put(theirs + "input_layernorm", ours + "attn_norm")
        fill.put(theirs + "pre_ff_layernorm", ours + "ffn_norm")
        mamba = theirs + "mamba."
        fill.put(mamba + "in_proj", ours + "ssm_in")
        fill.put(mamba + "out_proj", ours + "ssm_out")
        fill.put(mamba + "norm", ours + "ssm_norm", np.ravel)
        fill.state[mamba + "conv1d.weight"] = fill.get(ours + "ssm_conv1d")[:, None]
        fill.state[mamba + "conv1d.bias"] = fill.get(ours + "ssm_conv1d.bias")
        fill.state[mamba + "dt_bias"] = fill.get(ours + "ssm_dt.bias")
        fill.state[mamba + "A_log"] = np.log(-fill.get(ours + "ssm_a")[:, 0])
        fill.state[mamba + "D"] = fill.get(ours + "ssm_d")[:, 0]
    inner, n_head = w["ssm.inner_size"], w["ssm.time_step_rank"]
    biased = "blk.0.attn_q.bias" in w.tensors
    config = transformers.FalconH1Config(
        **shape_of(
            w,
            head_dim=w["attention.key_length"],
            mamba_d_ssm=inner,
            mamba_n_heads=n_head,
            mamba_d_head=inner // n_head,
            mamba_n_groups=w["ssm.group_count"],
            mamba_d_state=w["ssm.state_size"],
            mamba_d_conv=w["ssm.conv_kernel"],
            mamba_rms_norm="blk.0.ssm_norm" in w.tensors,
            mamba_norm_before_gate=False,
            attention_bias=biased,
            mlp_bias=biased,
        )
    )
    return fill.logits(transformers.FalconH1ForCausalLM(config))


def qwen3next(w: Weights) -> np.ndarray:
    fill = Fill(w)
    minus_one = lambda v: v - 1  # noqa: E731
    fill.whole(make=minus_one)
    interval, size = w["full_attention_interval"], w["ssm.state_size"]
    n_key, n_value = w["ssm.group_count"], w["ssm.time_step_rank"]
    kinds = []
    for i in range(w["block_count"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        kinds.append("linear_attention" if (i + 1) % interval else "full_attention")
        if kinds[-1] == "full_attention":
            attention(fill, theirs + "self_attn.", ours)
            for name in ("q_norm", "k_norm"):
                fill.put(f"{theirs}self_attn.{name}", f"{ours}attn_{name}", minus_one)
        else:
            linear = theirs + "linear_attn."
            query, key, value = np.split(fill.get(ours + "attn_qkv"), [n_key * size, 2 * n_key * size])
            parts = (query, key, value, fill.get(ours + "attn_gate"))
            together = np.concatenate([x.reshape(n_key, -1, x.shape[-1]) for x in parts], axis=1)
            fill.state[linear + "in_proj_qkvz.weight"] = together.reshape(-1, together.shape[-1])
            fill.put(linear + "in_proj_ba", ours + "ssm_ba")
            fill.put(linear + "out_proj", ours + "ssm_out")
            fill.put(linear + "norm", ours + "ssm_norm")
            fill.state[linear + "conv1d.weight"] = fill.get(ours + "ssm_conv1d")[:, None]
            fill.state[linear + "dt_bias"] = fill.get(ours + "ssm_dt.bias")
            fill.state[linear + "A_log"] = np.log(-fill.get(ours + "ssm_a"))
        fill.put(theirs + "input_layernorm", ours + "attn_norm", minus_one)
        fill.put(theirs + "post_attention_layernorm", ours + "post_attention_norm", minus_one)
        fill.put(theirs + "mlp.gate", ours + "ffn_gate_inp")
        fill.experts(theirs + "mlp.", ours)
        fill.feed_forward(theirs + "mlp.shared_expert.", ours, "_shexp")
        fill.put(theirs + "mlp.shared_expert_gate", ours + "ffn_gate_inp_shexp", lambda v: v[None])
    head = w["attention.key_length"]
    settings = shape_of(
        w,
        head_dim=head,
        layer_types=kinds,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_num_key_heads=n_key,
        linear_num_value_heads=n_value,
        linear_conv_kernel_dim=w["ssm.conv_kernel"],
        num_experts=w["expert_count"],
        num_experts_per_tok=w["expert_used_count"],
        moe_intermediate_size=w["expert_feed_forward_length"],
        shared_expert_intermediate_size=w["expert_shared_feed_forward_length"],
        norm_topk_prob=True,
    )
    settings["rope_parameters"]["partial_rotary_factor"] = w["rope.dimension_count"] / head
    return fill.logits(transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings)))


MODELS: dict[str, Callable[[Weights], np.ndarray]] = {
    "llama": llama,
    "llama:scaled": llama,
    "deepseek2": deepseek2,
    "deepseek2:v3": deepseek2,
    "deepseek2:v2": deepseek2,
    "gemma2": gemma2,
    "gemma2:capped": gemma2,
    "gemma2:deep": gemma2,
    "falcon_h1": falcon_h1,
    "falcon_h1:groups": falcon_h1,
    "falcon_h1:bare": falcon_h1,
    "qwen3next": qwen3next,
    "qwen3next:partial": qwen3next,
    "qwen3next:slow": qwen3next,
}  # llama:experts has no counterpart: no published model has both rope_freqs and YaRN


@pytest.mark.parametrize("name", MODELS)
def test_reference_agrees_with_transformers(name: str) -> None:
    weights = load_weights(resolve_model(name).path)
    metadata = {**weights.metadata, "attention.layer_norm_rms_epsilon": EPSILON}
    weights = replace(weights, metadata=metadata)
    ours, theirs = run_reference(weights, PROMPT).logits, MODELS[name](weights)
    assert np.abs(ours - theirs).max() < AGREEMENT * theirs.std()
