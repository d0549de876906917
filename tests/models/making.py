"""Small models made on the spot, and a plain greedy decode, for the tests of the model files."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

PROMPT = "<|im_start|>user\nExplain how a bicycle stays upright.<|im_end|>\n<|im_start|>assistant\n"


def write_tiny_llama(
    path: Path,
    layer_count: int = 30,
    has_own_head: bool = False,
    architecture: str = "llama",
    lists: dict[str, list[int]] | None = None,
) -> Path:
    """A random llama of width 64 without a vocabulary, 30 layers deep like the starter."""
    width, feed_forward, vocabulary_size = 64, 96, 96
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_block_count(layer_count)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary_size)
    writer.add_tokenizer_model("no_vocab")
    for key, values in (lists or {}).items():
        writer.add_array(f"{architecture}.{key}", values)
    shapes = {"token_embd": (vocabulary_size, width), "output_norm": (width,)}
    if has_own_head:
        shapes["output"] = (vocabulary_size, width)
    for layer in range(layer_count):
        names = {"attn_q": width, "attn_k": width, "attn_v": width, "attn_output": width, "ffn_gate": feed_forward}
        shapes |= {f"blk.{layer}.{name}": (rows, width) for name, rows in names.items()}
        shapes |= {f"blk.{layer}.ffn_up": (feed_forward, width), f"blk.{layer}.ffn_down": (width, feed_forward)}
        shapes |= {f"blk.{layer}.attn_norm": (width,), f"blk.{layer}.ffn_norm": (width,)}
    for name, shape in shapes.items():
        weights = 0.1 * random.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", weights.astype(np.float16) if len(shape) == 2 else 1 + weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy_tokens(path: Path, count: int, prompt_tokens: list[int] | None = None) -> list[int]:
    """The model's most probable continuation of `PROMPT`, or of the given tokens, by llama.cpp itself."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    assert model, f"{path} does not load"
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = 256
    parameters.n_threads = parameters.n_threads_batch = 1  # threads wait busily, which a loaded machine punishes
    context = llama_cpp.llama_init_from_model(model, parameters)
    assert context
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    vocabulary_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    pending = prompt_tokens or _tokenised(vocabulary)
    chosen: list[int] = []
    for _ in range(count):
        tokens = (llama_cpp.llama_token * len(pending))(*pending)  # named, because the batch only points at it
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(tokens))) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocabulary_size,))
        chosen.append(int(logits.argmax()))
        pending = chosen[-1:]
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return chosen


def _tokenised(vocabulary: object) -> list[int]:
    text = PROMPT.encode()
    buffer = (llama_cpp.llama_token * 256)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), buffer, len(buffer), True, True)
    return list(buffer[:count])


def write_vocabulary(
    path: Path, tokens: list[str], filler_bytes: int = 0, adds_bos: bool = False, tokenizer: str = "gpt2", bos: int = 0
) -> Path:
    """A model file with a byte-level vocabulary and no layers: enough for a load of the vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    if tokenizer == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([0.0] * len(tokens))
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(adds_bos)
    writer.add_tensor("filler", np.zeros(16 + filler_bytes // 4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path, name: str, count: int = 2) -> list[Path]:
    """A split model whose parts hold nothing but their numbers."""
    paths = [folder / f"{name}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
    return paths


def token_texts(count: int) -> list[str]:
    return ["<|start|>", "<|end|>", *(f"token{number}" for number in range(2, count))]
