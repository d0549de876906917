"""A loaded GGUF model: weights, vocabulary, facts, and the contexts that live on it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from engine.errors import ModelFileError
from engine.runtime.api import native
from engine.runtime.vocabulary import Vocabulary

GGUF_MAGIC = b"GGUF"

LoadProgress = Callable[[float], None]
"""Called with the share of the weights that has been read, from 0 to 1."""


class Closable(Protocol):
    """What can be closed, also twice."""

    def close(self) -> None:
        """Free what is native."""


class LoadCancelled(Exception):
    """Loading was cancelled by the caller; nothing is left behind."""


def check_gguf(path: Path) -> None:
    """Refuse early, with a plain reason, what is not a GGUF file at all.

    Raises:
        ModelFileError: the path is missing, a directory, empty, unreadable or of another format.
    """
    if not path.exists():
        raise ModelFileError(f"{path} does not exist; check the path, or list installed models with: launch.py models")
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory; give the path of one .gguf file in it")
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from error
    if not magic:
        raise ModelFileError(f"{path} is empty; its download may have failed: fetch it again")
    if magic != GGUF_MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {magic!r} instead of {GGUF_MAGIC!r}")


def _explain(path: Path, problem: str) -> str:
    if "not within the file bounds" in problem or "failed to read" in problem or "tensor data" in problem:
        return f"{path} is incomplete or damaged; fetch it again (llama.cpp: {problem})"
    if "unknown model architecture" in problem:
        return f"{path} has an architecture this llama.cpp does not know; a newer one may (llama.cpp: {problem})"
    return f"{path} could not be loaded (llama.cpp: {problem})"


class Model:
    """Owns the native model and closes every context registered on it first.

    Raises:
        ModelFileError: the file cannot be used; the message says why.
        LoadCancelled: `cancel` was set while loading.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int = 0,
        vocabulary_only: bool = False,
        progress: LoadProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        check_gguf(path)
        lib = native().lib
        self.path = path
        self.dependants: list[Closable] = []
        """What lives on the model and is not closed yet; closed in reverse order before the weights."""
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = 999 if gpu_layers < 0 else gpu_layers
        parameters.vocab_only = vocabulary_only

        def on_progress(share: float, _user_data: object) -> bool:
            if progress is not None:
                progress(share)
            return cancel is None or not cancel.is_set()

        callback = lib.llama_progress_callback(on_progress)
        parameters.progress_callback = callback
        native().log.clear()
        self.handle: Any = lib.llama_model_load_from_file(str(path).encode("utf-8"), parameters)
        if not self.handle:
            if cancel is not None and cancel.is_set():
                raise LoadCancelled(f"loading {path.name} was cancelled")
            raise ModelFileError(_explain(path, native().log.problem()))
        self.vocabulary = Vocabulary(lib.llama_model_get_vocab(self.handle))

    @property
    def description(self) -> str:
        """Architecture, size and quantisation, for example `llama 135M Q4_1`."""
        lib = native().lib
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.handle, buffer, len(buffer))
        # Its word for the size is guessed from the number of layers.
        architecture, _, kind = buffer.value.decode("utf-8", "replace").split(" ", 2)
        parameters = int(lib.llama_model_n_params(self.handle))
        size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
        return f"{architecture} {size} {kind}"

    @property
    def size_bytes(self) -> int:
        return int(native().lib.llama_model_size(self.handle))

    @property
    def trained_context_tokens(self) -> int:
        return int(native().lib.llama_model_n_ctx_train(self.handle))

    @property
    def layers(self) -> int:
        return int(native().lib.llama_model_n_layer(self.handle))

    @property
    def stated_layers(self) -> int:
        """What the header says, also of a model loaded for its vocabulary alone; 0 where it says nothing."""
        architecture = self._metadata("general.architecture")
        count = self._metadata(f"{architecture}.block_count")
        return int(count) if count.isdecimal() else 0

    def _metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        native().lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def window_tokens(self) -> int:
        """How far back the layers with sliding-window attention see; 0 for a model without such layers."""
        return int(native().lib.llama_model_n_swa(self.handle))

    @property
    def can_roll_back(self) -> bool:
        """Whether cached tokens can be removed from the end; recurrent and hybrid models cannot."""
        lib = native().lib
        return not (lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template stored in the file."""
        text = native().lib.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of one token's keys and values at two bytes a number (F16 or BF16)."""
        lib = native().lib
        heads = max(1, lib.llama_model_n_head(self.handle))
        head_size = lib.llama_model_n_embd(self.handle) // heads
        return int(2 * 2 * self.layers * lib.llama_model_n_head_kv(self.handle) * head_size)

    def close(self) -> None:
        """Free contexts, then weights. Safe to call twice."""
        while self.dependants:
            self.dependants.pop().close()
        if self.handle:
            native().lib.llama_model_free(self.handle)
            self.handle = None
