"""The web server: the chat page and the interface for other programs, on this machine, for this machine.

It listens where it is told (127.0.0.1 unless told otherwise), on the next free port when the wanted one is taken,
and ends with everything it started when it is interrupted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Collection

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from app.api.desk import SHUTS_DOWN
from app.api.gate import KEY_VARIABLE
from app.api.routes import HANDLERS, Api, ApiOptions
from app.api.translate import Defaults
from app.choices import SetChoice, preparation
from app.conversations import Conversations
from app.guard import Guard
from app.jobs import JobState, PhaseReport
from app.placements import Placements
from app.routes import download_routes
from app.service import Service
from app.worker import NotReady
from engine.config import GenerationSettings
from engine.errors import EnvironmentProblem
from engine.pool import PoolSettings
from models.folders import data_folder
from models.library import STARTER_NAME
from models.starter import is_present

PORTS_TRIED = 20
SHUTDOWN_S = 2
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection: a request that they send as it is closed would be lost."""
GRACE_S = 5.0
"""How long other programs' running requests may go on when the server is to end."""
LOOK_S = 0.1


def create_app(service: Service, base: SetChoice, generation: GenerationSettings, host: str, port: int) -> FastAPI:
    """The application: a health route, the interface for other programs, and the page."""
    # Gradio reads these: it must neither report to anyone nor keep what was asked.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_RUN_HISTORY"] = "False"
    import gradio as gr

    from app.style import HEAD, STYLE, theme
    from app.ui import build_page

    app = FastAPI(title="Quorum", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, host=host)

    @app.get("/health")
    def health() -> dict[str, str | None]:
        return _health(service)

    page, stream = build_page(service, base, generation)
    app.include_router(download_routes(service))
    app.include_router(stream)
    api = Api(service.desk, ApiOptions(Defaults(generation), key=os.environ.get(KEY_VARIABLE, "")))
    app.mount("/v1", api.application())
    app.router.routes.append(Route("/metrics", api.metrics()))
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=host,
        server_port=port,
        footer_links=[],
        show_error=True,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        allowed_paths=[],
        theme=theme(),
        css=STYLE,
        head=HEAD,
    )
    return app


def serve(
    *,
    choice: SetChoice,
    generation: GenerationSettings,
    host: str,
    port: int,
    opens_browser: bool,
) -> None:
    """Serve the page until interrupted.

    Args:
        choice: The set to load first; the starter is fetched when it is not there.
        generation: Where the controls of the page stand at first.
        host: The address to listen on.
        port: The port to listen on; the next free one is taken when it is in use.
        opens_browser: Whether to open the page in the user's browser.

    Raises:
        EnvironmentProblem: the address cannot be listened on.
    """
    listener, url = _listen_where_free(host, port)
    actual_port = listener.getsockname()[1]
    conversations = Conversations(data_folder() / "conversations.sqlite3")
    service = Service(conversations)
    try:
        if choice.target != STARTER_NAME or is_present():
            service.load(preparation(choice, placing=Placements(choice).placed))

        def announce() -> None:
            print(f"Quorum is ready at {url} (Ctrl-C ends it)", flush=True)
            if opens_browser:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        app = create_app(service, choice, generation, host, actual_port)
        settings = _settings(app)
        _AnnouncingServer(settings, announce, service).run(sockets=[listener])
    finally:
        service.close()
        conversations.close()
        listener.close()


def create_api_app(service: Service, options: ApiOptions, host: str, other_names: Collection[str] = ()) -> Starlette:
    """The interface for other programs alone: `/v1`, `/health` and `/metrics`."""

    async def health(_request: Request) -> JSONResponse:
        refusal = service.desk.refusal
        if refusal:
            return JSONResponse({"status": "unavailable", "reason": refusal}, 503)
        return JSONResponse(_health(service))

    api = Api(service.desk, options)
    routes = [
        Route("/health", health),
        Mount("/v1", api.application()),
        Route("/metrics", api.metrics()),
    ]
    guard = Middleware(Guard, host=host, other_names=tuple(other_names))
    return Starlette(routes=routes, middleware=[guard], exception_handlers=HANDLERS)


def _health(service: Service) -> dict[str, str | None]:
    """That the server is there, with which model, and what else the model has to do, if anything."""
    occupied_by = service.occupied_by
    found = {"status": "ok", "model": service.loaded.name if service.loaded else None}
    return {**found, "occupied_by": occupied_by} if occupied_by else found


def serve_api(
    *,
    choice: SetChoice,
    options: ApiOptions,
    pool: PoolSettings,
    host: str,
    other_names: Collection[str],
    port: int,
    progress: PhaseReport,
) -> None:
    """Serve other programs until interrupted; requests that run then get a short time to end.

    Args:
        choice: The set to load; the starter is fetched when it is not there.
        options: Of the interface.
        pool: How much is answered at once.
        host: The address to listen on.
        other_names: More names that requests may be addressed to.
        port: The port to listen on; the next free one is taken when it is in use.
        progress: Hears how the load gets on.

    Raises:
        QuorumError: the address cannot be listened on, or the set cannot be loaded.
    """
    listener, url = _listen_where_free(host, port)
    conversations = Conversations()
    service = Service(conversations, pool_settings=pool)
    try:
        load = service.load(preparation(choice))
        app = create_api_app(service, options, host, other_names)
        settings = _settings(app)
        server = _ApiServer(settings, service)

        def follow() -> None:
            while not load.wait_until_over(LOOK_S):
                told = load.peek()
                progress(told.phase, told.share)
            if load.peek().state is JobState.DONE:
                loaded = service.loaded
                name = loaded.name if loaded else "nothing"
                print(f"Quorum serves {name}; it is ready at {url}/v1 (Ctrl-C ends it)", flush=True)
            else:
                server.should_exit = True

        follower = threading.Thread(target=follow, name="quorum-load")
        follower.start()
        try:
            server.run(sockets=[listener])
        finally:
            load.cancel()
            follower.join()
        told = load.peek()
        if told.state is JobState.FAILED:
            raise NotReady(told.error)
    finally:
        service.close()
        conversations.close()
        listener.close()


def _listen_where_free(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and the address that leads to it."""
    listener = listen(host, port)
    actual_port = listener.getsockname()[1]
    if port and actual_port != port:
        print(f"Port {port} is in use; taking {actual_port}.", flush=True)
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{actual_port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the port, or to the first free one of those after it.

    Raises:
        EnvironmentProblem: none of them is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for candidate in range(port, port + PORTS_TRIED) if port else (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen()
        except OSError as error:
            listener.close()
            problem = error
            continue
        return listener
    raise EnvironmentProblem(
        f"cannot listen on {host}, ports {port} to {port + PORTS_TRIED - 1} ({problem}); give another one with --port"
    ) from problem


def _settings(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )


class _AnnouncingServer(uvicorn.Server):
    """Says when it is ready, and ends what pages are waiting for before it waits for the pages."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None], service: Service) -> None:
        super().__init__(config)
        self._announce = announce
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._service.close)
        await super().shutdown(sockets)


class _ApiServer(uvicorn.Server):
    """Lets running requests go on for a while before it ends them; a second Ctrl-C ends them at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        desk = self._service.desk
        desk.refuse(SHUTS_DOWN)
        deadline = time.monotonic() + GRACE_S
        while not desk.is_idle and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(self._service.close)
        await super().shutdown(sockets)
