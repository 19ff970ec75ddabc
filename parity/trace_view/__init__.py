"""A run as a picture: who ran when, chunks and decodes, pool and queue, preemptions and shares."""
