"""How much is rounded: nothing (the truth), or what llama.cpp's CPU kernels round beyond float32.

llama.cpp computes in float32, which is noise around the truth and is met by a bound. Some of its kernels
round to far fewer bits on purpose; against the bare truth their bound would be so wide that faults hide in
it. So these are done likewise here, on float64 values:

- *gelu* is a table over float16 (``ggml_vec_geglu_f32`` with ``GGML_GELU_FP16``), whatever the model's type;
- the *activations* of a product with quantised weights are quantised to 8 bits in blocks
  (``quantize_row_q8_0``, ``quantize_row_q8_K``), those of one with half weights rounded to half;
- *cells* are stored as float16, and queries meet them as float16;
- the *row kernel* of flash attention sums values in float16, one cell after the other
  (``ggml_compute_forward_flash_attn_ext_f16_one_chunk``).

A *shake* is the other half: the same computation with every intermediate value moved by one float32 ulp up or
down. What it does to the logits is how far float32 rounding can move them, layer by layer: a bound that is
derived from the model and the prompt, not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from parity.errors import UsageError
from parity.reference.weights import Tensor

ULP = float(np.finfo(np.float32).eps)  # relative step of float32: 2**-23
# What a product does to its right side, by the type of its weights (``type_traits_cpu[].vec_dot_type``).
Q8_BLOCK, Q8_K_BLOCK = 32, 256
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
Q8_0_PARTNERS = ("Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1")  # Q8_1 rounds values as Q8_0 does, and keeps a sum


class Kernel(StrEnum):
    """Whose rounding is followed."""

    EXACT = "exact"  # nobody's: float64 throughout
    PLAIN = "plain"  # flash attention off, float32 cells
    HALF = "half"  # flash attention off, float16 cells
    ROW = "row"  # flash attention's row kernel, float16 cells


@dataclass(slots=True)
class Arithmetic:
    """One way to compute. ``shake``: seed of a run in which every value is moved by one ulp (None:
    none is). ``flips``: in each rounding to fewer bits, the value of each row that is nearest to going
    the other way goes the other way.
    """

    kernel: Kernel = Kernel.EXACT
    shake: int | None = None
    flips: bool = False
    _stream: np.random.Generator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.shake is not None:
            self._stream = np.random.default_rng(self.shake)

    @property
    def follows_ggml(self) -> bool:
        return self.kernel is not Kernel.EXACT

    def settle(self, value: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
        """``value``, shaken by one ulp of ``size`` (of itself if None)."""
        if self._stream is None:
            return value
        moved = np.copysign(ULP, self._stream.random(value.shape) - 0.5)
        moved *= value if size is None else size
        return value + moved

    def settle_sum(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """``left @ right``; shaken by one ulp of the sum of its terms' sizes, since a sum that cancels keeps
        the rounding of what it was made of (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
        """
        value = left @ right
        if self._stream is None:
            return value
        return self.settle(value, np.abs(left) @ np.abs(right))

    def product(self, rows: np.ndarray, weight: Tensor) -> np.ndarray:
        """``rows`` [..., inputs] by ``weight`` [..., outputs, inputs]: [..., outputs]."""
        if self.follows_ggml:
            rows = self.activations(rows, weight.kind)
        return self.settle_sum(rows, np.swapaxes(weight.values, -1, -2))

    def gelu(self, x: np.ndarray) -> np.ndarray:
        """The tanh form of gelu (Hendrycks and Gimpel, 2016)."""
        if not self.follows_ggml:
            return self.settle(tanh_gelu(x))
        table = as_half(tanh_gelu(self.half(np.clip(x, -10, 10))))
        return self.settle(np.where(x <= -10, 0.0, np.where(x >= 10, x, table)))

    def cells(self, x: np.ndarray) -> np.ndarray:
        """Keys or values as the cache holds them, or queries as they meet it."""
        return self.half(x) if self.kernel in (Kernel.HALF, Kernel.ROW) else x

    def activations(self, rows: np.ndarray, kind: str) -> np.ndarray:
        """``rows`` as a product with weights of type ``kind`` sees them."""
        if kind == "F32":
            return rows
        if kind == "F16":
            return self.half(rows)
        if kind in Q8_0_PARTNERS:
            return self._eight_bits(rows, Q8_BLOCK, half_scale=True)
        if kind in K_QUANTS:
            return self._eight_bits(rows, Q8_K_BLOCK, half_scale=False)
        raise UsageError(
            f"weights of type {kind} have no reference", why="how their activations are rounded is unknown"
        )

    def half(self, x: np.ndarray) -> np.ndarray:
        """Rounded to float16."""
        rounded = as_half(x)
        if not self.flips:
            return rounded
        step = np.spacing(np.abs(rounded).astype(np.float16)).astype(np.float64)
        return _flip_nearest((x - rounded) / step, rounded, step)

    def _eight_bits(self, rows: np.ndarray, block: int, *, half_scale: bool) -> np.ndarray:
        """Blocks of whole numbers from -127 to 127 and one scale, stored as float16 or float32."""
        blocks = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, block)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        safe = np.where(largest > 0, largest, np.float32(1))
        scaled = (blocks * (np.float32(127) / safe)).astype(np.float64)
        whole = np.rint(scaled)
        if self.flips:
            flat = _flip_nearest(
                *(x.reshape(rows.shape) for x in (scaled - whole, whole, np.ones_like(whole)))
            )
            whole = flat.reshape(whole.shape)
        scale = safe / np.float32(127)
        scale = scale.astype(np.float16) if half_scale else scale
        return (whole * scale.astype(np.float64)).reshape(rows.shape)


EXACT = Arithmetic()


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))


def as_half(x: np.ndarray) -> np.ndarray:
    """Rounded to float16 by way of float32, as the hardware does."""
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def _flip_nearest(excess: np.ndarray, rounded: np.ndarray, step: np.ndarray) -> np.ndarray:
    """``rounded`` with one value of each row taken one ``step`` on: that whose ``excess``, the part of a step
    that rounding took away (-0.5 to 0.5), is largest.
    """
    at = np.abs(excess).argmax(axis=-1, keepdims=True)
    out = rounded.copy()
    moved = np.take_along_axis(rounded + np.where(excess < 0, -step, step), at, axis=-1)
    np.put_along_axis(out, at, moved, axis=-1)
    return out
