"""Whole models: the choice of layers is that of the tool; models from checkpoints of every layout."""

import copy
import json
import resource

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.torch import Linear4bit, QuantizedLinear, dense_reasons, quantize_model, replace_linear
from halfbyte.torch.model import _config_text

transformers = pytest.importorskip("transformers")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}


def llama(**changes):
    config = transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, "attention_bias": True, **changes})
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    model = llama()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    model.bfloat16().save_pretrained(path / "dense")
    return path


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


@torch.no_grad()
def logits(model):
    return model(torch.arange(24).reshape(2, 12).to(model.device)).logits.float().cpu()


def models():
    yield "llama", llama()
    yield "tied", llama(tie_word_embeddings=True)
    yield "mixtral", transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=2))
    yield "gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=512))
    yield "bert", transformers.BertModel(transformers.BertConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=512))


@pytest.mark.parametrize("name,model", list(models()), ids=lambda of: of if isinstance(of, str) else "")
def test_the_choice_is_that_of_the_tool(name, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    report = halfbyte.quantize_checkpoint(tmp_path / "model", tmp_path / "out", "int8", layout="halfbyte", dry_run=True)
    theirs = {weight.name.removeprefix(model.base_model_prefix + "."): weight for weight in report.weights}
    ours = dense_reasons(model)
    compared = 0
    for weight, reason in ours.items():
        of = theirs.get(weight.removeprefix(model.base_model_prefix + "."))
        if of is None or (not reason) == of.quantized:
            compared += of is not None
        else:  # a layer of the tool that is none here: experts in one tensor
            assert of.quantized and "no quantized layer" in reason, (weight, reason, of)
    assert compared > 5 and any(not reason for reason in ours.values())
    assert not any(reason == "" for weight, reason in ours.items() if "embed" in weight or "lm_head" in weight)


def test_models_that_are_not_known_go_by_names():
    model = nn.ModuleDict({"embed_tokens": nn.Linear(64, 64), "up": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64),
                           "router": nn.Linear(64, 8), "table": nn.Embedding(8, 64),
                           "attention": nn.MultiheadAttention(64, 2)})
    assert [name for name, reason in dense_reasons(model).items() if not reason] == ["up.weight"]
    assert [name for name, reason in dense_reasons(model, include="lm_head|router").items() if not reason] == [
        "lm_head.weight", "router.weight"]
    assert dense_reasons(model, exclude=["^up"])["up.weight"] == "excluded"
    assert "no quantized layer" in dense_reasons(model, include="attention")["attention.out_proj.weight"]
    with pytest.raises(ValueError, match="is not a regular expression"):
        dense_reasons(model, include="(")


@pytest.mark.parametrize("device", DEVICES)
def test_replace_linear(device):
    model = llama().eval()
    dense = copy.deepcopy(model)
    report = replace_linear(model, "affine8", exclude="down_proj", lora_rank=2, device=device)
    assert len(report.quantized) == 12 and {layer.reason for layer in report.dense} == {"embedding", "head", "excluded"}
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, QuantizedLinear) and layer.lora_rank == 2 and not layer.training
    assert layer.weight.device.type == device
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear and type(model.lm_head) is nn.Linear
    assert "dense, head: lm_head.weight" in str(report) and "affine8: model.layers.0" in str(report)
    exact = logits(dense)
    assert (logits(model.to(device)) - exact).norm() < 0.02 * exact.norm()
    again = replace_linear(model, "nf4")  # what is left
    assert [layer.name for layer in again.quantized] == [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]


def test_nothing_is_replaced_where_a_spec_does_not_fit():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 64))
    with pytest.raises(ValueError):
        replace_linear(model, "nf4,granularity=flat")
    with pytest.raises(ValueError):
        replace_linear(model, "int3,scale_dtype=f64")
    assert type(model[0]) is nn.Linear


def test_shared_weights_stay_shared():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    assert set(dense_reasons(model).values()) == {"shared with 1.weight", "shared with 0.weight"}


def test_conv1d_is_turned():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=128, n_layer=1, n_head=4, vocab_size=512)).eval()
    exact = logits(model)
    report = replace_linear(model, "int8,granularity=channel")
    assert len(report.quantized) == 4 and model.transformer.h[0].mlp.c_fc.out_features == 512
    assert (logits(model) - exact).norm() < 0.02 * exact.norm()


def test_a_model_that_multiplies_by_weights_unless_it_is_quantized():
    model = transformers.JambaForCausalLM(transformers.JambaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, pad_token_id=0)).eval()
    exact = logits(model)
    report = replace_linear(model, "int8,granularity=channel")
    assert any("mamba.dt_proj" in layer.name for layer in report.quantized)
    assert (logits(model) - exact).norm() < 0.05 * exact.norm()
    assert "_is_quantized" not in model.config.to_dict()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", ["nf4", "nf4,double_quant", "int8,granularity=tensor", "affine4,scale_dtype=bf16"])
def test_a_dense_directory_gives_the_bytes_of_replace_linear(spec, device, directory):
    model, report = quantize_model(directory / "dense", spec, device=device)
    assert len(report.quantized) == 14 and not model.training and model.device.type == device
    expected = load(directory / "dense")
    replace_linear(expected, spec)
    state, wanted = model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name].cpu(), tensor), name
    for (name, buffer), (_, want) in zip(model.named_buffers(), expected.named_buffers()):
        assert torch.equal(buffer.cpu(), want), name
    if device == "cpu":
        assert torch.equal(logits(model), logits(expected))
    assert quantize_model(load(directory / "dense"), spec)[1].quantized == report.quantized


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout,format", [("bitsandbytes", "nf4"), ("halfbyte", "affine4"), ("halfbyte", "fp4_e2m1"),
                                           ("mlx", "affine4"), ("gptq", "int4"), ("awq", "int4"),
                                           ("compressed-tensors", "int8"), ("compressed-tensors", "int4"),
                                           ("halfbyte", "int3"), ("mlx", "affine6")])
def test_quantized_directories_of_every_layout(layout, format, device, directory, tmp_path):
    halfbyte.quantize_checkpoint(directory / "dense", tmp_path / "quantized", format, layout=layout)
    halfbyte.dequantize_checkpoint(tmp_path / "quantized", tmp_path / "dense", dtype="f32")
    model, report = quantize_model(tmp_path / "quantized", None, device=device, dtype=torch.float32)
    assert len(report.quantized) == (15 if layout == "mlx" else 14)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    exact = logits(load(tmp_path / "dense"))
    assert (logits(model) - exact).norm() < 1e-4 * exact.norm()


def test_what_is_missing_is_named(directory, tmp_path):
    from safetensors.torch import load_file, save_file
    tensors = load_file(directory / "dense" / "model.safetensors")
    del tensors["model.norm.weight"]
    (tmp_path / "config.json").write_text((directory / "dense" / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no weight model.norm.weight, which LlamaForCausalLM has"):
        quantize_model(tmp_path)
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.norm.weight must have the shape \[128\], got \[64\]"):
        quantize_model(tmp_path)
    with pytest.raises(ValueError, match="a model must be a directory"):
        quantize_model(tmp_path / "model.safetensors")


def test_a_model_with_adapters_trains(directory):
    model, _ = quantize_model(directory / "dense", "nf4", dtype=torch.float32, lora_rank=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.arange(64).reshape(2, 32)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    layer = model.model.layers[0].mlp.up_proj
    assert layer.lora_b.grad is not None and isinstance(layer, Linear4bit)
    assert 0 < layer.merge_adapter().relative_rmse < 0.2


def test_memory_of_replacing_is_that_of_one_layer():
    if torch.cuda.is_available():
        pytest.skip("the memory of the process has that of the device's library")
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))  # 16.8 MB each
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    replace_linear(model, "nf4")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


def test_the_config_names_the_architecture():
    assert json.loads(_config_text(llama()))["architectures"] == ["LlamaForCausalLM"]
    assert _config_text(nn.Linear(2, 2)) == ""


def test_a_bar_shows_the_progress_of_long_work(directory, monkeypatch, capsys):
    monkeypatch.setattr("halfbyte._progress._QUIET_SECONDS", -1)
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)  # without tqdm, a line
    quantize_model(directory / "dense", "nf4", progress=True)
    assert "load: 100 %\n" in capsys.readouterr().err
    quantize_model(directory / "dense", "nf4", progress=False)
    assert capsys.readouterr().err == ""
