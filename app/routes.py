"""What can be downloaded from the page: conversations and traces. Read-only; the guard stands before all of it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

from app.bench.plot import write_plot
from app.bench.table import rows_csv
from app.comparison import read_result
from app.export import as_json, as_markdown, file_stem
from app.service import Service


def download_routes(service: Service) -> APIRouter:
    """The routes, for the application to include."""
    router = APIRouter()

    @router.get("/conversations/{name}.{suffix}")
    def conversation(name: str, suffix: str) -> Response:
        kept = service.conversations.get(name)
        if kept is None or suffix not in ("md", "json"):
            raise HTTPException(404, "there is no such conversation")
        if suffix == "md":
            return attachment(as_markdown(kept), "text/markdown", f"{file_stem(kept)}.md")
        return attachment(as_json(kept), "application/json", f"{file_stem(kept)}.json")

    @router.get("/trace.json")
    def trace() -> Response:
        steps = [dataclasses.asdict(step) for step in service.trace]
        return attachment(json.dumps(steps, ensure_ascii=False, indent=1), "application/json", "quorum-trace.json")

    @router.get("/comparisons/{result_id}.{suffix}")
    def comparison(result_id: str, suffix: str) -> Response:
        result = read_result(result_id)
        if result is None or suffix not in ("csv", "json", "png"):
            raise HTTPException(404, "there is no such comparison")
        name = f"quorum-{result_id}.{suffix}"
        if suffix == "csv":
            return attachment(rows_csv(result.rows), "text/csv", name)
        if suffix == "json":
            return attachment(json.dumps(result.document, ensure_ascii=False, indent=1), "application/json", name)
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / name
            write_plot(picture, result.summary)
            return attachment(picture.read_bytes(), "image/png", name)

    return router


def attachment(content: str | bytes, media_type: str, name: str) -> Response:
    """A file for the browser to save."""
    return Response(content, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{name}"'})
