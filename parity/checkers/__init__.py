"""Checkers: pure over a run's history and the oracle's answers. Each module names what it judges."""
