"""llama-server as a contestant: the same prompts and files, under a small grid of its own settings.

Flags differ from release to release, so they are taken from the binary's own `--help`; a setting the binary does not
know is left out and named. The server runs alone, on the loopback interface, and keeps its own times: its decoding
begins after the first token, which comes with the prompt, and its speed counts the tokens after it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from app.bench.prompts import Prompt
from app.bench.row import Row, distinct_share, hash_text
from engine.config import Sampling, SetConfig
from engine.errors import EnvironmentProblem, SettingError
from engine.runtime.api import OPENMP_WAITING

PEER_NAME = "llama-server"
START_SECONDS = 300.0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
SPEC_TYPE = ("--spec-type",)
DRAFT_MODEL = ("--spec-draft-model", "--model-draft", "-md")
DRAFT_LENGTH = ("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft")
CACHE_TYPE = ("--cache-type-k",)
DRAFT_CACHE_TYPE = ("--spec-draft-type-k", "--cache-type-k-draft")


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """One way to run the server."""

    kinds: tuple[str, ...] = ()
    """Values of its `--spec-type`; none for plain decoding."""
    length: int | None = None
    """Most tokens its draft model drafts; None leaves the server's own default."""

    @property
    def name(self) -> str:
        length = "" if self.length is None else f" n-max {self.length}"
        return f"{PEER_NAME} {','.join(self.kinds) or 'plain'}{length}"

    @property
    def needs_draft_model(self) -> bool:
        return any(kind.startswith("draft-") for kind in self.kinds)


GRID = (
    PeerSetting(),
    *(PeerSetting(("draft-simple",), length) for length in (2, 3, 5, 7)),
    PeerSetting(("ngram-mod",)),
    PeerSetting(("draft-simple", "ngram-mod"), 3),
)
"""Its own default for the draft model's length is 3, and is named so that a build with another one is no other peer."""


class Help:
    """What a binary's `--help` says about its flags."""

    def __init__(self, text: str) -> None:
        self._blocks: dict[str, str] = {}
        block = ""
        names: list[str] = []
        for line in [*text.splitlines(), "-"]:
            if line.startswith("-"):
                self._blocks.update(dict.fromkeys(names, block))
                spelled = re.match(r"(--?[\w-]+,\s*)*--?[\w-]+", line)
                names = re.split(r",\s*", spelled[0]) if spelled else []
                block = ""
            block += line + "\n"

    def flag(self, names: Sequence[str]) -> str | None:
        """The first of the names that the binary takes."""
        return next((name for name in names if name in self._blocks and "removed" not in self._blocks[name]), None)

    def offers(self, names: Sequence[str], value: str) -> bool:
        """Whether the flag lists this value."""
        flag = self.flag(names)
        return flag is not None and re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", self._blocks[flag]) is not None

    def default(self, names: Sequence[str]) -> str:
        """The flag's default, as the help names it."""
        flag = self.flag(names)
        found = re.search(r"default: ([\w.-]+)", self._blocks[flag]) if flag else None
        return found[1] if found else "unknown"


@dataclass(frozen=True, slots=True)
class Peer:
    """A llama-server binary and what it can do."""

    path: Path
    version: str
    help: Help

    @classmethod
    def probe(cls, path: Path) -> Peer:
        """Ask the binary.

        Raises:
            SettingError: there is no such program, or it does not run.
        """
        try:
            version = _output(path, "--version")
            text = _output(path, "--help")
        except (OSError, subprocess.SubprocessError) as error:
            raise SettingError(f"{path} does not run as a llama-server: {error}") from error
        if "--port" not in text:
            raise SettingError(f"{path} is no llama-server: its --help knows no --port")
        return cls(path, " ".join(version.split()), Help(text))

    def settings(self, has_draft_model: bool) -> tuple[PeerSetting, ...]:
        """The settings of the grid that this binary, with these files, can run."""
        return tuple(setting for setting in GRID if not self.obstacle(setting, has_draft_model))

    def obstacle(self, setting: PeerSetting, has_draft_model: bool) -> str:
        """Why a setting cannot be run; empty when it can."""
        if setting.needs_draft_model and not has_draft_model:
            return "no draft model is among the drafters"
        if setting.needs_draft_model and self.help.flag(DRAFT_MODEL) is None:
            return "this build takes no draft model"
        if setting.length is not None and self.help.flag(DRAFT_LENGTH) is None:
            return "this build has no flag for the draft length"
        if setting.kinds == ("draft-simple",) and self.help.flag(SPEC_TYPE) is None:
            return ""  # before there were kinds, a draft model alone meant this one
        missing = [kind for kind in setting.kinds if not self.help.offers(SPEC_TYPE, kind)]
        return f"this build does not know {', '.join(missing)}" if missing else ""

    def arguments(
        self, setting: PeerSetting, config: SetConfig, draft_model: Path | None, at_once: int = 1
    ) -> list[str]:
        """The command line of a setting, without address and port.

        Args:
            at_once: Requests that it is to answer together; they share the context.
        """
        arguments = ["--model", str(config.target)]
        wanted: list[tuple[tuple[str, ...], str | None]] = [
            (("--ctx-size", "-c"), str(config.context_tokens)),
            (("--threads", "-t"), str(config.placement.threads)),
            (("--parallel", "-np"), str(at_once)),
            (("--cache-ram", "-cram"), "0"),
        ]
        if config.placement.gpu_layers >= 0:
            wanted.append((("--n-gpu-layers", "--gpu-layers", "-ngl"), str(config.placement.gpu_layers)))
        if setting.kinds:
            wanted.append((SPEC_TYPE, ",".join(setting.kinds)))
        if setting.needs_draft_model:
            wanted.append((DRAFT_MODEL, str(draft_model)))
        if setting.length is not None:
            wanted.append((DRAFT_LENGTH, str(setting.length)))
        for names, value in wanted:
            flag = self.help.flag(names)
            if flag is not None and value is not None:
                arguments += [flag, value]
        return arguments

    def document(self, settings: Sequence[PeerSetting], config: SetConfig, draft_model: Path | None) -> dict[str, Any]:
        """Plain data for the report."""
        has_draft_model = draft_model is not None
        return {
            "version": self.version,
            "kv_type": self.help.default(CACHE_TYPE),
            "draft_kv_type": self.help.default(DRAFT_CACHE_TYPE),
            "draft_model": draft_model.stem if draft_model else None,
            "settings": {setting.name: self._flags(setting, config, draft_model) for setting in settings},
            "left_out": {
                setting.name: obstacle for setting in GRID if (obstacle := self.obstacle(setting, has_draft_model))
            },
        }

    def _flags(self, setting: PeerSetting, config: SetConfig, draft_model: Path | None) -> str:
        """The command line with file names instead of paths."""
        return " ".join(
            Path(argument).name if os.sep in argument else argument
            for argument in self.arguments(setting, config, draft_model)
        )


def _output(path: Path, argument: str) -> str:
    finished = subprocess.run(
        [path, argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True, text=True
    )
    return finished.stdout


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer to one completion request."""

    text: str
    token_ids: tuple[int, ...]
    """Empty where it does not tell them."""
    made_tokens: int
    """All that it decoded; a token that ends the answer is one of them."""
    has_ended: bool
    """Whether the model ended the answer, and not its limit."""
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    """After the first token, which comes with the prompt."""
    drafted: int
    accepted: int

    @property
    def answer_tokens(self) -> int:
        return self.made_tokens - self.has_ended

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Reply:
        """From the server's JSON.

        Raises:
            EnvironmentProblem: it lacks what every row needs.
        """
        try:
            timings = document["timings"]
            return cls(
                text=str(document["content"]),
                token_ids=tuple(document.get("tokens", ())),
                made_tokens=int(timings["predicted_n"]),
                has_ended=document.get("stop_type") == "eos",
                prompt_tokens=int(timings.get("prompt_n", 0)),
                prefill_seconds=float(timings["prompt_ms"]) / 1e3,
                decode_seconds=float(timings["predicted_ms"]) / 1e3,
                drafted=int(timings.get("draft_n", 0)),
                accepted=int(timings.get("draft_n_accepted", 0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EnvironmentProblem(
                f"the reply of {PEER_NAME} lacks {error}; it is too old to be compared with"
            ) from error


class PeerServer:
    """A running server; a context manager that ends it."""

    def __init__(self, peer: Peer, arguments: Sequence[str], at_once: int = 1) -> None:
        """Args:
        at_once: Requests that will be under way together at most.
        """
        self._peer = peer
        self._arguments = arguments
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        # The machine's proxy settings are not meant for its own loopback interface.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._executor = ThreadPoolExecutor(max_workers=at_once)

    def __enter__(self) -> PeerServer:
        port = _free_port()
        self._address = f"http://127.0.0.1:{port}"
        # What we set for our own OpenMP threads must not slow the peer's down.
        environment = {name: value for name, value in os.environ.items() if name not in OPENMP_WAITING}
        self._process = subprocess.Popen(
            [self._peer.path, *self._arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C is for us to act upon: the server would die in the middle of an answer.
            start_new_session=sys.platform != "win32",
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._executor.shutdown()
        self._log.close()

    def stop(self) -> None:
        """End the server; a request that waits for it fails."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def wait_until_ready(self, cancel: threading.Event) -> bool:
        """False when cancelled.

        Raises:
            EnvironmentProblem: the server ended, or is not ready in time; with its last words.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not cancel.wait(POLL_SECONDS):
            if self._process.poll() is not None:
                raise EnvironmentProblem(f"{self._peer.path} ended while it loaded: {self._last_words()}")
            if time.monotonic() > deadline:
                raise EnvironmentProblem(f"{self._peer.path} was not ready after {START_SECONDS:.0f} seconds")
            try:
                with self._opener.open(f"{self._address}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return True
            except OSError:
                continue
        return False

    def complete(
        self, tokens: Sequence[int], sampling: Sampling, max_tokens: int, cancel: threading.Event
    ) -> Reply | None:
        """The server's reply to a completion request; None when cancelled.

        Raises:
            EnvironmentProblem: the server failed, with its last words; or is too old to tell its times.
        """
        replies = self.complete_all([tokens], sampling, max_tokens, cancel)
        return None if replies is None else replies[0]

    def complete_all(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int, cancel: threading.Event
    ) -> list[Reply] | None:
        """Its replies to several, asked for together; None when cancelled.

        Raises:
            EnvironmentProblem: as for `complete`.
        """
        futures: list[Future[Reply]] = [
            self._executor.submit(self._post, json.dumps(_request(tokens, sampling, max_tokens)).encode())
            for tokens in prompts
        ]
        while wait(futures, POLL_SECONDS).not_done:
            if cancel.is_set():
                self.stop()
                return None
        try:
            return [future.result() for future in futures]
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(f"{self._peer.path} failed ({error}): {self._last_words()}") from error

    def _post(self, body: bytes) -> Reply:
        request = urllib.request.Request(f"{self._address}/completion", body, {"Content-Type": "application/json"})
        with self._opener.open(request) as reply:
            return Reply.from_document(json.load(reply))

    def memory_bytes(self) -> int:
        assert self._process is not None
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["it said nothing"])[-1]


def _request(tokens: Sequence[int], sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(tokens),
        "n_predict": max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "cache_prompt": False,
        "return_tokens": True,
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def peer_row(
    prompt: Prompt,
    setting: PeerSetting,
    baseline: str,
    round_number: int,
    reply: Reply,
    sampling: Sampling,
    total_seconds: float,
    memory_bytes: int,
) -> Row:
    """The row of an answer by the server."""
    seconds = reply.decode_seconds
    return Row(
        prompt_id=prompt.id,
        category=prompt.category,
        config=setting.name,
        baseline=baseline,
        round=round_number,
        tokens=reply.answer_tokens,
        seconds=seconds,
        tokens_per_second=(reply.made_tokens - 1) / seconds if seconds else 0.0,
        distinct_4gram=distinct_share(reply.token_ids),
        finish_reason="stop" if reply.has_ended else "length",
        answer_sha256="",
        text_sha256=hash_text(reply.text) if sampling.temperature == 0 else "",
        prompt_tokens=reply.prompt_tokens,
        prefill_seconds=reply.prefill_seconds,
        time_to_first_token_seconds=reply.prefill_seconds,
        decode_seconds=seconds,
        total_seconds=total_seconds,
        peak_memory_bytes=memory_bytes,
        drafted=reply.drafted,
        verified=reply.drafted,
        accepted=reply.accepted,
    )
