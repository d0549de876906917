"""The one door to llama-cpp-python: checks that it has what we call, and catches what it logs.

Everything below `engine.runtime` reaches the native library through `native()`; nothing else imports `llama_cpp`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections import deque
from types import ModuleType
from typing import Any

from engine.errors import EnvironmentProblem

REQUIRED_VERSION = "0.3.36"
REQUIRED_NAMES = (
    "llama_backend_init",
    "llama_batch_free",
    "llama_batch_init",
    "llama_context_default_params",
    "llama_decode",
    "llama_free",
    "llama_get_logits",
    "llama_get_memory",
    "llama_init_from_model",
    "llama_log_callback",
    "llama_log_set",
    "llama_logit_bias",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_rm",
    "llama_model_chat_template",
    "llama_model_default_params",
    "llama_model_desc",
    "llama_model_free",
    "llama_model_get_vocab",
    "llama_model_is_hybrid",
    "llama_model_is_recurrent",
    "llama_model_load_from_file",
    "llama_model_meta_val_str",
    "llama_model_n_ctx_train",
    "llama_model_n_embd",
    "llama_model_n_head",
    "llama_model_n_head_kv",
    "llama_model_n_layer",
    "llama_model_n_params",
    "llama_model_n_swa",
    "llama_model_quantize",
    "llama_model_quantize_default_params",
    "llama_model_size",
    "llama_n_ctx",
    "llama_print_system_info",
    "llama_progress_callback",
    "llama_sampler_accept",
    "llama_sampler_apply",
    "llama_sampler_chain_add",
    "llama_sampler_chain_default_params",
    "llama_sampler_chain_init",
    "llama_sampler_clone",
    "llama_sampler_free",
    "llama_sampler_init_dist",
    "llama_sampler_init_grammar",
    "llama_sampler_init_greedy",
    "llama_sampler_init_logit_bias",
    "llama_sampler_init_min_p",
    "llama_sampler_init_penalties",
    "llama_sampler_init_temp",
    "llama_sampler_init_top_k",
    "llama_sampler_init_top_p",
    "llama_sampler_sample",
    "llama_set_abort_callback",
    "llama_set_n_threads",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
    "llama_supports_gpu_offload",
    "llama_synchronize",
    "llama_token",
    "llama_token_data_array",
    "llama_token_data_p",
    "llama_token_to_piece",
    "llama_tokenize",
    "llama_vocab_bos",
    "llama_vocab_eos",
    "llama_vocab_get_add_bos",
    "llama_vocab_get_add_eos",
    "llama_vocab_get_text",
    "llama_vocab_is_eog",
    "llama_vocab_n_tokens",
    "llama_vocab_type",
)

OPENMP_WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "200"}
"""How long compute threads spin before they sleep, for the OpenMP libraries of Linux, read when they are loaded.

Every thread that computes has compute threads of its own, and where drafters draft beside other work
(`engine.runtime.lane`) there may be more of these than cores. GNU OpenMP then spins for 100 rounds only and sleeps at
every barrier of a pass; with the policy `active` it spins for 1,000, and a drafter's pass after the target's took 4 ms
instead of 13. Its own 300,000 rounds, on the other hand, hold the cores against the next pass.
`KMP_BLOCKTIME` is LLVM OpenMP's default, which the policy would else make endless."""

_LOG_LEVEL_WARNING = 3
_LOG_LEVEL_CONTINUATION = 5


class NativeLog:
    """Keeps llama.cpp's last log lines instead of printing them; errors and warnings explain failures."""

    def __init__(self, kept_lines: int = 200) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=kept_lines)
        self._partial = ""
        self._level = 0

    def receive(self, level: int, text: bytes, _user_data: Any) -> None:
        """Take one piece of log; a line may arrive in several."""
        if level != _LOG_LEVEL_CONTINUATION:
            self._level = level
        self._partial += text.decode("utf-8", "replace")
        *complete, self._partial = self._partial.split("\n")
        self._lines.extend((self._level, line) for line in complete if line.strip(" ."))

    def clear(self) -> None:
        self._lines.clear()

    def problem(self) -> str:
        """The first warning or error since `clear`: llama.cpp names the cause first, the consequences after."""
        for level, line in list(self._lines):
            if _LOG_LEVEL_WARNING <= level < _LOG_LEVEL_CONTINUATION and "error" in line.lower():
                return line.strip()
        problems = [line.strip() for level, line in list(self._lines) if level >= _LOG_LEVEL_WARNING]
        return problems[0] if problems else "llama.cpp gave no reason"


class Native:
    """The loaded llama.cpp library: `lib` is the binding module, `log` what it has logged."""

    def __init__(self, lib: ModuleType) -> None:
        missing = [name for name in REQUIRED_NAMES if not hasattr(lib, name)]
        version = str(getattr(lib, "__version__", "of unknown version"))
        if missing:
            raise EnvironmentProblem(
                f"llama-cpp-python {version} lacks {', '.join(missing)}; Quorum needs {REQUIRED_VERSION} or newer: "
                f'python -m pip install --upgrade "llama-cpp-python>={REQUIRED_VERSION},<0.4"'
            )
        self.lib: Any = lib
        self.version = version
        self.log = NativeLog()
        # ctypes callbacks die with their Python object, so this one must live as long as the library.
        self._log_callback = lib.llama_log_callback(self.log.receive)
        lib.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        lib.llama_backend_init()

    @property
    def system_info(self) -> str:
        """CPU features and backends llama.cpp was built with."""
        return str(self.lib.llama_print_system_info().decode())

    @property
    def has_gpu_offload(self) -> bool:
        return bool(self.lib.llama_supports_gpu_offload())


@functools.cache
def native() -> Native:
    """The library, initialised on first use.

    Raises:
        EnvironmentProblem: llama-cpp-python is not installed, cannot be loaded, or is too old.
    """
    if sys.platform == "linux":
        for name, value in OPENMP_WAITING.items():
            os.environ.setdefault(name, value)
    try:
        import llama_cpp
    except ImportError as error:
        raise EnvironmentProblem(
            f"llama-cpp-python could not be imported ({error}); install it with: "
            "python -m pip install -r requirements.txt"
        ) from error
    except (OSError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"llama-cpp-python is installed but its library does not load ({error}); reinstall it with: "
            "python -m pip install --force-reinstall --no-cache-dir llama-cpp-python"
        ) from error
    return Native(llama_cpp)
