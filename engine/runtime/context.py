"""A llama.cpp context: the key/value cache, its sequences, and the passes that fill it.

The context owns the length of every sequence. A pass either happens, and lengths grow by it, or raises, and every
sequence is as it was, or empty where a model cannot take tokens back. One thread owns a context: the one that made it.

Attention adds up in the order of the cells, and sums depend on their order in the last bits. A sequence that shares the
cache with others may come to lie out of order, in cells that another one left; alone it never does, and what it passes
over for a branch stays in its cells, out of use, until the cache is next tidied.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import KvType
from engine.errors import DecodeError
from engine.runtime.api import native
from engine.runtime.lane import Lane
from engine.runtime.model import Model
from engine.runtime.state import StateBytes

FloatRows = npt.NDArray[np.float32]

_DECODE_NO_ROOM = 1
_DECODE_ABORTED = 2


class PassCancelled(Exception):
    """A pass was cancelled; the context is as before it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens that enter one sequence in a pass."""

    sequence: int
    tokens: Sequence[int]
    outputs: int
    """Logits are produced for this many tokens at the end of the run."""
    also: tuple[int, ...] = ()
    """Branches of the sequence, of the same length, that the tokens enter too."""


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Size and number formats of a context."""

    context_tokens: int
    kv_type: KvType
    threads: int
    max_outputs: int
    """Most rows of logits one pass may produce."""
    max_sequences: int = 4
    batch_tokens: int = 512

    def __post_init__(self) -> None:
        # llama.cpp ends the process over this one.
        if self.max_outputs < self.max_sequences:
            raise ValueError(f"{self.max_outputs} outputs are fewer than {self.max_sequences} sequences")


class Context:
    """Owns a native context on `model`; closed by `close` or with the model."""

    def __init__(self, model: Model, settings: ContextSettings, lane: Lane | None = None) -> None:
        """Args:
        lane: Whose calls alone may use the context; without one, the thread that makes it may.

        Raises:
            DecodeError: llama.cpp could not make it.
        """
        lib = native().lib
        self._lib = lib
        self.model = model
        self.settings = settings
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = settings.context_tokens
        parameters.n_batch = settings.batch_tokens
        parameters.n_ubatch = settings.batch_tokens
        parameters.n_seq_max = settings.max_sequences
        parameters.n_outputs_max = settings.max_outputs
        parameters.n_threads = settings.threads
        parameters.n_threads_batch = settings.threads
        parameters.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.type_k = settings.kv_type.keys
        parameters.type_v = settings.kv_type.values
        parameters.kv_unified = True
        parameters.swa_full = True
        parameters.no_perf = True
        native().log.clear()
        self.handle: Any = lib.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise DecodeError(
                f"{model.path.name}: no context of {settings.context_tokens} tokens could be made "
                f"({native().log.problem()}); try a smaller context"
            )
        self._owner = threading.get_ident()
        self._lane = lane
        self._threads = (settings.threads, settings.threads)
        self._memory = lib.llama_get_memory(self.handle)
        self._batch = lib.llama_batch_init(settings.batch_tokens, 0, 1)
        room = settings.batch_tokens
        self._batch_tokens = np.ctypeslib.as_array(self._batch.token, shape=(room,))
        self._batch_positions = np.ctypeslib.as_array(self._batch.pos, shape=(room,))
        self._batch_outputs = np.ctypeslib.as_array(self._batch.logits, shape=(room,))
        self._batch_counts = np.ctypeslib.as_array(self._batch.n_seq_id, shape=(room,))
        # Each entry points to its sequence ids; they lie in one block so that a pass sets them by slices.
        self._batch_sequences = np.zeros((room, settings.max_sequences), dtype=np.int32)
        pointers = ctypes.cast(self._batch.seq_id, ctypes.POINTER(ctypes.c_size_t))
        self._sequence_pointers = np.ctypeslib.as_array(pointers, shape=(room,))
        self._native_sequence_pointers = self._sequence_pointers.copy()
        row_bytes = self._batch_sequences.strides[0]
        self._sequence_pointers[:] = self._batch_sequences.ctypes.data + row_bytes * np.arange(room, dtype=np.uint64)
        self._lengths: dict[int, int] = {}
        self._put_aside: dict[int, Any] = {}
        """State of sequences whose cells were cleared for another one."""
        self._parking: int | None = None
        """A sequence that holds cells out of use, so that no later token comes to lie in them."""
        self.parked_tokens = 0
        """Cells out of use."""
        self._outputs = 0
        self._cancel: threading.Event | None = None
        self._abort_callback = lib.ggml_abort_callback(self._is_cancelled)
        model.dependants.append(self)

    def _is_cancelled(self, _user_data: object) -> bool:
        return self._cancel is not None and self._cancel.is_set()

    def _check_owner(self) -> None:
        is_owner = threading.get_ident() == self._owner if self._lane is None else self._lane.is_entered
        assert is_owner, "a context is used by the thread that made it, or in its lane"

    @property
    def context_tokens(self) -> int:
        """Cells in the cache, shared by all sequences."""
        return int(self._lib.llama_n_ctx(self.handle))

    def allocate(self) -> int:
        """A free, empty sequence."""
        self._check_owner()
        sequence = self._unused_sequence()
        self._lengths[sequence] = 0
        return sequence

    def _unused_sequence(self) -> int:
        for sequence in range(self.settings.max_sequences):
            if sequence not in self._lengths and sequence != self._parking:
                return sequence
        raise ValueError(f"all {self.settings.max_sequences} sequences are in use")

    def free(self, sequence: int) -> None:
        """Drop a sequence and its cells."""
        self._check_owner()
        del self._lengths[sequence]
        self._put_aside.pop(sequence, None)
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def length(self, sequence: int) -> int:
        """Tokens of the sequence in the cache."""
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence.

        A model that cannot roll back loses the whole sequence instead; its length is then zero. So does one with
        sliding windows that would look back on tokens which are no longer held: a sequence that was put aside comes
        back with no more than the last window.
        """
        self._check_owner()
        assert sequence not in self._put_aside, "only what is in the cache can be cut"
        current = self._lengths[sequence]
        if length > current:
            raise ValueError(f"sequence {sequence} has {current} tokens, cannot be cut to {length}")
        if length == current:
            return
        self._cut(sequence, length if self.sees_back_from(sequence, length) else 0)

    def sees_back_from(self, sequence: int, length: int) -> bool:
        """Whether all is held that a token after the first `length` ones would look back on."""
        window = self.model.window_tokens
        if not window or not length:
            return True
        first = self._lib.llama_memory_seq_pos_min(self._memory, sequence)
        return bool(first <= max(0, length - window))

    def _cut(self, sequence: int, length: int) -> None:
        if self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            self._lengths[sequence] = length
        else:
            self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._lengths[sequence] = 0

    def hold_alone(self, sequence: int) -> None:
        """Give this sequence the cache for itself; the others wait in memory, as they are, until their turn.

        Raises:
            DecodeError: its state could not be brought back; the sequence is empty.
        """
        self._check_owner()
        held = [one for one, length in self._lengths.items() if length and one not in self._put_aside]
        if held != [sequence]:
            self._exchange(held, sequence)

    def tidy(self, sequence: int) -> None:
        """Bring the cells of a sequence that has the cache for itself back in line, so that none is out of use.

        Raises:
            DecodeError: its state could not be brought back; the sequence is empty.
        """
        self._check_owner()
        if self.parked_tokens:
            self._exchange([sequence] if self._lengths[sequence] else [], sequence)

    def state(self, sequence: int) -> StateBytes:
        """What the cache holds of a sequence, as `replace` takes it."""
        self._check_owner()
        assert sequence not in self._put_aside, "only what is in the cache can be read"
        return np.frombuffer(self._state(sequence), np.uint8)

    def take_beyond(self, sequence: int, length: int) -> StateBytes:
        """The state of a sequence beyond its first tokens, which the cache forgets: what is left can only be freed."""
        self._check_owner()
        if length:
            self._lib.llama_memory_seq_rm(self._memory, sequence, 0, length)
        return self.state(sequence)

    def replace(self, sequence: int, state: StateBytes, length: int) -> None:
        """Let a sequence that has the cache for itself hold what a state does.

        Args:
            sequence: What it held is dropped.
            state: As `state` gives it, of a context of the same model with the same cache format.
            length: Tokens that the state stands for.

        Raises:
            DecodeError: llama.cpp refused the state; the sequence is empty.
        """
        self._check_owner()
        self._put_aside[sequence] = (ctypes.c_uint8 * len(state)).from_buffer(state.data)
        self._lengths[sequence] = length
        self._exchange([], sequence)

    def _exchange(self, held: Sequence[int], sequence: int) -> None:
        for one in held:
            self._put_aside[one] = self._state(one)
        # Empty, the cache is filled from its first cell on.
        self._lib.llama_memory_clear(self._memory, False)
        self._parking = None
        self.parked_tokens = 0
        state = self._put_aside.pop(sequence, None)
        if state is not None and not self._lib.llama_state_seq_set_data(self.handle, state, len(state), sequence):
            length, self._lengths[sequence] = self._lengths[sequence], 0
            raise DecodeError(f"a conversation of {length} tokens could not be brought back into the cache")

    def _state(self, sequence: int) -> Any:
        size_bytes = self._lib.llama_state_seq_get_size(self.handle, sequence)
        state = (ctypes.c_uint8 * size_bytes)()
        written_bytes = self._lib.llama_state_seq_get_data(self.handle, state, size_bytes, sequence)
        assert written_bytes == size_bytes, "the size is what was told"
        return state

    def copy(self, source: int, length: int | None = None) -> int:
        """A new sequence with the same first tokens, or all of them; the cells are shared, not copied."""
        assert source not in self._put_aside, "only what is in the cache can be copied"
        branch = self.allocate()
        self._lib.llama_memory_seq_cp(self._memory, source, branch, -1, -1 if length is None else length)
        self._lengths[branch] = self._lengths[source] if length is None else length
        return branch

    def duplicate(self, source: int) -> int:
        """A new sequence with the same tokens in cells of its own.

        Raises:
            DecodeError: llama.cpp refused the state.
        """
        state = self._state(source)
        twin = self.allocate()
        if not self._lib.llama_state_seq_set_data(self.handle, state, len(state), twin):
            self.free(twin)
            raise DecodeError(f"a sequence of {self._lengths[source]} tokens could not be copied")
        self._lengths[twin] = self._lengths[source]
        return twin

    @property
    def spare_sequences(self) -> int:
        """How many branches can be made, with a place for what they leave behind."""
        return self.settings.max_sequences - len(self._lengths) - 1

    def adopt(self, sequence: int, branch: int, kept: int) -> None:
        """Let a sequence go on after its first `kept` tokens as one of its branches does, and free the branch.

        What the sequence had there is parked.
        """
        self.park(sequence, kept)
        self._lib.llama_memory_seq_cp(self._memory, branch, sequence, kept, -1)
        self._lengths[sequence] = self._lengths[branch]
        self.free(branch)

    def park(self, sequence: int, kept: int) -> None:
        """Cut a sequence to its first `kept` tokens, but let no token come to lie in the cells of the others."""
        self._check_owner()
        if self._parking is None:
            self._parking = self._unused_sequence()
        self._lib.llama_memory_seq_cp(self._memory, sequence, self._parking, kept, -1)
        self._lib.llama_memory_seq_rm(self._memory, sequence, kept, -1)
        self.parked_tokens += self._lengths[sequence] - kept
        self._lengths[sequence] = kept

    def set_threads(self, one_token: int, more_tokens: int) -> None:
        """Compute the next passes with so many threads, those over one token apart from those over more."""
        self._check_owner()
        if (one_token, more_tokens) != self._threads:
            self._lib.llama_set_n_threads(self.handle, one_token, more_tokens)
            self._threads = (one_token, more_tokens)

    def decode(self, runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        """Evaluate the runs in one pass; afterwards `logits` gives the rows asked for, in order.

        Args:
            runs: At most `batch_tokens` tokens and `max_outputs` outputs altogether. Later ones of the same sequence go
                on where earlier ones end.
            cancel: Checked between the operations of the pass (where the backend can) when it is long.

        Raises:
            DecodeError: the cache is full or llama.cpp failed.
            PassCancelled: `cancel` was set.
        """
        self._check_owner()
        start = 0
        outputs = 0
        lengths = self._lengths.copy()
        for run in runs:
            assert run.sequence not in self._put_aside, "a pass needs its sequences in the cache"
            end = start + len(run.tokens)
            position = lengths[run.sequence]
            self._batch_tokens[start:end] = run.tokens
            self._batch_positions[start:end] = np.arange(position, position + end - start, dtype=np.int32)
            sequences = (run.sequence, *run.also)
            self._batch_counts[start:end] = len(sequences)
            self._batch_sequences[start:end, : len(sequences)] = sequences
            for sequence in sequences:
                assert lengths[sequence] == position, "tokens enter all their sequences at the same place"
                lengths[sequence] += end - start
            self._batch_outputs[start : end - run.outputs] = 0
            self._batch_outputs[end - run.outputs : end] = 1
            outputs += run.outputs
            start = end
        if outputs > self.settings.max_outputs:
            # llama.cpp aborts the whole process over this.
            raise ValueError(f"a pass gives at most {self.settings.max_outputs} rows of logits, asked for {outputs}")
        self._batch.n_tokens = start
        if cancel is None:
            status = self._lib.llama_decode(self.handle, self._batch)
        else:
            status = self._decode_cancellable(cancel)
        if status == 0:
            # GPU backends return before the work is done; waiting here keeps measured times true.
            self._lib.llama_synchronize(self.handle)
            self._lengths = lengths
            self._outputs = outputs
            return
        for sequence, length in list(self._lengths.items()):
            if lengths[sequence] != length:
                self._cut(sequence, length)
        if status == _DECODE_ABORTED:
            raise PassCancelled
        if status == _DECODE_NO_ROOM:
            raise DecodeError(f"the cache of {self.context_tokens} tokens has no room for {start} more")
        raise DecodeError(f"llama.cpp could not evaluate {start} tokens (code {status}: {native().log.problem()})")

    def _decode_cancellable(self, cancel: threading.Event) -> int:
        self._cancel = cancel
        self._lib.llama_set_abort_callback(self.handle, self._abort_callback, None)
        try:
            return int(self._lib.llama_decode(self.handle, self._batch))
        finally:
            self._lib.llama_set_abort_callback(self.handle, self._lib.ggml_abort_callback(), None)
            self._cancel = None

    def logits(self) -> FloatRows:
        """Rows of the last pass, shape (outputs, vocabulary). A view: the next pass overwrites it."""
        address = ctypes.cast(self._lib.llama_get_logits(self.handle), ctypes.c_void_p).value
        assert address is not None, "the last pass asked for no logits"
        row_type = ctypes.c_float * (self._outputs * self.model.vocabulary.size)
        return np.ctypeslib.as_array(row_type.from_address(address)).reshape(self._outputs, -1)

    def stored_length(self, sequence: int) -> int:
        """Tokens of the sequence in the cache as llama.cpp counts them, by their last position."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def close(self) -> None:
        """Free the native context. Safe to call twice."""
        if self in self.model.dependants:
            self.model.dependants.remove(self)
        if self.handle:
            self._sequence_pointers[:] = self._native_sequence_pointers
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self.handle)
            self.handle = None
