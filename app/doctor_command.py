"""`launch.py doctor`: what llama.cpp sees on this machine, and how exact the chosen model is here."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
from typing import Any

import psutil

from app.choices import SetChoice, preparation
from app.options import set_choice
from app.terminal import ProgressLine, interrupt_event
from engine.config import default_threads
from engine.exactness import ExactnessReport, Way, probe
from engine.loader import LoadedSet
from engine.runtime.api import native
from engine.runtime.devices import list_devices
from models import starter
from models.folders import cache_folder, data_folder


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `doctor` to the program's parser."""
    parser = subparsers.add_parser("doctor", parents=[common], help="show devices, memory and exactness")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    report = machine_document()
    if args.target is not None or starter.is_present():
        report["model"] = _model_document(dataclasses.replace(set_choice(args), drafters=()))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0


def machine_document() -> dict[str, Any]:
    """Facts about the machine and the installation."""
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "llama_cpp_python": native().version,
        "llama_cpp_features": native().system_info.strip(" |"),
        "gpu_offload": native().has_gpu_offload,
        "devices": [dataclasses.asdict(device) for device in list_devices()],
        "physical_cores": psutil.cpu_count(logical=False),
        "default_threads": default_threads(),
        "memory_total_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "cache_folder": str(cache_folder()),
        "data_folder": str(data_folder()),
    }


def _model_document(choice: SetChoice) -> dict[str, Any]:
    progress = ProgressLine()
    with interrupt_event() as cancel, contextlib.ExitStack() as resources:

        def show_comparison(share: float) -> None:
            if cancel.is_set():
                raise KeyboardInterrupt
            progress.show("Comparing batches with single tokens", share)

        resources.callback(progress.clear)
        config = preparation(choice)(progress.show, cancel)
        loaded = LoadedSet.load(config, progress.show, cancel)
        resources.callback(loaded.close)
        report = probe(loaded.context, is_thorough=True, progress=show_comparison)
        cost = loaded.learning.cost
        return {
            "path": str(config.target),
            "description": loaded.model.description,
            "kv_type": loaded.context.settings.kv_type.name,
            "can_roll_back": loaded.model.can_roll_back,
            "setting": loaded.setting.document(),
            "one_token_pass_ms": cost.verify_ms(1, 0),
            "pass_cost_by_tokens": [round(ms / cost.verify_ms(1, 0), 2) for ms in cost.curve(0, 16)],
            "exactness": exactness_document(report),
        }


def exactness_document(report: ExactnessReport) -> dict[str, Any]:
    """The exactness report as plain data."""
    return {
        "is_exact": report.is_exact,
        "summary": report.summary,
        "in_words": {way.value: report.in_words(way) for way in Way},
        "compared_rows": report.compared_rows,
        "changed_choices": report.changed_choices,
        **dataclasses.asdict(report),
    }


def _print(report: dict[str, Any]) -> None:
    gigabyte = 2**30
    rows = [
        ("Python", f"{report['python']} on {report['system']}"),
        ("llama-cpp-python", report["llama_cpp_python"]),
        ("CPU features", report["llama_cpp_features"]),
        ("Devices", ", ".join(f"{device['name']} ({device['description']})" for device in report["devices"])),
        ("GPU offload", "yes" if report["gpu_offload"] else "no: this build of llama.cpp runs on the CPU"),
        ("Threads", f"{report['default_threads']} of {report['physical_cores']} physical cores"),
        (
            "Memory",
            f"{report['memory_free_bytes'] / gigabyte:.1f} of {report['memory_total_bytes'] / gigabyte:.1f} GB free",
        ),
        ("Cache folder", report["cache_folder"]),
        ("Data folder", report["data_folder"]),
    ]
    model = report.get("model")
    if model is None:
        rows.append(("Model", "none chosen; name one with --target, or fetch the starter: launch.py models fetch"))
    else:
        rows += [
            ("Model", f"{model['description']} ({model['path']})"),
            ("Drafting", model["setting"]["badge"]),
            ("One-token pass", f"{model['one_token_pass_ms']:.1f} ms"),
            ("Cost of 1–16 tokens", " ".join(f"{cost:g}" for cost in model["pass_cost_by_tokens"])),
            ("Exactness", model["exactness"]["summary"]),
            *((f"  {way}", found) for way, found in model["exactness"]["in_words"].items()),
        ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name:<{width}}  {value}\n")
