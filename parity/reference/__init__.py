"""What the models say, computed a second time: the five families in NumPy float64, straight from GGUF.

Shares no code with the engines: no cache, no chunks, no batch, no llama.cpp. A whole sequence goes in,
every position's logits come out.
"""

from __future__ import annotations

from parity.reference.arithmetic import EXACT, Arithmetic, Kernel
from parity.reference.forward import Pass, run_reference
from parity.reference.weights import Weights, load_weights

__all__ = ["EXACT", "Arithmetic", "Kernel", "Pass", "Weights", "load_weights", "run_reference"]
