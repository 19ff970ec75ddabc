"""One seeded model writer per family; each returns a ``ModelBuilder`` that is ready to be saved."""

from __future__ import annotations

from collections.abc import Callable

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.deepseek2 import build_deepseek2
from parity.models.tiny.falcon_h1 import build_falcon_h1
from parity.models.tiny.gemma2 import build_gemma2
from parity.models.tiny.llama import build_llama
from parity.models.tiny.qwen3next import build_qwen3next
from parity.models.tiny.variants import VARIANTS

BUILDERS: dict[str, Callable[[ModelSize], ModelBuilder]] = {
    "llama": build_llama,
    "deepseek2": build_deepseek2,
    "gemma2": build_gemma2,
    "falcon_h1": build_falcon_h1,
    "qwen3next": build_qwen3next,
}


def find_builder(family: str, variant: str | None = None) -> Callable[[ModelSize], ModelBuilder] | None:
    """A family's writer, or that of one of its variants; None if there is none."""
    return VARIANTS.get(family, {}).get(variant) if variant else BUILDERS.get(family)
