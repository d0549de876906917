"""The backend setting: chosen by what measures exact, kept, and kept to while drafting, K-quants included."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import Exactness, KvType, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.loader import LoadedSet
from engine.runtime.context import FloatRows, Run
from engine.runtime.devices import has_gpu
from engine.runtime.template import Message
from engine.session import Session
from engine.setting import Setting
from engine.types import StepDone
from models.expand import K_QUANTS, expand
from models.gguf_file import read_header, read_tensors
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings, tokens_of
from tests.engine.scripted import Bench, ScriptedDrafter, ScriptedTarget, knows

cpu_only = pytest.mark.skipif(has_gpu(), reason="measured on CPUs")
TWO_THREADS = ModelPlacement(threads=2)
FIXED = Speculation(Policy.parse("fixed:7"))
SEEDED = Sampling(temperature=0.8, seed=9)
ANSWER = tuple(range(10, 40))


def loaded_with(model: Path, *drafters: str | Path, **more: object) -> LoadedSet:
    return LoadedSet.load(SetConfig(model, tuple(map(str, drafters)), 1024, TWO_THREADS, **more))  # type: ignore[arg-type]


def test_passes_are_cut_to_the_largest_that_may_be_sent() -> None:
    some = Setting(KvType.BF16, is_exact=False, pass_sizes=(2, 4, 8), allows_branches=False)
    assert [some.fitting(tokens) for tokens in (1, 2, 3, 4, 7, 8, 30)] == [1, 2, 2, 4, 4, 8, 8]
    none = Setting(KvType.BF16, is_exact=False, pass_sizes=(), allows_branches=False)
    assert [none.fitting(tokens) for tokens in (1, 2, 9)] == [1, 1, 1]
    free = Setting(KvType.BF16, is_exact=True, pass_sizes=None, allows_branches=False)
    assert [free.fitting(tokens) for tokens in (1, 5)] == [1, 5]


@pytest.mark.parametrize(("sizes", "sent"), [((2, 3), {1, 2, 3}), ((4,), {1, 4}), ((), {1})])
@pytest.mark.parametrize("policy", ["fixed:7", "auto"])
def test_only_passes_that_are_exact_are_sent(sizes: tuple[int, ...], sent: set[int], policy: str) -> None:
    target = ScriptedTarget((*ANSWER, 0))
    setting = Setting(KvType.F16, is_exact=False, pass_sizes=sizes, allows_branches=True)
    bench = Bench(target, [ScriptedDrafter("a", knows(ANSWER))], policy, setting=setting)
    bench.run()
    assert bench.answer == ANSWER
    assert {len(tokens) for tokens in target.passes} <= sent
    if sizes and policy != "auto":
        assert max(len(tokens) for tokens in target.passes) == max(sizes)


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (1.081, "BF16 cache, 8 % dearer a token than F16"),
        (0.17, "BF16 cache, no dearer than F16"),
        (None, "BF16 cache"),
    ],
)
def test_the_price_of_exactness_is_said(price: float | None, said: str) -> None:
    setting = Setting(KvType.BF16, is_exact=True, pass_sizes=None, allows_branches=True, price=price)
    assert setting.badge == f"exact: {said}"


@cpu_only
def test_the_fastest_format_that_is_exact_is_chosen_once_and_kept(starter: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    phases: list[set[str]] = []
    found: list[Setting] = []
    for text in ("", "kept", "damaged"):
        if text == "damaged":
            stored = json.loads((tmp_path / "settings.json").read_text())
            for entry in stored["entries"].values():
                entry["kv_type"] = "Q3_9"
            (tmp_path / "settings.json").write_text(json.dumps(stored))
        phases.append(set())
        config = SetConfig(starter, (), 1024, TWO_THREADS, cost_file=costs)
        loaded = LoadedSet.load(config, lambda phase, _share: phases[-1].add(phase))
        found.append(loaded.setting)
        assert loaded.context.settings.kv_type is KvType.BF16_F16
        loaded.close()
    for setting in found:
        assert (setting.kv_type, setting.is_exact, setting.pass_sizes) == (KvType.BF16_F16, True, None)
        assert setting.allows_branches
        assert setting.price is not None
        assert setting.badge.startswith("exact: BF16_F16 cache, ")
    assert found[1] == found[0]
    assert ["Comparing cache formats" in seen for seen in phases] == [True, False, True]


@cpu_only
def test_what_is_asked_for_is_taken_and_judged(starter: Path, cost_file: Path) -> None:
    fast = loaded_with(starter, "ngram", exactness=Exactness.FAST, cost_file=cost_file)
    assert fast.setting == Setting(KvType.F16, None, None, allows_branches=True)
    fast.close()
    unequal = loaded_with(starter, "ngram", kv_type=KvType.F16, cost_file=cost_file)
    assert unequal.setting == Setting(KvType.F16, False, (), allows_branches=False, price=1.0)
    session = Session(unequal)
    prompt = tokens_of(unequal, "one two one two one two one")
    finished = answer(session.generate(prompt, settings(FIXED, GREEDY, 12), never()))
    assert (finished.metrics.verified, finished.state.reason) == (0, "off: no batch size is exact here")
    unequal.close()
    small = loaded_with(starter, kv_type=KvType.Q8_0, cost_file=cost_file)
    assert (small.setting.is_exact, small.setting.pass_sizes, small.setting.price) == (True, None, None)
    small.close()


# K-quants


@pytest.fixture(scope="module")
def k_quants(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k-quants") / K_QUANTS.file_name
    expand(starter, path, K_QUANTS)
    return path


@pytest.fixture(scope="module")
def k_set(k_quants: Path, draft_models: dict[str, Path], cost_file: Path) -> Iterator[LoadedSet]:
    loaded = loaded_with(k_quants, "ngram", "suffix", draft_models["few-bits"], cost_file=cost_file)
    yield loaded
    loaded.close()


def test_nearly_all_weights_are_k_quants(k_quants: Path) -> None:
    sizes: Counter[bool] = Counter()
    for tensor in read_tensors(k_quants):
        sizes[tensor.type.endswith("_K")] += tensor.size_bytes
    assert sizes[True] / sizes.total() > 0.99
    assert read_header(k_quants).embedding_width == 768


@cpu_only
def test_k_quants_draft_in_passes_that_measure_exact(k_set: LoadedSet) -> None:
    setting = k_set.setting
    assert setting.is_exact is False
    assert setting.pass_sizes
    assert set(setting.pass_sizes) < set(range(2, 17)), "some sizes are not"
    assert "by drafting in passes of" in setting.badge
    text = tokens_of(k_set, "The harbour was quiet when the first boats came in, and nobody counted them all.")
    single = scored(k_set, text, 1)
    assert np.array_equal(scored(k_set, text, setting.pass_sizes[-1]), single)
    assert not np.array_equal(scored(k_set, text, 8), single)


def scored(loaded: LoadedSet, tokens: Sequence[int], size: int) -> FloatRows:
    context = loaded.context
    sequence = context.allocate()
    context.hold_alone(sequence)
    rows = []
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        context.decode([Run(sequence, chunk, len(chunk))])
        rows.append(context.logits().copy())
    context.free(sequence)
    return np.concatenate(rows)


QUESTIONS = (
    "Write the first lines of a story about a lighthouse keeper who finds a letter.",
    "Name three rivers and say where they end.",
    "Repeat these words and add a colour to each: apple, plum, pear, apple, plum, pear.",
)


@cpu_only
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_change_no_token_of_a_k_quant(k_set: LoadedSet, sampling: Sampling) -> None:
    compared = accepted = 0
    sent: set[int] = set()
    for question in QUESTIONS:
        answers = []
        for speculation in (PLAIN, FIXED, Speculation()):
            session = Session(k_set)
            events = list(session.chat([Message("user", question)], settings(speculation, sampling, 40), never()))
            answers.append(answer(iter(events)))
            sent |= {event.step.verified + 1 for event in events if isinstance(event, StepDone)}
            session.close()
        assert answers[1].token_ids == answers[2].token_ids == answers[0].token_ids
        compared += 2 * len(answers[0].token_ids)
        accepted += answers[1].metrics.accepted + answers[2].metrics.accepted
    assert compared > 150
    assert accepted > 20
    assert sent <= {1, *(k_set.setting.pass_sizes or ())}
