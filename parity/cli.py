"""The ``parity`` command: every module of ``parity.commands`` is one subcommand,
loaded only when it is called.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
import traceback

import click

import parity.commands
from parity.errors import ExitCode, UsageError


class CommandsFolder(click.Group):
    """A group whose subcommands are the modules of ``parity.commands``; each exposes a
    click command named ``command``.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            module.name.replace("_", "-") for module in pkgutil.iter_modules(parity.commands.__path__)
        )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"parity.commands.{name.replace('-', '_')}").command


@click.command(
    cls=CommandsFolder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
def commands() -> None:
    """samebytes: same identity, same bytes. Parity tests for concurrent LLM serving."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with an ``ExitCode``.

    On standard error bad input costs one line, a bug of ours a traceback.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = commands.main(arguments, standalone_mode=False)
    except UsageError as error:
        print(f"parity: {error.line}", file=sys.stderr)
        code = ExitCode.USAGE
    except click.ClickException as error:
        print(f"parity: {error.format_message()}", file=sys.stderr)
        code = ExitCode.USAGE
    except click.Abort:
        print("parity: interrupted", file=sys.stderr)
        code = ExitCode.UNKNOWN
    except Exception:  # the boundary of the program: a bug of ours must not look like a failed check
        traceback.print_exc()
        code = ExitCode.INTERNAL
    sys.exit(int(code) if isinstance(code, int) else 0)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM is the keyboard's interrupt: a command ends its processes and says what it knows so far."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
