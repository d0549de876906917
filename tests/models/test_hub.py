"""The real hub client against a server on this machine that fails in every way a download can."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import EnvironmentProblem, ModelFileError, QuorumError, SettingError
from models import hub, transfer
from models.folders import models_folder
from models.hub import fetch, find, format_of, parse_reference
from models.identity import sha256_of
from models.library import list_models
from models.progress import Cancelled, Progress
from models.transfer import Patience
from tests.models.hub_server import (
    Answer,
    Hub,
    changed,
    cut_after,
    from_the_beginning,
    hub_server,
    longer_by,
    redirect,
    shorter_by,
    silence,
    slowly,
    status,
)
from tests.models.making import token_texts, write_vocabulary

REPOSITORY = "someone/Tiny-GGUF"
NAME = "Tiny-Q4_0.gguf"
EAGER = Patience(fruitless_attempts=3, first_wait_s=0.01, longest_wait_s=0.2, silence_s=1.0)


@pytest.fixture
def server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository of one model, and nobody logged in."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    content = write_vocabulary(tmp_path / "source.gguf", token_texts(300), filler_bytes=1_000_000).read_bytes()
    with hub_server() as running:
        running.repositories[REPOSITORY] = {NAME: content, "README.md": b"hello"}
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def destination() -> Path:
    return models_folder() / "someone" / "Tiny-GGUF" / NAME


def content_of(server: Hub) -> bytes:
    return server.repositories[REPOSITORY][NAME]


def assert_nothing_looks_whole() -> None:
    assert not destination().exists()
    assert list_models() == ()


def assert_whole(server: Hub) -> None:
    assert destination().read_bytes() == content_of(server)
    assert [path.name for path in destination().parent.iterdir()] == [NAME]
    (model,) = list_models()
    assert model.fault == ""


def test_a_model_is_fetched_once_and_its_hash_is_known(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[Progress] = []
    assert fetch(REPOSITORY, readings.append, patience=EAGER) == destination()
    assert_whole(server)
    assert readings[-1].done_bytes == readings[-1].total_bytes == len(content_of(server))
    assert readings[-1].bytes_per_second > 0
    assert readings[-1].seconds_left == 0
    assert fetch(f"{REPOSITORY}:{NAME}", patience=EAGER) == destination()
    assert server.starts == [0]
    monkeypatch.setattr("models.identity.hash_file", None)
    assert len(sha256_of(destination())) == 64


@pytest.mark.parametrize(
    ("answers", "starts"),
    [
        ([cut_after(300_000)], [0, 300_000]),
        ([cut_after(300_000), cut_after(0), cut_after(100_000)], [0, 300_000, 300_000, 400_000]),
        ([shorter_by(200_000)], None),
        ([status(503), status(500)], [0, 0, 0]),
        ([status(429, {"Retry-After": "0"}), status(408)], [0, 0, 0]),
        ([cut_after(300_000), status(416)], [0, 300_000, 0]),
        ([cut_after(300_000), from_the_beginning], [0, 300_000]),
        ([silence], [0, 0]),
    ],
    ids=["cut", "cut thrice", "short", "5xx", "429", "416", "range ignored", "silence"],
)
def test_a_passing_fault_is_overcome(server: Hub, answers: list[Answer], starts: list[int] | None) -> None:
    server.answers = answers
    fetch(REPOSITORY, patience=EAGER)
    assert_whole(server)
    assert starts is None or server.starts == starts


def test_a_wait_that_the_server_asks_for_is_kept(server: Hub) -> None:
    server.answers = [status(429, {"Retry-After": "1"})]
    began = time.monotonic()
    fetch(REPOSITORY, patience=Patience(first_wait_s=0.0, longest_wait_s=5.0))
    assert time.monotonic() - began >= 1
    assert_whole(server)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([cut_after(100_000), *[cut_after(0)] * 9], r"stopped arriving at 100,000 of [\d,]+ bytes"),
        ([status(503)] * 9, "the server answered 503"),
        ([status(429)] * 9, "the server answered 429"),
        ([changed], "arrived with the wrong contents"),
        ([longer_by(1)], "is longer than the"),
        ([status(401)], "hf auth login"),
        ([status(403)], "refused access"),
        ([status(403, {"X-Error-Code": "GatedRepo"})], "is gated: accept its terms at https://huggingface.co/someone/"),
        ([status(404, {"X-Error-Code": "EntryNotFound"})], "no longer has that file"),
        ([status(404)], r"\(404\)"),
    ],
    ids=["cut", "503", "429", "hash", "long", "401", "403", "gated", "missing", "404"],
)
def test_a_lasting_fault_is_explained_and_a_second_run_completes(
    server: Hub, answers: list[Answer], message: str
) -> None:
    server.answers = answers
    with pytest.raises(EnvironmentProblem, match=message):
        fetch(REPOSITORY, patience=EAGER)
    assert_nothing_looks_whole()
    server.answers = []
    fetch(REPOSITORY, patience=EAGER)
    assert_whole(server)


def test_a_second_run_goes_on_where_the_first_stopped(server: Hub) -> None:
    server.answers = [cut_after(300_000), *[status(503)] * 9]
    with pytest.raises(EnvironmentProblem):
        fetch(REPOSITORY, patience=EAGER)
    server.answers, server.requests = [], []
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts == [300_000]
    assert_whole(server)


def test_a_new_version_is_not_mixed_with_what_had_arrived_of_the_old(server: Hub) -> None:
    server.answers = [cut_after(300_000), *[status(503)] * 9]
    with pytest.raises(EnvironmentProblem):
        fetch(REPOSITORY, patience=EAGER)
    server.repositories[REPOSITORY][NAME] = content_of(server)[:-1] + b"!"
    server.answers, server.requests = [], []
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts == [0]
    assert_whole(server)


def test_the_listing_is_retried_and_its_refusals_are_explained(server: Hub) -> None:
    server.refusals = [status(503), status(429, {"Retry-After": "0"})]
    fetch(REPOSITORY, patience=EAGER)
    assert_whole(server)
    for refusal, message in [
        (status(401, {"X-Error-Code": "RepoNotFound"}), "no repository someone/Tiny-GGUF for you"),
        (status(403, {"X-Error-Code": "GatedRepo"}), "is gated"),
        (status(403), "refused access"),
    ]:
        server.refusals = [refusal]
        with pytest.raises(EnvironmentProblem, match=message):
            fetch(REPOSITORY, patience=EAGER)
    server.refusals = [status(429)] * 3
    with pytest.raises(EnvironmentProblem, match="too many requests"):
        fetch(REPOSITORY, patience=EAGER)
    server.refusals = [status(502)] * 3
    with pytest.raises(EnvironmentProblem, match=r"\(502\)"):
        fetch(REPOSITORY, patience=EAGER)
    with pytest.raises(EnvironmentProblem, match="no repository someone/Missing for you"):
        fetch("someone/Missing", patience=EAGER)


def test_an_unreachable_hub_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as gone:
        monkeypatch.setenv("HF_ENDPOINT", gone.url)
    with pytest.raises(EnvironmentProblem, match="cannot be reached"):
        fetch(REPOSITORY, patience=EAGER)


def test_offline_mode_is_honoured(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE is set"):
        fetch(REPOSITORY)
    assert server.requests == []


def test_the_token_stays_with_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with hub_server() as storage:
        storage.repositories = server.repositories
        server.answers = [redirect(storage.url)]
        fetch(REPOSITORY, patience=EAGER)
    assert_whole(server)
    assert all(headers["Authorization"] == "Bearer hf_secret" for _, headers in server.requests)
    assert [headers.get("Authorization") for _, headers in storage.requests] == [None]


def test_without_a_login_no_token_is_sent(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    fetch(REPOSITORY, patience=EAGER)
    assert all("Authorization" not in headers for _, headers in server.requests)


def test_a_full_disk_is_named_and_what_arrived_is_kept(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: io.FileIO, chunk: bytes) -> None:
        is_full = file.tell() >= 300_000
        file.write(chunk[:1000] if is_full else chunk)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(transfer, "_write", write)
        with pytest.raises(EnvironmentProblem, match=r"the disk is full; .* needs 1 MB more"):
            fetch(REPOSITORY, patience=EAGER)
    assert_nothing_looks_whole()
    server.requests = []
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts[0] >= 300_000
    assert_whole(server)


def test_too_little_room_is_said_before_the_first_byte(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(EnvironmentProblem, match="needs 1 MB of disk"):
        fetch(REPOSITORY, patience=EAGER)
    assert server.starts == []


def test_cancelling_takes_effect_at_once_and_keeps_what_arrived(server: Hub) -> None:
    cancel = threading.Event()
    server.answers = [slowly]

    def stop_half_way(progress: Progress) -> None:
        if progress.done_bytes >= 400_000:
            cancel.set()

    with pytest.raises(Cancelled, match="what has arrived is kept"):
        fetch(REPOSITORY, stop_half_way, cancel, EAGER)
    assert_nothing_looks_whole()
    server.requests = []
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts[0] >= 400_000
    assert_whole(server)


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")
def test_a_killed_download_leaves_nothing_whole_and_is_completed(server: Hub) -> None:
    server.answers = [slowly]
    code = f"from models.hub import fetch; fetch({REPOSITORY!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    partial: list[Path] = []
    while process.poll() is None and not (partial and partial[0].stat().st_size > 200_000):
        time.sleep(0.02)
        partial = list(models_folder().rglob("*.partial"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_nothing_looks_whole()
    server.requests = []
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts[0] > 200_000
    assert_whole(server)


def test_two_fetches_of_one_model_do_not_mix(server: Hub) -> None:
    server.answers = [slowly]
    begun = threading.Event()

    def note_the_first_bytes(progress: Progress) -> None:
        if progress.done_bytes:
            begun.set()

    first = threading.Thread(target=lambda: fetch(REPOSITORY, note_the_first_bytes, patience=EAGER))
    first.start()
    begun.wait()
    with pytest.raises(EnvironmentProblem, match="is being fetched already"):
        fetch(REPOSITORY, patience=EAGER)
    first.join()
    assert_whole(server)


def test_a_split_model_is_fetched_in_all_its_parts(server: Hub, tmp_path: Path) -> None:
    parts = {f"Q8_0/Big-Q8_0-0000{number}-of-00002.gguf": content_of(server) for number in (1, 2)}
    server.repositories[REPOSITORY] |= parts
    path = fetch(f"{REPOSITORY}:q8_0", patience=EAGER)
    assert path == models_folder() / "someone" / "Tiny-GGUF" / "Q8_0" / "Big-Q8_0-00001-of-00002.gguf"
    assert path.with_name("Big-Q8_0-00002-of-00002.gguf").read_bytes() == content_of(server)


def test_a_file_that_is_another_one_on_the_hub_now_is_fetched_anew(server: Hub) -> None:
    fetch(REPOSITORY, patience=EAGER)
    server.repositories[REPOSITORY][NAME] = content_of(server)[:-1] + b"!"
    fetch(REPOSITORY, patience=EAGER)
    assert server.starts == [0, 0]
    assert_whole(server)


def test_what_the_hubs_own_cache_holds_is_used_where_it_lies(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = str(destination().parent.parent.parent / "elsewhere.gguf")
    Path(cached).write_bytes(content_of(server))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: cached)
    assert fetch(REPOSITORY, patience=EAGER) == Path(cached)
    assert server.starts == []


def test_the_file_is_chosen_by_name_or_format(server: Hub) -> None:
    names = [
        "Tiny-Q4_0-00001-of-00002.gguf",
        "Tiny-Q4_0-00002-of-00002.gguf",
        "Tiny-Q4_K_M.gguf",
        "Tiny-UD-Q4_K_XL.gguf",
        "tiny-q8_0.gguf",
        "mmproj-Tiny-Q8_0.gguf",
        "mtp-Tiny-Q4_0.gguf",
        "Tiny-Q4_0_4_4.gguf",
        "Other-Q5_0-00001-of-00002.gguf",
    ]
    server.repositories[REPOSITORY] |= dict.fromkeys(names, b"")
    assert find(REPOSITORY).name == "Tiny-Q4_0"
    assert find(f"{REPOSITORY}:q4_k_m").name == "Tiny-Q4_K_M"
    assert find(f"{REPOSITORY}:Q8_0").name == "tiny-q8_0"
    assert find(f"{REPOSITORY}:tiny-q8_0.gguf").name == "tiny-q8_0"
    assert find(f"{REPOSITORY}:Renamed-since-Q4_K_M.gguf").name == "Tiny-Q4_K_M"
    for absent in ("Q4_0_4_4", "Q5_0", "F16", "none.gguf"):
        with pytest.raises(ModelFileError, match="it offers Q4_0, Q4_K_M, Q4_K_XL, Q8_0"):
            find(f"{REPOSITORY}:{absent}")
    server.repositories["someone/empty"] = {"README.md": b""}
    with pytest.raises(ModelFileError, match="holds no GGUF model"):
        find("someone/empty")


def test_an_empty_file_is_not_fetched(server: Hub) -> None:
    server.repositories[REPOSITORY][NAME] = b""
    with pytest.raises(ModelFileError, match="is empty on the hub"):
        fetch(REPOSITORY, patience=EAGER)
    assert_nothing_looks_whole()


def test_paths_that_would_leave_their_folder_are_not_listed(server: Hub) -> None:
    content = content_of(server)
    paths = ("../evil-Q8_0.gguf", "a/../../evil-Q8_0.gguf", "/evil-Q8_0.gguf", "..\\evil-Q8_0.gguf", "c:evil-Q8_0.gguf")
    server.repositories[REPOSITORY] = dict.fromkeys(paths, content)
    assert hub.list_repository(REPOSITORY) == ()


@pytest.mark.parametrize(
    ("reference", "parsed"),
    [
        ("a/b", ("a/b", "")),
        ("a/b-1.5_x:Q4_0", ("a/b-1.5_x", "Q4_0")),
        ("a/b:dir/file.gguf", ("a/b", "dir/file.gguf")),
        ("https://huggingface.co/a/b/", ("a/b", "")),
    ],
)
def test_references(reference: str, parsed: tuple[str, str]) -> None:
    assert parse_reference(reference) == parsed


@pytest.mark.parametrize("reference", ["", "starter", "a/b/c", "a b/c", "a/b:"])
def test_malformed_references(reference: str) -> None:
    with pytest.raises(SettingError, match="OWNER/REPOSITORY"):
        parse_reference(reference)


def test_a_name_the_client_refuses_is_a_setting_error(server: Hub) -> None:
    with pytest.raises(QuorumError, match="no repository name"):
        fetch("a--b/c..d", patience=EAGER)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen_Qwen3-8B-Q4_0.gguf", "Q4_0"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model-IQ4_NL.gguf", "IQ4_NL"),
        ("Qwen3-0.6B-BF16.gguf", "BF16"),
        ("plain.gguf", ""),
    ],
)
def test_the_format_is_read_from_the_name(name: str, expected: str) -> None:
    assert format_of(name) == expected
