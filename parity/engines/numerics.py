"""Numerics profiles: which kernels run, so that a row's result does not depend on its neighbours.

A profile is (environment, model parameters, attention kernel, widths). Which one is exact depends
on the model's tensor types, the CPU and the build; it is found by a self-test (``parity doctor``)
and remembered, never assumed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from parity.plain_data import load_json, read_record
from scheduler.limits import Layout

ROW_KERNEL_ROWS = 63  # ggml's flash attention handles 2 to 63 rows of a micro-batch one row at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsProfile:
    """One candidate. ``environment`` must be set before the library's first product, so per worker process.

    ``flash_attention`` with ``max_call_rows`` <= 63 and padded lone rows is *row* numerics; without it
    *plain* numerics.
    """

    name: str
    environment: tuple[tuple[str, str], ...] = ()
    use_extra_bufts: bool = True
    flash_attention: bool = True
    max_call_rows: int = ROW_KERNEL_ROWS
    pad_lone_rows: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> NumericsProfile:
        return read_record(NumericsProfile, load_json(text))

    def for_layout(self, layout: Layout) -> NumericsProfile:
        """The same products with the attention kernel and the widths that a layout uses.

        ``unified``: row numerics. ``streams``: flash attention off, any width. ``stock``: what people run,
        flash attention on and any width.
        """
        products = {"environment": self.environment, "use_extra_bufts": self.use_extra_bufts}
        if layout is Layout.UNIFIED:
            return self
        return NumericsProfile(
            name=f"{self.name}/{layout.value}",
            flash_attention=layout is Layout.STOCK,
            max_call_rows=512,
            pad_lone_rows=False,
            **products,
        )


ROW = NumericsProfile(name="row")
TILED_NEVER = (("GGML_CPU_TILED_MM", "0"),)
TILED_ALWAYS = (("GGML_CPU_TILED_MM_FORCE", "1"),)


def profile_candidates(*, quantised: bool, k_quants: bool) -> tuple[NumericsProfile, ...]:
    """Candidates for a model's tensor types, likely the fastest first.

    Float weights have one; other quantised weights may be repacked or not;
    K-quants also choose a product kernel.
    """
    if not quantised:
        return (ROW,)
    repack = (ROW, NumericsProfile(name="row, weights as stored", use_extra_bufts=False))
    if not k_quants:
        return repack
    return (
        *repack,
        NumericsProfile(name="row, tiled products always", environment=TILED_ALWAYS),
        NumericsProfile(
            name="row, tiled products always, weights as stored",
            environment=TILED_ALWAYS,
            use_extra_bufts=False,
        ),
        NumericsProfile(
            name="row, tiled products never, weights as stored",
            environment=TILED_NEVER,
            use_extra_bufts=False,
        ),
    )
