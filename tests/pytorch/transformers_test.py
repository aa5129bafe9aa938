"""Models of transformers: quantized while they are loaded, saved, reloaded, generating; experts included."""

import importlib
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import halfbyte
from halfbyte.torch import QuantizedExperts, quantize_model, replace_linear

transformers = pytest.importorskip("transformers", "5")
from halfbyte.torch.transformers import HalfbyteConfig, make_savable  # noqa: E402
from tiny_models import SMALL, TINY, load, logits, quantized_modules  # noqa: E402

WITH_EXPERTS = ["qwen3-moe", "mixtral", "gpt-oss"]


@pytest.mark.parametrize("name", TINY)
def test_quantized_while_loading_saved_reloaded_generating(name, models, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no expert stays dense: that would be said
        model, info = load(models / name, quantization_config=HalfbyteConfig("nf4"), device_map="cpu",
                           output_loading_info=True)
    assert not any(info.values()), info
    report = model.hf_quantizer.report
    assert {layer.reason for layer in report.dense} <= {"embedding", "head", "router"}
    modules = quantized_modules(model)
    assert sum(isinstance(module, QuantizedExperts) for module in modules.values()) == 2 * (name in WITH_EXPERTS)
    assert not any(type(module).__name__ in ("Linear", "Conv1D") for path, module in model.named_modules()
                   if path != "lm_head")
    # The bytes are those of the model that is quantized after it was loaded.
    expected = load(models / name)
    replace_linear(expected, "nf4")
    state, wanted = model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert torch.equal(logits(model), logits(expected))

    model.save_pretrained(tmp_path / "saved")
    again, info = load(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert quantized_modules(again).keys() == modules.keys()
    assert torch.equal(logits(again), logits(model))
    prompt = torch.arange(3, 11).unsqueeze(0)
    tokens = [of.generate(prompt, max_new_tokens=6, do_sample=False) for of in (model, again)]
    assert tokens[0].shape == (1, 14) and torch.equal(*tokens)
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(load(tmp_path / "twice")), logits(model))
    if name == "tied":
        assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("spec", ["nf4,double_quant", "int4,granularity=channel,scale_dtype=bf16", "affine4", "nvfp4",
                                  "mxfp4", "fp8,granularity=channel"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_specs(name, spec, models, tmp_path):
    model = load(models / name, quantization_config=HalfbyteConfig(spec))
    expected = load(models / name)
    replace_linear(expected, spec)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "halfbyte", "spec": str(halfbyte.QuantSpec.parse(spec)), "include": None, "exclude": None}
    assert torch.equal(logits(load(tmp_path)), logits(expected))


def test_include_and_exclude(models):
    model = load(models / "llama", quantization_config=HalfbyteConfig("int8", include="mlp|lm_head", exclude="down"))
    names = quantized_modules(model)
    assert sorted(names) == ["lm_head", *sorted(f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1)
                                                for part in ("gate", "up"))]
    model = load(models / "mixtral", quantization_config=HalfbyteConfig("int8", exclude="down_proj"))
    assert not any("experts" in name for name in quantized_modules(model))  # experts are quantized as a whole


def test_a_base_model_of_a_saved_model_with_a_head(models, tmp_path):
    load(models / "llama", quantization_config=HalfbyteConfig("nf4")).save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(quantized_modules(base)) == 14
    whole = load(tmp_path)
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_memory_of_an_accelerator_is_asked_for_ahead(models, tmp_path, monkeypatch):
    # As from_pretrained does for device_map="cuda": it sums up the bytes of what it will load.
    asked = []
    sum_up = transformers.modeling_utils.get_total_byte_count

    def get_total_byte_count(*args):
        asked.append(sum_up(*args))
        return asked[-1]

    monkeypatch.setattr(transformers.modeling_utils, "is_accelerator_device", lambda device: True)
    monkeypatch.setattr(transformers.modeling_utils, "get_total_byte_count", get_total_byte_count)
    for name in "llama", "mixtral":
        model = load(models / name, quantization_config=HalfbyteConfig("nf4"), device_map="cpu")
        model.save_pretrained(tmp_path / name)
        assert any(key.endswith("weight_spec") for key in model.state_dict())
        again, info = load(tmp_path / name, device_map="cpu", output_loading_info=True)
        assert not any(info.values()) and torch.equal(logits(again), logits(model))
        held = sum(tensor.nbytes for tensor in (*again.parameters(), *again.buffers()))
        assert 0.9 * held < sum(asked[-1].values()) <= held
    assert len(asked) == 4


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# Experts in f32: a token may go to others where the router's scores are rounded to bf16.
@needs_gpu
@pytest.mark.parametrize("name,dtype", [("llama", "bfloat16"), ("qwen3-moe", "float32"), ("mixtral", "float32")])
def test_on_a_gpu(name, dtype, models, tmp_path):
    model = load(models / name, quantization_config=HalfbyteConfig("nf4"), device_map="cuda", dtype=dtype)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device_map="cuda", dtype=dtype)
    tokens = torch.arange(8, device="cuda").unsqueeze(0)
    with torch.no_grad():
        on_gpu = model(tokens).logits.float()
        on_cpu = load(tmp_path, dtype=dtype)(tokens.cpu()).logits.float()
        assert torch.equal(again(tokens).logits.float(), on_gpu)
    assert (on_gpu.cpu() - on_cpu).norm() < 0.02 * on_cpu.norm()
    written = [of.generate(tokens, max_new_tokens=6, do_sample=False) for of in (model, again)]
    assert written[0].shape == (1, 14) and torch.equal(*written)


@needs_gpu
def test_a_captured_step_of_decoding_writes_the_bytes_of_the_eager_one(models):
    model = load(models / "llama", quantization_config=HalfbyteConfig("nf4"), device_map="cuda", dtype=torch.bfloat16)
    stream, graph, token = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.tensor([[7]], device="cuda")
    with torch.no_grad(), torch.cuda.stream(stream):
        eager = model(token, use_cache=False).logits
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = model(token, use_cache=False).logits
        graph.replay()
        stream.synchronize()
    assert torch.equal(captured, eager)


def test_bad_input_is_named(models, tmp_path):
    with pytest.raises(ValueError, match="must have quantized layers, got a LlamaForCausalLM without"):
        make_savable(load(models / "llama"))
    with pytest.raises(ValueError, match="nf5"):
        HalfbyteConfig("nf5")
    halfbyte.quantize_checkpoint(models / "llama", tmp_path / "tool", "nf4", layout="halfbyte")
    with pytest.raises(ValueError, match="load it by halfbyte.torch.quantize_model"):
        load(tmp_path / "tool")
    model = load(models / "llama", quantization_config=HalfbyteConfig("nf4"))
    model.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file, save_file
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_spec"
    text = bytes(tensors[name].tolist()).replace(b"[256, 128]", b"[256, 192]")
    tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(tensors, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.up_proj: .* the shape \[256, 128\], got \[256, 192\]"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("layout,format", [("bitsandbytes", "nf4"), ("halfbyte", "affine4"), ("mlx", "affine4"),
                                           ("compressed-tensors", "int4"), ("gptq", "int4")])
def test_checkpoints_of_other_layouts_are_saved_as_packed_weights(layout, format, models, tmp_path):
    halfbyte.quantize_checkpoint(models / "llama", tmp_path / "quantized", format, layout=layout)
    model, _ = quantize_model(tmp_path / "quantized", None)
    make_savable(model)
    model.save_pretrained(tmp_path / "packed")
    again, info = load(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()) and quantized_modules(again).keys() == quantized_modules(model).keys()
    assert torch.equal(logits(again), logits(model))


EXPERTS = [("mixtral", "bitsandbytes", "nf4", {"reader": "transformers-4"}),
           ("mixtral", "bitsandbytes", "nf4", {"reader": "transformers-4", "double_quant": True}),
           ("mixtral", "compressed-tensors", "int4", {"group_size": 32}), ("mixtral", "halfbyte", "affine4", {}),
           ("mixtral", "halfbyte", "int3", {"granularity": "channel"}), ("mixtral", "gptq", "int4", {"reader": "none", "group_size": 64}),
           ("mixtral", "fp8", "fp8", {}), ("qwen3-moe", "modelopt", "nvfp4", {}),
           ("qwen3-moe", "compressed-tensors", "mxfp4", {}), ("qwen3-moe", "awq", "int4", {"reader": "none", "group_size": 32}),
           ("gpt-oss", "gpt-oss", "mxfp4", {})]


@pytest.mark.parametrize("name,layout,format,options", EXPERTS)
def test_experts_of_quantized_checkpoints_are_taken_as_they_are(name, layout, format, options, models, tmp_path):
    halfbyte.quantize_checkpoint(models / name, tmp_path / "quantized", format, layout=layout, **options)
    halfbyte.dequantize_checkpoint(tmp_path / "quantized", tmp_path / "dense", dtype="f32")
    model, report = quantize_model(tmp_path / "quantized", None, dtype=torch.float32)
    exact = load(tmp_path / "dense", dtype=torch.float32)
    modules = quantized_modules(model)
    assert sum(isinstance(module, QuantizedExperts) for module in modules.values()) == 2
    assert {layer.name for layer in report.quantized if "experts" in layer.name} == {
        f"model.layers.{layer}.mlp.experts.{own}" for layer in (0, 1) for own in ("gate_up_proj", "down_proj")}
    for path, module in modules.items():
        for own in module.packed_names if isinstance(module, QuantizedExperts) else ():
            want = exact.get_submodule(path).get_parameter(own)
            want = want.transpose(-1, -2) if name == "gpt-oss" else want
            assert torch.equal(module.dequantized(own, torch.float32), want), f"{path}.{own}"
    assert (logits(model) - logits(exact)).norm() < 1e-4 * logits(exact).norm()
    make_savable(model)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))


def test_experts_as_mlx_names_them(models, tmp_path):
    halfbyte.quantize_checkpoint(models / "qwen3-moe", tmp_path / "mlx", "affine4", layout="mlx")
    model, _ = quantize_model(tmp_path / "mlx", None, dtype=torch.float32)
    checkpoint = halfbyte.Checkpoint(tmp_path / "mlx")
    for layer in (0, 1):
        module, path = model.model.layers[layer].mlp.experts, f"model.layers.{layer}.mlp.switch_mlp"
        gate, up, down = (torch.from_numpy(checkpoint.load_dense(f"{path}.{own}_proj.weight", "f32"))
                          for own in ("gate", "up", "down"))
        assert torch.equal(module.dequantized("gate_up_proj", torch.float32), torch.cat([gate, up], 1))
        assert torch.equal(module.dequantized("down_proj", torch.float32), down)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("spec", ["nf4", "nf4,double_quant", "nvfp4"])
def test_dense_experts_of_a_directory_are_quantized_as_by_from_pretrained(name, spec, models):
    model, report = quantize_model(models / name, spec)
    expected = load(models / name, quantization_config=HalfbyteConfig(spec))
    assert report.quantized == sorted(expected.hf_quantizer.report.quantized, key=report.quantized.index)
    state, wanted = model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    dense, report = quantize_model(models / name, None)
    assert not report.quantized and torch.equal(logits(dense), logits(load(models / name)))
    adapted, _ = quantize_model(models / name, spec, lora_rank=4)
    assert torch.equal(logits(adapted), logits(model))
    assert not any(parameter.is_meta for parameter in adapted.parameters())


@pytest.mark.parametrize("name", TINY)
def test_what_a_directory_has_is_loaded(name, models):
    """No weight is random: of embeddings, too, whose modules compute a buffer."""
    model, report = quantize_model(models / name, None)
    expected = load(models / name)
    state, wanted = model.state_dict(), expected.state_dict()
    assert not report.quantized and state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    for (of, buffer), (_, want) in zip(model.named_buffers(), expected.named_buffers()):
        assert torch.equal(buffer, want), of
    assert torch.equal(logits(model), logits(expected))


def test_quantized_experts_that_have_no_packed_form_stay_dense_and_are_named(models, tmp_path):
    # The groups of gpt-oss in layout halfbyte lie along the outputs.
    halfbyte.quantize_checkpoint(models / "gpt-oss", tmp_path / "quantized", "nf4", layout="halfbyte")
    halfbyte.dequantize_checkpoint(tmp_path / "quantized", tmp_path / "dense")
    with pytest.warns(UserWarning, match="4 weights stay dense .*experts.gate_up_proj .of GptOssExperts, which have no packed"):
        model, _ = quantize_model(tmp_path / "quantized")
    exact = load(tmp_path / "dense").state_dict()
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, exact["model.layers.1.mlp.experts.down_proj"])


def test_rows_of_one_weight_share_a_global_scale(models, tmp_path):
    from safetensors.torch import load_file, save_file
    halfbyte.quantize_checkpoint(models / "qwen3-moe", tmp_path, "nvfp4", layout="modelopt", force=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale_2"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="experts.0.gate_proj.weight and .*up_proj.weight must have one global scale"):
        quantize_model(tmp_path, None)
    halfbyte.quantize_checkpoint(models / "qwen3-moe", tmp_path / "int8", "int8", layout="halfbyte", granularity="tensor")
    with pytest.raises(ValueError, match="experts.0.gate_proj.weight and .* must have one scale and zero point"):
        quantize_model(tmp_path / "int8", None)


# ---- Memory

LOAD = """
import sys, threading, time, transformers
import halfbyte.torch.transformers as of

def allocated():  # pages of mapped files, which the system takes back, do not count
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

def watch():
    while True:
        peaks.append(allocated())
        time.sleep(0.001)

load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(
    path, quantization_config=of.HalfbyteConfig("nf4"), device_map="cpu")
load(sys.argv[1])
before, peaks = allocated(), []
threading.Thread(target=watch, daemon=True).start()
model = load(sys.argv[2])
print(max(peaks) - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def test_memory_of_loading_is_that_of_the_result_and_one_weight(models, tmp_path):
    config = transformers.LlamaConfig(**{**SMALL, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12})
    model = transformers.LlamaForCausalLM(config).bfloat16()
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 360e6
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-c", LOAD, models / "llama", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    peak, size = map(int, result.stdout.split()[-2:])
    assert size < 110e6 and peak < size + 60e6


def test_docstrings():
    import doctest
    result = doctest.testmod(importlib.import_module("halfbyte.torch.transformers"))
    assert result.attempted > 0 and result.failed == 0
