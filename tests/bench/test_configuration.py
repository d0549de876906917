"""Configurations are read as they are written, and named by their shortest spelling."""

from __future__ import annotations

import pytest

from app.bench.configuration import Configuration, parse_configurations
from engine.config import Exactness, LookAhead, Policy, PolicyKind, Speculation, VoteMode, WeightRule
from engine.errors import SettingError

BASE = Configuration()


def names(text: str, base: Configuration = BASE) -> list[str]:
    return [configuration.name for configuration in parse_configurations(text, base)]


def test_a_comma_list_of_bare_policies() -> None:
    assert names("auto, fixed:3,minions,adaedl") == ["auto", "fixed:3", "minions", "adaedl"]


def test_every_key() -> None:
    text = "fixed:7,weights=minions,vote=collective,look-ahead=on,exactness=fast,drafters=ngram+drop14"
    (configuration,) = parse_configurations(text, BASE)
    assert configuration == Configuration(
        Speculation(Policy(PolicyKind.FIXED, 7), WeightRule.MINIONS, VoteMode.COLLECTIVE, LookAhead.ON),
        Exactness.FAST,
        ("ngram", "drop14"),
    )
    assert configuration.name == text


def test_semicolons_separate_and_defaults_are_left_out() -> None:
    assert names("auto; auto,weights=hedge; auto,vote=collective;") == ["auto", "auto,vote=collective"]


def test_plain_is_not_listed_because_it_always_runs() -> None:
    assert names("plain,auto,off") == ["auto"]


def test_what_is_not_said_is_as_the_command_says() -> None:
    base = Configuration(Speculation(weights=WeightRule.MINIONS), Exactness.FAST)
    assert names("auto;fixed:1,weights=hedge", base) == [
        "auto,weights=minions,exactness=fast",
        "fixed:1,exactness=fast",
    ]


def test_no_drafters_at_all_can_be_asked_for() -> None:
    (configuration,) = parse_configurations("auto,drafters=", BASE)
    assert configuration.drafters == ()


def test_the_baseline_shares_the_exactness() -> None:
    (fast,) = parse_configurations("auto,exactness=fast,drafters=ngram", BASE)
    assert fast.baseline.name == "plain,exactness=fast"
    assert fast.baseline.is_plain


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("turbo", "unknown policy 'turbo'"),
        ("auto,colour=red", "unknown key 'colour'.*weights, vote, look-ahead, shape, acceptance, exactness, drafters"),
        ("auto,vote=secret", "vote must be one of tree, collective, found 'secret'"),
        ("auto,fixed:3,vote=tree", "'fixed:3' in .* is no key=value; separate configurations by ;"),
    ],
)
def test_refuses_what_it_does_not_know(text: str, fault: str) -> None:
    with pytest.raises(SettingError, match=fault):
        parse_configurations(text, BASE)
