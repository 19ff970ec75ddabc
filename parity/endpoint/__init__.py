"""Any OpenAI-compatible server: its answers under load against its answers alone."""
