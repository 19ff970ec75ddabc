"""A Hypothesis backend that draws the same from the same seed in every process.

Hypothesis' own also draws constants that it finds in the source of whatever modules are loaded,
so that pytest, the command line and a Dask worker would explore different cases. Strategies here
name their boundaries themselves.
"""

from __future__ import annotations

from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

BACKEND = "samebytes-steady"


class SteadyProvider(HypothesisProvider):
    """Hypothesis' provider without constants from loaded modules."""

    def _maybe_draw_constant(self, choice_type: Any, constraints: Any, *, p: float = 0.05) -> None:
        return None


def steady_backend() -> str:
    """The backend's name for ``settings(backend=...)``, registered."""
    AVAILABLE_PROVIDERS[BACKEND] = SteadyProvider
    return BACKEND
