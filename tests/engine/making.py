"""Model files with one fault each, made from the real starter; and tiny models of several architectures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader

TOKENS = "tokenizer.ggml.tokens"
TEMPLATE = "tokenizer.chat_template"
ARCHITECTURE = "general.architecture"


def patched_copy(source: Path, destination: Path, key: str, text: str, item: int = 0) -> Path:
    """The model with another text, cut or filled up to the old one's length, in its header."""
    shutil.copyfile(source, destination)
    reader = GGUFReader(destination, "r+")
    field = reader.fields[key]
    stored = field.parts[field.data[item]]
    stored[:] = np.frombuffer(text.encode().ljust(len(stored))[: len(stored)], np.uint8)
    reader.data.flush()
    return destination


def value_of(field: Any) -> Any:
    """A metadata value; texts stay bytes."""
    is_text = field.types[-1] is gguf.GGUFValueType.STRING
    values = [field.parts[index].tobytes() if is_text else field.parts[index].tolist()[0] for index in field.data]
    return values if field.types[0] is gguf.GGUFValueType.ARRAY else values[0]


def write_tiny_mamba(vocabulary_of: Path, path: Path) -> Path:
    """A random recurrent model of two layers with another model's vocabulary."""
    width, inner, state, rank, kernel, layers = 32, 64, 8, 4, 4, 2
    reader = GGUFReader(vocabulary_of)
    random = np.random.default_rng(11)
    writer = gguf.GGUFWriter(path, "mamba")
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = value_of(field)
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=field.types[-1])
        else:
            writer.add_key_value(key, value, field.types[0])
    tokens = len(value_of(reader.fields[TOKENS]))
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (0.3 * random.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", tokens, width)
    add("output_norm.weight", width)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ssm_in.weight", 2 * inner, width)
        add(f"blk.{layer}.ssm_conv1d.weight", inner, kernel)
        add(f"blk.{layer}.ssm_conv1d.bias", inner)
        add(f"blk.{layer}.ssm_x.weight", rank + 2 * state, inner)
        add(f"blk.{layer}.ssm_dt.weight", inner, rank)
        add(f"blk.{layer}.ssm_dt.bias", inner)
        writer.add_tensor(f"blk.{layer}.ssm_a", -np.abs(random.standard_normal((inner, state))).astype(np.float32))
        add(f"blk.{layer}.ssm_d", inner)
        add(f"blk.{layer}.ssm_out.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TINY_TOKENS = 96


def _tiny_writer(path: Path, architecture: str, layers: int, width: int, tokens: int) -> gguf.GGUFWriter:
    """A writer that has what all tiny models share: sizes, and a vocabulary of one character each."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<|start|>", "<|end|>", *(chr(ord("!") + number) for number in range(tokens - 2))])
    writer.add_token_types([3, 3, *[1] * (tokens - 2)])
    writer.add_token_merges(["0 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    return writer


class _Weights:
    """Random weights; with noise, such as agree with those without it only in part."""

    def __init__(self, writer: gguf.GGUFWriter, noise: float) -> None:
        self._writer = writer
        self._noise = noise
        self._random, self._disturbance = np.random.default_rng(5), np.random.default_rng(6)

    def add(self, name: str, *shape: int) -> None:
        """A matrix in Q8_0, or a vector around one."""
        weights = self.values(shape)
        if len(shape) == 1:
            self._writer.add_tensor(name, (1 + weights).astype(np.float32))
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        self._writer.add_tensor(name, gguf.quants.quantize(weights.astype(np.float32), kind), raw_dtype=kind)

    def add_plain(self, name: str, *shape: int) -> None:
        """A matrix in single precision."""
        self._writer.add_tensor(name, self.values(shape).astype(np.float32))

    def values(self, shape: tuple[int, ...]) -> Any:
        disturbance = 0.3 * self._noise * self._disturbance.standard_normal(shape)
        return 0.3 * self._random.standard_normal(shape) + disturbance


def _finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_llama(path: Path, noise: float = 0.0, tokens: int = TINY_TOKENS) -> Path:
    """A random llama of two layers and few tokens, in Q8_0; with noise, one that agrees with it only in part."""
    width, feed_forward, layers = 64, 96, 2
    writer = _tiny_writer(path, "llama", layers, width, tokens)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    weights = _Weights(writer, noise)
    weights.add("token_embd.weight", tokens, width)
    weights.add("output.weight", tokens, width)
    weights.add("output_norm.weight", width)
    for layer in range(layers):
        _add_attention(weights, layer, width)
        _add_feed_forward(weights, layer, width, feed_forward)
    return _finished(writer, path)


def _add_attention(weights: _Weights, layer: int, width: int) -> None:
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        weights.add(f"blk.{layer}.{name}.weight", width, width)
    weights.add(f"blk.{layer}.attn_norm.weight", width)


def _add_feed_forward(weights: _Weights, layer: int, width: int, feed_forward: int) -> None:
    weights.add(f"blk.{layer}.ffn_gate.weight", feed_forward, width)
    weights.add(f"blk.{layer}.ffn_up.weight", feed_forward, width)
    weights.add(f"blk.{layer}.ffn_down.weight", width, feed_forward)
    weights.add(f"blk.{layer}.ffn_norm.weight", width)


WINDOW_TOKENS = 32


def write_tiny_gemma3(path: Path, noise: float = 0.0) -> Path:
    """A random Gemma 3 of four layers, every second of which sees no more than a short window."""
    width, feed_forward, layers, head_width = 64, 96, 4, 32
    writer = _tiny_writer(path, "gemma3", layers, width, TINY_TOKENS)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_sliding_window(WINDOW_TOKENS)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    weights = _Weights(writer, noise)
    weights.add("token_embd.weight", TINY_TOKENS, width)
    weights.add("output.weight", TINY_TOKENS, width)
    weights.add("output_norm.weight", width)
    for layer in range(layers):
        _add_attention(weights, layer, width)
        _add_feed_forward(weights, layer, width, feed_forward)
        for name in ("attn_q_norm", "attn_k_norm"):
            weights.add(f"blk.{layer}.{name}.weight", head_width)
        for name in ("post_attention_norm", "post_ffw_norm"):
            weights.add(f"blk.{layer}.{name}.weight", width)
    return _finished(writer, path)


def write_tiny_hybrid(path: Path) -> Path:
    """A random LFM2: two layers of convolution, which cannot take tokens back, and two of attention."""
    width, feed_forward, layers, kernel = 64, 96, 4, 3
    writer = _tiny_writer(path, "lfm2", layers, width, TINY_TOKENS)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    writer.add_head_count_kv([0, 2, 0, 2])
    writer.add_shortconv_l_cache(kernel)
    weights = _Weights(writer, 0.0)
    weights.add("token_embd.weight", TINY_TOKENS, width)
    weights.add("output.weight", TINY_TOKENS, width)
    weights.add("token_embd_norm.weight", width)
    for layer in range(layers):
        _add_feed_forward(weights, layer, width, feed_forward)
        if layer % 2:
            _add_attention(weights, layer, width)
            for name in ("attn_q_norm", "attn_k_norm"):
                weights.add(f"blk.{layer}.{name}.weight", width // 2)
        else:
            weights.add(f"blk.{layer}.attn_norm.weight", width)
            weights.add_plain(f"blk.{layer}.shortconv.conv.weight", width, kernel)
            weights.add(f"blk.{layer}.shortconv.in_proj.weight", 3 * width, width)
            weights.add(f"blk.{layer}.shortconv.out_proj.weight", width, width)
    return _finished(writer, path)
