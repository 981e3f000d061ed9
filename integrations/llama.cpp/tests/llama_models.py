"""Models for the tests that run llama.cpp: models of bench/llama_cpp_models.py, and small random models."""

import importlib
from unittest import mock

import llama_cpp_build
import numpy as np
import pytest
from support.compiling import ROOT

SEED = ("--seed", "1")  # of test-llama-archs, which takes another one each time


def writer():
    """Return bench/llama_cpp_models.py as a module; skip the test without the package that it writes with."""
    pytest.importorskip("gguf")
    return importlib.import_module("llama_cpp_models")


def write_repository(folder):
    """Write the repository's model, whose tokens are bytes, and return its path."""
    return writer().write("repository", folder)


def write_small(path, seed=0, **sizes):
    """Write a small random model, whose vocabulary is the same, and return its path."""
    module = writer()

    def add_bytes(writer, *_):
        add_vocabulary(writer, *module.byte_vocabulary())
        writer.add_bos_token_id(10)
        writer.add_add_bos_token(False)

    add_vocabulary = module.add_vocabulary
    common = {"hidden_size": 64, "inner_size": 64, "num_kv_heads": 1, "vocab_size": 256}
    with mock.patch.object(module, "add_vocabulary", add_bytes):
        module.write_random(path, module.Shape(**common | sizes), seed)
    return path


def write_windows(folder):
    """Write such a model of seven layers, six of them with windows of 64 tokens."""
    sizes = {"num_layers": 7, "num_heads": 2, "head_dim": 64, "window": 64}
    return write_small(folder / "windows.gguf", architecture="gemma3", **sizes)


def write_hybrid(folder):
    """Write such a model of six layers, four of which have a recurrent state in place of rows."""
    sizes = {"num_layers": 6, "num_heads": 2, "head_dim": 32, "conv_size": 3}
    return write_small(folder / "hybrid.gguf", architecture="lfm2", **sizes)


def write_random(folder, architecture, *options):
    """Write a small random model of an architecture unless the folder has one, and return its path.

    With the options -d 0.5 its attention is far from even, and its answer shows each token.
    """
    folder = folder / "".join(options)
    folder.mkdir(exist_ok=True)
    if not list(folder.glob(f"{architecture}-*.gguf")):
        llama_cpp_build.run("test-llama-archs", *SEED, "-a", f"^{architecture}$", *options, "-o", folder)
    return sorted(folder.glob(f"{architecture}-*.gguf"))[0]


SPARSE = ("deepseek32", "dots3note", "glm-dsa", "hy_v4", "minimax-m3")  # tokens choose rows by an indexer
POOLED = ("glm5-next", "qwen4exp")  # tokens choose blocks of rows, by keys that are pooled of several tokens


def write_sparse(folder, architecture, *options, **sizes):
    """Write a small random model whose tokens choose 16 rows, or blocks of 4 rows, and return its path."""
    gguf = pytest.importorskip("gguf")
    path = write_random(folder, architecture, *options)
    reader = gguf.GGUFReader(path, "r+")
    for key, size in ({"attention.indexer.top_k": 16} | sizes).items():
        field = reader.get_field(f"{architecture}.{key}")
        field.parts[field.data[0]][0] = size
    return path


def write_compressed(folder, *options):
    """Write a small random DeepSeek V4 without images, whose tokens choose 8 compressed rows, and return its path."""
    model = write_random(folder, "deepseek4", *options)
    sizes = {"attention.indexer.top_k": 8, "context_length": 8192}
    return write_layers(folder / "compressed.gguf", model, range(4), without="exp_probs_b_vl", **sizes)


def write_layers(path, model, layers, *, has_weights=True, without=" ", **sizes):
    """Write a model of these layers of another model, which are numbers; return its path.

    Weights whose names have the part `without` are left out. llama.cpp runs a model without weights, whose file is
    metadata alone, with random ones.
    """
    gguf_files = pytest.importorskip("support.gguf_files")
    reader = gguf_files.gguf.GGUFReader(model)
    name = reader.get_field("general.architecture").contents()
    fields = {key: field for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general."))}
    num_layers = fields[f"{name}.block_count"].contents()
    changed = {f"{name}.{key}": value for key, value in ({"block_count": len(layers)} | sizes).items()}
    writer = gguf_files.gguf.GGUFWriter(path, name)
    for key, field in fields.items():
        value = field.contents()
        if field.types[0] == gguf_files.gguf.GGUFValueType.ARRAY:
            writer.add_array(key, [value[i] for i in layers] if len(value) == num_layers else value)
        else:
            writer.add_key_value(key, changed.get(key, value), field.types[0])
    for tensor in reader.tensors if has_weights else ():
        if without in tensor.name:
            continue
        block, number, part = [*tensor.name.split(".", 2), ""][:3]
        names = [f"blk.{i}.{part}" for i, layer in enumerate(layers) if number == str(layer)]
        for written in names if block == "blk" else [tensor.name]:
            writer.add_tensor(written, np.array(tensor.data))
    gguf_files.finish(writer)
    return path


def write_deci(folder):
    """Write a small random Deci model, two of whose five layers have no KV heads: in one, queries have none either."""
    gguf_files = pytest.importorskip("support.gguf_files")
    rng = np.random.default_rng(0)
    name, hidden, inner, dim, heads, kv_heads = "deci", 64, 96, 32, [4, 0, 4, 4, 2], [2, 0, 0, 1, 2]
    sizes = {
        "block_count": 5, "context_length": 1024, "embedding_length": hidden, "feed_forward_length": [inner] * 5,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim,
        "attention.value_length": dim, "rope.dimension_count": dim, "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 128,
    }  # fmt: skip
    tensors = {"token_embd": (128, hidden), "output_norm": (hidden,)}
    for i, (n, n_kv) in enumerate(zip(heads, kv_heads, strict=True)):
        of_layer = {"ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
        of_layer["ffn_down"] = (hidden, inner)
        if n:
            of_layer |= {"attn_norm": (hidden,), "attn_output": (hidden, n * dim if n_kv else hidden)}
        if n_kv:
            of_layer |= {"attn_q": (n * dim, hidden), "attn_k": (n_kv * dim, hidden), "attn_v": (n_kv * dim, hidden)}
        tensors |= {f"blk.{i}.{part}": size for part, size in of_layer.items()}
    weights = [
        (f"{part}.weight", rng.standard_normal(size, np.float32) / 2 / size[-1] ** 0.5 + (len(size) == 1), None)
        for part, size in tensors.items()
    ]
    metadata = {f"{name}.{key}": value for key, value in sizes.items()} | {"tokenizer.ggml.model": "none"}
    return gguf_files.write(folder / f"{name}-blank.gguf", name, metadata, weights)


def write_projector(folder, hidden):
    """Write the part of a model that turns an image into 64 tokens of embeddings, random and without layers."""
    gguf_files = pytest.importorskip("support.gguf_files")
    rng = np.random.default_rng(0)
    dim, size, patch = 32, 112, 14
    sizes = {
        "embedding_length": dim, "feed_forward_length": dim, "block_count": 1, "projection_dim": hidden,
        "attention.head_count": 1, "attention.layer_norm_epsilon": 1e-5, "image_size": size, "patch_size": patch,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    metadata = {f"clip.vision.{key}": value for key, value in sizes.items()}
    metadata |= {"clip.has_vision_encoder": True, "clip.projector_type": "mlp", "clip.use_gelu": True}
    tensors = {"v.patch_embd.weight": (dim, 3, patch, patch), "v.position_embd.weight": ((size // patch) ** 2, dim)}
    parts = {f"v.blk.0.{part}": (dim, dim) for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")}
    parts |= {"v.blk.0.ln1": (dim,), "v.blk.0.ln2": (dim,), "mm.0": (hidden, dim), "mm.2": (hidden, hidden)}
    for part, shape in parts.items():
        tensors |= {f"{part}.weight": shape, f"{part}.bias": shape[:1]}
    weights = [(name, rng.standard_normal(shape, np.float32), None) for name, shape in tensors.items()]
    return gguf_files.write(folder / "projector.gguf", "clip", metadata, weights)


def picture(seed):
    """Return a picture of random pixels, as a PPM."""
    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8)
    return b"P6 112 112 255\n" + pixels.tobytes()


def text(begin, end):
    """Return a piece of the text that belongs to the repository's model, as long in bytes as in characters."""
    return (ROOT / "examples/model/eval.txt").read_text()[begin:end]
