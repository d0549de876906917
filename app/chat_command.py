"""`launch.py chat "prompt"`: one answer in the terminal, streamed, or as one JSON document."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import threading
from typing import Any

from app.choices import preparation
from app.options import add_sampling_options, generation_settings, set_choice
from app.terminal import EXIT_INTERRUPTED, ProgressLine, interrupt_event
from engine.config import Acceptance, GenerationSettings
from engine.errors import PromptError
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.setting import SAME_DISTRIBUTION
from engine.types import EmittedToken, Finished, FinishReason, Metrics, PrefillProgress, StepDone


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `chat` to the program's parser."""
    parser = subparsers.add_parser("chat", parents=[common], help="answer one prompt in the terminal")
    parser.add_argument("prompt", help="the message; - reads it from standard input")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the text")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: every token's log-probability, and the N most probable tokens with theirs (0 to 20)",
    )
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer and return the exit code.

    Raises:
        QuorumError: something the user can mend.
    """
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise PromptError("the prompt is empty; write something to answer")
    settings = dataclasses.replace(generation_settings(args), top_log_probabilities=args.logprobs)
    messages = [Message("user", prompt)]
    if args.system:
        messages.insert(0, Message("system", args.system))
    progress = ProgressLine()
    emitted: list[EmittedToken] = []
    with interrupt_event() as cancel, contextlib.ExitStack() as resources:
        try:
            config = preparation(set_choice(args))(progress.show, cancel)
            loaded = LoadedSet.load(config, progress.show, cancel)
        finally:
            progress.clear()
        resources.callback(loaded.close)
        session = Session(loaded)
        finished = _stream(session, messages, settings, cancel, progress, emitted, prints_text=not args.json)
        loaded.save_learnt()
    if args.json:
        result = {**document(finished), "exactness": exactness_document(loaded, settings)}
        if args.logprobs is not None:
            result["log_probabilities"] = [
                dataclasses.asdict(token.log_probabilities)
                for token in emitted[: len(finished.token_ids)]
                if token.log_probabilities is not None
            ]
        print(json.dumps(result))
    return EXIT_INTERRUPTED if finished.reason is FinishReason.CANCELLED else 0


def _stream(
    session: Session,
    messages: list[Message],
    settings: GenerationSettings,
    cancel: threading.Event,
    progress: ProgressLine,
    emitted: list[EmittedToken],
    *,
    prints_text: bool,
) -> Finished:
    printed = 0
    for event in session.chat(messages, settings, cancel):
        if isinstance(event, PrefillProgress):
            progress.show("Reading the prompt", event.done_tokens / event.total_tokens)
            continue
        progress.clear()
        if isinstance(event, StepDone):
            emitted.extend(event.tokens)
        text = event.text if isinstance(event, StepDone) else event.text[printed:]
        printed += len(text)
        if prints_text:
            sys.stdout.write(text)
            sys.stdout.flush()
        if isinstance(event, Finished):
            if prints_text:
                print()
                print(_closing_line(event), file=sys.stderr)
            return event
    raise AssertionError("an answer ends with a Finished event")


def _closing_line(finished: Finished) -> str:
    rate = finished.metrics.acceptance_rate
    acceptance = "" if rate is None else f", {rate:.0%} of drafted tokens accepted"
    return (
        f"[{finished.reason.value}] {finished.metrics.emitted} tokens, "
        f"{finished.timings.tokens_per_second:.1f} tokens/s, {finished.state.reason}{acceptance}"
    )


def document(finished: Finished) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "text": finished.text,
        "token_ids": list(finished.token_ids),
        "finish_reason": finished.reason.value,
        "seed": finished.seed,
        "timings": dataclasses.asdict(finished.timings),
        "metrics": metrics_document(finished.metrics),
        "speculation": dataclasses.asdict(finished.state),
    }


def exactness_document(loaded: LoadedSet, settings: GenerationSettings) -> dict[str, Any]:
    """How exact the answer is, as plain data."""
    exactness = loaded.setting.document()
    if settings.speculation.acceptance is Acceptance.RESIDUAL and settings.sampling.can_be_drawn:
        exactness["badge"] = SAME_DISTRIBUTION
    return exactness


def metrics_document(metrics: Metrics) -> dict[str, Any]:
    """Counters and the rates derived from them, as plain data."""
    return {
        **dataclasses.asdict(metrics),
        "rejected": metrics.rejected,
        "emitted": metrics.emitted,
        "acceptance_rate": metrics.acceptance_rate,
        "mean_accepted_length": metrics.mean_accepted_length,
        "mean_agreement": metrics.mean_agreement,
    }
