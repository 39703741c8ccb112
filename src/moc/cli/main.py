"""The command ``moc``: finds the verb, runs it, turns errors into one line and an exit code.

Only the module of the verb that was called is imported, so that `moc ls` answers at once; none
of the verbs that look at a run imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moc import __version__
from moc.errors import ConfigError, MocError, StepNotFound

__all__ = ["main"]

_EXIT_CODES = """\
exit codes:
  0    done, and all is well
  1    a problem was found (damage, a failed check), or the work failed
  2    wrong usage, or no such run or step
  130  interrupted"""


class _Verb(NamedTuple):
    """Where a verb is: its module has ``add_arguments``, and a function that runs it."""

    module: str
    function: str
    help: str


_VERBS = {
    "demo": _Verb("moc.demo.run", "run_demo", "train a small MoE twice, lose a node, compare"),
    "ls": _Verb("moc.cli.ls", "run", "list the steps of a run"),
    "show": _Verb("moc.cli.show", "run", "show one step: files, age of each expert, attempts"),
    "verify": _Verb("moc.cli.verify", "run", "read a run's bytes and name what is damaged"),
    "report": _Verb("moc.cli.report", "run", "draw what a run's events tell, as one HTML page"),
    "prune": _Verb("moc.cli.prune", "run", "delete old steps, and say why the rest stays"),
    "clean": _Verb("moc.cli.clean", "run", "remove what dead runs have left in this memory"),
    "bench": _Verb("moc.cli.bench", "run", "measure saves against this machine's raw limits"),
    "doctor": _Verb("moc.cli.doctor", "run", "check this machine before the first step"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; by default the process's own.

    Returns:
        The exit code. Wrong usage and ``--help`` leave by SystemExit, as argparse does it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, called = _parser(words)
    args = parser.parse_args(words)
    if called is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code = called(args)
        sys.stdout.flush()
    except MocError as error:
        return _fail(args, error)
    except KeyboardInterrupt:
        print(f"moc {args.verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read (`moc ls RUN | head`) has gone; the exit must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser(
    words: Sequence[str],
) -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int] | None]:
    """A parser that knows all verbs by name, and the options of the one that is called."""
    parser = argparse.ArgumentParser(
        prog="moc",
        description="Fault tolerance for large-model training in PyTorch.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"moc {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    name = next((word for word in words if not word.startswith("-")), None)
    called = None
    for verb, (module, function, text) in _VERBS.items():
        child = verbs.add_parser(
            verb,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if verb == name:
            home = importlib.import_module(module)
            home.add_arguments(child)
            called = getattr(home, function)
    return parser, called


def _fail(args: argparse.Namespace, error: MocError) -> int:
    """One line for people, one object for programs."""
    text = " ".join(str(error).split())
    print(f"moc {args.verb}: {text}", file=sys.stderr)
    if getattr(args, "json", False):
        print(json.dumps({"error": text}))
    return 2 if isinstance(error, ConfigError | StepNotFound) else 1
