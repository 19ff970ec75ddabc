"""The ``parity`` command: every module of ``parity.commands`` is one subcommand,
loaded only when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import parity.commands
from parity.errors import ExitCode, OutputError, UsageError
from parity.outputs import OUTPUT_ERRNOS
from parity.store import PROJECT_VARIABLE

# What ``parity --help`` lists under which heading.
HEADINGS = {
    "Prove": ("check", "check-endpoint", "gate", "regen", "reference", "policies", "mutants", "mutate"),
    "Search and explain": ("fuzz", "hunt", "replay", "bisect", "trace"),
    "Serve and measure": (
        "serve",
        "bench",
        "cutover",
        "peers",
        "handoff",
        "overlap",
        "churn",
        "endurance",
        "compare",
        "telemetry",
    ),
    "Models": ("models", "fetch", "lock", "slice", "doctor", "explain-memory"),
}


class CommandsFolder(click.Group):
    """A group whose subcommands are the modules of ``parity.commands``; each exposes a
    click command named ``command``.
    """

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands under their headings."""
        for heading, names in HEADINGS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                limit = formatter.width - 6 - max(map(len, names))
                formatter.write_dl(
                    [(name, command.get_short_help_str(limit)) for name, command in found if command]
                )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            module.name.replace("_", "-") for module in pkgutil.iter_modules(parity.commands.__path__)
        )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"parity.commands.{name.replace('-', '_')}").command

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with pipes_are_outputs():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with pipes_are_outputs():
            return super().invoke(ctx)


@contextlib.contextmanager
def pipes_are_outputs() -> Iterator[None]:
    """A closed pipe as an ``OutputError``: click and rich would exit with 1, which is the code of *fail*."""
    try:
        yield
    except BrokenPipeError as error:
        raise output_error(error) from error
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise output_error(end.__context__) from end
        raise


@click.command(
    cls=CommandsFolder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--project",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose manifests/, splits/ and golden/ add to or replace ours; by default the current one.",
)
def commands(project: Path | None) -> None:
    """samebytes: same identity, same bytes. Parity tests for concurrent LLM serving."""
    if project is not None:
        os.environ[PROJECT_VARIABLE] = str(project.resolve())  # worker processes inherit it


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with an ``ExitCode``.

    On standard error bad input and output that cannot be written cost one line, a bug of ours a traceback.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows only ASCII
    code = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _tell(output_error(error).line, ExitCode.OUTPUT)
    if code is ExitCode.OUTPUT:
        _give_up(sys.stdout)  # what is left in its buffer would be tried again at the end of the process
    sys.exit(int(code) if isinstance(code, int) else 0)


def _run(arguments: list[str] | None) -> ExitCode | None:
    try:
        return commands.main(arguments, standalone_mode=False)
    except UsageError as error:
        return _tell(error.line, ExitCode.USAGE)
    except click.ClickException as error:
        return _tell(" ".join(error.format_message().split()), ExitCode.USAGE)
    except OutputError as error:
        return _tell(error.line, ExitCode.OUTPUT)
    except click.Abort:
        return _tell("interrupted", ExitCode.UNKNOWN)
    except KeyboardInterrupt:  # again, while the first was being told
        return _tell("interrupted", ExitCode.UNKNOWN)
    except Exception as error:  # the boundary of the program: a bug of ours must not look like a failed check
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRNOS:
            return _tell(output_error(error).line, ExitCode.OUTPUT)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return ExitCode.INTERNAL


def output_error(error: OSError) -> OutputError:
    """What the system said about a file or about standard output, as one line."""
    where = str(error.filename) if error.filename else "standard output or a file of the cache"
    return OutputError("output cannot be written", where=where, why=error.strerror or str(error))


def _tell(line: str, code: ExitCode) -> ExitCode:
    """Print the line on standard error, if anybody listens."""
    try:
        print(f"parity: {line}", file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)
    return code


def _give_up(stream: io.TextIOWrapper) -> None:
    """Point a standard stream that takes nothing more at nothing."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM is the keyboard's interrupt: a command ends its processes and says what it knows so far."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
