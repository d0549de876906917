"""Draft models behind the server: several clients at once, each answered as if it were alone and nobody drafted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.api.routes import ApiOptions
from app.conversations import Conversations
from app.service import Service
from engine.config import ModelPlacement, SetConfig
from engine.pool import PoolSettings
from tests.app.api.conftest import Served, serving_in_thread
from tests.app.conftest import finished, loading
from tests.engine.making import write_tiny_llama

CLIENTS = 4
END_TOKEN = "1"
TEXTS = ("one", "two and so on", "three, and so on and on", "four: a longer question than the others, so to speak")


@pytest.fixture(scope="module")
def drafting(client_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random target with two draft models that often guess what it says, and no others that draft."""
    folder = tmp_path_factory.mktemp("tiny")
    target = write_tiny_llama(folder / "target.gguf")
    drafters: list[Path] = [write_tiny_llama(folder / f"{noise}.gguf", noise) for noise in (0.1, 0.2)]
    config = SetConfig(target, tuple(map(str, drafters)), 768, ModelPlacement(threads=1))
    with contextlib.closing(Service(Conversations(), pool_settings=PoolSettings(CLIENTS, CLIENTS))) as service:
        finished(service.load(loading(config)))
        with serving_in_thread(service, ApiOptions()) as url:
            yield Served(url, service)


def ask(drafting: Served, text: str, policy: str, **fields: Any) -> dict[str, Any]:
    return drafting.chat(
        messages=[{"role": "user", "content": text}],
        max_tokens=40,
        logit_bias={END_TOKEN: -100},
        speculation={"policy": policy},
        **fields,
    )


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["fixed:3", "auto"])
def test_drafted_answers_to_several_clients_are_those_to_each_alone(
    drafting: Served, sampling: dict[str, Any], policy: str
) -> None:
    desk = drafting.service.desk
    alone = [ask(drafting, text, "off", **sampling) for text in TEXTS]
    assert all(answer["timings"]["draft_n"] == 0 for answer in alone)
    before = desk.counts
    with ThreadPoolExecutor(CLIENTS) as threads:
        found = list(threads.map(lambda text: ask(drafting, text, policy, **sampling), TEXTS * 2))
    after = desk.counts
    for one, expected in zip(found, alone * 2, strict=True):
        assert one["choices"] == expected["choices"]
        assert one["usage"]["completion_tokens"] == 40
    passes = after["passes"] - before["passes"]
    assert after["carried_answers"] - before["carried_answers"] > 1.5 * passes, "they did not share passes"
    if policy != "auto":  # which drafts where that is the faster way
        assert all(one["timings"]["draft_n"] > one["timings"]["draft_n_accepted"] > 0 for one in found)
    statistics = desk.statistics
    assert statistics is not None
    assert statistics.exactness.startswith("exact")
    assert statistics.left_out == ()
