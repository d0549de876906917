"""A stand-in for llama-server: it answers `--version` and `--help`, and every completion with fixed times.

Run as a program. The environment says where it notes what it was asked and how it was started, and how many requests
it waits for before it answers any.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HELP = """\
usage: llama-server [options]

----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0)
-t,    --threads N                      number of CPU threads (default: -1)
-ctk,  --cache-type-k TYPE              KV cache data type for K
                                        allowed values: f32, f16, bf16
                                        (default: f16)
-np,   --parallel N                     number of server slots (default: -1)
-m,    --model FNAME                    model path to load
--host HOST                             address to listen on
--port PORT                             port to listen on

----- speculative params -----

--spec-draft-type-k, -ctkd, --cache-type-k-draft TYPE
                                        KV cache data type for K for the draft model
                                        (default: f16)
--spec-draft-n-max N                    number of tokens to draft (default: 3)
--spec-draft-model, -md, --model-draft FNAME
                                        draft model for speculative decoding (default: unused)
--spec-type none,draft-simple,draft-mtp,ngram-simple,ngram-mod
                                        comma-separated list of types (default: none)
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max
"""
VERSION = "version: 1.2.3 (build 7, commit abcdef0)\nbuilt with a pencil\n"


TOGETHER = threading.Barrier(int(os.environ.get("FAKE_SERVER_AT_ONCE", "1")), timeout=60)


class Handler(BaseHTTPRequestHandler):
    """Notes each request in the file that FAKE_SERVER_NOTES names."""

    def do_GET(self) -> None:
        self._reply({"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["FAKE_SERVER_NOTES"], "a", encoding="utf-8") as notes:
            notes.write(json.dumps({"arguments": sys.argv[1:], "request": request}) + "\n")
        if os.environ.get("FAKE_SERVER_FAILS"):
            print("error: out of paper", flush=True)
            os._exit(3)
        TOGETHER.wait()
        self._reply(
            {
                "content": "Hello there.",
                "tokens": [1, 2, 3, 4, 5],
                "stop_type": "eos",
                "timings": {
                    "prompt_n": len(request["prompt"]),
                    "prompt_ms": 250.0,
                    "predicted_n": 5,
                    "predicted_ms": 400.0,
                    "draft_n": 3,
                    "draft_n_accepted": 2,
                },
            }
        )

    def _reply(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Be silent."""


def written_to(folder: Path) -> Path:
    """The stand-in as a program of its own."""
    program = folder / "llama-server"
    program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text(encoding='utf-8')}", encoding="utf-8")
    program.chmod(0o755)
    return program


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(VERSION, file=sys.stderr)
    elif arguments == ["--help"]:
        print(HELP)
    else:
        port = int(arguments[arguments.index("--port") + 1])
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
