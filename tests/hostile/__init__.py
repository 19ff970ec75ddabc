"""Input and events that no friendly user would send: what they may cost is one line, never a traceback."""
