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


def make_model(path, changes={}, dtype="BF16", biases="", num_shards=1):
    """A model with random weights."""
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    rng = np.random.default_rng()
    hidden, inner = config["hidden_size"], config["intermediate_size"]
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
        for module, n, k in [
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ]:
            add(f"{layer}.{module}.weight", n, k, deviation=1.5 / np.sqrt(k))
            if module.split(".")[1][0] in biases:
                add(f"{layer}.{module}.bias", n, deviation=0.5)
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


# ---- Generation


@pytest.mark.parametrize("format", [None, "int4"])
def test_the_likeliest_text(format, halfbyte, tmp_path):
    model = TINY_LLAMA
    if format is not None:
        model = tmp_path / "model"
        halfbyte("quantize", TINY_LLAMA, "-o", model, "--format", format)
    prompt, count = "It is a truth ", 12
    config, weights = read_model(model)
    text = prompt.encode()
    for _ in range(count):
        tokens = np.frombuffer(text, np.uint8).astype(np.int64)
        text += bytes([int(llama.logits(config, weights, tokens)[-1].argmax())])
    result = run_json("--prompt", prompt, "--tokens", count, model)["generate"]
    assert (result["prompt"] + result["text"]).encode() == text
    assert bytes(result["tokens"]) == text[len(prompt) :]
    assert run("--prompt", prompt, "--tokens", count, model).stdout.startswith(text + b"\n")


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


def test_a_cuda_device_must_have_something_to_compute(device):
    assert "must have fused products" in fails("--eval", TEXT, "--device", device, TINY_LLAMA, code=USAGE)


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
        ({"model_type": "gpt2"}, '"model_type" must be llama, mistral or qwen2, got "gpt2"'),
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


def test_tokens_are_bytes(tmp_path):
    path = make_model(tmp_path / "model")
    (path / "tokenizer.json").write_text("{}")
    assert "has tokenizer.json" in fails("--eval", TEXT, path, code=BAD_INPUT)
    (path / "tokenizer.json").unlink()
    (path / "config.json").write_text(json.dumps({**BASE, "vocab_size": 300}))
    assert '"vocab_size" must be 256' in fails("--eval", TEXT, path, code=BAD_INPUT)
    (path / "config.json").write_text("{")
    assert re.search("config.json: .*parse error", fails("--eval", TEXT, path, code=BAD_INPUT))
