"""`launch.py serve`: answers for other programs, over HTTP as OpenAI's clients speak it."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys

from app.api.gate import KEY_VARIABLE
from app.options import add_sampling_options, generation_settings, positive, set_choice
from app.terminal import ProgressLine
from engine.errors import SettingError

DEFAULT_PORT = 8080
DEFAULT_PARALLEL = 8
DEFAULT_QUEUE = 64
DEFAULT_HOST = "127.0.0.1"


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `serve` to the program's parser."""
    parser = subparsers.add_parser(
        "serve",
        parents=[common],
        help="answer other programs over HTTP, as OpenAI's API",
        description="Serves /v1/chat/completions, /v1/completions and /v1/models as OpenAI's clients expect them, "
        "/health, and /metrics for Prometheus. What a request does not say is as the options below say; no request may "
        "ask for more than --max-tokens.",
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default=DEFAULT_HOST, metavar="ADDRESS", help="address to listen on; 127.0.0.1")
    server.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine that requests may be addressed to; may be given again",
    )
    server.add_argument(
        "--api-key", metavar="KEY", help=f"what clients must show; better kept in {KEY_VARIABLE}, where nobody sees it"
    )
    server.add_argument(
        "--parallel", type=positive, default=DEFAULT_PARALLEL, metavar="N", help="requests answered at once; 8"
    )
    server.add_argument(
        "--queue", type=positive, default=DEFAULT_QUEUE, metavar="N", help="requests that may wait; more get 429; 64"
    )
    server.add_argument(
        "--cache-tokens", type=positive, metavar="N", help="tokens in the cache that requests share; default: --ctx"
    )
    server.add_argument("--max-body-bytes", type=positive, metavar="N", help="largest request that is read; 4 MiB")
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted and return the exit code.

    Raises:
        QuorumError: something the user can mend.
    """
    # The web server takes a while to import, which the other commands need not wait for.
    from app.api.routes import DEFAULT_BODY_BYTES, ApiOptions
    from app.api.translate import Defaults
    from app.server import serve_api
    from engine.pool import PoolSettings

    key = os.environ.get(KEY_VARIABLE, "") if args.api_key is None else args.api_key
    if args.api_key is not None and not key.strip():
        raise SettingError("--api-key needs a key; leave it out to serve everyone who reaches this machine's port")
    if not key and not _is_loopback(args.host):
        print(
            f"warning: everyone who reaches {args.host} can ask; give --api-key or {KEY_VARIABLE} to prevent it",
            file=sys.stderr,
        )
    progress = ProgressLine()
    try:
        serve_api(
            choice=set_choice(args),
            options=ApiOptions(
                Defaults(generation_settings(args), args.max_tokens), args.max_body_bytes or DEFAULT_BODY_BYTES, key
            ),
            pool=PoolSettings(args.parallel, args.queue, args.cache_tokens),
            host=args.host,
            other_names=args.allow_host,
            port=args.port or DEFAULT_PORT,
            progress=progress.show,
        )
    finally:
        progress.clear()
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
