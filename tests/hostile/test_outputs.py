"""Where results go: looked at before the work, written through links and devices, one line when it fails."""

from __future__ import annotations

import importlib
import os
import pkgutil
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest

import parity.commands
from parity.cli import commands
from parity.errors import ExitCode, OutputError, UsageError
from parity.outputs import OutputPath, check_output, check_output_folder, save_output
from parity.store import REPOSITORY

# Options that name a file or folder which is read, or edited in place.
READ = {("regen", "directory"), ("lock", "manifests"), ("fetch", "manifests"), ("peers", "llama_server")}


def run_parity(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "parity.cli", *arguments],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,
    )


def test_every_option_that_names_a_file_is_looked_at_before_the_work() -> None:
    unchecked = set()
    for module in pkgutil.iter_modules(parity.commands.__path__):
        command = importlib.import_module(f"parity.commands.{module.name}").command
        for parameter in command.params:
            if isinstance(parameter, click.Option) and isinstance(parameter.type, click.Path):
                if not isinstance(parameter.type, OutputPath):
                    unchecked.add((module.name, parameter.name))

    assert unchecked - READ == {("bench", "result_dir")}  # only with --save-result, and then the same way


@pytest.mark.parametrize("command", ["check", "gate", "mutants", "fuzz", "trace"])
def test_command_refuses_a_folder_before_it_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = "--html" if command == "trace" else "--json"
    arguments = [command, *([__file__] if command == "trace" else []), option, str(tmp_path)]
    with pytest.raises(UsageError, match="the output is no file.*it is a folder"):
        commands.main(arguments, standalone_mode=False)


def test_file_is_replaced_and_a_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "a" / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    for text in ("first", "second"):
        check_output(link)
        save_output(link, text)

    assert link.is_symlink() and target.read_text() == "second" and not target.is_symlink()
    assert [path.name for path in target.parent.iterdir()] == ["target.json"]


def test_every_name_of_a_file_sees_the_result(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("a longer text than the new one")
    other.hardlink_to(one)
    save_output(one, "new")

    assert other.read_text() == one.read_text() == "new"


@pytest.mark.parametrize("name", ["/dev/null", "link"])
def test_device_stays_a_device(name: str, tmp_path: Path) -> None:
    path = Path(name)
    if name == "link":
        path = tmp_path / "null"
        path.symlink_to("/dev/null")
    check_output(path)
    save_output(path, "gone")

    assert Path("/dev/null").is_char_device() and path.exists() and (name != "link" or path.is_symlink())


def test_pipe_is_written_to_and_one_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_output(path)
    with pytest.raises(OutputError, match="output cannot be written"):
        save_output(path, "lost")
    got: list[str] = []
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    held = os.open(path, os.O_WRONLY)  # so that the reader does not see an end before the beginning
    reader = threading.Thread(target=lambda: got.append(os.fdopen(opened).read()))
    data = "x" * (1 << 20)
    reader.start()
    save_output(path, data)
    os.close(held)
    reader.join()

    assert got == [data] and path.is_fifo()


def test_standard_output_that_is_a_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    with open(tmp_path / "all", "wb") as file:
        code = (
            "from pathlib import Path; from parity.outputs import save_output; print('before', flush=True);"
            "save_output(Path('/dev/stdout'), 'result\\n'); print('after')"
        )
        subprocess.run([sys.executable, "-c", code], stdout=file, cwd=REPOSITORY, check=True)

    said = (tmp_path / "all").read_text()
    assert "before" in said and ("result" in said or "after" in said) and (tmp_path / "all").is_file()


def test_full_device_is_an_output_error() -> None:
    with pytest.raises(OutputError, match="/dev/full: No space left on device"):
        save_output(Path("/dev/full"), "x")


@pytest.mark.parametrize("make", ["socket", "folder", "below a file", "loop", "gone"])
def test_what_cannot_hold_a_result_is_refused(make: str, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "out"
    if make == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif make == "folder":
        path.mkdir()
    elif make == "below a file":
        path.write_text("")
        path = path / "deeper" / "out"
    elif make == "loop":
        path.symlink_to(path)
    else:
        path = Path("/proc/nobody/out")
    with pytest.raises(UsageError):
        check_output(path)
    if make != "folder":
        with pytest.raises(UsageError):
            check_output_folder(path)


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_output(tmp_path / "deep" / "out")
    check_output_folder(tmp_path / "deep")

    assert not [*tmp_path.iterdir()]


def test_file_that_outgrows_the_disk_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            save_output(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_full_standard_output_is_one_line_and_a_code_of_its_own() -> None:
    with open("/dev/full", "wb") as full:
        done = run_parity("models", stdout=full)

    assert done.returncode == ExitCode.OUTPUT
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr


@pytest.mark.parametrize("arguments", [("models",), ("--help",)], ids=" ".join)
def test_closed_standard_output_is_one_line_and_never_the_code_of_fail(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_parity(*arguments, stdout=writing)
    finally:
        os.close(writing)

    assert done.returncode == ExitCode.OUTPUT
    assert done.stderr.count("\n") == 1 and "Broken pipe" in done.stderr


def test_terminal_that_knows_only_ascii_is_no_error(tmp_path: Path) -> None:
    done = run_parity(
        "replay",
        str(tmp_path / "\N{SNOWMAN}"),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )

    assert done.returncode == ExitCode.USAGE
    assert "Traceback" not in done.stderr and "\\u2603" in done.stderr
