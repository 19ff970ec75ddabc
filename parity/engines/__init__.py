"""Engines: what runs a batch. ``llama`` is the only module that imports ``llama_cpp``."""
