"""Changes to a model or to the reference: a trait turned off, or a fault
planted. None of them is a rounding.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from parity.reference import Weights, forward, operations
from parity.reference.operations import experts, keep_state, rotate, visible
from parity.reference.weights import Tensor

LOST_AT = 20  # position at which a state or a key is lost


@dataclass(frozen=True, slots=True)
class Change:
    """``edit`` changes the weights; ``patches`` replace functions of the reference, by name."""

    name: str
    edit: Callable[[Weights], Weights] = lambda weights: weights
    patches: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def applied(self, weights: Weights) -> Iterator[Weights]:
        """The changed weights, while the reference is changed."""
        with contextlib.ExitStack() as stack:
            for name, value in self.patches.items():
                for module in (operations, forward):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, value))
            yield self.edit(weights)


def setting(name: str, **values: Any) -> Change:
    """Metadata set (None: removed); ``__`` in a key stands for a dot."""

    def edit(weights: Weights) -> Weights:
        metadata = dict(weights.metadata)
        for key, value in ((key.replace("__", "."), value) for key, value in values.items()):
            assert metadata.get(key) != value, f"{key} is {value} as it is"
            metadata.pop(key, None)
            if value is not None:
                metadata[key] = value
        return replace(weights, metadata=metadata)

    return Change(name, edit)


def tensors(
    name: str, pattern: str, make: Callable[[np.ndarray], np.ndarray] | None = None, copy_to: str = ""
) -> Change:
    """Tensors whose names match ``pattern`` made into others, or removed; or one put under another name."""

    def edit(weights: Weights) -> Weights:
        changed = dict(weights.tensors)
        names = fnmatch.filter(changed, pattern)
        assert names, f"no tensor {pattern}"
        for tensor in names:
            old = changed.pop(tensor) if not copy_to else changed[tensor]
            if make is not None:
                changed[copy_to or tensor] = Tensor(make(old.values), old.kind)
        return replace(weights, tensors=changed)

    return Change(name, edit)


def patch(name: str, **patches: Any) -> Change:
    return Change(name, patches=patches)


def _one_key_lost(n_tokens: int, window: int | None) -> np.ndarray:
    seen = visible(n_tokens, window)
    seen[LOST_AT + 1 :, LOST_AT] = False
    return seen


def _one_future_key_seen(n_tokens: int, window: int | None) -> np.ndarray:
    seen = visible(n_tokens, window)
    if n_tokens > LOST_AT + 1:
        seen[LOST_AT, LOST_AT + 1] = True
    return seen


def _lost_once(state: np.ndarray, decay: np.ndarray, position: int) -> np.ndarray:
    return keep_state(state * (position != LOST_AT), decay, position)


def _tiled(x: np.ndarray, n_head: int) -> np.ndarray:
    return np.tile(x, (1, n_head // x.shape[1], 1))


KEY_LOST = patch("one key lost", visible=_one_key_lost)
FUTURE_SEEN = patch("one future key seen", visible=_one_future_key_seen)
STATE_LOST = patch("a state lost once", keep_state=_lost_once)
HEADS_TILED = patch("heads tiled", for_each_query_head=_tiled)
OTHER_PAIRS = patch(
    "the other kind of pairs", rotate=lambda f, x, *, neighbours: rotate(f, x, neighbours=not neighbours)
)
SHARED_DROPPED = tensors("shared expert dropped", "*ffn_down_shexp", np.zeros_like)
OTHERWISE_NORMALISED = patch(
    "weights normalised or not",
    experts=lambda *a, normalise, **rest: experts(*a, normalise=not normalise, **rest),
)
CAP_OFF = setting("cap on scores off", attn_logit_softcapping=0.0)


def epsilon(times: int) -> Change:
    return setting(f"epsilon {times} times", attention__layer_norm_rms_epsilon=times * 1e-5)


def theta(base: float) -> Change:
    return setting("rope theta 1 % off", rope__freq_base=base * 1.01)


def window(tokens: int) -> Change:
    return setting(f"window of {tokens}", attention__sliding_window=tokens)


PAST = (KEY_LOST, FUTURE_SEEN, OTHER_PAIRS)
ATTENTION = (epsilon(10), *PAST)
# Faults in the model, not in the schedule: each is to be told from rounding.
FAULTS: dict[str, tuple[Change, ...]] = {
    "llama": (*ATTENTION, theta(1e4), HEADS_TILED),
    "llama:scaled": (*ATTENTION, theta(5e5)),
    "llama:experts": (*ATTENTION, theta(1e4), HEADS_TILED, OTHERWISE_NORMALISED),
    "deepseek2": (*ATTENTION, theta(1e4), SHARED_DROPPED, OTHERWISE_NORMALISED),
    "deepseek2:v3": (*ATTENTION, theta(1e4), SHARED_DROPPED, OTHERWISE_NORMALISED),
    "deepseek2:v2": (*ATTENTION, theta(1e4), SHARED_DROPPED, OTHERWISE_NORMALISED),
    "gemma2": (*ATTENTION, theta(1e4), HEADS_TILED, window(15), window(17), CAP_OFF),
    "gemma2:capped": (*ATTENTION, theta(5e4), HEADS_TILED, window(23), window(25), CAP_OFF),
    # Its half-precision gelu in 46 layers makes rounding as large as ten times epsilon.
    "gemma2:deep": (epsilon(100), *PAST, theta(1e4), window(15), window(17)),
    "falcon_h1": (*ATTENTION, theta(1e4), HEADS_TILED, STATE_LOST),
    "falcon_h1:groups": (*ATTENTION, theta(1e6), HEADS_TILED, STATE_LOST),
    "falcon_h1:bare": (*ATTENTION, theta(1e4), HEADS_TILED, STATE_LOST),
    "qwen3next": (*ATTENTION, theta(1e4), HEADS_TILED, STATE_LOST, SHARED_DROPPED, OTHERWISE_NORMALISED),
    "qwen3next:partial": (
        *ATTENTION,
        theta(1e4),
        HEADS_TILED,
        STATE_LOST,
        SHARED_DROPPED,
        OTHERWISE_NORMALISED,
    ),
    "qwen3next:slow": (*ATTENTION, theta(1e7), HEADS_TILED, STATE_LOST, SHARED_DROPPED, OTHERWISE_NORMALISED),
}


def _without(name: str, pattern: str) -> Change:
    return tensors(f"{name} off", pattern)


FEWER_EXPERTS = setting("last expert off", expert_used_count=3)
NO_ROPE_SCALING = setting("rope scaling off", rope__scaling__type="none")
UNTIED = tensors("tied head off", "token_embd", lambda values: values[::-1], copy_to="output")
DEFAULT_THETA = setting("own freq_base off", rope__freq_base=None)
# Traits that a model has and its family's tiny model lacks (or drowns): each off must show.
TRAITS: dict[str, tuple[Change, ...]] = {
    "llama:scaled": (
        DEFAULT_THETA,
        NO_ROPE_SCALING,
        UNTIED,
        *(
            _without(f"{name}'s bias", f"*.{name}.bias")
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        ),
    ),
    "llama:experts": (
        FEWER_EXPERTS,
        OTHERWISE_NORMALISED,
        _without("rope_freqs", "rope_freqs"),
        setting("YaRN off", rope__scaling__type="none"),
        setting("YaRN taken for linear", rope__scaling__type="linear"),
        setting("original context off", rope__scaling__original_context_length=8192),
    ),
    "deepseek2:v3": (
        FEWER_EXPERTS,
        OTHERWISE_NORMALISED,
        setting("YaRN off", rope__scaling__type="none"),
        setting("mscale off", rope__scaling__yarn_log_multiplier=0.0),
        setting("sigmoid gating off", expert_gating_func=1),
        setting("groups off", expert_group_count=1),
        setting("scale of weights off", expert_weights_scale=1.0),
        _without("selection bias", "*.exp_probs_b.bias"),
        tensors("norm of compressed queries off", "*.attn_q_a_norm", np.ones_like),
        tensors("second shared expert off", "*.ffn_down_shexp", lambda v: v * (np.arange(v.shape[1]) < 16)),
    ),
    "deepseek2:v2": (
        FEWER_EXPERTS,
        OTHERWISE_NORMALISED,
        UNTIED,
        setting("other mscale", rope__scaling__yarn_log_multiplier=0.1),
        setting("scale of weights off", expert_weights_scale=1.0),
        tensors("third shared expert off", "*.ffn_down_shexp", lambda v: v * (np.arange(v.shape[1]) < 32)),
    ),
    "gemma2:capped": (
        CAP_OFF,
        DEFAULT_THETA,
        NO_ROPE_SCALING,
        setting("cap on logits off", final_logit_softcapping=0.0),
        setting("listed pattern off", attention__sliding_window_pattern=None),
    ),
    "gemma2:deep": (
        patch("27B's query scale off", gemma2_scale=lambda weights: operations.head_values(weights) ** -0.5),
    ),
    "falcon_h1:groups": (
        STATE_LOST,
        UNTIED,
        DEFAULT_THETA,
        NO_ROPE_SCALING,
        _without("mamba norm", "*.ssm_norm"),
        _without("bias of the convolution", "*.ssm_conv1d.bias"),
        tensors("groups of channels swapped", "*.ssm_norm", lambda values: values[::-1]),
    ),
    "falcon_h1:bare": (
        STATE_LOST,
        tensors("strong decay off", "*.ssm_a", lambda values: values / 100),
        *(
            _without(f"{name}'s bias", f"*.{name}.bias")
            for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
        ),
    ),
    "qwen3next:partial": (
        FEWER_EXPERTS,
        OTHERWISE_NORMALISED,
        STATE_LOST,
        setting("partial rope off", rope__dimension_count=32),
        tensors("strong decay off", "*.ssm_a", lambda values: values / 100),
        tensors("gate of the shared expert off", "*.ffn_gate_inp_shexp", np.zeros_like),
    ),
    "qwen3next:slow": (STATE_LOST, UNTIED, DEFAULT_THETA, NO_ROPE_SCALING, FEWER_EXPERTS),
}
