"""Root conftest: makes the framework's pytest plugin part of every run in this repository."""

import importlib.util

pytest_plugins = ["parity.plugin"] if importlib.util.find_spec("parity.plugin") else []
