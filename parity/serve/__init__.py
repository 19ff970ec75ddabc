"""The reference scheduler behind an OpenAI-compatible endpoint: one thread owns
the engine, callers submit to it.
"""
