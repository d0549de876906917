"""`launch.py bench`: how fast each way to answer is here, against plain decoding and against llama-server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.bench.benchmark import Benchmark, Plan, RowReport, ceiling, fingerprint
from app.bench.concurrent import ConcurrentBenchmark, render_concurrent, summarised
from app.bench.concurrent import Row as ConcurrentRow
from app.bench.configuration import Configuration, parse_configurations
from app.bench.journal import Journal
from app.bench.machine import kv_document, machine_document, models_document
from app.bench.peer import PEER_NAME, Peer
from app.bench.peer_pool import PeerPool, PeerPoolRow, render_peer_pool
from app.bench.plot import require_matplotlib, write_plot
from app.bench.prompts import SHIPPED_PROMPTS, Half, Prompt, choose_prompts, first_of_each, read_prompts
from app.bench.recording import Recording, load, record_answers, record_chains, save
from app.bench.replay import ReplayClock, cost_model
from app.bench.replayed import best_in_hindsight, replay_rows
from app.bench.rounds import WARM_UP, check_prompts, prompt_tokens
from app.bench.row import Row, compare, hash_text, row_document
from app.bench.simulate import (
    NOTE,
    ForeseenAnswer,
    Machine,
    Scenario,
    even_answers,
    flat_cost,
    recorded_answers,
    render_simulated,
)
from app.bench.step_costs import measure_step_costs
from app.bench.summary import Summary, summarise
from app.bench.table import render, render_hindsight, rows_csv
from app.choices import preparation
from app.options import positive, set_choice, speculation
from app.terminal import EXIT_INTERRUPTED, ProgressLine, interrupt_event
from engine.config import Exactness, LookAhead, Policy, PolicyKind, Sampling, SetConfig
from engine.cost import CALIBRATED_SIZES, CostModel, reading_ms
from engine.errors import EnvironmentProblem, SettingError
from engine.loader import CPU_BATCH_TOKENS, FREE_DRAFTERS, GPU_BATCH_TOKENS, LoadedSet
from engine.pool import GPU_SLICE_TOKENS, SLICE_TOKENS, PoolSettings
from engine.runtime.api import native
from engine.runtime.model import LoadCancelled
from models.atomic import replacing, write_json
from models.expand import build_fixtures
from models.library import resolve
from models.progress import Cancelled, stop_if_asked
from models.starter import fetch_starter

DEFAULT_CONFIGS = "auto"
DEFAULT_MAX_TOKENS = 160
DEFAULT_ROUNDS = 3
DEFAULT_SEED = 1
SIMULATED_CONCURRENCIES = (1, 2, 4, 8, 16)
SIMULATED_ACCEPTANCE = 0.7
SIMULATED_REQUESTS = 32
SIMULATED_PROMPT_TOKENS = 64
UNKNOWN_READ_SHARE = 0.25
"""A drafter reads a token in so much of a pass, where it was not measured; as `engine.cost` believes."""
TIMED_PROMPTS = 2
"""Prompts in whose answers a recording times steps: evenly spread, so that short and long ones are among them."""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `bench` to the program's parser."""
    parser = subparsers.add_parser(
        "bench", parents=[common], help="measure speed against plain decoding", allow_abbrev=False
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--configs",
        default="",
        metavar="LIST",
        help="joined by ;, each policy[,key=value...] with the keys weights, vote, look-ahead, shape, "
        "exactness and drafters=a+b; or a comma list of policies; default: auto. Plain decoding always runs",
    )
    what.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: those that come with the program")
    what.add_argument(
        "--half",
        choices=[half.value for half in Half],
        help="prompts by the hash of their id; default: report, or all of a file of your own",
    )
    what.add_argument("--categories", default="", metavar="LIST", help="default: all")
    what.add_argument(
        "--limit-per-category",
        type=positive,
        metavar="N",
        help="the first N prompts of each whose plain answer does not loop; loops are passed over after it",
    )
    what.add_argument("--repeat", type=positive, default=DEFAULT_ROUNDS, metavar="ROUNDS", help="default: 3")
    what.add_argument("--max-tokens", type=positive, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: 160")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    what.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="default: 1; each round adds one")
    what.add_argument(
        "--peer",
        metavar=f"{PEER_NAME}=PATH",
        help="run the same prompts on a llama-server binary, in several settings; with --concurrent, as many at once",
    )
    what.add_argument("--ceiling", action="store_true", help="also show what a perfect, free drafter could reach")
    what.add_argument(
        "--concurrent",
        type=_concurrencies,
        metavar="LIST",
        help="so many requests at once through the request pool, against one after another: 1,2,4,8,16 for example",
    )
    what.add_argument(
        "--overlap",
        type=_overlaps,
        default=(LookAhead.AUTO,),
        metavar="LIST",
        help="with --concurrent: draft for some requests while the target verifies others: auto, on or off, or "
        "several in turn: on,off; default: auto",
    )
    what.add_argument(
        "--cores",
        type=_cores,
        default=((), ()),
        metavar="TARGET/DRAFTERS",
        help="with --concurrent and --threads 1: keep the target and the draft models to cores of their own, as 0/1",
    )
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="OUT", help="everything, as one JSON document")
    results.add_argument("--csv", type=Path, metavar="OUT", help="one line for each answer")
    results.add_argument("--plot", type=Path, metavar="OUT.png", help="speed, acceptance and lengths as a picture")
    results.add_argument("--resume", action="store_true", help="continue the unfinished run beside OUT")
    again = parser.add_argument_group("recording and replaying")
    again.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="only record what every drafter would draft along the target's own answers, and what steps cost here",
    )
    again.add_argument(
        "--replay", type=Path, metavar="FILE", help="try --configs on a recording: seconds each, no model is loaded"
    )
    again.add_argument(
        "--hindsight",
        action="store_true",
        help="with --replay: also the best fixed settings of each category, out of all drafter sets and lengths",
    )
    _add_simulation(parser.add_argument_group("simulation of the request pool: predicted, nothing is measured"))
    parser.add_argument(
        "--build-fixtures",
        type=Path,
        metavar="DIR",
        help="only build targets of larger cost and degraded drafters out of the starter",
    )


def _add_simulation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--simulate",
        action="store_true",
        help="predict the pool's speed at 1,2,4,8,16 requests at once, or those of --concurrent, out of the costs that "
        "were measured for the set, those of a recording named with --replay, or those given here; with "
        "--limit-per-category, for the prompts that --concurrent would ask",
    )
    group.add_argument("--accepted", type=_share, metavar="SHARE", help="of draft tokens; default: as recorded, or 0.7")
    group.add_argument("--requests", type=positive, default=SIMULATED_REQUESTS, metavar="N", help="default: 32")
    group.add_argument(
        "--prompt-tokens", type=positive, default=SIMULATED_PROMPT_TOKENS, metavar="N", help="default: 64"
    )
    group.add_argument(
        "--read-ms", type=_amount, metavar="MS", help="a token of a prompt, for the target; default: out of its passes"
    )
    group.add_argument(
        "--target-ms",
        type=_duration,
        metavar="MS",
        help="the target's pass of one token, as on a GPU; instead of its costs",
    )
    group.add_argument(
        "--target-slope-ms", type=_amount, default=0.0, metavar="MS", help="with it: each token more; default: 0"
    )
    group.add_argument("--drafter-ms", type=_amount, metavar="MS", help="a drafter's pass for one request")
    group.add_argument(
        "--drafter-slope-ms",
        type=_amount,
        metavar="MS",
        help="each request more; default: grows as passes that were measured here do, or else as the target's",
    )
    group.add_argument(
        "--drafters-apart", action="store_true", help="drafters compute on a device of their own, not on the target's"
    )
    group.add_argument(
        "--link-ms", type=_amount, default=0.0, metavar="MS", help="from when a draft is made until the target has it"
    )


def _amount(text: str) -> float:
    """An option's number from 0."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, found {text}")
    return number


def _duration(text: str) -> float:
    """An option's number above 0."""
    number = _amount(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be more than 0, found {text}")
    return number


def _share(text: str) -> float:
    """An option's number from 0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, found {text}")
    return number


def _concurrencies(text: str) -> tuple[int, ...]:
    """An option's list of numbers of requests."""
    return tuple(positive(number) for number in text.split(","))


def _overlaps(text: str) -> tuple[LookAhead, ...]:
    """An option's list of ways to draft beside the target's passes."""
    return tuple(LookAhead(choice) for choice in text.split(","))


def _cores(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """An option's cores of the target, and those of the draft models."""
    target, drafters = text.split("/")
    return tuple(map(int, target.split(","))), tuple(map(int, drafters.split(",")))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the results; returns the exit code.

    Raises:
        QuorumError: something the user can mend; finished rows are kept beside the result file.
    """
    progress = ProgressLine()
    with interrupt_event() as cancel:
        try:
            if args.build_fixtures is not None:
                return _build(args.build_fixtures, progress, cancel)
            if args.plot is not None:
                require_matplotlib()
            if args.record is not None:
                return _record(args, progress, cancel)
            if args.simulate:
                return _simulate(args, progress, cancel)
            if args.replay is not None:
                return _replay(args, progress, cancel)
            if args.concurrent is not None:
                return _measure_concurrent(args, progress, cancel)
            return _measure(args, progress, cancel)
        except (Cancelled, LoadCancelled):
            progress.clear()
            return EXIT_INTERRUPTED


def _build(directory: Path, progress: ProgressLine, cancel: threading.Event) -> int:
    starter = fetch_starter(progress.show_bytes, cancel)
    fixtures = build_fixtures(directory, starter, progress.show_bytes, cancel=cancel)
    progress.clear()
    for path in (*fixtures.targets.values(), *fixtures.drafters.values()):
        print(path)
    return 0


def _measure(args: argparse.Namespace, progress: ProgressLine, cancel: threading.Event) -> int:
    known = read_prompts(args.prompts or SHIPPED_PROMPTS)
    half = _half(args)
    plan = _plan(args, known, half, progress, cancel)
    models = _models_document(plan, progress)
    settings = fingerprint(plan, models, hash_text(repr(known)), native().version)
    result = args.json or args.csv
    journal = Journal.resume(result, settings) if args.resume else Journal.start(result, settings)
    benchmark = Benchmark(plan, journal, progress.show, _announce(plan, journal, progress), cancel)
    with contextlib.closing(journal):
        complete = benchmark.run()
        progress.clear()
        rows = compare(journal.rows)
        peers = dict.fromkeys(row.config for row in rows if row.config.startswith(f"{PEER_NAME} "))
        summary = summarise(rows, tuple(peers), args.seed)
        document = {
            "complete": complete,
            "machine": machine_document(plan.set_config),
            "models": {**models, "kv": benchmark.findings.kv},
            "settings": settings,
            "prompts": _prompts_document(benchmark.prompts, half),
            "rounds": plan.rounds,
            "ceiling": benchmark.findings.ceiling,
            "rows": [row_document(row) for row in rows],
            "warm_up": [row_document(row) for row in benchmark.findings.warm_up],
            "summary": dataclasses.asdict(summary),
        }
        _write(args, document, rows, summary)
        if complete:
            journal.remove()
    print(render(document, summary, shows_ceiling=args.ceiling), end="")
    return 0 if complete else EXIT_INTERRUPTED


def _models_document(plan: Plan, progress: ProgressLine) -> dict[str, Any]:
    """The files that are measured, and how a peer runs them."""
    models = models_document(plan.set_config.target, plan.drafters, progress.show_bytes)
    if plan.peer is not None:
        models["peer"] = plan.peer.document(plan.peer_settings, plan.set_config, plan.draft_model)
    return models


def _measure_concurrent(args: argparse.Namespace, progress: ProgressLine, cancel: threading.Event) -> int:
    """Measure the request pool at several numbers of requests."""
    known = read_prompts(args.prompts or SHIPPED_PROMPTS)
    half = _half(args)
    plan = _plan(args, known, half, progress, cancel)
    prompts = first_of_each(plan.prompts, plan.limit_per_category)
    models = _models_document(plan, progress)
    peer_pool = None
    if plan.peer is not None:
        peer_pool = PeerPool(plan.peer, plan.peer_settings, plan.set_config, plan.draft_model)
    loaded = LoadedSet.load(replace(plan.set_config, drafters=plan.drafters), progress.show, cancel)
    rows: list[ConcurrentRow] = []
    peer_rows: list[PeerPoolRow] = []

    def tell(name: str, row: ConcurrentRow | PeerPoolRow, more: str = "") -> None:
        progress.clear()
        print(
            f"round {row.round}/{plan.rounds} {name}: {row.concurrency} at once "
            f"{row.tokens_per_second:.1f} tokens/s{more}",
            file=sys.stderr,
            flush=True,
        )

    def heard(row: ConcurrentRow) -> None:
        tell(row.configuration, row, f", one by one {row.sequential_tokens_per_second:.1f}")

    def heard_peer(row: PeerPoolRow) -> None:
        tell(row.setting, row)

    with contextlib.closing(loaded):
        check_prompts(loaded, prompts, plan.max_tokens)
        target_cores, drafter_cores = args.cores
        shapes = [
            PoolSettings(overlap=own, target_cores=target_cores, drafter_cores=drafter_cores) for own in args.overlap
        ]
        benchmark = ConcurrentBenchmark(loaded, prompts, plan.sampling, plan.max_tokens, shapes, cancel)
        requests = [prompt_tokens(loaded, prompt) for prompt in prompts]
        warm_up = prompt_tokens(loaded, WARM_UP)
        for concurrency in args.concurrent:
            for configuration in plan.configurations:
                rows += benchmark.run(configuration, concurrency, plan.rounds, heard)
            if peer_pool is not None:
                peer_rows += peer_pool.run(
                    requests, warm_up, plan.sampling, plan.max_tokens, concurrency, plan.rounds, cancel, heard_peer
                )
        loaded.save_learnt()
        kv = kv_document(loaded)
    complete = not cancel.is_set()
    summary = summarised(rows)
    document = {
        "complete": complete,
        "machine": machine_document(plan.set_config),
        "models": {**models, "kv": kv},
        "settings": fingerprint(plan, models, hash_text(repr(known)), native().version),
        "prompts": _prompts_document(prompts, half),
        "overlap": [own.value for own in args.overlap],
        "cores": args.cores,
        "rounds": plan.rounds,
        "rows": [row.document() for row in rows],
        "summary": summary,
        "peer_rows": [row.document() for row in peer_rows],
    }
    _write_document(args, document)
    print(render_concurrent(summary), end="")
    print(render_peer_pool(summary, peer_rows), end="")
    return 0 if complete else EXIT_INTERRUPTED


def _simulate(args: argparse.Namespace, progress: ProgressLine, cancel: threading.Event) -> int:
    """Predict what the request pool would bring."""
    policy = Policy.parse(args.policy or PolicyKind.AUTO.value)
    if policy.kind not in (PolicyKind.AUTO, PolicyKind.FIXED):
        raise SettingError(f"--simulate knows the policies auto and fixed:N, found {policy}")
    if args.replay is not None:
        recording = load(args.replay)
        scenarios = _recorded_scenarios(args, recording)
        source = f"recording {args.replay}"
    elif args.target_ms is not None and args.drafter_ms is not None:
        scenarios, source = [Scenario("a drafter", _what_if(args, None, ""), _even_answers(args))], "options"
    else:
        config = preparation(set_choice(args))(progress.show, cancel)
        with contextlib.closing(LoadedSet.load(config, progress.show, cancel)) as loaded:
            scenarios = _measured_scenarios(args, loaded)
        progress.clear()
        source = f"measured for {config.target.name}"
    if not scenarios:
        raise SettingError("there is no draft model to simulate; name one with --drafters")
    fixed_length = policy.fixed_length if policy.kind is PolicyKind.FIXED else None
    documents = []
    for scenario in scenarios:
        stop_if_asked(cancel, "simulating")
        outcomes = scenario.outcomes(args.concurrent or SIMULATED_CONCURRENCIES, fixed_length)
        print(render_simulated(scenario, outcomes), end="")
        documents.append(scenario.document(outcomes))
    _write_document(
        args,
        {
            "simulated": True,
            "note": NOTE,
            "costs_from": source,
            "policy": str(policy),
            "seed": args.seed,
            "scenarios": documents,
        },
    )
    return 0


def _measured_scenarios(args: argparse.Namespace, loaded: LoadedSet) -> list[Scenario]:
    """One for each draft model of a set: for equal requests, or for those that --concurrent would ask."""
    cost, names = loaded.learning.cost, [drafter.name for drafter in loaded.panel.models]
    if args.limit_per_category is None:
        return [Scenario(name, _what_if(args, cost, name), _even_answers(args)) for name in names]
    known = choose_prompts(read_prompts(args.prompts or SHIPPED_PROMPTS), _half(args), _categories(args))
    prompts = [tuple(prompt_tokens(loaded, one)) for one in first_of_each(known, args.limit_per_category)]
    prompt_token_ms = reading_ms(cost, loaded.context)
    scenarios = []
    for name in names:
        machine = _what_if(args, cost, name)
        acceptance = loaded.learning.acceptance.general((name,)) if args.accepted is None else args.accepted
        even = even_answers(len(prompts), 0, args.max_tokens, acceptance, args.seed)
        answers = [
            replace(answer, prompt_tokens=len(prompt), prompt=prompt)
            for answer, prompt in zip(even, prompts, strict=True)
        ]
        read = machine if args.read_ms is not None else replace(machine, read_ms=prompt_token_ms)
        scenarios.append(Scenario(name, read, tuple(answers)))
    return scenarios


def _half(args: argparse.Namespace) -> Half:
    return Half(args.half or (Half.ALL if args.prompts else Half.REPORT))


def _categories(args: argparse.Namespace) -> list[str]:
    return [name.strip() for name in args.categories.split(",") if name.strip()]


def _recorded_scenarios(args: argparse.Namespace, recording: Recording) -> list[Scenario]:
    """One for each draft model of a recording."""
    cost = cost_model(recording.costs, ReplayClock())
    scenarios = []
    for name in recording.drafters:
        if name in FREE_DRAFTERS:
            continue
        answers = _even_answers(args)
        if args.accepted is None:
            answers = recorded_answers(recording.answers, name, args.requests)
        overhead_ms = recording.costs.overhead_ms + recording.costs.sample_ms
        scenarios.append(Scenario(name, replace(_what_if(args, cost, name), overhead_ms=overhead_ms), answers))
    return scenarios


def _even_answers(args: argparse.Namespace) -> tuple[ForeseenAnswer, ...]:
    acceptance = SIMULATED_ACCEPTANCE if args.accepted is None else args.accepted
    return even_answers(args.requests, args.prompt_tokens, args.max_tokens, acceptance, args.seed)


def _what_if(args: argparse.Namespace, measured: CostModel | None, drafter: str) -> Machine:
    """The machine that was measured, with what the options say instead.

    Args:
        measured: None where the options say everything.
        drafter: Its name in what was measured.
    """
    if args.target_ms is not None:
        target = flat_cost(args.target_ms, args.target_slope_ms)
        slice_tokens, read_tokens = GPU_SLICE_TOKENS, GPU_BATCH_TOKENS
        read_ms = args.target_slope_ms
    else:
        assert measured is not None
        target, slice_tokens, read_tokens = measured, SLICE_TOKENS, CPU_BATCH_TOKENS
        read_ms = measured.verify_ms(CALIBRATED_SIZES[-1], 0) / CALIBRATED_SIZES[-1]
    if args.drafter_ms is not None:
        drafter_ms = args.drafter_ms
        drafter_read_ms = drafter_ms * UNKNOWN_READ_SHARE
    else:
        assert measured is not None
        drafter_ms, drafter_read_ms = measured.draft_ms((drafter,)), measured.read_ms(drafter)
    growth = measured or target
    if args.drafter_slope_ms is not None:
        growth = flat_cost(drafter_ms, args.drafter_slope_ms)
    return Machine(
        target=target,
        read_ms=read_ms if args.read_ms is None else args.read_ms,
        drafter=growth,
        drafter_ms=drafter_ms,
        drafter_read_ms=drafter_read_ms,
        link_ms=args.link_ms,
        is_apart=args.drafters_apart,
        overhead_ms=target.overhead_ms,
        slice_tokens=slice_tokens,
        read_tokens=read_tokens,
    )


def _record(args: argparse.Namespace, progress: ProgressLine, cancel: threading.Event) -> int:
    """Record the drafters along the target's answers, and time the steps of real answers."""
    if args.temperature:
        raise SettingError("--record follows the greedy answer; leave --temperature at 0")
    known = read_prompts(args.prompts or SHIPPED_PROMPTS)
    half = _half(args)
    plan = _plan(args, known, half, progress, cancel)
    models = models_document(plan.set_config.target, plan.drafters, progress.show_bytes)
    loaded = LoadedSet.load(replace(plan.set_config, drafters=plan.drafters), progress.show, cancel)
    with contextlib.closing(loaded):
        check_prompts(loaded, plan.prompts, plan.max_tokens)
        answers = record_answers(
            loaded, plan.prompts, plan.sampling, plan.max_tokens, progress.show, cancel, plan.limit_per_category
        )
        if not answers:
            raise SettingError("every answer runs in a loop; choose other prompts")
        timed = [answer.prompt for answer in answers[:: max(1, len(answers) // TIMED_PROMPTS)]][:TIMED_PROMPTS]
        costs = measure_step_costs(loaded, timed, progress.show, cancel)
        stop_if_asked(cancel, "recording")
        names, kv = loaded.panel.names, kv_document(loaded)
        found_ceiling = ceiling(loaded)
    for spec in plan.drafters:
        if spec not in FREE_DRAFTERS:
            record_chains(Path(spec), answers, plan.set_config.placement.threads, progress.show, cancel)
    recorded = {answer.prompt_id for answer in answers}
    about = {
        "machine": machine_document(plan.set_config),
        "models": {**models, "kv": kv},
        "settings": fingerprint(plan, models, hash_text(repr(known)), native().version),
        "prompts": _prompts_document([prompt for prompt in plan.prompts if prompt.id in recorded], half),
        "ceiling": found_ceiling,
    }
    try:
        save(args.record, Recording(about, names, costs, tuple(answers)))
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the recording: {error}") from error
    progress.clear()
    print(f"{args.record}: {len(answers)} answers, {', '.join(names)}")
    return 0


def _replay(args: argparse.Namespace, progress: ProgressLine, cancel: threading.Event) -> int:
    """Run configurations over a recording."""
    recording = load(args.replay)
    configurations = parse_configurations(
        args.configs or args.policy or DEFAULT_CONFIGS, Configuration(speculation(args))
    )
    rows = replay_rows(recording, configurations, cancel)
    summary = summarise(rows, (), args.seed)
    document = {
        **recording.about,
        "complete": True,
        "replayed": True,
        "rounds": 1,
        "costs": dataclasses.asdict(recording.costs),
        "rows": [row_document(row) for row in rows],
        "summary": dataclasses.asdict(summary),
    }
    best = best_in_hindsight(recording, progress.show, cancel) if args.hindsight else {}
    document["hindsight"] = {
        category: [dataclasses.asdict(setting) for setting in settings] for category, settings in best.items()
    }
    progress.clear()
    _write(args, document, rows, summary)
    print(render(document, summary, shows_ceiling=args.ceiling), end="")
    if best:
        print(f"\n{render_hindsight(best)}", end="")
    return 0


def _plan(
    args: argparse.Namespace, known: tuple[Prompt, ...], half: Half, progress: ProgressLine, cancel: threading.Event
) -> Plan:
    base = Configuration(speculation(args), Exactness(args.exactness or Exactness.EXACT.value))
    configurations = parse_configurations(args.configs or args.policy or DEFAULT_CONFIGS, base)
    prompts = choose_prompts(known, half, _categories(args))
    sampling = Sampling(temperature=args.temperature, seed=args.seed)
    peer = None if args.peer is None else _peer(args.peer)
    config = preparation(set_choice(args))(progress.show, cancel)
    named = [name for configuration in configurations for name in configuration.drafters or ()]
    return Plan(
        set_config=config,
        configurations=configurations,
        drafter_specs={name: _drafter_spec(name, config) for name in named},
        prompts=prompts,
        rounds=args.repeat,
        sampling=sampling,
        max_tokens=args.max_tokens,
        peer=peer,
        limit_per_category=args.limit_per_category,
    )


def _prompts_document(prompts: Sequence[Prompt], half: Half) -> dict[str, Any]:
    categories = {prompt.category for prompt in prompts}
    return {
        "count": len(prompts),
        "categories": len(categories),
        "half": half.value,
        "copies": sum(prompt.copies for prompt in prompts),
    }


def _peer(text: str) -> Peer:
    kind, _, path = text.partition("=")
    if kind != PEER_NAME or not path:
        raise SettingError(f"--peer takes {PEER_NAME}=PATH, found {text!r}")
    return Peer.probe(Path(path).expanduser())


def _drafter_spec(name: str, config: SetConfig) -> str:
    """A drafter by the name that `--drafters` gives it, or as `--drafters` would name it."""
    for spec in config.drafters:
        if name in (spec, Path(spec).stem):
            return spec
    return name if name in FREE_DRAFTERS else str(resolve(name))


def _announce(plan: Plan, journal: Journal, progress: ProgressLine) -> RowReport:
    def heard(row: Row) -> None:
        progress.clear()
        print(
            f"[{len(journal.rows)}/{plan.answers}] round {row.round}/{plan.rounds} {row.prompt_id}: "
            f"{row.config} {row.tokens_per_second:.1f} tokens/s",
            file=sys.stderr,
            flush=True,
        )

    return heard


def _write_document(args: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Write what has neither answers' rows nor a picture."""
    if args.json is not None:
        try:
            write_json(args.json, document)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write the results: {error}") from error


def _write(args: argparse.Namespace, document: Mapping[str, Any], rows: list[Row], summary: Summary) -> None:
    try:
        if args.json is not None:
            write_json(args.json, document)
        if args.csv is not None:
            with replacing(args.csv) as temporary:
                temporary.write_text(rows_csv(rows), encoding="utf-8")
        if args.plot is not None:
            write_plot(args.plot, summary)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the results: {error}") from error
