"""Small checkpoints full of the values and shapes that quantizers get wrong."""

import json

import numpy as np

from . import safetensors_io as st

CONFIG = {
    "architectures": ["OddForCausalLM"],
    "model_type": "odd",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "big": 2**53 + 1,
    "nested": {"list": [1, None, True, {"key": '\u00fc"\\/'}], "empty": {}},
    "tie_word_embeddings": False,
}

COPIED_FILES = {
    "generation_config.json": b'{"use_cache": true}\n',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling_odd.py": b"# code of the model\n",
}
SKIPPED_FILES = {"pytorch_model.bin": b"\0" * 64, "original/consolidated.pth": b"\0" * 64}

SEGMENT = 128


def hard_weight(shape, dtype, seed):
    """Normal values, cut into segments of 128 of which most are special; the last row is zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(int(np.prod(shape))).astype(np.float32) * np.float32(0.05)
    for index, begin in enumerate(range(0, x.size, SEGMENT)):
        part = x[begin : begin + SEGMENT]
        match index % 10:
            case 1:
                part[:] = 0
                part[::3] = -0.0
            case 2:
                part[:] = 0.7
            case 3:
                part[:] = -0.3
            case 4:  # halves: ties of a scale of 1
                part[:] = rng.integers(-14, 15, part.size) / 2
                part[::16] = 7
            case 5:
                part[:] = np.abs(part) + 1
            case 6:
                part[:] = -np.abs(part) - 1
            case 7:
                part[part.size // 2] = 30
            case 8:  # the extremes have one magnitude
                part[::8], part[1::8] = 0.25, -0.25
    x = x.reshape(shape)
    if x.shape[0] > 2:
        x[-1] = 0
    return st.from_f32(x, dtype)


def dense_tensors():
    """What stays as it is."""
    rng = np.random.default_rng(99)
    normal = rng.standard_normal((16, 64)).astype(np.float32)
    return {
        "lm_head.weight": st.from_f32(normal, "BF16"),
        "model.embed_tokens.weight": st.from_f32(normal, "F16"),
        "model.norm.weight": st.from_f32(normal[0], "F32"),
        "model.layers.0.mlp.up_proj.bias": st.from_f32(normal[1], "BF16"),
        "model.layers.0.rotary.inv_freq": st.Tensor("F64", normal[2].astype(np.float64)),
        "model.position_ids": st.Tensor("I64", np.arange(5)),
        "model.step": st.Tensor("I32", np.array(7, np.int32)),
        "model.empty": st.Tensor("BF16", np.zeros((0, 3), np.uint16)),
    }


def _checkpoint(shapes):
    tensors = dense_tensors()
    for seed, (module, shape, dtype) in enumerate(shapes):
        tensors[f"model.layers.{module}.weight"] = hard_weight(shape, dtype, seed)
    return tensors


def odd():
    """Any shape: tails, an odd number of elements, a single element."""
    tensors = odd_rows()
    tensors["model.layers.0.self_attn.q_proj.weight"] = hard_weight((1, 1), "BF16", 8)
    return tensors


def odd_rows():
    """As odd, with more than a few columns."""
    return _checkpoint(
        [
            ("0.mlp.up_proj", (5, 7), "BF16"),
            ("0.mlp.gate_proj", (3, 130), "F32"),
            ("0.mlp.down_proj", (33, 65), "F16"),
            ("0.self_attn.k_proj", (40, 257), "BF16"),
            ("0.self_attn.v_proj", (7, 64), "F32"),
            ("1.mlp.up_proj", (129, 128), "BF16"),
            ("1.mlp.down_proj", (2, 4099), "F16"),
        ]
    )


def grouped():
    """Rows of whole groups, and an odd number of rows."""
    return _checkpoint(
        [
            ("0.mlp.up_proj", (9, 1280), "BF16"),
            ("0.mlp.gate_proj", (10, 1152), "F16"),
            ("0.mlp.down_proj", (13, 128), "F32"),
            ("0.self_attn.q_proj", (1, 256), "BF16"),
            ("1.mlp.down_proj", (64, 384), "F32"),
        ]
    )


def words():
    """Rows and columns that fill words of any number of bits."""
    return _checkpoint(
        [
            ("0.mlp.up_proj", (32, 1280), "BF16"),
            ("0.mlp.gate_proj", (96, 384), "BF16"),
            ("0.self_attn.q_proj", (64, 128), "BF16"),
        ]
    )


def many_words():
    """More than a block of rows, that a block does not divide."""
    return _checkpoint([("0.mlp.up_proj", (352, 8192), "BF16"), ("0.mlp.gate_proj", (2080, 1280), "BF16")])


def experts():
    """Weights of three axes."""
    return _checkpoint(
        [
            ("0.mlp.experts.up_proj", (3, 11, 1280), "BF16"),
            ("0.mlp.experts.down_proj", (2, 5, 128), "F32"),
            ("0.self_attn.q_proj", (6, 256), "F16"),
        ]
    )


def blocks():
    """Matrices and experts that blocks of 128 x 128 divide, and that they do not."""
    return _checkpoint(
        [
            ("0.mlp.up_proj", (128, 384), "BF16"),
            ("0.mlp.gate_proj", (300, 200), "F32"),
            ("0.mlp.down_proj", (5, 7), "F16"),
            ("0.self_attn.q_proj", (129, 128), "BF16"),
            ("0.mlp.experts.up_proj", (3, 130, 140), "BF16"),
            ("1.mlp.up_proj", (1100, 1300), "BF16"),
        ]
    )


def turned_experts():
    """As gpt-oss has them: [experts, in, out]."""
    return _checkpoint(
        [
            ("0.mlp.experts.gate_up_proj", (3, 96, 22), "BF16"),
            ("0.mlp.experts.down_proj", (3, 32, 7), "F32"),
            ("1.mlp.experts.gate_up_proj", (2, 1280, 640), "BF16"),
            ("0.self_attn.q_proj", (6, 256), "F16"),
        ]
    )


def write_model(path, tensors, metadata=None, num_shards=1):
    """A model directory with its config and the files around it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2))
    for name, content in (COPIED_FILES | SKIPPED_FILES).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    write_shards(path, tensors, metadata or {"format": "pt"}, num_shards)


def write_shards(path, tensors, metadata, num_shards):
    """model.safetensors, or shards that take the tensors in turn and their index."""
    if num_shards == 1:
        st.write(path / "model.safetensors", tensors, metadata)
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        weight_map |= dict.fromkeys(names, file)
        st.write(path / file, {name: tensors[name] for name in names}, metadata)
    total_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
