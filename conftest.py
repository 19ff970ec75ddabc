"""Root conftest: makes the framework's pytest plugin part of every run in this repository."""

pytest_plugins = ["parity.plugin"]
