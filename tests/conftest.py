"""What every test may rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A run in the background hands an ignored interrupt on, but tests send it to processes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
