"""`launch.py models ...`: what is installed, fetching more, what fits together, derived drafters.

Results go to stdout and progress to stderr, so that `--json` can be piped. A `QuorumError` is left to the caller.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf.constants import LlamaFileType

from app.choices import SetChoice
from app.terminal import TransferLine, interrupt_event, size_text
from engine.errors import ModelFileError, SettingError
from models import hub
from models.budget import forecast
from models.catalogue import WHY_Q4_0_ON_CPU, MachineKind, recommended, this_machine
from models.derive import all_derived, default_format, derive, derive_default
from models.gguf_file import read_header
from models.identity import known_sha256s, sha256_of
from models.layer_search import DEFAULT_SECONDS, SearchResult, search
from models.library import (
    STARTER_NAME,
    InstalledModel,
    Origin,
    add_folder,
    added_folders,
    list_models,
    remove_model,
    resolve,
)
from models.pairing import Verdict, choose_drafters, order_reason, pairings, suggest
from models.progress import Cancelled
from models.starter import fetch_starter

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_FORMATS = {
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q2_k": LlamaFileType.MOSTLY_Q2_K,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_MEMORY_NAMES = {
    MachineKind.CPU: "main memory",
    MachineKind.APPLE: "memory shared with the GPU",
    MachineKind.GPU: "GPU memory",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add `models` and what can follow it to the program's parser."""
    parser = subparsers.add_parser("models", help="list, fetch, pair and derive model files")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    actions = parser.add_subparsers(dest="models_action", metavar="ACTION")

    listing = actions.add_parser("list", help="what is installed (also without ACTION)")
    listing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")

    showing = actions.add_parser("show", help="all about one installed model, its SHA-256 included")
    showing.add_argument("model", help="name or path")
    showing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")

    actions.add_parser("recommend", help="what to fetch for this machine, and why")

    fetch = actions.add_parser("fetch", help="download a model")
    fetch.add_argument(
        "what",
        nargs="?",
        default="starter",
        help="starter (the default), recommended (the first set that `recommend` names), or OWNER/REPOSITORY[:FORMAT "
        "or :FILE] of the Hugging Face hub",
    )

    pair = actions.add_parser("pair", help="which installed files can draft for a target, and why others cannot")
    pair.add_argument("target", help="name or path")
    pair.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")

    deriving = actions.add_parser("derive", help="make a drafter from a target: fewer layers, fewer bits, or both")
    deriving.add_argument("target", help="name or path")
    deriving.add_argument("--drop", type=_layers, help="layers to leave out, as 10,14")
    deriving.add_argument("--bits", type=str.lower, choices=sorted(_FORMATS), help="format of the copy's weights")

    deriving.add_argument("--search", action="store_true", help="choose the layers by trying them out")
    deriving.add_argument("--count", type=int, help="how many layers --search leaves out")
    deriving.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="how long --search may take, about (%(default)s)"
    )

    removing = actions.add_parser("remove", help="delete a derived or fetched model; forget an added folder")
    removing.add_argument("name", help="name of a model, or an added folder")

    adding = actions.add_parser("add-folder", help="look for models in this folder too")
    adding.add_argument("folder", type=Path)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say.

    Raises:
        QuorumError: it cannot be done; the message says why.
    """
    actions: dict[str | None, Callable[[argparse.Namespace], None]] = {
        None: _list,
        "list": _list,
        "show": _show,
        "recommend": _recommend,
        "fetch": _fetch,
        "pair": _pair,
        "derive": _derive,
        "remove": _remove,
        "add-folder": _add_folder,
    }
    actions[args.models_action](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    models = list_models()
    if args.json:
        hashes = known_sha256s(model.path for model in models)
        _print_json([_as_json(model, hashes.get(model.path)) for model in models])
    elif models:
        _print_table(("NAME", "SIZE", "FORMAT", "PARAMETERS", "CONTEXT", "FROM"), map(_row, models))
        for model in models:
            if model.fault:
                print(f"\n{model.name} cannot be used: {model.fault}")
        _hint("`models pair NAME` tells what can draft for one of them, `models recommend` what else to fetch")
    else:
        print("No model is installed. `python launch.py models fetch` gets the starter (98 MB).")


def _show(args: argparse.Namespace) -> None:
    path = resolve(args.model)
    installed = {model.path.resolve(): model for model in list_models()}
    model = installed.get(path.resolve()) or InstalledModel(path.stem, path, Origin.ELSEWHERE, read_header(path))
    if model.fault:
        raise ModelFileError(model.fault)
    with TransferLine(sys.stderr) as line:
        sha256 = sha256_of(path, line.show)
    described = _as_json(model, sha256)
    if args.json:
        _print_json(described)
        return
    made = next((copy for copy in all_derived() if copy.path.resolve() == path.resolve()), None)
    if made is not None:
        described |= {
            "derived_from": made.target_name,
            "measured": made.measured or "not yet; derive --search does it",
        }
    names = [name for name, value in described.items() if value not in ("", None)]
    width = max(map(len, names))
    for name in names:
        print(f"{name.replace('_', ' '):<{width}}  {described[name]}")


def _recommend(_: argparse.Namespace) -> None:
    machine = this_machine()
    presets = recommended(machine)
    if presets:
        print(f"For {machine.memory_gib:.0f} GB of {_MEMORY_NAMES[machine.kind]}:")
    for preset in presets:
        print(f"\n{preset.name}, about {preset.total_gib:.1f} GB in use: {preset.why}")
        for offer in (preset.target, *preset.drafters):
            role = "target" if offer is preset.target else "drafter"
            print(f"  {role:<8}{offer.size_gib:5.1f} GB  python launch.py models fetch {offer.reference}")
    if machine.kind is MachineKind.CPU and presets:
        print(f"\n{WHY_Q4_0_ON_CPU}.")
    if presets:
        print("`python launch.py models fetch recommended` gets the first of these sets.")
    print("The starter (`python launch.py models fetch`, 0.1 GB) runs on every machine.")


def _fetch(args: argparse.Namespace) -> None:
    paths = []
    try:
        with interrupt_event() as cancel, TransferLine(sys.stderr) as line:
            for reference in _references(args.what):
                if reference == STARTER_NAME:
                    paths.append(fetch_starter(line.show, cancel))
                else:
                    paths.append(hub.fetch(reference, line.show, cancel))
                print(paths[-1])
    except (Cancelled, KeyboardInterrupt):
        _hint("stopped; what has arrived from the hub is kept, and the same command goes on from there")
        raise
    if paths:
        _hint(f"`python launch.py --target {shlex.quote(paths[0].stem)}` chats with it")


def _references(what: str) -> tuple[str, ...]:
    if what.lower() == STARTER_NAME:
        return (STARTER_NAME,)
    if what.lower() != "recommended":
        return (what,)
    presets = recommended(this_machine())
    if not presets:
        return (STARTER_NAME,)
    return tuple(offer.reference for offer in (presets[0].target, *presets[0].drafters))


def _pair(args: argparse.Namespace) -> None:
    target = resolve(args.target)
    verdicts = [verdict for verdict in pairings(target) if verdict.path.resolve() != target.resolve()]
    if args.json:
        _print_json([_verdict_as_json(verdict) for verdict in verdicts])
        return
    print(f"Drafters for {target.stem}: ngram and suffix always; of the installed models:")
    for verdict in verdicts:
        mark = "fits" if verdict.is_worth_choosing else "fits, but" if verdict.is_compatible else "no"
        print(f"  {mark:<10}{verdict.name}")
        for text in (verdict.reason, verdict.caution, verdict.measured):
            if text:
                print(f"            {text}")
    suggestions = {verdict.suggestion for verdict in verdicts if verdict.suggestion}
    for suggestion in sorted(suggestions):
        print(f"Suggestion: {suggestion}.")
    if not verdicts:
        print(f"  none; {suggest(target)}.")
    chosen = choose_drafters(target)
    placed = SetChoice().config(target, chosen)
    print(f"Without --drafters: {', '.join(Path(name).stem for name in chosen)}. In memory, this")
    print(f"  {forecast(placed.config).summary}.")
    reason = order_reason(chosen)
    if reason:
        print(f"Order: {reason}.")
    if placed.reason:
        print(f"{placed.reason}.")


def _derive(args: argparse.Namespace) -> None:
    target = resolve(args.target)
    facts = read_header(target)
    file_type = _FORMATS[args.bits] if args.bits else None
    if args.search and args.drop is not None:
        raise SettingError("--search chooses the layers itself; leave out --drop, or --search")
    if args.seconds <= 0:
        raise SettingError(f"--seconds must be more than 0, found {args.seconds:g}")
    if args.count is not None and not args.search:
        raise SettingError("--count says how many layers --search leaves out; add --search, or name layers with --drop")
    with TransferLine(sys.stderr) as line:
        if args.search:
            result = search(target, file_type or default_format(facts), args.seconds, line.show, drop_count=args.count)
            made = result.made
        elif args.drop is None and args.bits is None:
            made = derive_default(target, line.show)
        else:
            made = derive(target, args.drop or (), file_type, line.show)
    print(made.path)
    print(f"{made.name}: {size_text(made.size_bytes)}, target {size_text(facts.size_bytes)}", file=sys.stderr)
    if args.search:
        print(_findings(result), file=sys.stderr)
    advice = "" if made.measured else "; with --search its layers are chosen, and it is measured"
    _hint(f"it is offered as a drafter of {target.stem} from now on{advice}")


def _findings(result: SearchResult) -> str:
    ending = "every layer tried" if result.is_complete else "time ran out"
    lines = [
        f"{len(result.trials)} copies tried ({ending}), compared over {result.compared_tokens} tokens that the target "
        f"wrote; the target itself agrees with {result.target_agreement:.0%} of them"
    ]
    for label, measured in (("without a search", result.before), ("with it", result.after)):
        layers = ", ".join(map(str, measured.dropped_layers))
        lines.append(
            f"  {label:<17}without layer {layers}: agrees {measured.agreement:.0%}, "
            f"a pass costs {measured.cost_ratio:.0%} of the target's; at most {measured.best_speedup:.2f}x alone"
        )
    return "\n".join(lines)


def _remove(args: argparse.Namespace) -> None:
    print(f"removed {remove_model(args.name)}", file=sys.stderr)


def _add_folder(args: argparse.Namespace) -> None:
    add_folder(args.folder)
    folder = added_folders()[-1]
    found = sum(model.path.is_relative_to(folder) for model in list_models())
    print(f"{args.folder}: {found} model file{'' if found == 1 else 's'}", file=sys.stderr)


def _hint(text: str) -> None:
    """What may come next, for people; not among the results."""
    print(f"{text}.", file=sys.stderr)


def _layers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"layers are numbers with commas between them, as 10,14; found {text!r}")
    return tuple(map(int, text.split(",")))


def _row(model: InstalledModel) -> tuple[str, ...]:
    facts = model.facts
    if facts is None:
        return (model.name, "-", "-", "-", "-", model.origin.value)
    return (
        model.name,
        size_text(facts.size_bytes),
        facts.quantisation,
        f"{facts.parameter_count / 1e6:,.0f} M",
        str(facts.context_tokens),
        model.origin.value,
    )


def _as_json(model: InstalledModel, sha256: str | None) -> dict[str, object]:
    facts = model.facts
    described: dict[str, object] = {
        "name": model.name,
        "path": str(model.path),
        "origin": model.origin.value,
        "fault": model.fault,
        "derived_from": model.derived_from,
        "sha256": sha256,
    }
    if facts is not None:
        described |= {
            "size_bytes": facts.size_bytes,
            "architecture": facts.architecture,
            "quantisation": facts.quantisation,
            "parameter_count": facts.parameter_count,
            "layer_count": facts.layer_count,
            "context_tokens": facts.context_tokens,
            "vocabulary_size": facts.vocabulary_size,
            "has_chat_template": facts.has_chat_template,
            "licence": facts.licence,
            "expansion": facts.expansion,
        }
    return described


def _verdict_as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.name,
        "path": str(verdict.path),
        "is_compatible": verdict.is_compatible,
        "reason": verdict.reason,
        "caution": verdict.caution,
        "measured": verdict.measured,
        "suggestion": verdict.suggestion,
    }


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
