"""The command line. Each command lives in a module of its own and is imported when it is called."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any, NoReturn

import click

from lifecycle._version import __version__
from lifecycle.errors import ConfigurationError, LifecycleError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("lifecycle.cli.run", "Generate samples for a file of prompts."),
    "sim": ("adapters.sglang.simulator.command", "Serve a simulated SGLang."),
    "diagram": ("lifecycle.cli.diagram", "Draw the machines, a log on them, or what changed."),
    "report": ("lifecycle.cli.report", "Say what happened, from logs alone."),
    "log": ("lifecycle.cli.log", "Replay one rollout, or convert logs."),
    "snapshots": ("lifecycle.cli.snapshots", "Look into a store of snapshots."),
}
EXIT_USAGE = 2
EXIT_BUG = 70


class _Lazy(click.Group):
    """A group whose commands are imported when they are used, so that `--help` and logs need no HTTP client."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: Any = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command  # type: ignore[no-any-return]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="lifecycle")
def cli() -> None:
    """The life of every rollout request, as one explicit state machine: run it, draw it, read its log.

    Exit status: 0 done; 1 ended short; 2 bad usage or input; 3 violations found by --strict; 70 a bug of ours;
    130 or 143 interrupted, with partials saved.
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script `lifecycle`."""
    try:
        status = cli.main(arguments, prog_name="lifecycle", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (ConfigurationError, LifecycleError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has gone: nothing to say to anybody
        sys.exit(0)
    except Exception:  # noqa: BLE001  the last resort: say that it is ours
        traceback.print_exc()
        click.echo("This is a bug in rollout-lifecycle; please report it with the lines above.", err=True)
        sys.exit(EXIT_BUG)
    sys.exit(status if isinstance(status, int) else 0)
