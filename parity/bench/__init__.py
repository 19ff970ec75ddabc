"""Benchmarks of concurrent serving. Names and definitions follow ``vllm bench serve`` where it has them."""
