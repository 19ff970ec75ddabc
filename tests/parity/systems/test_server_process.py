"""A server that we start never blocks on what it says, and nothing of it is left, however we end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from parity.errors import UsageError
from parity.store import REPOSITORY
from parity.systems.server_process import TAIL_BYTES, ServerDied, ServerProcess
from tests.parity.systems.small_servers import small_server

BOUND_S = 30.0
# A child of the server's own that would outlive it, and says its process id.
GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(f"grandchild {child.pid}", flush=True)
"""
OWN_ID = """
import os
print(f"server {os.getpid()}", flush=True)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def pid_of(name: str, server: ServerProcess) -> int:
    """Process id that a server has written after ``name``."""
    return next(int(line.split()[1]) for line in server.tail().splitlines() if line.startswith(f"{name} "))


def has_process(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(pid: int) -> None:
    """Return when a process that is no child of ours has ended; fails after a bound."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([handle], [], [], BOUND_S)
        assert ready, f"process {pid} still runs after {BOUND_S:g} s"
    finally:
        os.close(handle)


def test_server_answers_and_is_gone_after_close() -> None:
    with ServerProcess(small_server()) as server:
        assert httpx.get(f"{server.url}/anything", trust_env=False).text == "ok"
        group, log = server.pid, server.log
        assert has_process(group)
    assert not has_process(group)
    assert not log.exists()
    server.close()  # again: nothing to do


def test_noise_beyond_every_pipe_does_not_block_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with ServerProcess(small_server(noise=100_000), log=log) as server:
        for _ in range(20):
            assert httpx.get(server.url, timeout=BOUND_S, trust_env=False).text == "ok"
        assert len(server.tail()) <= TAIL_BYTES
    assert log.stat().st_size > 2_000_000


def test_what_the_server_started_ends_with_it() -> None:
    with ServerProcess(small_server(before=GRANDCHILD)) as server:
        grandchild = pid_of("grandchild", server)
        os.kill(grandchild, 0)
    wait_for_end(grandchild)


def test_server_that_ignores_sigterm_is_killed() -> None:
    with ServerProcess(small_server(before=DEAF + OWN_ID + GRANDCHILD), term_timeout_s=0.1) as server:
        pids = [pid_of("server", server), pid_of("grandchild", server)]
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_ends_when_its_caller_is_killed(how: signal.Signals) -> None:
    code = (
        "import signal\n"
        "from parity.systems.server_process import ServerProcess\n"
        f"server = ServerProcess({small_server(before=OWN_ID + GRANDCHILD)!r})\n"
        "print(*server.tail().split()[1:4:2], flush=True)\n"
        "signal.pause()\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
    )
    with caller:
        server, grandchild = caller.stdout.readline().split()
        try:
            caller.send_signal(how)
            caller.wait(BOUND_S)
        finally:
            caller.kill()  # else leaving the block would wait for it for ever
        wait_for_end(int(server))
        wait_for_end(int(grandchild))


def test_server_that_ends_at_once_says_why() -> None:
    with pytest.raises(ServerDied, match=r"exited with 3: no such model$") as death:
        ServerProcess(small_server(before="sys.stderr.write('no such model\\n'); sys.exit(3)"))
    assert death.value.code == 3


def test_server_that_is_killed_says_by_what() -> None:
    with ServerProcess(small_server(before=OWN_ID + GRANDCHILD)) as server:
        server.check_alive()
        grandchild = pid_of("grandchild", server)
        os.kill(pid_of("server", server), signal.SIGSEGV)
        wait_for_end(server.pid)
        with pytest.raises(ServerDied, match="ended by SIGSEGV"):
            server.check_alive()
        wait_for_end(grandchild)


def test_server_that_never_gets_healthy_is_ended() -> None:
    with pytest.raises(UsageError, match=r"server did not start.*not healthy in 0\.5 s"):
        ServerProcess(small_server(health=503), start_timeout_s=0.5)


def test_command_that_is_no_program() -> None:
    with pytest.raises(
        ServerDied, match=r"exited with 127: cannot be started: .*no_such_server: No such file"
    ):
        ServerProcess(["./no_such_server"])
