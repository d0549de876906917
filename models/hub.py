"""Models from the Hugging Face hub: found by repository and format, fetched whole or not at all.

Which file is meant is decided when it is fetched, from the repository's own list and by the format in the file names,
so that a renamed file is still found. The hub's client lists the files, knows the user's login and the endpoint, and
explains refusals; the bytes come over plain HTTP (`models.transfer`), never through Xet, so that progress, resuming and
cancelling are the same for everyone. The token is the one of the user's own login and stays with the hub's host.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine.errors import EnvironmentProblem, ModelFileError, SettingError
from models.folders import models_folder
from models.gguf_file import is_later_part, read_header, split_paths
from models.identity import remember, sha256_of
from models.progress import Progress, Report, no_report, stop_if_asked
from models.transfer import TRANSIENT, Patience, RemoteFile, pause, retry_after_s, transfer

PREFERRED_FORMATS = ("Q4_0", "IQ4_NL", "Q4_K_M", "Q4_1", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""Tried in this order when no format is named. Q4_0 first: llama.cpp repacks it for the CPU, so that checking several
drafted tokens costs least; on a GPU it is no slower than the others."""

_REFERENCE = re.compile(r"^(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<wanted>[^:]+))?$")
_FORMAT = re.compile(
    r"(?:^|[-._])(?P<format>(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[-.]|$)", re.IGNORECASE
)
_NO_TARGET = re.compile(r"^(mmproj|imatrix|mtp|eagle3?|dflash|dspark)\b|imatrix|mmproj", re.IGNORECASE)
"""Projectors, calibration data and head drafters, which lie beside the models they belong to."""
_CONNECTION_ATTEMPTS = 2
"""Without a network at all, the user should hear of it soon."""
_UNLOADABLE = re.compile(r"Q4_0_[48]_[48]", re.IGNORECASE)
"""Formats that llama.cpp has given up."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository at one commit."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in a repository: one file, or the parts of a split one in order."""

    repository: str
    commit: str
    format: str
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def name(self) -> str:
        return PurePosixPath(self.files[0].path).stem


def find(reference: str, cancel: threading.Event | None = None, patience: Patience | None = None) -> HubModel:
    """The model that `REPOSITORY`, `REPOSITORY:FORMAT` or `REPOSITORY:FILE` means on the hub now."""
    repository, wanted = parse_reference(reference)
    return _choose(list_repository(repository, cancel, patience), repository, wanted)


def parse_reference(reference: str) -> tuple[str, str]:
    """Repository, and what is wanted of it (empty: the preferred format)."""
    match = _REFERENCE.match(reference.strip().removeprefix("https://huggingface.co/").rstrip("/"))
    if match is None:
        raise SettingError(
            f"{reference!r} names no model on the hub; write OWNER/REPOSITORY, or OWNER/REPOSITORY:Q4_0, or "
            "OWNER/REPOSITORY:FILE.gguf"
        )
    return match["repository"], match["wanted"] or ""


def list_repository(
    repository: str, cancel: threading.Event | None = None, patience: Patience | None = None
) -> tuple[HubModel, ...]:
    """Every model in a repository, as the hub lists it now."""
    with _explained(repository):
        info = _repository_info(repository, cancel, patience or Patience())
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    models = []
    for path in sorted(files):
        name = PurePosixPath(path).name
        if not name.lower().endswith(".gguf") or _NO_TARGET.search(name) or _UNLOADABLE.search(name):
            continue
        if is_later_part(Path(name)) or not _is_safe(path):
            continue
        parts = [str(PurePosixPath(path).with_name(part.name)) for part in split_paths(Path(name))]
        if all(part in files for part in parts):
            models.append(HubModel(repository, info.sha, format_of(name), tuple(_file(files[part]) for part in parts)))
    return tuple(models)


def format_of(file_name: str) -> str:
    """The format that a file name tells: `Q4_K_M`, `Q8_0`, ...; empty when it tells none."""
    found = [match["format"].upper() for match in _FORMAT.finditer(file_name)]
    return found[-1] if found else ""


def fetch(
    reference: str,
    report: Report = no_report,
    cancel: threading.Event | None = None,
    patience: Patience | None = None,
) -> Path:
    """Download a model unless it is here already, and return the path of its (first) file.

    Raises:
        QuorumError: it cannot be found or had; the message says why and what to do.
        Cancelled: `cancel` was set.
    """
    patience = patience or Patience()
    api = _client()
    report(Progress(f"asking the hub for {reference}"))
    model = find(reference, cancel, patience)
    folder = models_folder() / Path(*model.repository.split("/"))
    paths = [folder / Path(*PurePosixPath(file.path).parts) for file in model.files]
    cached = [_in_hub_cache(model, file) for file in model.files]
    if all(cached):
        return Path(str(cached[0]))
    for file, path in zip(model.files, paths, strict=True):
        stop_if_asked(cancel, f"fetching {model.name}")
        if not file.size_bytes:
            raise ModelFileError(f"{model.repository}/{file.path} is empty on the hub; choose another file")
        if _is_here(file, path, report, cancel):
            continue
        with _explained(model.repository):
            transfer(
                RemoteFile(f"{model.repository}/{file.path}", file.size_bytes, file.sha256),
                path,
                _opener(api, model, file, patience),
                report,
                cancel,
                patience,
            )
        if file.sha256:
            remember(path, file.sha256)
    read_header(paths[0])
    return paths[0]


def _repository_info(repository: str, cancel: threading.Event | None, patience: Patience) -> Any:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    api = _client()
    for fruitless in itertools.count(1):
        stop_if_asked(cancel, f"asking the hub for {repository}")
        asked_wait_s = None
        try:
            return api.model_info(repository, files_metadata=True, timeout=patience.silence_s)
        except HfHubHTTPError as error:
            if error.response.status_code not in TRANSIENT or fruitless == patience.fruitless_attempts:
                raise
            asked_wait_s = retry_after_s(error.response.headers.get("Retry-After", ""))
        except HTTPError:
            if fruitless == min(_CONNECTION_ATTEMPTS, patience.fruitless_attempts):
                raise
        pause(patience.wait_s(asked_wait_s, fruitless), cancel)
    raise AssertionError("the loop ends by returning or raising")


def _choose(models: tuple[HubModel, ...], repository: str, wanted: str) -> HubModel:
    """By file name, else by format; single files before split ones, and short names first."""
    if not models:
        raise ModelFileError(f"{repository} holds no GGUF model; look for a repository whose name ends in -GGUF")
    by_size = sorted(models, key=lambda model: (len(model.files), len(model.name)))
    if wanted.lower().endswith(".gguf"):
        matching = [model for model in by_size if wanted in (model.files[0].path, f"{model.name}.gguf")]
        # A file that was renamed is known by its format.
        matching = matching or [model for model in by_size if format_of(wanted) and model.format == format_of(wanted)]
    elif wanted:
        matching = [model for model in by_size if model.format == wanted.upper()]
    else:
        ranked = [model for choice in PREFERRED_FORMATS for model in by_size if model.format == choice]
        matching = ranked or by_size
    if not matching:
        offered = ", ".join(sorted({model.format or model.name for model in models}))
        raise ModelFileError(f"{repository} has no {wanted}; it offers {offered}")
    return matching[0]


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(sibling.rfilename, int(lfs.size if lfs else sibling.size or 0), lfs.sha256 if lfs else "")


def _is_safe(path: str) -> bool:
    """Whether a path from the hub stays in the folder it is put in, on every system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and all(re.fullmatch(r"[^\\/:*?\"<>|\x00-\x1f]+", part) and part != ".." for part in parts)


def _client() -> Any:
    """The hub's client for the endpoint in force now."""
    if _is_offline():
        raise EnvironmentProblem(
            "HF_HUB_OFFLINE is set, so nothing is fetched; unset it to download, or use an installed model "
            "(`python launch.py models`)"
        )
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="quorum")


def _is_offline() -> bool:
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in {"1", "ON", "YES", "TRUE"} for value in values)


def _opener(api: Any, model: HubModel, file: HubFile, patience: Patience) -> Any:
    """Opens the file's bytes from a position on, at the commit that was listed."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(model.repository, file.path, revision=model.commit, endpoint=api.endpoint)
    headers = build_hf_headers(library_name="quorum") | {"Accept-Encoding": "identity"}

    @contextlib.contextmanager
    def open_from(start: int) -> Iterator[Any]:
        ranged = headers | ({"Range": f"bytes={start}-"} if start else {})
        with get_session().stream("GET", url, headers=ranged, timeout=patience.silence_s) as response:
            hf_raise_for_status(response)
            yield response

    return open_from


def _is_here(file: HubFile, path: Path, report: Report, cancel: threading.Event | None) -> bool:
    """Whether the file is the one that the hub has now; one of another content has been replaced there since."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return not file.sha256 or sha256_of(path, report, cancel) == file.sha256


def _in_hub_cache(model: HubModel, file: HubFile) -> Path | None:
    """The same bytes where the hub's own tools keep them."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.repository, file.path, revision=model.commit)
    if not isinstance(found, str):
        return None
    path = Path(found)
    return path if path.stat().st_size == file.size_bytes else None


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn the client's errors into ones that say what to do."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    page = f"https://huggingface.co/{repository}"
    log_in = "log in with `hf auth login` (or set HF_TOKEN)"
    try:
        yield
    except HFValidationError as error:
        raise SettingError(f"{repository!r} is no repository name: {error}") from error
    except GatedRepoError as error:
        raise EnvironmentProblem(
            f"{repository} is gated: accept its terms at {page} with your own account, then {log_in} and run it again"
        ) from error
    except RepositoryNotFoundError as error:
        raise EnvironmentProblem(
            f"the hub has no repository {repository} for you; check the spelling at {page}, and if it is private, "
            f"{log_in}"
        ) from error
    except EntryNotFoundError as error:
        raise EnvironmentProblem(f"{repository} no longer has that file; run it again to list it anew") from error
    except OfflineModeIsEnabled as error:
        raise EnvironmentProblem("HF_HUB_OFFLINE is set, so nothing is fetched; unset it to download") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise EnvironmentProblem(
                f"the hub refused access to {repository} ({status}); {log_in}, and accept its terms at {page} if it "
                "has any"
            ) from error
        if status == 429:
            raise EnvironmentProblem(f"the hub asks to wait (429, too many requests); {log_in} or try later") from error
        raise EnvironmentProblem(f"the hub could not serve {repository} ({status}); try again later") from error
    except HTTPError as error:
        raise EnvironmentProblem(
            f"the hub cannot be reached ({error or type(error).__name__}); check the network and proxy settings"
        ) from error
