"""`launch.py` as users run it: a process, its two streams and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.exactness import Way
from tests.engine.making import ARCHITECTURE, TOKENS, patched_copy

ROOT = Path(__file__).parent.parent
PROMPT = "Name three fruits."
PATIENCE_S = 240
QUICK = ("--drafters", "ngram,suffix", "--threads", "1", "--ctx", "1024")


@pytest.fixture(scope="module")
def home(starter_home: Path) -> Path:
    return starter_home


def environment(home: Path, **more: str) -> dict[str, str]:
    return os.environ | {"QUORUM_HOME": str(home), "HOME": str(home), "PYTHONUNBUFFERED": "1"} | more


def launch(
    home: Path, *arguments: object, text: str | bytes | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    given = text.encode() if isinstance(text, str) else text
    done = subprocess.run(
        [sys.executable, "launch.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment(home, **more),
        input=given,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def chat(home: Path, *arguments: object, prompt: str = PROMPT) -> subprocess.CompletedProcess[str]:
    return launch(home, "chat", prompt, *QUICK, *arguments)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON document on standard output."""
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# Answers


def test_the_document_has_every_field_and_its_counters_add_up(home: Path) -> None:
    result = document(chat(home, "--json", "--max-tokens", 24, "--seed", 3))
    assert set(result) >= {"text", "token_ids", "finish_reason", "seed", "timings", "metrics"}
    assert set(result["timings"]) >= {"prefill_ms", "decode_ms", "time_to_first_token_ms", "tokens_per_second"}
    assert result["seed"] == 3
    assert result["finish_reason"] in ("stop", "length")
    metrics = result["metrics"]
    assert metrics["drafted"] == metrics["verified"] + metrics["trimmed"] + metrics["unused_look_ahead"]
    assert metrics["verified"] == metrics["accepted"] + metrics["rejected"]
    assert metrics["emitted"] == sum(metrics[name] for name in ("accepted", "corrected", "bonus", "plain"))
    assert metrics["emitted"] == len(result["token_ids"])
    assert [drafter["name"] for drafter in metrics["drafters"]] == ["ngram", "suffix"]
    assert {"acceptance_rate", "mean_accepted_length", "mean_agreement", "look_ahead_hits"} <= set(metrics)


def test_the_text_is_streamed_to_standard_output_and_nothing_else_is(home: Path) -> None:
    given = ("--max-tokens", 12, "--temperature", 0)
    text = chat(home, *given)
    assert text.returncode == 0
    assert text.stdout == document(chat(home, *given, "--json"))["text"] + "\n"
    assert text.stderr.startswith("[length] 12 tokens, ")
    assert text.stderr.count("\n") == 1


def test_one_seed_gives_the_same_tokens_whatever_the_policy(home: Path) -> None:
    given = ("--json", "--max-tokens", 24, "--temperature", 0.8, "--seed", 7)
    ids = [
        document(chat(home, *given, "--policy", policy))["token_ids"] for policy in ("off", "plain", "auto", "fixed:3")
    ]
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert document(chat(home, *given[:-1], 8))["token_ids"] != ids[0]


def test_a_seed_that_was_drawn_is_told(home: Path) -> None:
    given = ("--json", "--max-tokens", 16, "--temperature", 1.2)
    first = document(chat(home, *given))
    again = document(chat(home, *given, "--seed", first["seed"], "--policy", "off"))
    assert again["token_ids"] == first["token_ids"]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_the_limit_of_tokens_is_exact(home: Path, max_tokens: int) -> None:
    result = document(chat(home, "--json", "--max-tokens", max_tokens))
    assert (len(result["token_ids"]), result["finish_reason"]) == (max_tokens, "length")


def test_a_full_context_is_a_reason_to_end_not_an_error(home: Path) -> None:
    small = launch(home, "chat", PROMPT, "--json", "--drafters", "ngram", "--ctx", 256, "--threads", 1)
    result = document(small)
    if result["finish_reason"] == "context":
        assert result["metrics"]["prompt_tokens"] + len(result["token_ids"]) == 256
    else:
        assert result["finish_reason"] == "stop"


def test_a_system_prompt_and_standard_input_are_heard(home: Path) -> None:
    given = ("--json", "--max-tokens", 12, "--temperature", 0, *QUICK)
    from_input = document(launch(home, "chat", "-", *given, text=PROMPT))
    assert from_input["token_ids"] == document(launch(home, "chat", PROMPT, *given))["token_ids"]
    with_system = document(launch(home, "chat", PROMPT, *given, "--system", "You are a pirate. Answer in one word."))
    assert with_system["metrics"]["prompt_tokens"] != from_input["metrics"]["prompt_tokens"]


def test_options_are_understood_before_the_command_too(home: Path) -> None:
    done = launch(home, *QUICK, "--policy", "off", "chat", PROMPT, "--json", "--max-tokens", 4)
    assert document(done)["speculation"]["reason"] == "off: the policy is plain decoding"


def test_what_cannot_be_read_or_shown_is_no_crash(home: Path) -> None:
    broken = launch(home, "chat", "-", *QUICK, "--max-tokens", 2, text=b"caf\xe9 \xff?")
    assert broken.returncode == 0
    narrow = launch(home, "chat", "é", *QUICK, "--max-tokens", 40, "--seed", 1, PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0, narrow.stderr


# What goes wrong


@pytest.fixture(scope="module")
def bad(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    names = ("missing", "directory", "empty", "not-gguf", "truncated", "unknown", "other-vocabulary")
    files = {name: folder / f"{name}.gguf" for name in names}
    files["directory"].mkdir()
    files["empty"].touch()
    files["not-gguf"].write_bytes(b"This is a letter, not a model." * 40)
    files["truncated"].write_bytes(starter.read_bytes()[:20_000_000])
    patched_copy(starter, files["unknown"], ARCHITECTURE, "lemon")
    patched_copy(starter, files["other-vocabulary"], TOKENS, "qzxwqzxw", item=1007)
    return files


LONG_PROMPT = "word " * 300
BAD_INPUT: dict[str, tuple[Sequence[str], str]] = {
    "empty prompt": ((" ",), "prompt is empty"),
    "prompt longer than the context": (
        (LONG_PROMPT, "--ctx", "256", "--drafters", "ngram"),
        r"prompt has 3\d\d tokens and the context holds 256",
    ),
    "missing target": ((PROMPT, "--target", "{missing}"), "missing"),
    "directory": ((PROMPT, "--target", "{directory}"), "is a (directory|folder)"),
    "empty file": ((PROMPT, "--target", "{empty}"), "is empty"),
    "no GGUF file": ((PROMPT, "--target", "{not-gguf}"), "not a GGUF file"),
    "truncated file": ((PROMPT, "--target", "{truncated}"), "truncated.*(incomplete|damaged|cut short|shorter)"),
    "unknown architecture": ((PROMPT, "--target", "{unknown}"), "lemon"),
    "drafter of another vocabulary": ((PROMPT, "--drafters", "{other-vocabulary}"), "token 1007"),
    "missing drafter": ((PROMPT, "--drafters", "ngram,{missing}"), "missing"),
    "drafter of no name": ((PROMPT, "--drafters", "quick"), "quick"),
    "drafter named twice": ((PROMPT, "--drafters", "ngram,ngram"), "named twice"),
    "truncated drafter": ((PROMPT, "--drafters", "{truncated}"), "truncated"),
    "too little memory": ((PROMPT, "--ctx", "2000000000", "--drafters", ""), r"GB.*GB"),
    "context too small": ((PROMPT, "--ctx", "10"), "64"),
    "no threads": ((PROMPT, "--threads", "0"), "threads must be"),
    "unknown policy": ((PROMPT, "--policy", "fastest"), "unknown policy"),
    "length out of range": ((PROMPT, "--policy", "fixed:32"), "from 1 to 31"),
    "temperature out of range": ((PROMPT, "--temperature", "9"), "temperature must be"),
    "seed out of range": ((PROMPT, "--seed", "-1"), "seed must be"),
    "no tokens": ((PROMPT, "--max-tokens", "0"), "max tokens must be"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line_and_exit_code_2(home: Path, bad: dict[str, Path], case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = launch(home, "chat", *(argument.format(**bad) for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert re.search(says, done.stderr), done.stderr


def test_a_wrong_call_shows_the_usage(home: Path) -> None:
    for arguments in (("chat",), ("chat", PROMPT, "--max-tokens", "many"), ("sing",), ("chat", PROMPT, "--vote", "x")):
        done = launch(home, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: launch.py")
        assert "Traceback" not in done.stderr


# Stopping


@pytest.fixture
def running(home: Path) -> Iterator[Any]:
    """Starts a chat that would go on for long."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "launch.py", "chat", "Write a very long story about the sea.", *QUICK, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(home), text=True, **streams)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another Ctrl-C")
class TestControlC:
    def test_the_answer_so_far_is_kept_and_the_code_is_130(self, running: Any) -> None:
        process = running("--temperature", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        beginning = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert len(beginning) == 10
        assert rest.endswith("\n")
        assert errors.startswith("[cancelled] ")
        assert "Traceback" not in errors

    def test_a_document_is_printed_all_the_same(self, home: Path, running: Any) -> None:
        process = running("--json", "--temperature", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._wait_until_it_computes(process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        assert json.loads(output)["finish_reason"] == "cancelled"
        assert "Traceback" not in errors

    @staticmethod
    def _wait_until_it_computes(process: subprocess.Popen[str]) -> None:
        """Nothing is printed before the end, so the use of the processor tells that the answer has begun."""
        observed = psutil.Process(process.pid)
        while observed.cpu_times().user < 6:
            assert process.poll() is None, "it ended before it could be stopped"
            time.sleep(0.1)

    def test_doctor_stops_too(self, home: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "launch.py", "doctor", "--threads", "1"],
            cwd=ROOT,
            env=environment(home),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._wait_until_it_computes(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (130, "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows closes pipes otherwise")
def test_a_reader_that_has_heard_enough_is_no_error(running: Any) -> None:
    process = running("--max-tokens", "200", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(PATIENCE_S) == 0
    assert errors == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_on_a_terminal_progress_is_erased_before_the_text_and_never_after(running: Any) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = running("--max-tokens", "30", "--temperature", "0", stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    output = b""
    try:
        while piece := os.read(ours, 4096):
            output += piece
    except OSError:  # how Linux tells that the other end was closed
        pass
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    progress, _, text = output.decode().rpartition("\r\x1b[K")
    assert "Loading SmolLM2" in progress
    lines = text.split("\r\n")
    assert lines[-2].startswith("[length] 30 tokens")
    assert len("".join(lines[:-2])) > 60


# Doctor


def test_doctor_tells_what_is_here_and_how_exact_it_is(home: Path) -> None:
    report = document(launch(home, "doctor", "--json", "--threads", 1))
    assert report["llama_cpp_python"]
    assert report["devices"]
    assert report["default_threads"] >= 1
    assert report["memory_total_bytes"] > report["memory_free_bytes"] > 0
    model = report["model"]
    assert model["kv_type"] == "BF16_F16" or report["gpu_offload"]
    exactness = model["exactness"]
    assert {finding["first_position"] for finding in exactness["findings"]} >= {64, 520}
    assert {finding["way"] for finding in exactness["findings"]} == {way.value for way in Way} - {
        Way.THREADS.value,
        Way.CHANGING_THREADS.value,
    }, "one thread has no others"
    assert exactness["is_exact"] is all(
        finding["equal_rows"] == finding["compared_rows"] for finding in exactness["findings"]
    )
    if not report["gpu_offload"]:
        assert exactness["is_exact"]


def test_doctor_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    done = launch(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    assert "launch.py models fetch" in done.stdout
    assert "model" not in document(launch(tmp_path, "doctor", "--json"))


def test_doctor_refuses_a_bad_target_like_chat_does(home: Path, bad: dict[str, Path]) -> None:
    done = launch(home, "doctor", "--target", bad["empty"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
