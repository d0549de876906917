"""The peer is asked what it can do, started alone, and measured by its own times.

Against a stand-in; `QUORUM_LLAMA_SERVER` names a real llama-server for the test that needs one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.bench.peer import GRID, Help, Peer, PeerServer, PeerSetting, Reply, peer_row
from app.bench.prompts import Prompt
from app.bench.row import hash_text
from engine.config import ModelPlacement, Sampling, SetConfig
from engine.errors import EnvironmentProblem, SettingError
from engine.runtime.api import OPENMP_WAITING
from engine.runtime.template import Message
from tests.bench import fake_server

REAL_SERVER = os.environ.get("QUORUM_LLAMA_SERVER", "")
GREEDY = Sampling(temperature=0, seed=1)
PROMPT = Prompt("a", "chat", (Message("user", "Hi"),))

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is started by its first line")


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "notes.jsonl"
    monkeypatch.setenv("FAKE_SERVER_NOTES", str(path))
    return path


@pytest.fixture
def fake(tmp_path: Path, notes: Path) -> Path:
    """The stand-in as a program."""
    return fake_server.written_to(tmp_path)


def config(target: Path, gpu_layers: int = -1) -> SetConfig:
    return SetConfig(target, (), context_tokens=512, placement=ModelPlacement(threads=2, gpu_layers=gpu_layers))


def noted(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]


def test_help_is_read_flag_by_flag() -> None:
    known = Help(fake_server.HELP)
    assert known.flag(("--draft-max", "--spec-draft-n-max")) == "--spec-draft-n-max"
    assert known.flag(("--model-draft",)) == "--model-draft"
    assert known.flag(("--cache-ram",)) is None
    assert known.offers(("--spec-type",), "ngram-mod")
    assert not known.offers(("--spec-type",), "ngram")
    assert not known.offers(("--spec-type",), "draft-eagle3")
    assert known.default(("--cache-type-k",)) == "f16"


def test_a_grid_of_seven_with_a_draft_model_and_two_without(fake: Path) -> None:
    peer = Peer.probe(fake)
    assert peer.version == "version: 1.2.3 (build 7, commit abcdef0) built with a pencil"
    assert [setting.name for setting in peer.settings(has_draft_model=True)] == [
        "llama-server plain",
        *(f"llama-server draft-simple n-max {length}" for length in (2, 3, 5, 7)),
        "llama-server ngram-mod",
        "llama-server draft-simple,ngram-mod n-max 3",
    ]
    assert [setting.name for setting in peer.settings(has_draft_model=False)] == [
        "llama-server plain",
        "llama-server ngram-mod",
    ]


def test_what_an_older_build_lacks_is_left_out_and_named(tmp_path: Path) -> None:
    """Before there were kinds, a draft model alone meant the simple one."""
    text = "--port PORT\n-md,   --model-draft FNAME   draft model\n--draft-max, --draft-n N   tokens to draft\n"
    peer = Peer(tmp_path, "old", Help(text))
    assert peer.settings(has_draft_model=True) == GRID[:5]
    document = peer.document(peer.settings(True), config(tmp_path / "target.gguf"), tmp_path / "drafter.gguf")
    assert document["left_out"] == {
        "llama-server ngram-mod": "this build does not know ngram-mod",
        "llama-server draft-simple,ngram-mod n-max 3": "this build does not know draft-simple, ngram-mod",
    }
    arguments = peer.arguments(GRID[2], config(tmp_path / "target.gguf"), tmp_path / "drafter.gguf")
    assert arguments[-4:] == ["--model-draft", str(tmp_path / "drafter.gguf"), "--draft-max", "3"]


def test_arguments_of_a_setting(fake: Path, tmp_path: Path) -> None:
    peer = Peer.probe(fake)
    target, drafter = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    assert peer.arguments(PeerSetting(("draft-simple",), 5), config(target), drafter) == [
        *("--model", str(target), "--ctx-size", "512", "--threads", "2", "--parallel", "1"),
        *("--spec-type", "draft-simple", "--spec-draft-model", str(drafter), "--spec-draft-n-max", "5"),
    ]
    plain = peer.document((GRID[0],), config(target), drafter)
    assert plain["settings"] == {
        "llama-server plain": "--model target.gguf --ctx-size 512 --threads 2 --parallel 1",
    }
    assert plain["kv_type"] == "f16"


@pytest.mark.parametrize("script", ["exit 1", "echo --model is all I know"])
def test_what_is_no_llama_server_is_refused(tmp_path: Path, script: str) -> None:
    path = tmp_path / "other"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    with pytest.raises(SettingError, match="other"):
        Peer.probe(path)
    with pytest.raises(SettingError, match="does not run"):
        Peer.probe(tmp_path / "absent")


def test_one_answer(fake: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 ms for the four tokens after the first, the end token among them."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    peer = Peer.probe(fake)
    with PeerServer(peer, ["--model", "x"]) as server:
        assert server.wait_until_ready(threading.Event())
        reply = server.complete([5, 6, 7], GREEDY, 20, threading.Event())
        assert server.memory_bytes() > 0
    assert reply is not None
    (note,) = noted(notes)
    assert note["request"]["prompt"] == [5, 6, 7]
    assert note["request"]["n_predict"] == 20
    assert note["request"]["temperature"] == 0
    assert note["request"]["cache_prompt"] is False
    assert note["arguments"][:4] == ["--model", "x", "--host", "127.0.0.1"]
    row = peer_row(PROMPT, GRID[1], "plain", 2, reply, GREEDY, 0.7, 1000)
    assert (row.config, row.baseline, row.round) == ("llama-server draft-simple n-max 2", "plain", 2)
    assert (row.tokens, row.finish_reason) == (4, "stop")
    assert row.tokens_per_second == pytest.approx(10)
    assert (row.seconds, row.prefill_seconds, row.total_seconds) == (0.4, 0.25, 0.7)
    assert (row.verified, row.accepted) == (3, 2)
    assert row.distinct_4gram == 1.0
    assert row.text_sha256 == hash_text("Hello there.")
    sampled = peer_row(PROMPT, GRID[1], "plain", 2, reply, Sampling(temperature=0.8, seed=1), 0.7, 1000)
    assert sampled.text_sha256 == ""


def test_the_server_is_gone_when_the_block_ends(fake: Path) -> None:
    before = set(psutil.Process().children())
    with PeerServer(Peer.probe(fake), []) as server:
        assert server.wait_until_ready(threading.Event())
        (child,) = set(psutil.Process().children()) - before
    assert not child.is_running()


def test_our_threads_settings_do_not_reach_it(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPENMP_WAITING.items():
        monkeypatch.setenv(name, value)
    before = set(psutil.Process().children())
    with PeerServer(Peer.probe(fake), []) as server:
        assert server.wait_until_ready(threading.Event())
        (child,) = set(psutil.Process().children()) - before
        environment = child.environ()
    assert "FAKE_SERVER_NOTES" in environment
    assert not OPENMP_WAITING.keys() & environment.keys()


def test_a_server_that_ends_while_it_loads_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\necho --port\n[ $# -gt 1 ] && echo error: no such model && exit 1\nexit 0\n", "utf-8")
    path.chmod(0o755)
    with (
        PeerServer(Peer.probe(path), []) as server,
        pytest.raises(EnvironmentProblem, match="ended while it loaded: error: no such model"),
    ):
        server.wait_until_ready(threading.Event())


def test_a_server_that_fails_at_an_answer_is_quoted(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER_FAILS", "1")
    with PeerServer(Peer.probe(fake), []) as server:
        assert server.wait_until_ready(threading.Event())
        with pytest.raises(EnvironmentProblem, match=r"failed .*error: out of paper"):
            server.complete([1], GREEDY, 4, threading.Event())


def test_a_reply_without_times_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="lacks 'timings'"):
        Reply.from_document({"content": "Hello"})


def test_cancelled_before_it_is_ready(fake: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with PeerServer(Peer.probe(fake), []) as server:
        assert not server.wait_until_ready(cancel)


@pytest.mark.skipif(not REAL_SERVER, reason="QUORUM_LLAMA_SERVER names no llama-server")
def test_a_real_server_answers_in_every_setting(starter: Path, draft_models: dict[str, Path]) -> None:
    peer = Peer.probe(Path(REAL_SERVER))
    settings = peer.settings(has_draft_model=True)
    assert settings == GRID
    texts = set()
    for setting in (GRID[0], GRID[2], GRID[-1]):
        arguments = peer.arguments(setting, config(starter), draft_models["no-layer-14"])
        with PeerServer(peer, arguments) as server:
            assert server.wait_until_ready(threading.Event())
            reply = server.complete([1, 4093, 198, 19556, 2], GREEDY, 16, threading.Event())
        assert reply is not None
        row = peer_row(PROMPT, setting, "plain", 1, reply, GREEDY, 1.0, 0)
        assert 0 < row.tokens <= 16
        assert row.tokens_per_second > 0
        assert bool(row.verified) == setting.needs_draft_model
        texts.add(reply.text)
    assert len(texts) == 1
