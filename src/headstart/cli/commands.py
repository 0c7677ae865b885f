"""The group of commands: loads the one asked for, and turns every mistake into one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from headstart.cli import end_interrupted
from headstart.runtime.declined import Declined

COMMANDS = (
    "bench",
    "bundle",
    "cases",
    "env",
    "explain",
    "prefill",
    "report",
    "static",
    "tune",
    "verify",
)

NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""How a group without a command asks for its help; older versions of click print it themselves."""


class Command(click.Command):
    """A command that refuses an option given twice, whose first value would go unsaid."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and raise a usage error for an option of one value that stands there again."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in given:
            single = isinstance(option, click.Option) and not (option.multiple or option.count)
            if single and (times := given.count(option)) > 1:
                raise click.UsageError(f"{option.opts[0]}: expected once, got it {times} times")
        return super().parse_args(ctx, args)


class Group(click.Group):
    """A group of such commands."""

    command_class = Command


class Commands(click.Group):
    """Commands by name, each the `command` of the module of that name, loaded when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`, or None."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"headstart.cli.{cmd_name}").command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run and exit; mistakes of the caller give one line on stderr and exit code 2."""
        options["standalone_mode"] = False
        try:
            code = super().main(args, *rest, **options)
        except click.ClickException as error:
            if isinstance(error, NO_ARGUMENTS):
                error.show()
                sys.exit(error.exit_code)
            _fail(error.format_message())
        except (ValueError, Declined, MissingExtra) as error:
            _fail(str(error))
        except (KeyboardInterrupt, click.Abort):
            end_interrupted()
        except BrokenPipeError:
            # The reader has gone; the interpreter must not try to flush to it on its way out.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(code or 0)


class MissingExtra(Exception):
    """A command needs packages of an extra that is not installed."""


def need(extra: str, *modules: str) -> None:
    """Raise `MissingExtra` unless the modules of an extra can be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this command needs {' and '.join(missing)}: pip install 'headstart[{extra}]'"
        )


def _fail(message: str) -> NoReturn:
    print("headstart: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headstart")
def headstart() -> None:
    """Prefill of hybrid-attention language models; a prefix-cache hit is a cold prefill."""
