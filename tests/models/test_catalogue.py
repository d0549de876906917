from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from models.catalogue import (
    FAMILIES,
    PRESETS,
    Machine,
    MachineKind,
    Preset,
    drafters_for,
    family_of,
    recommended,
    this_machine,
)
from models.gguf_file import GgufFacts, read_header
from models.hub import parse_reference

OFFERS = [offer for family in FAMILIES for offer in family.offers]


def named(facts: GgufFacts, name: str, size_gib: float = 100) -> GgufFacts:
    return replace(facts, name=name, path=Path(f"{name}.gguf"), size_bytes=round(size_gib * 2**30))


@pytest.fixture(scope="module")
def facts(starter: Path) -> GgufFacts:
    return read_header(starter)


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.name)
def test_an_offer_belongs_to_its_family_alone(offer: object) -> None:
    assert sum(offer in family.offers for family in FAMILIES) == 1


def test_offers_can_be_fetched_and_stand_in_order() -> None:
    for family in FAMILIES:
        sizes = [offer.size_gib for offer in family.offers]
        assert sizes == sorted(sizes)
        for offer in family.offers:
            assert parse_reference(offer.reference) == (offer.repository, offer.format)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: f"{preset.kind.value} {preset.memory_gib}")
def test_a_preset_is_one_family_and_fits_its_machine(preset: Preset) -> None:
    def family(repository: str) -> str:
        return next(family.name for family in FAMILIES if family.has_member(repository.partition("/")[2]))

    assert {family(offer.repository) for offer in preset.drafters} == {family(preset.target.repository)}
    assert all(2 * offer.size_gib < preset.target.size_gib for offer in preset.drafters)
    assert preset.target.size_gib + sum(offer.size_gib for offer in preset.drafters) < preset.total_gib
    assert preset.total_gib < preset.memory_gib
    assert len(preset.drafters) <= 3


def test_targets_for_a_cpu_are_in_the_format_it_is_fast_with() -> None:
    cpu = [preset for preset in PRESETS if preset.kind is MachineKind.CPU]
    assert {offer.format for preset in cpu for offer in (preset.target, *preset.drafters)} == {"Q4_0"}


@pytest.mark.parametrize(
    ("kind", "memory_gib", "names"),
    [
        (MachineKind.CPU, 2, []),
        (MachineKind.CPU, 7.6, ["Everyday", "Small and quick"]),
        (MachineKind.CPU, 15.5, ["Capable", "Code", "Everyday", "Small and quick"]),
        (MachineKind.APPLE, 16, ["Everyday"]),
        (MachineKind.APPLE, 64, ["Capable", "Everyday"]),
        (MachineKind.GPU, 11.99, ["Capable", "Code"]),
        (MachineKind.GPU, 80, ["Large", "Capable", "Code"]),
    ],
)
def test_recommendations_go_by_memory(kind: MachineKind, memory_gib: float, names: list[str]) -> None:
    assert [preset.name for preset in recommended(Machine(kind, memory_gib))] == names


def test_a_gpu_too_small_falls_back_to_the_processor() -> None:
    presets = recommended(Machine(MachineKind.GPU, 2))
    assert presets == recommended(Machine(MachineKind.CPU, this_machine().memory_gib))


def test_this_machine_has_memory() -> None:
    assert this_machine().memory_gib > 0.5


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("SmolLM2 135M Instruct", "SmolLM2"),
        ("Qwen_Qwen3-8B-Q4_0", "Qwen3"),
        ("Qwen3 0.6B", "Qwen3"),
        ("Qwen3-4B-Instruct-2507", "Qwen3"),
        ("Qwen3-30B-A3B-Instruct", None),
        ("Qwen3-VL-8B", None),
        ("Qwen3.5-9B", None),
        ("Qwen2.5-Coder-7B-Instruct", "Qwen2.5 Coder"),
        ("Qwen2.5-7B-Instruct", "Qwen2.5"),
        ("DeepSeek-R1-Distill-Qwen-7B", "DeepSeek R1 Distill (Qwen)"),
        ("Meta-Llama-3.1-8B-Instruct", "Llama 3.1 and 3.2"),
        ("Llama-3.3-70B-Instruct", "Llama 3.1 and 3.2"),
        ("Meta-Llama-3-8B", None),
        ("gemma-3-27b-it", "Gemma 3"),
        ("gemma-3n-E2B-it", None),
        ("granite-4.1-8b", "Granite 4"),
        ("granite-4.0-h-1b", None),
        ("SmolLM3-3B", None),
    ],
)
def test_families_are_known_by_name(facts: GgufFacts, name: str, family: str | None) -> None:
    found = family_of(named(facts, name))
    assert (found.name if found else None) == family


def test_drafters_are_much_smaller_than_their_target(facts: GgufFacts) -> None:
    assert [offer.name for offer in drafters_for(named(facts, "SmolLM2 1.7B", 0.93))] == [
        "SmolLM2-135M-Instruct Q4_0",
        "SmolLM2-360M-Instruct Q4_0",
    ]
    assert drafters_for(facts) == ()
    assert drafters_for(named(facts, "unheard-of")) == ()
