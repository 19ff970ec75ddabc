"""Servers of a few lines that behave badly in one way, as commands for ``ServerProcess``."""

from __future__ import annotations

import sys
import textwrap

SERVE = """
import http.server, signal, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sys.stderr.write("x" * noise + "\\n")
        sys.stderr.flush()
        self.send_response(health)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def small_server(*, health: int = 200, noise: int = 0, port: int = 0, before: str = "") -> list[str]:
    """A command that serves every path with status ``health`` and writes ``noise`` bytes for each
    request; ``before`` is run first.
    """
    lines = [
        "import signal, subprocess, sys",
        f"health, noise, port = {health}, {noise}, {port}",
        textwrap.dedent(before),
        SERVE,
    ]
    return [sys.executable, "-c", "\n".join(lines)]
