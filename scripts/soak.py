"""Many short requests at a server of a tiny model, with clients that misbehave; what went wrong is counted.

    python -m scripts.soak --requests 10000

The tiny model's weights are random, so what it says means nothing; what it must say is asked beforehand of a session of
its own, and every answer is compared. One in four clients goes away in the middle, sends nonsense, or asks for too
much. Exit code 0: no crash, no wrong answer, no lost request, and memory stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.config import GenerationSettings, ModelPlacement, Sampling, SetConfig
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished
from scripts.serving import served
from tests.engine.making import write_tiny_llama

CHAT = "/v1/chat/completions"
CONTEXT_TOKENS = 512
PARALLEL, QUEUE = 8, 24
CASES = 60
PATIENCE_S = 120.0
RETRY_S = 0.05
WARM_SHARE = 0.2
"""Memory is first looked at after this part of the requests: by then everything that is made once is there."""
MOST_GROWTH_PERCENT = 5.0
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "grammar": "root ::= ("}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 4000}',
    b"\xff\xfe\x00",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what must come of it."""

    body: dict[str, Any]
    text: str


@dataclass(slots=True)
class Tally:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def make_cases(target: Path) -> list[Case]:
    """Requests with their answers, from a session that has the set for itself."""
    config = SetConfig(target, context_tokens=CONTEXT_TOKENS, placement=ModelPlacement(threads=1))
    loaded = LoadedSet.load(config)
    cases = []
    try:
        for number in range(CASES):
            question = f"q{number % 7} " + "and so on " * (number % 5)
            seed, length = 100 + number, 1 + number % 24
            sampling = Sampling(temperature=0.0 if number % 3 == 0 else 0.9, seed=seed)
            session = Session(loaded)
            settings = GenerationSettings(sampling, max_tokens=length)
            *_, end = session.chat([Message("user", question)], settings, threading.Event())
            assert isinstance(end, Finished)
            session.close()
            body = {
                "messages": [{"role": "user", "content": question}],
                "temperature": sampling.temperature,
                "seed": seed,
                "max_tokens": length,
                "speculation": {"policy": ("auto", "off", "fixed:3")[number % 3]},
            }
            cases.append(Case(body, end.text))
    finally:
        loaded.close()
    return cases


class Client:
    """Asks one thing after the other until all are asked."""

    def __init__(self, http: httpx.AsyncClient, cases: list[Case], tally: Tally, chance: random.Random) -> None:
        self._http = http
        self._cases = cases
        self._tally = tally
        self._chance = chance

    async def ask(self) -> None:
        """One request of a random kind."""
        kinds = (self._whole, self._stream, self._leave, self._leave_early, self._bad, self._elsewhere)
        [kind] = self._chance.choices(kinds, weights=(45, 30, 9, 6, 8, 2))
        try:
            await asyncio.wait_for(kind(self._chance.choice(self._cases)), PATIENCE_S)
        except (httpx.HTTPError, asyncio.TimeoutError, ValueError, KeyError, LookupError) as error:
            self._tally.lost.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _whole(self, case: Case) -> None:
        response = await self._post(case.body)
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text}")
        self._compare(case, response.json()["choices"][0]["message"]["content"], "whole")

    async def _stream(self, case: Case) -> None:
        while True:
            async with self._http.stream("POST", CHAT, json={**case.body, "stream": True}) as response:
                if response.status_code == 200:
                    documents = [
                        json.loads(line.removeprefix("data: "))
                        async for line in response.aiter_lines()
                        if line.startswith("data: {")
                    ]
                    text = "".join(
                        choice["delta"].get("content", "") for part in documents for choice in part["choices"]
                    )
                    self._compare(case, text, "stream")
                    return
                if response.status_code != 429:
                    raise ValueError(f"status {response.status_code}")
            await self._wait_for_room()

    async def _leave(self, case: Case) -> None:
        """Go in the middle of a stream."""
        body = {**case.body, "stream": True, "max_tokens": 400}
        async with self._http.stream("POST", CHAT, json=body) as response:
            left = self._chance.randrange(1, 6)
            async for _ in response.aiter_lines():
                left -= 1
                if not left:
                    break
        self._tally.outcomes["left in the middle"] += 1

    async def _leave_early(self, case: Case) -> None:
        """Go before there can be an answer."""
        try:
            await asyncio.wait_for(
                self._http.post(CHAT, json={**case.body, "max_tokens": 400, "n": 2}), self._chance.random() / 50
            )
        except asyncio.TimeoutError:
            self._tally.outcomes["left before the answer"] += 1
        else:
            self._tally.outcomes["answered before it left"] += 1

    async def _bad(self, _case: Case) -> None:
        response = await self._http.post(CHAT, content=self._chance.choice(BAD_BODIES))
        if response.status_code == 429:
            self._tally.outcomes["no room"] += 1
        elif response.status_code == 400 and response.json()["error"]["message"]:
            self._tally.outcomes["refused"] += 1
        else:
            self._tally.wrong.append(f"nonsense got status {response.status_code}")

    async def _elsewhere(self, _case: Case) -> None:
        response = await self._http.get("/v1/nothing")
        if response.status_code == 404 and response.json()["error"]["code"] == "not_found":
            self._tally.outcomes["not found"] += 1
        else:
            self._tally.wrong.append(f"an unknown place got status {response.status_code}")

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        while True:
            response = await self._http.post(CHAT, json=body)
            if response.status_code != 429:
                return response
            await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        self._tally.outcomes["no room"] += 1
        await asyncio.sleep(RETRY_S)

    def _compare(self, case: Case, text: str, kind: str) -> None:
        if text == case.text:
            self._tally.outcomes[kind] += 1
        else:
            self._tally.wrong.append(f"{case.body}: {text!r} for {case.text!r}")


async def soak(url: str, cases: list[Case], requests: int, clients: int, seed: int) -> dict[str, Any]:
    """Ask everything; returns what is to be told."""
    tally = Tally()
    left = requests
    looked_at = int(requests * (1 - WARM_SHARE))
    resident_bytes: list[float] = []
    started = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:

        async def work(client: Client) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if left == looked_at:
                    resident_bytes.append((await metrics(http))["process_resident_memory_bytes"])
                await client.ask()

        await asyncio.gather(*(work(Client(http, cases, tally, random.Random(f"{seed}/{n}"))) for n in range(clients)))
        crashes = 0
        counts: dict[str, float] = {}
        try:
            counts = await until_idle(http)
            resident_bytes.append(counts["process_resident_memory_bytes"])
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            crashes = 1
            tally.lost.append(f"the server at the end: {type(error).__name__}: {error}")
    growth = (resident_bytes[-1] / resident_bytes[0] - 1) * 100 if len(resident_bytes) > 1 else 0.0
    return {
        "requests": requests,
        "clients": clients,
        "seconds": round(time.monotonic() - started, 1),
        "outcomes": dict(tally.outcomes),
        "crashes": crashes,
        "wrong_answers": len(tally.wrong),
        "lost_requests": len(tally.lost),
        "memory_growth_percent": round(growth, 2),
        "resident_megabytes": [round(size / 1e6, 1) for size in resident_bytes],
        "server": {name: value for name, value in counts.items() if name.startswith("quorum_")},
        "first_wrong": tally.wrong[:3],
        "first_lost": tally.lost[:3],
    }


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """What the server counts, by name."""
    lines = (await http.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def until_idle(http: httpx.AsyncClient) -> dict[str, float]:
    """What the server counts once no request is open any more.

    Raises:
        TimeoutError: some never end.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        counts = await metrics(http)
        if not counts["quorum_active"] and not counts["quorum_waiting"]:
            return counts
        if time.monotonic() > deadline:
            raise asyncio.TimeoutError("requests were still open that nobody waits for")
        await asyncio.sleep(RETRY_S)


def main() -> int:
    """Run it and print what happened as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="default: 10000")
    parser.add_argument("--clients", type=int, default=40, metavar="N", help="that ask at the same time; default: 40")
    parser.add_argument(
        "--cache-tokens", type=int, default=8 * CONTEXT_TOKENS, metavar="N", help="that requests share; default: 4096"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of who does what; default: 1")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUORUM_HOME"] = folder
        target = write_tiny_llama(Path(folder) / "tiny.gguf")
        cases = make_cases(target)
        options = ["--target", str(target), "--threads", "1", "--ctx", str(CONTEXT_TOKENS), "--port", "18080"]
        limits = ["--parallel", str(PARALLEL), "--queue", str(QUEUE), "--cache-tokens", str(args.cache_tokens)]
        with served(["serve", *options, *limits], folder) as url:
            base = url.removesuffix("/v1")
            result = asyncio.run(soak(base, cases, args.requests, args.clients, args.seed))
    print(json.dumps(result, indent=1))
    is_fine = not (result["crashes"] or result["wrong_answers"] or result["lost_requests"])
    return 0 if is_fine and result["memory_growth_percent"] <= MOST_GROWTH_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
