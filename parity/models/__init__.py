"""Models by name: generated tiny ones, their quantised variants, packaged and fetched real ones, any GGUF file."""

from __future__ import annotations

from parity.models.catalogue import ModelFile, resolve_model

__all__ = ["ModelFile", "resolve_model"]
