"""`launch.py batch IN.jsonl --out OUT.jsonl`: many requests at once, into a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from app.api.desk import Lent
from app.api.recollection import Recollection
from app.api.schema import MOST_CHOICES
from app.api.translate import Defaults
from app.batch import Added, Batch, Output, read_input
from app.choices import preparation
from app.options import add_sampling_options, generation_settings, positive, set_choice
from app.terminal import EXIT_INTERRUPTED, ProgressLine, interrupt_event
from engine.config import GenerationSettings, SetConfig
from engine.errors import SettingError
from engine.loader import LoadedSet
from engine.pool import Pool, PoolSettings

EXIT_ROWS_FAILED = 1
DEFAULT_PARALLEL = 8
LINE_EVERY_S = 30
"""How often progress is told where it cannot be told in place."""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `batch` to the program's parser."""
    parser = subparsers.add_parser(
        "batch",
        parents=[common],
        help="answer the requests of a file into another",
        description="Answers each line of a JSONL file: messages or prompt, an id if wanted, any field of the API's "
        "requests, which goes before the options here. OpenAI's batch format is understood too. Run again after a stop "
        "or a kill, it goes on where it was. Exit code 0: all answered; 1: some rows hold an error.",
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one on each line; - reads standard input")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl", help="where the answers go")
    parser.add_argument("--restart", action="store_true", help="throw away what OUT holds")
    parser.add_argument("--n", type=positive, metavar="N", help="answers to each row; default: 1")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="tell every token's log-probability, and the N most probable's"
    )
    parser.add_argument(
        "--parallel", type=positive, default=DEFAULT_PARALLEL, metavar="N", help="requests answered at once; default: 8"
    )
    parser.add_argument(
        "--cache-tokens", type=positive, metavar="N", help="tokens in the cache that requests share; default: --ctx"
    )
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer all rows and return the exit code.

    Raises:
        QuorumError: something the user can mend.
    """
    settings = generation_settings(args)
    added = Added(args.n, args.logprobs)
    text = _input_text(args.input)
    progress = ProgressLine()
    with interrupt_event() as cancel, contextlib.ExitStack() as resources:
        resources.callback(progress.clear)
        config = preparation(set_choice(args))(progress.show, cancel)
        lines = read_input(text, _settings_text(settings, added, config))
        output = Output(args.out, lines, begins_anew=args.restart)
        resources.callback(output.close)
        left = [line for line in lines if line.number not in output.done]
        if not left:
            print(f"all {len(lines)} rows are in {args.out} already", file=sys.stderr)
            return 0
        loaded = LoadedSet.load(config, progress.show, cancel)
        resources.callback(loaded.close)
        pool = Pool(loaded, PoolSettings(args.parallel, _most_waiting(args), args.cache_tokens))
        resources.callback(pool.close)
        batch = Batch(pool, Lent(loaded, Recollection()), Defaults(settings), added)
        reading = _Reading(len(lines), len(output.done), progress)
        for row in batch.rows(iter(left), cancel.is_set):
            output.add(row)
            reading.show(batch)
        loaded.save_learnt()
    print(reading.closing_line(batch, args.out), file=sys.stderr)
    if cancel.is_set():
        return EXIT_INTERRUPTED
    return EXIT_ROWS_FAILED if batch.failed else 0


class _Reading:
    """Tells how far the batch has come."""

    def __init__(self, total: int, done: int, progress: ProgressLine) -> None:
        self._total = total
        self._before = done
        self._done = done
        self._progress = progress
        self._started = time.monotonic()
        self._told = self._started

    def show(self, batch: Batch) -> None:
        """One more row is done."""
        self._done += 1
        now = time.monotonic()
        elapsed_s = now - self._started
        left_s = round(elapsed_s / (self._done - self._before) * (self._total - self._done))
        text = f"{self._count(batch)}, {batch.tokens / elapsed_s:.0f} tokens/s, {left_s // 60}:{left_s % 60:02d} left"
        self._progress.show(text, self._done / self._total)
        if not sys.stderr.isatty() and now - self._told >= LINE_EVERY_S:
            self._told = now
            print(text, file=sys.stderr, flush=True)

    def closing_line(self, batch: Batch, path: Path) -> str:
        elapsed_s = time.monotonic() - self._started
        rest = "" if self._done == self._total else "; run it again to go on"
        return f"{self._count(batch)} in {path}, {batch.tokens} tokens in {elapsed_s:.0f} s{rest}"

    def _count(self, batch: Batch) -> str:
        failed = f", {batch.failed} of them with an error" if batch.failed else ""
        return f"{self._done} of {self._total} rows{failed}"


def _most_waiting(args: argparse.Namespace) -> int:
    """Enough that the pool never waits for rows, and a row's answers find room together."""
    parallel: int = args.parallel
    answers: int = args.n or 1
    return max(2 * parallel, answers, MOST_CHOICES)


def _settings_text(settings: GenerationSettings, added: Added, config: SetConfig) -> str:
    """What answers depend on besides their rows. How they are drafted is no part of it, as it changes no token."""
    size_bytes = config.target.stat().st_size
    acceptance = settings.speculation.acceptance.value
    model = (config.target.name, size_bytes, config.context_tokens)
    return repr((*model, settings.sampling, settings.max_tokens, acceptance, added))


def _input_text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read {name}: {error}") from error
