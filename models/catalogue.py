"""Model families whose members share a tokenizer, and sets that suit common machines.

The data names repositories and formats, not files: which file a format means is looked up on the hub when it is
fetched. Sizes are approximate and only for display. Facts were gathered in the late summer of 2026.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from enum import Enum

import psutil

from engine.runtime.devices import has_gpu, list_devices
from models.gguf_file import GgufFacts

GIBIBYTE = 2**30
WHY_Q4_0_ON_CPU = (
    "Q4_0 is first choice for a CPU: llama.cpp rearranges these weights when it loads them, and a pass over four or "
    "eight drafted tokens then costs less than with any other format"
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A model to be had from the hub."""

    repository: str
    format: str
    size_gib: float

    @property
    def reference(self) -> str:
        """As `models.hub.fetch` takes it."""
        return f"{self.repository}:{self.format}"

    @property
    def name(self) -> str:
        return f"{self.repository.partition('/')[2].removesuffix('-GGUF')} {self.format}"


@dataclass(frozen=True, slots=True)
class Family:
    """Models that can draft for each other, smallest first."""

    name: str
    pattern: str
    """Matches the name of every member, in lower case, and of no other model."""
    licence: str
    context: str
    offers: tuple[Offer, ...]
    note: str = ""

    def has_member(self, model_name: str) -> bool:
        return re.search(self.pattern, model_name.lower()) is not None


class MachineKind(str, Enum):
    """What does the work."""

    CPU = "cpu"
    APPLE = "apple"
    """Processor and GPU share one memory."""
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has to run models with."""

    kind: MachineKind
    memory_gib: float
    """The GPU's own for `GPU`, otherwise all of main memory."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and drafters that suit a class of machines."""

    name: str
    kind: MachineKind
    memory_gib: int
    """For machines with this much memory or more."""
    target: Offer
    drafters: tuple[Offer, ...]
    context_tokens: int
    total_gib: float
    """Weights, F16 cache and buffers together, by calculation."""
    why: str
    is_for_code: bool = False


_SMOLLM2_135M = Offer("bartowski/SmolLM2-135M-Instruct-GGUF", "Q4_0", 0.09)
_SMOLLM2_360M = Offer("bartowski/SmolLM2-360M-Instruct-GGUF", "Q4_0", 0.21)
_SMOLLM2_1B7 = Offer("bartowski/SmolLM2-1.7B-Instruct-GGUF", "Q4_0", 0.93)
_QWEN3_0B6 = Offer("unsloth/Qwen3-0.6B-GGUF", "Q4_0", 0.36)
_QWEN3_0B6_Q8 = Offer("Qwen/Qwen3-0.6B-GGUF", "Q8_0", 0.6)
_QWEN3_1B7 = Offer("unsloth/Qwen3-1.7B-GGUF", "Q4_0", 0.98)
_QWEN3_1B7_Q8 = Offer("Qwen/Qwen3-1.7B-GGUF", "Q8_0", 1.7)
_QWEN3_4B = Offer("unsloth/Qwen3-4B-Instruct-2507-GGUF", "Q4_0", 2.2)
_QWEN3_8B = Offer("bartowski/Qwen_Qwen3-8B-GGUF", "Q4_0", 4.5)
_QWEN3_8B_K = Offer("Qwen/Qwen3-8B-GGUF", "Q4_K_M", 4.7)
_QWEN3_14B_K = Offer("Qwen/Qwen3-14B-GGUF", "Q4_K_M", 8.4)
_CODER_0B5 = Offer("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "Q4_0", 0.4)
_CODER_0B5_Q8 = Offer("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "Q8_0", 0.63)
_CODER_1B5 = Offer("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "Q4_0", 0.99)
_CODER_7B = Offer("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "Q4_0", 4.1)
_CODER_7B_K = Offer("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "Q4_K_M", 4.4)
_LLAMA_1B = Offer("bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_0", 0.72)
_LLAMA_3B = Offer("bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_0", 1.8)
_LLAMA_8B = Offer("unsloth/Llama-3.1-8B-Instruct-GGUF", "Q4_0", 4.4)
_GEMMA_270M = Offer("ggml-org/gemma-3-270m-it-qat-GGUF", "Q4_0", 0.22)
_GEMMA_1B = Offer("ggml-org/gemma-3-1b-it-qat-GGUF", "Q4_0", 0.67)
_GEMMA_4B = Offer("ggml-org/gemma-3-4b-it-qat-GGUF", "Q4_0", 2.4)
_GEMMA_12B = Offer("ggml-org/gemma-3-12b-it-qat-GGUF", "Q4_0", 6.6)
_GEMMA_27B = Offer("ggml-org/gemma-3-27b-it-qat-GGUF", "Q4_0", 14.8)

FAMILIES = (
    Family(
        "SmolLM2",
        r"smollm2",
        "Apache-2.0",
        "8k",
        (_SMOLLM2_135M, _SMOLLM2_360M, _SMOLLM2_1B7),
        "The starter's family. A few fine-tunes have one token more, which does no harm.",
    ),
    Family(
        "Qwen3",
        r"qwen3[-_ ](?:\d+(?:\.\d+)?b)(?!-a\d|.*(?:vl|omni|embed|rerank))",
        "Apache-2.0",
        "32k; 4B-Instruct-2507: 256k",
        (_QWEN3_0B6, _QWEN3_1B7, _QWEN3_4B, _QWEN3_8B, _QWEN3_14B_K),
        "Thinks before it answers unless told /no_think; 4B-Instruct-2507 never does.",
    ),
    Family(
        "Qwen2.5 Coder",
        r"qwen2\.5-coder",
        "Apache-2.0; 3B: research only",
        "32k",
        (_CODER_0B5, _CODER_1B5, _CODER_7B),
        "Small caches, and code is easy to draft. Sizes of the vocabulary differ by padding alone.",
    ),
    Family(
        "Qwen2.5",
        r"qwen2\.5-(?:\d+(?:\.\d+)?b)(?!.*(?:vl|omni))",
        "Apache-2.0; 3B: research only",
        "32k",
        (
            Offer("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_0", 0.4),
            Offer("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Q4_0", 0.99),
            Offer("bartowski/Qwen2.5-7B-Instruct-GGUF", "Q4_0", 4.1),
            Offer("bartowski/Qwen2.5-14B-Instruct-GGUF", "Q4_0", 8.0),
        ),
    ),
    Family(
        "DeepSeek R1 Distill (Qwen)",
        r"deepseek-r1-distill-qwen",
        "MIT",
        "128k",
        (
            Offer("alamios/DeepSeek-R1-DRAFT-Qwen2.5-0.5B-GGUF", "Q4_K_M", 0.4),
            Offer("bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF", "Q4_0", 1.0),
            Offer("bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", "Q4_0", 4.1),
            Offer("bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF", "Q4_0", 8.0),
        ),
        "Always thinks. Adds a BOS token, so that plain Qwen2.5 models cannot draft for it.",
    ),
    Family(
        "Llama 3.1 and 3.2",
        r"llama[-_ ]3\.[123]",
        "Llama community licence",
        "128k",
        (_LLAMA_1B, _LLAMA_3B, _LLAMA_8B),
        "Meta's own repositories are gated; these copies are open.",
    ),
    Family(
        "Gemma 3",
        r"gemma[-_ ]3[-_ ](?!n)",
        "Gemma terms of use",
        "32k (270M, 1B), 128k",
        (_GEMMA_270M, _GEMMA_1B, _GEMMA_4B, _GEMMA_12B, _GEMMA_27B),
        "Trained for four bits. Google's own repositories are gated; these copies are open.",
    ),
    Family(
        "Granite 4",
        r"granite-4\.[01]-(?!h-)",
        "Apache-2.0",
        "128k; 350M: 32k",
        (
            Offer("unsloth/granite-4.0-350m-GGUF", "Q4_0", 0.21),
            Offer("unsloth/granite-4.1-3b-GGUF", "Q4_0", 1.9),
            Offer("unsloth/granite-4.1-8b-GGUF", "Q4_0", 4.7),
        ),
    ),
    Family(
        "Mistral Small 3",
        r"mistral-small-3",
        "Apache-2.0",
        "128k",
        (
            Offer("bartowski/alamios_Mistral-Small-3.1-DRAFT-0.5B-GGUF", "Q4_K_M", 0.4),
            Offer("bartowski/mistralai_Mistral-Small-3.2-24B-Instruct-2506-GGUF", "Q4_0", 12.6),
        ),
    ),
)

PRESETS = (
    Preset(
        "Small and quick",
        MachineKind.CPU,
        4,
        _SMOLLM2_1B7,
        (_SMOLLM2_135M, _SMOLLM2_360M),
        4096,
        2.7,
        "the starter's larger sister, for machines with little memory",
    ),
    Preset(
        "Everyday",
        MachineKind.CPU,
        8,
        _QWEN3_4B,
        (_QWEN3_0B6,),
        4096,
        4.1,
        "good answers without a pause for thinking",
    ),
    Preset(
        "Capable",
        MachineKind.CPU,
        16,
        _QWEN3_8B,
        (_QWEN3_0B6, _QWEN3_1B7),
        4096,
        7.8,
        "two sizes of drafter for a target that is slow enough to need them",
    ),
    Preset(
        "Code",
        MachineKind.CPU,
        16,
        _CODER_7B,
        (_CODER_0B5, _CODER_1B5),
        8192,
        6.7,
        "small caches, and text that is easy to foresee",
        is_for_code=True,
    ),
    Preset(
        "Everyday",
        MachineKind.APPLE,
        16,
        _LLAMA_8B,
        (_LLAMA_1B,),
        8192,
        6.9,
        "the pair with the most experience behind it; leaves room for other programs",
    ),
    Preset(
        "Capable",
        MachineKind.APPLE,
        32,
        _QWEN3_14B_K,
        (_QWEN3_0B6_Q8, _QWEN3_1B7_Q8),
        8192,
        14.3,
        "a large target with two drafters, and room for other programs",
    ),
    Preset(
        "Code",
        MachineKind.GPU,
        8,
        _CODER_7B_K,
        (_CODER_0B5_Q8,),
        8192,
        6.3,
        "fits whole into the GPU's memory",
    ),
    Preset(
        "Capable",
        MachineKind.GPU,
        12,
        _QWEN3_8B_K,
        (_QWEN3_0B6_Q8, _QWEN3_1B7_Q8),
        8192,
        10.6,
        "target and two drafters whole in the GPU's memory",
    ),
    Preset(
        "Large",
        MachineKind.GPU,
        24,
        _GEMMA_27B,
        (_GEMMA_270M, _GEMMA_1B, _GEMMA_4B),
        8192,
        21.0,
        "three drafters of one family beside a large target",
    ),
)


def this_machine() -> Machine:
    """Main memory and GPU as the system and llama.cpp report them."""
    memory_gib = psutil.virtual_memory().total / GIBIBYTE
    if not has_gpu():
        return Machine(MachineKind.CPU, memory_gib)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return Machine(MachineKind.APPLE, memory_gib)
    gpu_gib = max((device.total_bytes for device in list_devices() if not device.name.startswith("CPU")), default=0)
    return Machine(MachineKind.GPU, gpu_gib / GIBIBYTE) if gpu_gib else Machine(MachineKind.CPU, memory_gib)


def recommended(machine: Machine | None = None) -> tuple[Preset, ...]:
    """Presets for a machine (None: this one), the most capable first; empty where only the starter will do."""
    machine = machine or this_machine()
    fitting = [preset for preset in PRESETS if _suits(preset, machine)]
    if not fitting and machine.kind is not MachineKind.CPU:
        main_memory_gib = psutil.virtual_memory().total / GIBIBYTE
        return recommended(Machine(MachineKind.CPU, main_memory_gib))
    return tuple(sorted(fitting, key=lambda preset: (-preset.memory_gib, preset.is_for_code)))


def family_of(facts: GgufFacts) -> Family | None:
    """The family that a model file says it belongs to."""
    names = (facts.name, facts.path.stem)
    return next((family for family in FAMILIES if any(map(family.has_member, names))), None)


def drafters_for(facts: GgufFacts) -> tuple[Offer, ...]:
    """What could be fetched to draft for a target: members of its family of less than half its size, smallest first."""
    family = family_of(facts)
    if family is None:
        return ()
    return tuple(offer for offer in family.offers if 2 * offer.size_gib * GIBIBYTE < facts.size_bytes)


def _suits(preset: Preset, machine: Machine) -> bool:
    """Memory is sold in round sizes, of which the system shows a little less."""
    return preset.kind is machine.kind and machine.memory_gib >= 0.9 * preset.memory_gib
