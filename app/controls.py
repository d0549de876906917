"""The controls that settle how an answer is made, and their reading as settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from app.choices import whole_number
from app.preset_controls import PresetControls, build_preset_choice, build_preset_controls
from engine.config import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    GenerationSettings,
    LookAhead,
    Policy,
    PolicyKind,
    Sampling,
    Shape,
    Speculation,
    VoteMode,
    WeightRule,
)
from engine.setting import SAME_DISTRIBUTION

AS_THE_MODEL = "model"
POLICIES = (
    ("Auto: as far as it measurably pays", PolicyKind.AUTO.value),
    ("Minions: follow the trend of acceptance", PolicyKind.MINIONS.value),
    ("AdaEDL: stop when the drafter is unsure", PolicyKind.ADAEDL.value),
    ("Fixed: always the same length", PolicyKind.FIXED.value),
    ("Off: the target alone", PolicyKind.OFF.value),
)
WEIGHT_RULES = (
    ("Hedge: all drafters learn", WeightRule.HEDGE.value),
    ("Minions: the winner learns", WeightRule.MINIONS.value),
)
VOTE_MODES = (
    ("Tree: draft, then vote", VoteMode.TREE.value),
    ("Collective: vote on every token", VoteMode.COLLECTIVE.value),
)
SHAPES = (("Auto: side branches where they pay", Shape.AUTO.value), ("Chain: the voted draft alone", Shape.CHAIN.value))
ACCEPTANCES = (
    ("The very tokens of plain decoding", Acceptance.MATCH.value),
    (f"{SAME_DISTRIBUTION[:1].upper()}{SAME_DISTRIBUTION[1:]}", Acceptance.RESIDUAL.value),
)
THINKING = (("As the model does", AS_THE_MODEL), ("Think first", "on"), ("Answer at once", "off"))
LOOK_AHEADS = (("Auto", LookAhead.AUTO.value), ("On", LookAhead.ON.value), ("Off", LookAhead.OFF.value))


@dataclass(frozen=True)
class AnswerControls:
    """Components, in the order in which they appear."""

    thinking: gr.Radio
    """Shown where the loaded model has a switch for it."""
    system_prompt: gr.Textbox
    policy: gr.Dropdown
    fixed_length: gr.Slider
    weights: gr.Radio
    vote: gr.Radio
    look_ahead: gr.Radio
    shape: gr.Radio
    acceptance: gr.Radio
    temperature: gr.Slider
    max_tokens: gr.Textbox
    seed: gr.Textbox
    top_k: gr.Textbox
    top_p: gr.Slider
    min_p: gr.Slider
    repeat_penalty: gr.Slider
    presets: PresetControls

    @property
    def sampled(self) -> tuple[Any, ...]:
        """Those that a sampling preset fills, in the order of `filled`."""
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.repeat_penalty, self.seed)

    @staticmethod
    def filled(sampling: Sampling) -> tuple[Any, ...]:
        """What the controls of `sampled` are to hold."""
        seed = "" if sampling.seed is None else str(sampling.seed)
        return (
            sampling.temperature,
            str(sampling.top_k),
            sampling.top_p,
            sampling.min_p,
            sampling.repeat_penalty,
            seed,
        )

    def all(self) -> set[Any]:
        """All that settle how an answer is made."""
        return {getattr(self, field.name) for field in fields(self)} - {self.presets}

    def said_before(self, values: Mapping[Any, Any]) -> str:
        """The system prompt."""
        return values[self.system_prompt] or ""

    def settings(self, values: Mapping[Any, Any]) -> GenerationSettings:
        """What the controls say.

        Raises:
            SettingError: a value is missing or out of range.
        """
        kind = values[self.policy]
        policy = f"{kind}:{values[self.fixed_length]}" if kind == PolicyKind.FIXED.value else kind
        return GenerationSettings(
            sampling=self.sampling(values),
            speculation=Speculation(
                policy=Policy.parse(policy),
                weights=WeightRule(values[self.weights]),
                vote=VoteMode(values[self.vote]),
                look_ahead=LookAhead(values[self.look_ahead]),
                shape=Shape(values[self.shape]),
                acceptance=Acceptance(values[self.acceptance]),
            ),
            max_tokens=whole_number(values[self.max_tokens], self.max_tokens.label),
            thinking=None if values[self.thinking] == AS_THE_MODEL else values[self.thinking] == "on",
        )

    def sampling(self, values: Mapping[Any, Any]) -> Sampling:
        """How the next token is to be drawn.

        Raises:
            SettingError: a value is missing or out of range.
        """
        return Sampling(
            temperature=values[self.temperature],
            top_k=whole_number(values[self.top_k], self.top_k.label) or 0,
            top_p=values[self.top_p],
            min_p=values[self.min_p],
            repeat_penalty=values[self.repeat_penalty],
            seed=whole_number(values[self.seed], self.seed.label),
        )


def build_answer_controls(defaults: GenerationSettings) -> AnswerControls:
    """Lay the controls out, in the Gradio context at hand."""
    sampling, speculation = defaults.sampling, defaults.speculation
    is_fixed = speculation.policy.kind is PolicyKind.FIXED
    thinking = gr.Radio(THINKING, value=AS_THE_MODEL, label="Thinking", visible=False, elem_id="thinking")
    preset = build_preset_choice(sampling)
    with gr.Accordion("System prompt", open=False, elem_id="system-section"):
        system_prompt = gr.Textbox(
            label="What the model is told before the conversation",
            placeholder="Empty: the model's own",
            lines=3,
            max_lines=12,
            elem_id="system-prompt",
        )
    with gr.Accordion("Drafting", open=False, elem_id="drafting-section"):
        policy = gr.Dropdown(
            POLICIES, value=speculation.policy.kind.value, label="How far to draft", elem_id="policy", filterable=False
        )
        fixed_length = gr.Slider(
            1,
            MAX_DRAFT_TOKENS,
            value=speculation.policy.fixed_length or 3,
            step=1,
            label="Fixed length",
            visible=is_fixed,
            elem_id="fixed-length",
        )
        weights = gr.Radio(WEIGHT_RULES, value=speculation.weights.value, label="Voting weights", elem_id="weights")
        vote = gr.Radio(VOTE_MODES, value=speculation.vote.value, label="Vote", elem_id="vote")
        look_ahead = gr.Radio(
            LOOK_AHEADS, value=speculation.look_ahead.value, label="Draft while the target checks", elem_id="look-ahead"
        )
        shape = gr.Radio(SHAPES, value=speculation.shape.value, label="What is sent to the target", elem_id="shape")
        acceptance = gr.Radio(
            ACCEPTANCES, value=speculation.acceptance.value, label="What is promised", elem_id="acceptance"
        )
        policy.change(
            lambda kind: gr.update(visible=kind == PolicyKind.FIXED.value),
            policy,
            fixed_length,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
    with gr.Accordion("Sampling", open=False, elem_id="sampling-section"):
        temperature = gr.Slider(0, 2, value=sampling.temperature, step=0.05, label="Temperature", elem_id="temperature")
        with gr.Row():
            max_tokens = _whole_number(defaults.max_tokens, "Max tokens", "no limit", "max-tokens")
            seed = _whole_number(sampling.seed, "Seed", "random", "seed")
            top_k = _whole_number(sampling.top_k, "Top-k (0: off)", "0", "top-k")
        top_p = gr.Slider(0.01, 1, value=sampling.top_p, step=0.01, label="Top-p", elem_id="top-p")
        min_p = gr.Slider(0, 0.99, value=sampling.min_p, step=0.01, label="Min-p", elem_id="min-p")
        repeat_penalty = gr.Slider(
            0.5, 2, value=sampling.repeat_penalty, step=0.05, label="Repeat penalty", elem_id="repeat-penalty"
        )
        presets = build_preset_controls(preset)
    return AnswerControls(
        thinking=thinking,
        system_prompt=system_prompt,
        policy=policy,
        fixed_length=fixed_length,
        weights=weights,
        vote=vote,
        look_ahead=look_ahead,
        shape=shape,
        acceptance=acceptance,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presets=presets,
    )


def _whole_number(value: int | None, label: str, placeholder: str, elem_id: str) -> Any:
    """A box for a number that may be left out, which Gradio's own number box turns into 0."""
    text = "" if value is None else str(value)
    return gr.Textbox(text, label=label, placeholder=placeholder, max_lines=1, elem_id=elem_id, min_width=100)
