"""Threads that wait for each other do not spin, in whatever process llama.cpp is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parity.store import REPOSITORY


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_library_is_loaded_with_a_passive_wait_unless_the_user_says_otherwise(given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        "import os; from parity.engines.llama import library; library(); print(os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**environment, **({"OMP_WAIT_POLICY": given} if given else {})},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [given or "PASSIVE"]
