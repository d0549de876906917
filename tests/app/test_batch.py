"""Batches of a tiny random model, run as a user runs them: stopped, killed, gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.batch import Output, read_input
from engine.errors import SettingError
from scripts.serving import ROOT
from tests.engine.making import write_tiny_llama

PATIENCE_S = 240.0
ROWS = 300


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


class Runner:
    """Starts `launch.py batch` with a home of its own."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.out = folder / "out" / "answers.jsonl"
        self._tiny = tiny
        self._environment = os.environ | {"QUORUM_HOME": str(folder / "home")}

    def write(self, rows: Sequence[object]) -> None:
        self.input.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "launch.py", "batch", str(self.input), "--out", str(self.out)]
        fixed = ["--target", str(self._tiny), "--threads", "1", "--ctx", "512"]
        return subprocess.Popen(
            [*command, *fixed, *options],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in said, said
        return process.returncode, said

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def wait_for_rows(self, count: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < count:
            assert process.poll() is None, "the batch ended before it was stopped"
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.fixture
def runner(tiny: Path, tmp_path: Path) -> Runner:
    return Runner(tiny, tmp_path)


def said(row: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in row["choices"]]


def many_rows(count: int = ROWS) -> list[dict[str, Any]]:
    return [
        {"id": f"row-{number}", "messages": [{"role": "user", "content": f"q{number % 50}"}], "seed": number}
        for number in range(count)
    ]


def test_rows_are_answered_each_in_its_own_way(runner: Runner) -> None:
    question = [{"role": "user", "content": "hello"}]
    runner.write(
        [
            {"id": "chat", "messages": question},
            "",
            {"prompt": "once", "max_tokens": 3, "n": 1, "logprobs": 1},
            {"id": 7, "messages": question, "temperature": 9},
            "{not json",
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": question}},
            {"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
            {"id": "neither"},
            {"id": "long", "messages": [{"role": "user", "content": "x" * 900}]},
        ]
    )
    code, told = runner.run("--n", "2", "--logprobs", "3", "--max-tokens", "8", "--temperature", "0.9", "--seed", "5")
    assert code == 1
    assert "8 of 8 rows, 5 of them with an error" in told
    rows = {row["row"]: row for row in runner.rows()}
    assert sorted(rows) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert rows[1]["id"] == "chat"
    assert len(set(said(rows[1]))) == 2
    assert len(rows[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    assert rows[1]["usage"]["completion_tokens"] <= 16
    assert len(rows[3]["choices"][0]["logprobs"]["tokens"]) <= 3
    assert "temperature must be" in rows[4]["error"]["message"]
    assert rows[4]["id"] == 7
    assert "no JSON" in rows[5]["error"]["message"]
    assert rows[6]["custom_id"] == "a"
    assert rows[6]["response"]["body"]["choices"][0]["message"] == rows[1]["choices"][0]["message"]
    assert rows[7]["response"]["status_code"] == 400
    assert "url must be" in rows[7]["error"]["message"]
    assert "neither messages nor prompt" in rows[8]["error"]["message"]
    assert "512" in rows[9]["error"]["message"]


def test_a_killed_batch_goes_on_without_losing_or_doubling_a_row(runner: Runner) -> None:
    options = ("--max-tokens", "60", "--temperature", "0.8")
    runner.write(many_rows())
    process = runner.start(*options)
    runner.wait_for_rows(5, process)
    process.kill()
    process.communicate()
    survived = runner.rows()[:5]
    with runner.out.open("ab") as file:
        file.write(b'{"row": 299, "request": "torn')
    process = runner.start(*options)
    runner.wait_for_rows(20, process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "run it again to go on" in told
    kept = len(runner.rows())
    code, told = runner.run(*options)
    assert code == 0
    rows = runner.rows()
    assert rows[:5] == survived
    assert 20 <= kept < ROWS
    assert sorted(row["row"] for row in rows) == list(range(1, ROWS + 1))
    assert {row["id"] for row in rows} == {row["id"] for row in many_rows()}
    code, told = runner.run(*options)
    assert code == 0
    assert "already" in told
    assert runner.rows() == rows
    answers = {row["row"]: said(row) for row in rows}
    runner.out = runner.out.with_name("alone.jsonl")
    assert runner.run(*options, "--parallel", "1")[0] == 0
    assert {row["row"]: said(row) for row in runner.rows()} == answers


def test_answers_to_something_else_are_not_added_to(runner: Runner) -> None:
    runner.write(many_rows(3))
    assert runner.run("--max-tokens", "4")[0] == 0
    before = runner.out.read_bytes()
    for change in ("settings", "input"):
        options = ["--max-tokens", "5" if change == "settings" else "4"]
        runner.write(many_rows(3) if change == "settings" else list(reversed(many_rows(3))))
        code, told = runner.run(*options)
        assert code == 2
        assert "--restart" in told
        assert runner.out.read_bytes() == before
    runner.write(many_rows(5))
    assert runner.run("--max-tokens", "4")[0] == 0, "rows were added at the end"
    assert runner.out.read_bytes().startswith(before)
    assert len(runner.rows()) == 5
    assert runner.run("--max-tokens", "2", "--restart")[0] == 0
    assert [row["usage"]["completion_tokens"] <= 2 for row in runner.rows()] == [True] * 5


def test_what_is_wrong_with_the_whole_is_told_before_anything_is_loaded(runner: Runner) -> None:
    code, told = runner.run()
    assert (code, "cannot read" in told) == (2, True)
    runner.write(["", ""])
    code, told = runner.run()
    assert (code, "no request in the input" in told) == (2, True)
    runner.write(many_rows(1))
    runner.out.parent.write_text("a file where the folder should be")
    code, told = runner.run()
    assert (code, "cannot write" in told) == (2, True)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    lines = read_input('{"prompt": "a"}\n', "settings")
    first = Output(tmp_path / "out.jsonl", lines, begins_anew=False)
    with pytest.raises(SettingError, match="another batch"):
        Output(tmp_path / "out.jsonl", lines, begins_anew=False)
    first.add({"row": 1, "request": lines[0].fingerprint})
    first.close()
    second = Output(tmp_path / "out.jsonl", lines, begins_anew=False)
    assert second.done == {1}
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
