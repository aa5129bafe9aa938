"""A model of the shape of Qwen3-30B-A3B, or a smaller one, with random weights, or sparse: full size without the disk for it.

    cd tests && python3 -m independent.moe OUT --sparse                          # 61 GB, of which the disk has the headers
    cd tests && python3 -m independent.moe OUT --layers 2 --experts 8 --hidden 256 --width 128
"""

import argparse
import json
from pathlib import Path

import numpy as np

from . import safetensors_io as st

VOCABULARY, HEAD = 151936, 128


def shapes_of(layer, experts, hidden, width):
    """{name: shape} of a layer, as published: experts one by one."""
    prefix = f"model.layers.{layer}"
    heads, kv_heads = hidden // 64, max(hidden // 512, 1)
    attention = {"q_proj": (heads * HEAD, hidden), "k_proj": (kv_heads * HEAD, hidden), "v_proj": (kv_heads * HEAD, hidden)}
    attention["o_proj"] = (hidden, heads * HEAD)
    shapes = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {f"{prefix}.self_attn.{name}.weight": (HEAD,) for name in ("q_norm", "k_norm")}
    shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
    for expert in range(experts):
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = (width, hidden)
        shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    return shapes


def write_file(path, shapes, sparse, rng):
    """bf16: random numbers from one pool, or holes."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = st.from_f32(rng.standard_normal(1 << 20).astype(np.float32) * np.float32(0.02), "BF16").data.tobytes()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, 0 if sparse else offset, len(pool)):
            at = int(rng.integers(len(pool) // 4)) * 2
            file.write((pool[at:] + pool[:at])[: offset - begin])
        file.truncate(8 + len(text) + offset)


def write_model(path, layers=48, experts=128, hidden=2048, width=768, vocabulary=VOCABULARY, sparse=False):
    """A directory with a file for each layer, and one for the embeddings and the head."""
    path = Path(path)
    path.mkdir()
    rng = np.random.default_rng(1)
    files = [shapes_of(layer, experts, hidden, width) for layer in range(layers)]
    files.append({name: (vocabulary, hidden) for name in ("lm_head.weight", "model.embed_tokens.weight")})
    files[-1]["model.norm.weight"] = (hidden,)
    weight_map = {}
    for number, shapes in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        write_file(path / name, shapes, sparse, rng)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 512, 1),
        "head_dim": HEAD,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="OUT")
    for name, value in (("layers", 48), ("experts", 128), ("hidden", 2048), ("width", 768), ("vocabulary", VOCABULARY)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sparse", action="store_true", help="zeros, which take no room on the disk")
    write_model(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
