"""Whole servers as systems under test: started as child processes, reached over HTTP, ended for certain."""
