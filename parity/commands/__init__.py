"""One module per subcommand of ``parity``; each exposes a click command named
``command`` that returns an exit code.
"""
