"""Reference scheduler for concurrent LLM serving: pure Python, standard library only, no model in it."""
