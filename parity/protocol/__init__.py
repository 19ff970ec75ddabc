"""Schedulers in any language: a child process that speaks JSON lines (README.md here is for its author)."""
