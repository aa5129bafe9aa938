"""examples/llama against a second implementation: losses, texts, and what it refuses."""

import json
import os
import re
import subprocess

import numpy as np
import pytest

from conftest import ROOT, TINY_LLAMA
from independent import checkpoints, llama, unpack
from independent import safetensors_io as st

TEXT = ROOT / "examples" / "llama" / "austen.txt"
WINDOW, WINDOWS = 96, 2
USAGE, BAD_INPUT, DEVICE, IO = 2, 3, 5, 6


def run(*arguments, expect=0, **options):
    program = os.environ.get("HALFBYTE_LLAMA", ROOT / "build/release/examples/programs/llama")
    command = [str(program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, timeout=120, **options)
    assert result.returncode == expect, f"{command}: exit {result.returncode}\n{result.stderr.decode()}"
    return result


def run_json(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def fails(*arguments, code, **options):
    result = run(*arguments, expect=code, **options)
    assert result.stdout == b""
    return result.stderr.decode()


def evaluate(model, *arguments):
    return run_json("--eval", TEXT, "--window", WINDOW, "--windows", WINDOWS, *arguments, model)


def read_model(path):
    """config.json, and every weight in f32: quantized ones as the independent unpacker decodes them."""
    tensors, _ = st.read_directory(path)
    config = json.loads((path / "config.json").read_text())
    quantized = unpack.weights(tensors, config)
    parts = {key for weight in quantized.values() for key in weight.keys}
    weights = {name: st.to_f32(tensor) for name, tensor in tensors.items() if name not in parts}
    return config, weights | {name: np.float32(weight.weights) for name, weight in quantized.items()}


def expected(path):
    config, weights = read_model(path)
    losses = llama.losses(config, weights, TEXT.read_bytes(), WINDOW, WINDOWS)
    assert losses.shape == (WINDOWS, WINDOW - 1)
    return losses.mean()


def test_the_loss_of_the_dense_model():
    document = run_json("--eval", TEXT, TINY_LLAMA)
    evaluation = document["eval"]
    assert (evaluation["window"], evaluation["windows"], evaluation["predictions"]) == (512, 8, 8 * 511)
    assert evaluation["nats_per_byte"] == pytest.approx(1.0711666, abs=1e-6)  # that of the second implementation
    assert document["products"] == [{"layers": 29, "weight": "bf16", "kind": "dense"}]
    assert document["stored_bytes"] == sum(t.data.nbytes for t in st.read_directory(TINY_LLAMA)[0].values())
    assert "1.071167 nats/byte: 4088 predictions, 8 windows of 512" in run("--eval", TEXT, TINY_LLAMA).stdout.decode()


FUSED = {  # options of `quantize`, and how the report describes the weights
    "--format nf4": "nf4 g64, bitsandbytes",
    "--format fp4 --double-quant --group-size 128": "fp4 g128 double-quant, bitsandbytes",
    "--format int4": "int4 g128, compressed-tensors",
    "--format int4 --asymmetric": "int4 asymmetric g128, compressed-tensors",
    "--format int8 --group-size channel": "int8 channel, compressed-tensors",
    "--format int8 --asymmetric": "int8 asymmetric g128, compressed-tensors",
    "--format affine4": "affine4 g64, mlx",
    "--format affine8": "affine8 g64, mlx",
    "--format nf4 --layout halfbyte --double-quant": "nf4 g64 double-quant, halfbyte",
    "--format int4 --asymmetric --layout halfbyte --group-size 48": "int4 asymmetric g48, halfbyte",
    "--format fp4_e2m1 --group-size tensor": "fp4_e2m1 tensor, halfbyte",
    "--format affine4 --layout halfbyte --scale-dtype f16": "affine4 g64, halfbyte",
    "--format affine3": "affine3 g64, mlx",
    "--format int2": "int2 g64, halfbyte",
    "--format int6 --asymmetric": "int6 asymmetric g64, halfbyte",
    "--format lut4 --table=-1,-.8,-.6,-.5,-.4,-.3,-.2,-.1,0,.1,.2,.3,.4,.5,.75,1": "lut4 g64, halfbyte",
}
# With layout mlx the head is quantized, too.
LAYERS = {True: 29, False: 28}


@pytest.mark.parametrize("options", FUSED)
def test_fused_products_of_every_layout(options, halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", *options.split())
    loss = expected(tmp_path / "model")
    fused, dequantized = (evaluate(tmp_path / "model", "--matmul", kind) for kind in ("fused", "dequantize"))
    (row,) = (row for row in fused["products"] if row["kind"] != "dense")
    assert row.pop("kernel").startswith("qgemm_")
    layers = LAYERS[FUSED[options].endswith("mlx")]
    assert row == {"layers": layers, "weight": FUSED[options], "kind": "fused"}
    assert {"layers": layers, "weight": FUSED[options], "kind": "dequantized"} in dequantized["products"]
    assert fused["eval"]["nats_per_byte"] == pytest.approx(loss, abs=1e-5)
    assert dequantized["eval"]["nats_per_byte"] == pytest.approx(loss, abs=1e-5)
    assert fused["stored_bytes"] == dequantized["stored_bytes"] < 4e6
    assert fused["memory_bytes"] < dequantized["memory_bytes"] / 2


def test_an_embedding_and_a_head_that_are_quantized_too(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--include", "proj|lm_head|embed", "--format", "affine4")
    document = evaluate(tmp_path / "model")
    assert [row["layers"] for row in document["products"]] == [29]
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "model"), abs=1e-5)


def test_the_map_of_double_quantization_is_that_of_the_file(halfbyte, tmp_path):
    model = tmp_path / "model"
    halfbyte("quantize", TINY_LLAMA, "-o", model, "--format", "nf4", "--double-quant")
    loss = evaluate(model)["eval"]["nats_per_byte"]
    tensors, metadata = st.read_directory(model)
    for name, tensor in tensors.items():
        if name.endswith(".nested_quant_map"):
            tensors[name] = st.Tensor("F32", tensor.data * np.float32(0.75))
    checkpoints.write_shards(model, tensors, metadata, 1)
    fused, dequantized = (
        evaluate(model, "--matmul", kind)["eval"]["nats_per_byte"] for kind in ("fused", "dequantize")
    )
    assert fused == pytest.approx(dequantized, abs=1e-5)
    assert abs(fused - loss) > 1e-3


def test_bf16_activations(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", "nf4")
    loss = expected(tmp_path / "model")
    for kind in ("fused", "dequantize"):
        document = evaluate(tmp_path / "model", "--dtype", "bf16", "--matmul", kind)
        assert document["dtype"] == "bf16"
        assert 1e-7 < abs(document["eval"]["nats_per_byte"] - loss) < 5e-3  # rounded, and not by much


@pytest.mark.parametrize("format", ["nf4", "int4", "nvfp4", "affine3"])
def test_activations_of_8_bits(format, halfbyte, tmp_path):
    layout = ["--layout", "halfbyte"]
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", format, *layout)
    exact = evaluate(tmp_path / "model")
    document = evaluate(tmp_path / "model", "--math", "int8")
    assert document["math"] == "int8"
    assert 1e-7 < abs(document["eval"]["nats_per_byte"] - exact["eval"]["nats_per_byte"]) < 1e-2
    assert document["eval"] != exact["eval"]
    same = evaluate(tmp_path / "model", "--math", "int8", "--threads", 5)
    assert same["eval"]["nats_per_byte"] == document["eval"]["nats_per_byte"]


def test_any_number_of_threads_gives_the_same_loss(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", "int4")
    results = {evaluate(tmp_path / "model", "--threads", n)["eval"]["nats_per_byte"] for n in (1, 2, 5)}
    assert len(results) == 1


# ---- Other models of the type

BASE = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "classic": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "no groups of queries": ({"num_key_value_heads": None}, {}),
    "heads of another size": ({"head_dim": 10, "num_key_value_heads": 3}, {"dtype": "F32"}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {"biases": "qkvogud", "num_shards": 3}),
    "qwen2": ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, {"biases": "qkv"}),
    "mistral": ({"model_type": "mistral", "sliding_window": None, "hidden_act": "silu"}, {"dtype": "F16"}),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "llama3 rope": ({"rope_scaling": LLAMA3}, {}),
    "rope parameters": ({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 300.0}}, {}),
}


def feed_forward(config, layer):
    """Names and shapes of the linear layers behind attention."""
    hidden, inner, is_mixtral = config["hidden_size"], config.get("intermediate_size"), config["model_type"] == "mixtral"
    block = f"model.layers.{layer}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    modules = [block]
    if llama.has_experts(config, layer):
        inner = config.get("moe_intermediate_size", inner)
        experts = config["num_local_experts" if is_mixtral else "num_experts"]
        modules = [f"{block}.experts.{expert}" for expert in range(experts)]
        yield f"{block}.gate", experts, hidden
    for module in modules:
        yield f"{module}.{gate}", inner, hidden
        yield f"{module}.{up}", inner, hidden
        yield f"{module}.{down}", hidden, inner


def make_model(path, changes={}, dtype="BF16", biases="", num_shards=1, seed=None):
    """A model with random weights."""
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    rng = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    kv_size = config.get("num_key_value_heads", heads) * head_dim
    tensors = {}

    def add(name, *shape, mean=0.0, deviation=1.0):
        values = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
        tensors[name] = st.from_f32(values, dtype)

    add("model.embed_tokens.weight", 256, hidden)
    add("model.norm.weight", hidden, mean=1, deviation=0.2)
    if not config.get("tie_word_embeddings"):
        add("lm_head.weight", 256, hidden, deviation=0.3)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        add(f"{layer}.input_layernorm.weight", hidden, mean=1, deviation=0.2)
        add(f"{layer}.post_attention_layernorm.weight", hidden, mean=1, deviation=0.2)
        if config["model_type"] == "qwen3_moe":
            add(f"{layer}.self_attn.q_norm.weight", head_dim, mean=1, deviation=0.2)
            add(f"{layer}.self_attn.k_norm.weight", head_dim, mean=1, deviation=0.2)
        for module, n, k in [
            (f"{layer}.self_attn.q_proj", heads * head_dim, hidden),
            (f"{layer}.self_attn.k_proj", kv_size, hidden),
            (f"{layer}.self_attn.v_proj", kv_size, hidden),
            (f"{layer}.self_attn.o_proj", hidden, heads * head_dim),
            *feed_forward(config, i),
        ]:
            add(f"{module}.weight", n, k, deviation=1.5 / np.sqrt(k))
            if module.split(".")[-1][0] in biases:
                add(f"{module}.bias", n, deviation=0.5)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    checkpoints.write_shards(path, tensors, {"format": "pt"}, num_shards)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_other_models(name, halfbyte, tmp_path):
    changes, how = MODELS[name]
    dense = make_model(tmp_path / "dense", changes, **how)
    assert evaluate(dense)["eval"]["nats_per_byte"] == pytest.approx(expected(dense), abs=2e-5)
    halfbyte("quantize", dense, "-o", tmp_path / "quantized", "--format", "int4", "--layout", "halfbyte")
    document = evaluate(tmp_path / "quantized")
    assert {row["kind"]: row["layers"] for row in document["products"]} == {"dense": 1, "fused": 14}
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "quantized"), abs=2e-5)


def test_groups_that_cross_rows_have_no_packed_form(halfbyte, tmp_path):
    dense = make_model(tmp_path / "dense")
    halfbyte("quantize", dense, "-o", tmp_path / "model", "--format", "nf4")  # groups of 64, rows of 48 and 80
    document = evaluate(tmp_path / "model")
    assert {row["kind"] for row in document["products"]} == {"dense", "dequantized"}
    assert any("must divide the columns" in row.get("reason", "") for row in document["products"])
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "model"), abs=2e-5)


# ---- Models with experts

EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "head_dim": 16,
        "intermediate_size": None,
    },
}


def make_experts(path, model_type, changes={}, **how):
    """The same in each run: where two experts are almost equally likely, the last bit chooses one."""
    base = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return make_model(path, base | EXPERTS[model_type] | changes, seed=1, **how)


def grouped(document):
    """Linear layers of experts that are multiplied together: those of products with gate and up as one weight and with
    down, and those with gate or up alone."""
    rows = [row for row in document["products"] if row["kind"] == "grouped"]
    assert all(row["kernel"].startswith("qgemm_") for row in rows)
    alone = [row for row in rows if row.get("reason", "").startswith("concat_rows: ")]
    return tuple(sum(row["layers"] for row in some) for some in ([row for row in rows if row not in alone], alone))


@pytest.mark.parametrize("model_type", EXPERTS)
@pytest.mark.parametrize(
    "options, alone",
    [
        ("--format nf4 --layout halfbyte", False),
        ("--format int4 --group-size 32", False),
        ("--format nvfp4", False),
        ("--format affine4 --group-size 32", False),  # MLX has them in one tensor
        ("--format nf4 --double-quant --layout halfbyte", True),
        ("--format fp4_e2m1 --group-size tensor", True),
    ],
)
def test_experts_are_multiplied_together(model_type, options, alone, halfbyte, tmp_path):
    model = tmp_path / "model"
    halfbyte("quantize", make_experts(tmp_path / "dense", model_type), "-o", model, *options.split())
    loss = expected(model)
    fused, dequantized = (evaluate(model, "--matmul", kind) for kind in ("fused", "dequantize"))
    assert grouped(fused) == ((16, 32) if alone else (48, 0))  # 2 layers of 8 experts
    assert grouped(dequantized) == (0, 0)
    assert fused["eval"]["nats_per_byte"] == pytest.approx(loss, abs=2e-5)
    assert dequantized["eval"]["nats_per_byte"] == pytest.approx(loss, abs=2e-5)
    assert fused["memory_bytes"] < dequantized["memory_bytes"] / 2


def test_experts_of_bitsandbytes(halfbyte, tmp_path):
    dense = make_experts(tmp_path / "dense", "mixtral")
    halfbyte("quantize", dense, "-o", tmp_path / "model", "--format", "nf4", "--reader", "transformers-4")
    document = evaluate(tmp_path / "model")
    assert grouped(document) == (48, 0)
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "model"), abs=2e-5)


SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4, "intermediate_size": 80}
EXPERT_MODELS = {  # the type, changes, how it is made, and linear layers as of grouped()
    "top 1": ("mixtral", {"num_experts_per_tok": 1}, {"num_shards": 3}, (48, 0)),
    "all experts": ("mixtral", {"num_experts_per_tok": 8, "tie_word_embeddings": True}, {}, (48, 0)),
    "weights as they are": ("qwen3_moe", {"norm_topk_prob": None}, {"dtype": "F16"}, (48, 0)),
    "some layers only": ("qwen3_moe", SPARSE, {}, (24, 0)),
    "biases of attention": ("qwen3_moe", {"attention_bias": True}, {"biases": "qkvo"}, (48, 0)),
    "narrow experts": ("qwen3_moe", {"moe_intermediate_size": 48}, {}, (16, 32)),  # rows that are no strips of 32
}


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_other_models_with_experts(name, halfbyte, tmp_path):
    model_type, changes, how, layers = EXPERT_MODELS[name]
    dense = make_experts(tmp_path / "dense", model_type, changes, **how)
    document = evaluate(dense)
    assert {row["kind"] for row in document["products"]} == {"dense"}
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(dense), abs=2e-5)
    halfbyte("quantize", dense, "-o", tmp_path / "model", *"--format int4 --layout halfbyte --group-size 16".split())
    document = evaluate(tmp_path / "model")
    assert grouped(document) == layers
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "model"), abs=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        "--format int4 --layout halfbyte --exclude experts.3.up_proj",
        "--format affine4 --exclude layers.1.*down_proj",  # of experts in one tensor
    ],
)
def test_experts_of_which_some_are_dense(options, halfbyte, tmp_path):
    dense = make_experts(tmp_path / "dense", "qwen3_moe", {"moe_intermediate_size": 64})
    halfbyte("quantize", dense, "-o", tmp_path / "model", *options.split())
    document = evaluate(tmp_path / "model")
    assert "dense" in {row["kind"] for row in document["products"]}
    assert grouped(document) == ((0, 0) if "int4" in options else (24, 0))
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(tmp_path / "model"), abs=2e-5)


def test_experts_of_different_formats(halfbyte, tmp_path):
    dense, model, other = make_experts(tmp_path / "dense", "qwen3_moe"), tmp_path / "model", tmp_path / "other"
    for path, format in ((model, "int4"), (other, "int8")):
        halfbyte("quantize", dense, "-o", path, "--layout", "halfbyte", "--group-size", 32, "--format", format)
    tensors, metadata = st.read_directory(model)
    module = "model.layers.0.mlp.experts.3.up_proj."
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    others = {name: tensor for name, tensor in st.read_directory(other)[0].items() if name.startswith(module)}
    checkpoints.write_shards(model, tensors | others, metadata, 1)
    document = evaluate(model)
    fused = {row["weight"]: row["layers"] for row in document["products"] if row["kind"] == "fused"}
    assert fused == {"int4 g32, halfbyte": 8 + 23, "int8 g32, halfbyte": 1}
    assert grouped(document) == (24, 0)  # those of the other layer
    assert document["eval"]["nats_per_byte"] == pytest.approx(expected(model), abs=2e-5)


@pytest.mark.parametrize("options", ["--format nf4", "--format nf4 --double-quant"])
def test_experts_with_bf16_activations(options, halfbyte, tmp_path):
    # All experts: rounding changes none.
    dense = make_experts(tmp_path / "dense", "mixtral", {"num_experts_per_tok": 8})
    halfbyte("quantize", dense, "-o", tmp_path / "model", "--layout", "halfbyte", *options.split())
    loss = evaluate(tmp_path / "model")["eval"]["nats_per_byte"]
    for kind in ("fused", "dequantize"):
        document = evaluate(tmp_path / "model", "--dtype", "bf16", "--matmul", kind)
        assert 1e-7 < abs(document["eval"]["nats_per_byte"] - loss) < 2e-2


def test_any_number_of_threads_gives_the_same_loss_of_experts(halfbyte, tmp_path):
    dense = make_experts(tmp_path / "dense", "qwen3_moe")
    halfbyte("quantize", dense, "-o", tmp_path / "model", "--format", "int4", "--group-size", 32)
    for kind in ("fused", "dequantize"):
        documents = [evaluate(tmp_path / "model", "--matmul", kind, "--threads", n) for n in (1, 2, 5)]
        assert len({document["eval"]["nats_per_byte"] for document in documents}) == 1


# ---- Generation


def likeliest(model, prompt, count):
    config, weights = read_model(model)
    text = prompt.encode()
    for _ in range(count):
        tokens = np.frombuffer(text, np.uint8).astype(np.int64)
        text += bytes([int(llama.logits(config, weights, tokens)[-1].argmax())])
    return text


@pytest.mark.parametrize("format", [None, "int4"])
def test_the_likeliest_text(format, halfbyte, tmp_path):
    model = TINY_LLAMA
    if format is not None:
        model = tmp_path / "model"
        halfbyte("quantize", TINY_LLAMA, "-o", model, "--format", format)
    prompt, count = "It is a truth ", 12
    text = likeliest(model, prompt, count)
    result = run_json("--prompt", prompt, "--tokens", count, model)["generate"]
    assert (result["prompt"] + result["text"]).encode() == text
    assert bytes(result["tokens"]) == text[len(prompt) :]
    assert run("--prompt", prompt, "--tokens", count, model).stdout.startswith(text + b"\n")


@pytest.mark.parametrize("options", ["int4", "nf4", "nf4 --double-quant"])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_the_likeliest_text_of_experts(model_type, options, halfbyte, tmp_path):
    dense = make_experts(tmp_path / "dense", model_type)
    model, prompt, count = tmp_path / "model", "It is a truth ", 12
    halfbyte("quantize", dense, "-o", model, "--layout", "halfbyte", "--group-size", 32, "--format", *options.split())
    text = likeliest(model, prompt, count)
    result = run_json("--prompt", prompt, "--tokens", count, model)["generate"]
    assert prompt.encode() + bytes(result["tokens"]) == text


def test_texts_at_a_temperature():
    def text(*arguments):
        return run_json("--prompt", "The ", "--tokens", 40, *arguments, TINY_LLAMA)["generate"]["tokens"]

    greedy, hot = text(), text("--temperature", 1.5, "--seed", 3)
    assert text("--temperature", 1.5, "--seed", 3) == hot
    assert text("--temperature", 1.5, "--seed", 4) != hot
    assert hot != greedy == text("--temperature", 1e-4, "--seed", 4)


# ---- On a CUDA device


@pytest.mark.parametrize("format", ["nf4", "int4", "affine4", "int8"])
def test_a_cuda_device_gives_the_loss_of_the_cpu(format, device, halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", format)
    cpu, cuda = (evaluate(tmp_path / "model", "--device", where) for where in ("cpu", device))
    assert cuda["device"] == device
    assert [row["layers"] for row in cuda["products"] if row["kind"] == "fused"] == [LAYERS[format == "affine4"]]
    assert cuda["eval"]["nats_per_byte"] == pytest.approx(cpu["eval"]["nats_per_byte"], abs=1e-4)
    bf16 = evaluate(tmp_path / "model", "--device", device, "--dtype", "bf16")["eval"]["nats_per_byte"]
    assert bf16 == pytest.approx(cpu["eval"]["nats_per_byte"], abs=5e-3)
    prompt = ["--prompt", "It is a truth ", "--tokens", 20]
    texts = {run_json(*prompt, "--device", where, tmp_path / "model")["generate"]["text"] for where in ("cpu", device)}
    assert len(texts) == 1


@pytest.mark.parametrize("options", ["nf4", "nf4 --double-quant", "int4 --group-size 32"])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_a_cuda_device_gives_the_loss_of_experts_on_the_cpu(model_type, options, device, halfbyte, tmp_path):
    dense = make_experts(tmp_path / "dense", model_type)
    halfbyte("quantize", dense, "-o", tmp_path / "model", "--layout", "halfbyte", "--format", *options.split())
    cpu, cuda = (evaluate(tmp_path / "model", "--device", where) for where in ("cpu", device))
    assert grouped(cuda) == grouped(cpu) != (0, 0)
    assert cuda["eval"]["nats_per_byte"] == pytest.approx(cpu["eval"]["nats_per_byte"], abs=1e-4)


def test_a_cuda_device_must_have_something_to_compute(device):
    assert "must have fused products" in fails("--eval", TEXT, "--device", device, TINY_LLAMA, code=USAGE)


# ---- Weights that are cut


def kinds(document):
    return {row["kind"]: row["layers"] for row in document["products"]}


@pytest.mark.parametrize("options", ["nf4", "int4 --group-size 32 --asymmetric", "affine4 --group-size 32", "int8 --group-size channel",
                                     "nvfp4"])
def test_parts_give_the_loss_of_the_whole(options, halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", *options.split())
    whole = evaluate(tmp_path / "model", "--tensor-parallel", 1)
    assert whole["tensor_parallel"] == 1 and "fused" in kinds(whole)
    for members in (2, 3):
        parts = evaluate(tmp_path / "model", "--tensor-parallel", members)
        assert parts["tensor_parallel"] == members
        assert parts["eval"]["nats_per_byte"] == pytest.approx(whole["eval"]["nats_per_byte"], abs=2e-6)
        assert kinds(parts)["fused, rowwise"] == 8 and "fused" not in kinds(parts)
        assert kinds(parts)["fused, colwise"] == kinds(whole)["fused"] - 8
    bf16 = evaluate(tmp_path / "model", "--tensor-parallel", 2, "--dtype", "bf16")["eval"]["nats_per_byte"]
    assert bf16 == pytest.approx(whole["eval"]["nats_per_byte"], abs=5e-3)


def test_biases_are_added_once(halfbyte, tmp_path):
    make_model(tmp_path / "dense", biases="qkvogud")
    halfbyte("quantize", tmp_path / "dense", "-o", tmp_path / "model", "--format", "int8", "--group-size", "channel")
    whole, parts = (evaluate(tmp_path / "model", "--tensor-parallel", members) for members in (1, 2))
    assert parts["eval"]["nats_per_byte"] == pytest.approx(whole["eval"]["nats_per_byte"], abs=2e-6)
    assert kinds(parts)["fused, colwise"] > 0


def test_what_cannot_be_cut_is_multiplied_whole_and_the_report_says_why(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", "nf4", "--double-quant")
    whole, parts = (evaluate(tmp_path / "model", "--tensor-parallel", members) for members in (1, 2))
    assert parts["eval"]["nats_per_byte"] == pytest.approx(whole["eval"]["nats_per_byte"], abs=2e-6)
    reasons = [row["reason"] for row in parts["products"] if row["kind"] == "fused"]
    assert reasons and all("run across rows" in reason for reason in reasons)


def test_cuda_devices_give_the_loss_of_one(device, halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "model", "--format", "nf4")
    if len(json.loads(halfbyte("doctor", "--json", "-").stdout)["cuda"]["devices"]) < 2:
        pytest.skip("needs two devices")
    one = evaluate(tmp_path / "model", "--device", device)
    two = evaluate(tmp_path / "model", "--device", "cuda", "--tensor-parallel", 2)
    assert two["eval"]["nats_per_byte"] == pytest.approx(one["eval"]["nats_per_byte"], abs=1e-4)


# ---- What is refused


def test_bad_arguments():
    for arguments, message in [
        ([], "MODEL_DIR must be given"),
        ([TINY_LLAMA], "one of --eval and --prompt"),
        (["--eval", TEXT, "--prompt", "a", TINY_LLAMA], "one of --eval and --prompt"),
        (["--eval", TEXT, TINY_LLAMA, "more"], 'unexpected "more"'),
        (["--eval", TEXT, TINY_LLAMA, "--window"], "--window: must have a value"),
        (["--eval", TEXT, "--window", "1", TINY_LLAMA], "--window: must be a number from 2"),
        (["--eval", TEXT, "--window", "513", TINY_LLAMA], "512 positions, got 513"),
        (["--prompt", "abc", "--tokens", "510", TINY_LLAMA], "512 positions, got 513"),
        (["--prompt", "", TINY_LLAMA], "--prompt: must have a byte"),
        (["--prompt", "a", "--temperature", "nan", TINY_LLAMA], "--temperature: must be a number"),
        (["--eval", TEXT, "--matmul", "dense", TINY_LLAMA], "must be fused or dequantize"),
        (["--eval", TEXT, "--dtype", "f16", TINY_LLAMA], "must be f32 or bf16"),
        (["--eval", TEXT, "--device", "gpu", TINY_LLAMA], '"gpu"'),
        (["--eval", TEXT, "--tensor-parallel", "65", TINY_LLAMA], "--tensor-parallel: must be at most 64, got 65"),
        (["--eval", TEXT, "--tensor-parallel", "2", "--device", "cuda:1", TINY_LLAMA], "the first CUDA devices, got --device cuda:1"),
    ]:
        error = fails(*arguments, code=USAGE)
        assert message in error and "usage: llama" in error
    assert run("--help").stdout.startswith(b"usage: llama")


def test_what_is_not_there(tmp_path):
    assert str(tmp_path / "no.txt") in fails("--eval", tmp_path / "no.txt", TINY_LLAMA, code=IO)
    assert "config.json" in fails("--eval", TEXT, tmp_path / "no-model", code=IO)
    error = fails("--eval", TEXT, "--windows", 9, TINY_LLAMA, code=BAD_INPUT)
    assert "must have 9 windows of 512 bytes, has 4096 bytes" in error
    no_driver = {**os.environ, "HALFBYTE_CUDA_DRIVER": "/nowhere/libcuda.so.1"}
    assert "/nowhere/libcuda.so.1" in fails("--eval", TEXT, "--device", "cuda", TINY_LLAMA, code=DEVICE, env=no_driver)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, '"model_type" must be llama, mistral, mixtral, qwen2 or qwen3_moe, got "gpt2"'),
        ({"hidden_act": "gelu"}, '"hidden_act" must be silu, got "gelu"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, '"rope_type" must be default, linear or llama3, got "yarn"'),
        ({"rope_scaling": {"rope_type": "linear"}}, 'no "factor"'),
        ({"partial_rotary_factor": 0.5}, '"partial_rotary_factor" must be 1'),
        ({"hidden_size": None}, 'no "hidden_size"'),
        ({"hidden_size": "48"}, "must be number"),
        ({"num_hidden_layers": 0}, '"num_hidden_layers" must be from 1'),
        ({"num_hidden_layers": 3}, 'no weight "model.layers.2.input_layernorm.weight"'),
        ({"num_hidden_layers": 1}, 'weight "model.layers.1.'),
        ({"num_key_value_heads": 4}, '"num_attention_heads" must be a multiple of "num_key_value_heads"'),
        ({"head_dim": 9}, '"head_dim" must be even, got 9'),
        ({"intermediate_size": 81}, "must have the shape [81, 48] by config.json, got [80, 48]"),
        ({"model_type": "mistral", "sliding_window": 64}, None),
    ],
)
def test_models_that_are_not_supported(changes, message, tmp_path):
    path = make_model(tmp_path / "model")
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    if message is None:
        assert "64 positions" in fails("--eval", TEXT, "--window", 65, path, code=USAGE)
    else:
        assert message in fails("--eval", TEXT, "--window", 65, path, code=BAD_INPUT)


@pytest.mark.parametrize(
    "model_type, changes, message",
    [
        ("mixtral", {"num_local_experts": None}, 'no "num_local_experts"'),
        ("mixtral", {"num_local_experts": 9}, ".gate.weight: must have the shape [9, 64] by config.json, got [8, 64]"),
        ("mixtral", {"num_experts_per_tok": 9}, '"num_experts_per_tok" must be at most "num_local_experts", got 9 and 8'),
        ("mixtral", {"num_experts_per_tok": 0}, '"num_experts_per_tok" must be from 1'),
        ("mixtral", {"intermediate_size": 96}, "experts.0.w1.weight: must have the shape [96, 64]"),
        ("qwen3_moe", {"num_experts": None}, 'no "num_experts"'),
        ("qwen3_moe", {"num_experts_per_tok": 9}, '"num_experts_per_tok" must be at most "num_experts", got 9 and 8'),
        ("qwen3_moe", {"moe_intermediate_size": None}, 'no "moe_intermediate_size"'),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "must be boolean"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, '"decoder_sparse_step" must be from 1'),
        ("qwen3_moe", {"mlp_only_layers": [1]}, 'no "intermediate_size"'),
        ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 96}, 'no weight "model.layers.1.mlp.gate_proj.weight"'),
        ("qwen3_moe", {"head_dim": None, "hidden_size": 32}, "embed_tokens.weight: must have the shape [256, 32]"),
        ("qwen3_moe", {"model_type": "qwen2_moe"}, 'got "qwen2_moe"'),
        ("qwen3_moe", {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 96}, "block_sparse_moe.gate"),
    ],
)
def test_models_with_experts_that_are_not_supported(model_type, changes, message, tmp_path):
    path = make_experts(tmp_path / "model", model_type)
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    assert message in fails("--eval", TEXT, "--window", 65, path, code=BAD_INPUT)


def test_an_expert_that_is_missing_or_has_a_bias(tmp_path):
    path = make_experts(tmp_path / "model", "qwen3_moe")
    tensors, metadata = st.read_directory(path)
    name = "model.layers.1.mlp.experts.7.down_proj"
    without = {key: tensor for key, tensor in tensors.items() if key != f"{name}.weight"}
    checkpoints.write_shards(path, without, metadata, 1)
    assert f'no weight "{name}.weight"' in fails("--eval", TEXT, path, code=BAD_INPUT)
    bias = {f"{name}.bias": tensors["model.norm.weight"]}
    checkpoints.write_shards(path, tensors | bias, metadata, 1)
    assert f'weight "{name}.bias" is none of a model of the type "qwen3_moe"' in fails("--eval", TEXT, path, code=BAD_INPUT)


def test_tokens_are_bytes(tmp_path):
    path = make_model(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    assert "has tokenizer.json" in fails("--eval", TEXT, path, code=BAD_INPUT)
    (path / "tokenizer.json").unlink()
    (path / "config.json").write_text(json.dumps({**BASE, "vocab_size": 300}))
    assert '"vocab_size" must be 256' in fails("--eval", TEXT, path, code=BAD_INPUT)
    (path / "config.json").write_text("{")
    assert re.search("config.json: .*parse error", fails("--eval", TEXT, path, code=BAD_INPUT))
