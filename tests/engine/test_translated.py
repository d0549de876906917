"""Drafters of another vocabulary: refused unless allowed, and then their text is guessed with, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader

from engine.config import ModelPlacement, Policy, Sampling, SetConfig, Speculation, VoteMode
from engine.drafters.translated import TranslatedDrafter
from engine.errors import IncompatibleDrafter
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings
from tests.engine.making import TOKENS, value_of, write_tiny_llama

FIRST_MOVED = 300
"""Below are control tokens and single bytes, whose numbers stay."""


def with_other_numbers(source: Path, path: Path) -> Path:
    """The same model with its tokens numbered otherwise: as good a drafter as can be, of another vocabulary."""
    reader = GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    count = len(reader.fields[TOKENS].data)
    order = np.arange(count)
    order[FIRST_MOVED:] = np.random.default_rng(1).permutation(order[FIRST_MOVED:])
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = value_of(field)
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            if len(value) == count and key.startswith("tokenizer.ggml.to"):
                value = [value[number] for number in order]
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        data = tensor.data[order] if tensor.name == "token_embd.weight" else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def renumbered(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_numbers(starter, tmp_path_factory.mktemp("renumbered") / "renumbered.gguf")


@pytest.fixture(scope="module")
def loaded(starter: Path, renumbered: Path, cost_file: Path) -> Iterator[LoadedSet]:
    config = SetConfig(
        starter, (str(renumbered),), 1024, ModelPlacement(threads=2), cost_file=cost_file, translates=True
    )
    loaded = LoadedSet.load(config)
    assert isinstance(loaded.panel.models[0], TranslatedDrafter)
    yield loaded
    loaded.close()


def test_without_leave_it_is_refused_with_rule_and_token(starter: Path, renumbered: Path) -> None:
    fault = r"token \d+ is '.*' in the target and '.*' in the drafter.*--translate"
    with pytest.raises(IncompatibleDrafter, match=fault):
        LoadedSet.load(SetConfig(starter, (str(renumbered),), 512, ModelPlacement(threads=2)))


@pytest.mark.parametrize("vote", VoteMode)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=6)], ids=["greedy", "seeded"])
def test_its_drafts_are_accepted_and_change_no_token(loaded: LoadedSet, sampling: Sampling, vote: VoteMode) -> None:
    messages: list[Message] = []
    session, other = Session(loaded), Session(loaded)
    speculation = Speculation(Policy.parse("fixed:3"), vote=vote)
    accepted = verified = compared = 0
    for question in ("Write two lines about the sea, with an emoji.", "Say it again: naïve café, 東京, 🙂."):
        messages.append(Message("user", question))
        drafted = answer(session.chat(messages, settings(speculation, sampling, 40), never()))
        plain = answer(other.chat(messages, settings(PLAIN, sampling, 40), never()))
        assert drafted.token_ids == plain.token_ids
        messages.append(Message("assistant", plain.text))
        accepted += drafted.metrics.accepted
        verified += drafted.metrics.verified
        compared += len(plain.token_ids)
    session.close()
    other.close()
    assert compared > 20
    if sampling is GREEDY and vote is VoteMode.TREE:
        assert accepted / verified > 0.7, "the same model says the same text, whatever its tokens are called"
    assert accepted > compared / 8


def test_a_model_that_knows_other_characters_changes_nothing(starter: Path, tmp_path: Path, cost_file: Path) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf")
    drafters = ("ngram", str(tiny))
    loaded = LoadedSet.load(
        SetConfig(starter, drafters, 512, ModelPlacement(threads=2), cost_file=cost_file, translates=True)
    )
    session = Session(loaded)
    prompt = loaded.model.vocabulary.tokenize("The harbour was quiet when 🙂 the first boats", adds_special=True)
    said = [
        answer(session.generate(prompt, settings(speculation, GREEDY, 24), never()))
        for speculation in (PLAIN, Speculation(Policy.parse("fixed:3")))
    ]
    assert said[0].token_ids == said[1].token_ids
    assert [report.note for report in said[1].metrics.drafters] == ["", ""]
    assert said[1].metrics.proposed > 0
    loaded.close()


def test_its_score_counts_what_the_target_said(loaded: LoadedSet) -> None:
    drafter = loaded.panel.models[0]
    assert isinstance(drafter, TranslatedDrafter)
    drafter.forget()
    drafter.begin([1, 2, 3])
    drafter._last = (4, 5, 6)
    drafter.accept([4, 9, 6])
    score = drafter.take_score()
    assert (score.hits, score.scored) == (1, 2)
    assert drafter.behind_tokens == 6
    drafter.truncate(2)
    assert drafter.behind_tokens == 2
    drafter.check([1, 2])
    with pytest.raises(AssertionError, match="heard of other tokens"):
        drafter.check([1])
