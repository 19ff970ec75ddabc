"""Parity test framework: N sessions in one pool give the same bytes as each session alone."""
