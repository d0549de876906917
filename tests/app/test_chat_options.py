"""What `launch.py chat` can be told about the form of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import main

QUICK = ["chat", "Is water wet?", "--drafters", "ngram", "--threads", "1", "--ctx", "512", "--temperature", "0"]


@pytest.fixture(autouse=True)
def _use_home(starter_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORUM_HOME", str(starter_home))


def write(folder: Path, text: str) -> str:
    path = folder / "form"
    path.write_text(text, encoding="utf-8")
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*QUICK, "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_an_answer_follows_a_grammar_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, "--grammar", write(tmp_path, 'root ::= "It is " ("wet" | "dry") "."'))
    assert result["text"] in ("It is wet.", "It is dry.")
    assert result["finish_reason"] == "stop"


def test_an_answer_follows_a_json_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    result = document(capsys, "--json-schema", write(tmp_path, json.dumps(schema)), "--max-tokens", "24")
    assert isinstance(json.loads(result["text"])["wet"], bool)


def test_a_forbidden_token_is_not_said_and_log_probabilities_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    free = document(capsys, "--max-tokens", "4", "--logprobs", "2")
    banned = free["token_ids"][0]
    told = free["log_probabilities"]
    assert len(told) == len(free["token_ids"])
    assert told[0]["top"][0] == [banned, told[0]["chosen"]]
    biased = document(capsys, "--max-tokens", "4", "--logit-bias", f"{banned}=-inf", "--logprobs", "2")
    assert banned not in biased["token_ids"]
    assert biased["log_probabilities"][0]["top"] == told[0]["top"], "the target's own, before the bias"
    assert "log_probabilities" not in document(capsys, "--max-tokens", "1")


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--grammar", "root ::= (", "no GBNF grammar"),
        ("--grammar", " \n", "is empty"),
        ("--json-schema", "{", "no JSON"),
        ("--json-schema", '{"type": "colour"}', "cannot be turned into a grammar"),
    ],
)
def test_a_bad_form_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, text: str, message: str
) -> None:
    assert main([*QUICK, option, write(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_form_that_is_not_there_and_a_bias_that_is_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--grammar", "no/such/file"]) == 2
    assert "cannot read no/such/file" in capsys.readouterr().err
    assert main([*QUICK, "--logit-bias", "5=200"]) == 2
    assert "a logit bias must be from -100 to 100" in capsys.readouterr().err
    for bias in ("5", "word=1", "5=much"):
        with pytest.raises(SystemExit, match="2"):
            main([*QUICK, "--logit-bias", bias])
        assert "--logit-bias" in capsys.readouterr().err
