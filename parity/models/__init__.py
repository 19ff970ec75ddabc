"""Models by name: generated ones and their quantised variants, packaged and fetched real ones, any file."""

from __future__ import annotations

from parity.models.catalogue import ModelFile, resolve_model

__all__ = ["ModelFile", "resolve_model"]
