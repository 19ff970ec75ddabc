"""The endpoint's tests ask the same servers as those of ``serve``."""

from __future__ import annotations

from tests.parity.serve.conftest import client, served, start, url

__all__ = ["client", "served", "start", "url"]
