"""What is compared: a policy and the settings that go with it, written `policy[,key=value...]`.

Several are joined by `;`, or by commas where all are bare policies. The baseline, plain decoding, always runs and need
not be named. A configuration's name is its shortest spelling: defaults are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from engine.config import Acceptance, Exactness, LookAhead, Policy, PolicyKind, Shape, Speculation, VoteMode, WeightRule
from engine.errors import SettingError

KEYS = ("weights", "vote", "look-ahead", "shape", "acceptance", "exactness", "drafters")

Choice = TypeVar("Choice", bound=Enum)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to answer."""

    speculation: Speculation = field(default_factory=Speculation)
    exactness: Exactness = Exactness.EXACT
    drafters: tuple[str, ...] | None = None
    """Names of the drafters it uses; None: all that `--drafters` names."""

    @property
    def is_plain(self) -> bool:
        return self.speculation.policy.kind is PolicyKind.OFF

    @property
    def name(self) -> str:
        """How rows and tables call it."""
        default = Speculation()
        parts = ["plain" if self.is_plain else str(self.speculation.policy)]
        if not self.is_plain:
            if self.speculation.weights is not default.weights:
                parts.append(f"weights={self.speculation.weights.value}")
            if self.speculation.vote is not default.vote:
                parts.append(f"vote={self.speculation.vote.value}")
            if self.speculation.look_ahead is not default.look_ahead:
                parts.append(f"look-ahead={self.speculation.look_ahead.value}")
            if self.speculation.shape is not default.shape:
                parts.append(f"shape={self.speculation.shape.value}")
            if self.speculation.acceptance is not default.acceptance:
                parts.append(f"acceptance={self.speculation.acceptance.value}")
        if self.exactness is not Exactness.EXACT:
            parts.append(f"exactness={self.exactness.value}")
        if self.drafters is not None and not self.is_plain:
            parts.append(f"drafters={'+'.join(self.drafters)}")
        return ",".join(parts)

    @property
    def baseline(self) -> Configuration:
        """Plain decoding under the same exactness, which this one is measured against."""
        return Configuration(Speculation(Policy(PolicyKind.OFF)), self.exactness)


def parse_configurations(text: str, base: Configuration) -> tuple[Configuration, ...]:
    """Read the configurations of `--configs`; plain ones are left out, for the baseline runs anyway.

    Args:
        text: As the user wrote it.
        base: What holds where a configuration does not say otherwise.

    Raises:
        SettingError: a policy, key or value is unknown; the message names it.
    """
    texts = text.split(";")
    if len(texts) == 1 and "=" not in text:
        texts = text.split(",")
    configurations = [_parse(part, base) for part in texts if part.strip()]
    return tuple(dict.fromkeys(configuration for configuration in configurations if not configuration.is_plain))


def _parse(text: str, base: Configuration) -> Configuration:
    policy, *settings = (part.strip() for part in text.split(","))
    speculation = replace(base.speculation, policy=Policy.parse(policy))
    configuration = replace(base, speculation=speculation)
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise SettingError(f"{setting!r} in {text!r} is no key=value; separate configurations by ;")
        configuration = _with(configuration, key.strip(), value.strip())
    return configuration


def _with(configuration: Configuration, key: str, value: str) -> Configuration:
    speculation = configuration.speculation
    if key == "weights":
        speculation = replace(speculation, weights=_choice(WeightRule, key, value))
    elif key == "vote":
        speculation = replace(speculation, vote=_choice(VoteMode, key, value))
    elif key == "look-ahead":
        speculation = replace(speculation, look_ahead=_choice(LookAhead, key, value))
    elif key == "shape":
        speculation = replace(speculation, shape=_choice(Shape, key, value))
    elif key == "acceptance":
        speculation = replace(speculation, acceptance=_choice(Acceptance, key, value))
    elif key == "exactness":
        return replace(configuration, exactness=_choice(Exactness, key, value))
    elif key == "drafters":
        names = tuple(name.strip() for name in value.split("+") if name.strip())
        return replace(configuration, drafters=tuple(dict.fromkeys(names)))
    else:
        raise SettingError(f"unknown key {key!r} in a configuration; there are {', '.join(KEYS)}")
    return replace(configuration, speculation=speculation)


def _choice(choices: type[Choice], key: str, value: str) -> Choice:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(str(choice.value) for choice in choices)
        raise SettingError(f"{key} must be one of {known}, found {value!r}") from None
