"""Residual acceptance: by exact enumeration with several drafters, and by counting on real models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import Acceptance, GenerationSettings, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.loader import LoadedSet
from engine.residual import Chance, Row
from engine.runtime.context import Run
from engine.runtime.sampler import Distribution
from engine.session import Session
from engine.types import Draft
from engine.verify.sampled import Drawn, judge, tree_of
from tests.engine.conftest import answer, never
from tests.engine.making import write_tiny_llama
from tests.engine.test_residual import Model, check_equal, every_way, random_model, says

FREE = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def speculate(
    target: Model, drafters: list[Model], length: int, stops_at: int, branches: int, chance: Chance
) -> tuple[int, ...]:
    """One step with a chain of each drafter, which ends early after a certain token; then the target alone."""
    drafts = []
    for number, drafter in enumerate(drafters):
        tokens: list[int] = []
        rows: list[Row] = []
        while len(tokens) < length and stops_at not in tokens:
            rows.append(drafter(tuple(tokens)))
            tokens.append(chance.pick(rows[-1]))
        drafts.append(Draft(str(number), tuple(tokens), (0.5,) * len(tokens), rows=tuple(rows)))
    tree = tree_of(drafts, branches)
    paths = [tree.trunk.tokens[:end] for end in range(len(tree.trunk) + 1)]
    for branch in tree.branches:
        paths += [(*tree.trunk.tokens[: branch.fork], *branch.tokens[: end + 1]) for end in range(len(branch))]
    verdict = judge(lambda output: target(paths[output]), tree, Drawn(tuple(drafts), chance))
    text = [*verdict.path(tree.trunk.tokens), verdict.final]
    while len(text) <= length:
        text.append(chance.pick(target(tuple(text))))
    return tuple(text)


@pytest.mark.parametrize("stops_at", [-1, 1], ids=["whole", "stopping after a token"])
@pytest.mark.parametrize("branches", [0, 6], ids=["trunk alone", "with branches"])
@pytest.mark.parametrize(("size", "length", "count"), [(2, 2, 1), (2, 2, 2), (3, 1, 3)])
def test_drawn_drafts_leave_the_targets_distribution_as_it_is(
    size: int, length: int, count: int, branches: int, stops_at: int
) -> None:
    target = random_model(7, size)
    drafters = [random_model(20 + number, size) for number in range(count)]
    found = every_way(lambda chance: speculate(target, drafters, length, stops_at, branches, chance))
    check_equal(found, says(target, length + 1, size))


# Real models

ANSWERS = 2500
LENGTH = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedSet]:
    folder = tmp_path_factory.mktemp("tiny")
    target = write_tiny_llama(folder / "target.gguf", tokens=34)
    near, far = (write_tiny_llama(folder / f"{name}.gguf", noise, 34) for name, noise in (("near", 0.1), ("far", 0.6)))
    loaded = LoadedSet.load(SetConfig(target, (str(near), str(far)), 256, ModelPlacement(threads=1)))
    yield loaded
    loaded.close()


def test_a_distribution_is_what_the_sampler_draws_from(tiny: LoadedSet) -> None:
    logits = np.random.default_rng(3).standard_normal(34).astype(np.float32) * 2
    plain = np.exp(logits.astype(np.float64) / 0.7)
    assert np.allclose(
        Distribution(Sampling(temperature=0.7, top_k=0, top_p=1, min_p=0), 34).row(logits), plain / plain.sum()
    )
    cut = Distribution(Sampling(temperature=1.0, top_k=5, top_p=1, min_p=0), 34).row(logits)
    assert set(np.flatnonzero(cut)) == set(np.argsort(logits)[-5:])
    assert math.isclose(cut.sum(), 1)
    wider = Distribution(FREE, 40).row(logits)
    assert (len(wider), wider[34:].sum()) == (40, 0)
    narrower = Distribution(FREE, 30).row(logits)
    assert len(narrower) == 30
    assert math.isclose(narrower.sum(), 1)


@pytest.mark.parametrize("drafters", [("near",), ("near", "far")], ids=["one drafter", "two drafters"])
def test_answers_have_the_targets_distribution_by_chi_square(tiny: LoadedSet, drafters: tuple[str, ...]) -> None:
    own = tiny.with_drafters(drafters)
    prompt = [5, 9, 17, 9]
    expected = first_two(tiny, prompt)
    speculation = Speculation(Policy.parse("fixed:3"), acceptance=Acceptance.RESIDUAL)
    counts: Counter[tuple[int, int]] = Counter()
    accepted = verified = 0
    session = Session(own)
    for seed in range(ANSWERS):
        sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        finished = answer(session.generate(prompt, GenerationSettings(sampling, speculation, LENGTH), never()))
        said = (*finished.token_ids, 1, 1)  # an end token is not among the ids
        counts[said[0], said[1]] += 1
        accepted += finished.metrics.accepted
        verified += finished.metrics.verified
    session.close()
    assert accepted > ANSWERS / 5
    assert verified > accepted
    statistic, freedom = chi_square(counts, expected)
    assert freedom > 20
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    drafted = first_two_of_drafter(tiny, prompt)
    wrong, _ = chi_square(counts, drafted)
    assert wrong > freedom + 20 * math.sqrt(2 * freedom), "the drafter's own distribution would be told apart"


def first_two(loaded: LoadedSet, prompt: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The exact distribution of the first two tokens, shape (vocabulary, vocabulary)."""
    context, size = loaded.context, loaded.model.vocabulary.size
    distribution = Distribution(FREE, size)
    sequence = context.allocate()
    context.hold_alone(sequence)
    context.decode([Run(sequence, prompt, 1)])
    first = distribution.row(context.logits()[0])
    table = np.zeros((size, size))
    for token in range(size):
        if token == 1:
            table[token, 1] = first[token]  # the end
            continue
        context.decode([Run(sequence, [token], 1)])
        table[token] = first[token] * distribution.row(context.logits()[0])
        context.truncate(sequence, len(prompt))
    context.free(sequence)
    return table


def first_two_of_drafter(loaded: LoadedSet, prompt: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    own = LoadedSet.load(SetConfig(loaded.config.target.with_name("far.gguf"), (), 256, ModelPlacement(threads=1)))
    table = first_two(own, prompt)
    own.close()
    return table


def chi_square(
    counts: Counter[tuple[int, int]], expected: np.ndarray[tuple[int, int], np.dtype[np.float64]]
) -> tuple[float, int]:
    """The statistic and its degrees of freedom; what is expected less than five times is put together."""
    statistic = rest_expected = 0.0
    rest_counted = cells = 0
    for pair, probability in np.ndenumerate(expected):
        wanted = ANSWERS * float(probability)
        if wanted < 5:
            rest_expected += wanted
            rest_counted += counts[pair[0], pair[1]]
        else:
            statistic += (counts[pair[0], pair[1]] - wanted) ** 2 / wanted
            cells += 1
    if rest_expected:
        statistic += (rest_counted - rest_expected) ** 2 / rest_expected
        cells += 1
    return statistic, cells - 1


def test_without_a_temperature_tokens_are_matched(tiny: LoadedSet) -> None:
    residual = Speculation(Policy.parse("fixed:3"), acceptance=Acceptance.RESIDUAL)
    session = Session(tiny)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.8, seed=3, repeat_penalty=1.2)):
        texts = [
            answer(session.generate([5, 9, 17], GenerationSettings(sampling, speculation, 20), never())).token_ids
            for speculation in (Speculation(Policy.parse("plain")), residual)
        ]
        assert texts[0] == texts[1]
    session.close()


def test_a_seed_gives_the_same_answer_again(tiny: LoadedSet) -> None:
    speculation = Speculation(Policy.parse("fixed:3"), acceptance=Acceptance.RESIDUAL)
    given = GenerationSettings(Sampling(temperature=0.8, seed=3), speculation, 20)
    said = []
    for _ in range(2):
        session = Session(tiny)
        said.append(answer(session.generate([5, 9, 17], given, never())).token_ids)
        session.close()
    assert said[0] == said[1]
