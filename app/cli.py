"""The program's commands. Without one it opens the chat UI."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from app import (
    batch_command,
    bench_command,
    chat_command,
    doctor_command,
    models_command,
    serve_command,
    verify_command,
)
from app.options import common_options, set_choice, speculation
from app.terminal import EXIT_INTERRUPTED
from engine.config import GenerationSettings
from engine.errors import QuorumError
from engine.runtime.model import LoadCancelled
from models.progress import Cancelled

EXIT_USER_ERROR = 2
DEFAULT_PORT = 7860


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 when done, 1 when answers differ or rows failed, 2 after an error, 130 after Ctrl-C."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show, or that was typed broken, is no reason to stop.
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(arguments)
    try:
        if args.command == "chat":
            return chat_command.run(args)
        if args.command == "models":
            return models_command.run(args)
        if args.command == "bench":
            return bench_command.run(args)
        if args.command == "doctor":
            return doctor_command.run(args)
        if args.command == "verify-lossless":
            return verify_command.run(args)
        if args.command == "serve":
            return serve_command.run(args)
        if args.command == "batch":
            return batch_command.run(args)
        return _serve(args)
    except (KeyboardInterrupt, LoadCancelled, Cancelled):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has heard enough; Python must not try to flush the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except QuorumError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        description="A local chat whose drafters vote and whose words are the target model's own.",
        parents=[common_options(with_defaults=True)],
        allow_abbrev=False,
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    common = common_options(with_defaults=False)
    chat_command.add_parser(subparsers, common)
    models_command.add_parser(subparsers)
    doctor_command.add_parser(subparsers, common)
    bench_command.add_parser(subparsers, common)
    verify_command.add_parser(subparsers, common)
    serve_command.add_parser(subparsers, common)
    batch_command.add_parser(subparsers, common)
    return parser


def _serve(args: argparse.Namespace) -> int:
    # Gradio takes a second to import, which the other commands need not wait for.
    from app.server import serve

    serve(
        choice=set_choice(args),
        generation=GenerationSettings(speculation=speculation(args)),
        host="127.0.0.1",
        port=args.port or DEFAULT_PORT,
        opens_browser=not args.no_browser,
    )
    return 0
