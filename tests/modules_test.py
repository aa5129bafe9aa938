"""Which weights of a model are quantized, in what form, and what its reader is told: by modules, not by names."""

import json

import numpy as np
import pytest

from conftest import TINY_LLAMA
from independent import safetensors_io as st

USAGE = 2


def matrix(*shape, seed=0):
    return st.from_f32(np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32) * 0.05, "BF16")


def write_model(path, architecture, tensors, **config):
    path.mkdir()
    st.write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]} | config))
    return path


def quantize(halfbyte, source, output, *arguments, expect=0):
    run = halfbyte("quantize", source, "-o", output, *arguments, "--json", "-", expect=expect)
    return json.loads(run.stdout) if expect == 0 else run


def reasons(report):
    return {w["name"]: w["reason"] for w in report["weights"]}


def quantized(report):
    return sorted(w["name"] for w in report["weights"] if w["quantized"])


def config_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def stored(path):
    return st.read(path / "model.safetensors")[0]


LAYER = "model.layers.0."
ATTENTION = [f"{LAYER}self_attn.{p}_proj.weight" for p in "qkvo"]
LLAMA = (
    {n: matrix(128, 128) for n in ATTENTION}
    | {"model.embed_tokens.weight": matrix(128, 128), "lm_head.weight": matrix(128, 128)}
    | {f"{LAYER}input_layernorm.weight": matrix(128)}
)


@pytest.fixture
def llama(tmp_path):
    return write_model(tmp_path / "llama", "LlamaForCausalLM", LLAMA, model_type="llama", tie_word_embeddings=False)


def test_report_says_what_the_model_is_and_who_reads_it(halfbyte, llama, tmp_path):
    text = halfbyte("quantize", llama, "-o", tmp_path / "out", "--format", "nf4").stdout
    lines = text.splitlines()
    assert lines[0].split() == "quantized 66.6% of the model; dense: embedding 16.6%, head 16.6%".split()
    assert lines[-1].split() == "loads in transformers-5, transformers-4 (by its rules, not run), vllm (by its rules, not run)".split()
    report = quantize(halfbyte, llama, tmp_path / "two")
    assert report["architecture"] == "LlamaForCausalLM" and report["reader"] == "transformers-5"
    assert quantized(report) == sorted(ATTENTION)
    assert reasons(report)["model.embed_tokens.weight"] == "embedding" and reasons(report)["lm_head.weight"] == "head"


def test_an_unknown_model_is_selected_by_names_with_a_warning(halfbyte, tmp_path):
    source = write_model(tmp_path / "model", "NobodyForCausalLM", LLAMA, model_type="nobody")
    text = halfbyte("quantize", source, "-o", tmp_path / "out").stdout
    assert text.startswith("warning") and "nothing vouches" in text.splitlines()[0]
    assert text.splitlines()[-1].split() == ["loads", "in", "unknown"]
    report = quantize(halfbyte, source, tmp_path / "two")
    assert quantized(report) == sorted(ATTENTION) and report["readers"][0]["loads"] is None
    # Nobody else reads the layout halfbyte: nothing to warn of.
    assert not halfbyte("quantize", source, "-o", tmp_path / "own", "--layout", "halfbyte").stdout.startswith("warning")


def test_names_of_an_unknown_model(halfbyte, tmp_path):
    kept = ["model.embed_tokens.weight", "wte.weight", "transformer.wpe.weight", "a.shared.weight", "relative_attention_bias.weight",
            "lm_head.weight", "output.weight", "head.weight", "score.weight", "classifier.weight", "final_norm.weight", "mlp.gate.weight",
            "delegate.weight", "moe.router.weight", "router.layer.weight"]  # fmt: skip
    chosen = ["a.xwte.weight", "ashared.weight", "a.output.weight", "a.head.weight", "gate_proj.weight", "q.weight", "router.proj.weight"]
    tensors = {name: matrix(64, 64) for name in kept + chosen}
    source = write_model(tmp_path / "model", "NobodyForCausalLM", tensors, model_type="nobody")
    assert quantized(quantize(halfbyte, source, tmp_path / "out")) == sorted(chosen)


def test_include_of_what_the_reader_cannot_load(halfbyte, llama, tmp_path):
    include = ("--include", "embed_tokens", "--format", "nf4")
    run = quantize(halfbyte, llama, tmp_path / "out", *include, expect=USAGE)
    assert "embed_tokens" in run.stderr and "dense only" in run.stderr and "--force-layout" in run.stderr
    assert not (tmp_path / "out").exists()
    assert quantized(quantize(halfbyte, llama, tmp_path / "out", *include, "--force-layout")) == ["model.embed_tokens.weight"]
    own = quantize(halfbyte, llama, tmp_path / "own", *include, "--layout", "halfbyte")
    assert quantized(own) == ["model.embed_tokens.weight"]
    head = quantize(halfbyte, llama, tmp_path / "head", "--include", "lm_head")
    assert quantized(head) == ["lm_head.weight"]
    assert "lm_head" not in config_of(tmp_path / "head")["llm_int8_skip_modules"]


def test_reader_and_layout_must_fit(halfbyte, llama, tmp_path):
    run = quantize(halfbyte, llama, tmp_path / "out", "--reader", "mlx-lm", expect=USAGE)
    assert "reader mlx-lm does not read layout bitsandbytes" in run.stderr
    run = quantize(halfbyte, llama, tmp_path / "out", "--reader", "tgi", expect=USAGE)
    assert "unknown reader 'tgi'" in run.stderr


# Conv1D of transformers: stored as [in, out].

GPT2 = {
    "wte.weight": matrix(96, 64),
    "wpe.weight": matrix(32, 64),
    "h.0.attn.c_attn.weight": matrix(64, 192),
    "h.0.attn.c_proj.weight": matrix(64, 64),
    "h.0.mlp.c_fc.weight": matrix(64, 256),
    "h.0.mlp.c_proj.weight": matrix(256, 64),
    "h.0.ln_1.weight": matrix(64),
}


@pytest.fixture
def gpt2(tmp_path):
    return write_model(tmp_path / "gpt2", "GPT2LMHeadModel", GPT2, model_type="gpt2")


def test_conv1d_is_transposed_for_bitsandbytes(halfbyte, gpt2, tmp_path):
    report = quantize(halfbyte, gpt2, tmp_path / "out", "--format", "nf4")
    shapes = {w["name"]: w["shape"] for w in report["weights"] if w["quantized"]}
    assert shapes["h.0.attn.c_attn.weight"] == [192, 64] and shapes["h.0.mlp.c_proj.weight"] == [64, 256]
    assert len(shapes) == 4
    assert "lm_head" in config_of(tmp_path / "out")["llm_int8_skip_modules"]
    # As if the transposed weight were that of a linear layer.
    turned = {n: st.Tensor(t.dtype, np.ascontiguousarray(t.data.T)) if t.data.ndim == 2 and ".c_" in n else t for n, t in GPT2.items()}
    expected = write_model(tmp_path / "turned", "Nobody", turned)
    quantize(halfbyte, expected, tmp_path / "expected", "--include", "c_(attn|proj|fc)")
    mine, theirs = (stored(tmp_path / d) for d in ("out", "expected"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and np.array_equal(tensor.data, theirs[name].data), name


def test_conv1d_stays_dense_where_its_reader_has_no_other(halfbyte, gpt2, tmp_path):
    run = quantize(halfbyte, gpt2, tmp_path / "out", "--format", "int4", "--group-size", "64", expect=USAGE)
    assert "Conv1D" in run.stderr
    own = quantize(halfbyte, gpt2, tmp_path / "own", "--layout", "halfbyte", "--format", "int4")
    assert {w["name"]: w["shape"] for w in own["weights"]}["h.0.attn.c_attn.weight"] == [64, 192]


def test_conv1d_is_transposed_for_gptq(halfbyte, gpt2, tmp_path):
    """And turned back when it is read; awq has no such layers."""
    arguments = ("--format", "int4", "--layout", "gptq", "--group-size", "64")
    report = quantize(halfbyte, gpt2, tmp_path / "out", *arguments)
    shapes = {w["name"]: w["shape"] for w in report["weights"] if w["quantized"]}
    assert shapes["h.0.attn.c_attn.weight"] == [192, 64] and len(shapes) == 4
    assert config_of(tmp_path / "out")["block_name_to_quantize"] == "transformer.h"
    assert stored(tmp_path / "out")["h.0.attn.c_attn.qweight"].data.shape == (8, 192)
    rows = json.loads(halfbyte("compare", gpt2, tmp_path / "out", "--json", "-").stdout)["rows"]
    assert all(not row["problem"] and row["relative_rmse"] < 0.15 for row in rows)
    halfbyte("dequantize", tmp_path / "out", "-o", tmp_path / "back")
    assert {n: t.data.shape for n, t in stored(tmp_path / "back").items()} == {n: t.data.shape for n, t in GPT2.items()}
    arguments = ("--format", "int4", "--layout", "awq", "--group-size", "64")
    assert "Conv1D" in quantize(halfbyte, gpt2, tmp_path / "awq", *arguments, expect=USAGE).stderr


# Experts

MOE = f"{LAYER}mlp."
ROUTED = LLAMA | {f"{MOE}gate.weight": matrix(4, 128)}
ROUTED |= {
    f"{MOE}experts.{e}.{p}_proj.weight": matrix(*((128, 64) if p == "down" else (64, 128)), seed=e)
    for e in range(4)
    for p in ("gate", "up", "down")
}


@pytest.fixture
def qwen(tmp_path):
    return write_model(tmp_path / "qwen", "Qwen3MoeForCausalLM", ROUTED, model_type="qwen3_moe")


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_experts_in_words(halfbyte, qwen, tmp_path, layout):
    """transformers 5 has no place for them; vllm has. What stays dense is said."""
    arguments = ("--format", "int4", "--layout", layout, "--group-size", "64")
    report = quantize(halfbyte, qwen, tmp_path / "five", *arguments)
    assert quantized(report) == sorted(ATTENTION)
    assert "transformers-5 holds experts in one tensor" in reasons(report)[f"{MOE}experts.0.up_proj.weight"]
    config = config_of(tmp_path / "five")
    if layout == "awq":
        assert f"{MOE}experts" in config["modules_to_not_convert"] and "lm_head" in config["modules_to_not_convert"]
    else:
        assert set(config["modules_in_block_to_quantize"][0]) == {name.removesuffix(".weight") for name in ATTENTION}
    report = quantize(halfbyte, qwen, tmp_path / "vllm", *arguments, "--reader", "vllm")
    assert len(quantized(report)) == 4 + 12
    assert f"{MOE}experts.3.down_proj.qweight" in stored(tmp_path / "vllm")
    verdicts = {v["reader"]: v for v in report["readers"]}
    assert verdicts["vllm"]["loads"] and verdicts["transformers-4"]["loads"] and not verdicts["transformers-5"]["loads"]


def test_experts_one_by_one(halfbyte, qwen, tmp_path):
    report = quantize(halfbyte, qwen, tmp_path / "nf4")
    assert quantized(report) == sorted(ATTENTION)
    assert "transformers-5 holds experts in one tensor" in reasons(report)[f"{MOE}experts.0.up_proj.weight"]
    assert reasons(report)[f"{MOE}gate.weight"] == "router"
    report = quantize(halfbyte, qwen, tmp_path / "nf4-4", "--reader", "transformers-4")
    assert len(quantized(report)) == 4 + 12
    verdicts = {v["reader"]: v for v in report["readers"]}
    assert verdicts["transformers-4"]["loads"] and not verdicts["transformers-5"]["loads"]
    assert "experts" in verdicts["transformers-5"]["why_not"]
    report = quantize(halfbyte, qwen, tmp_path / "int4", "--format", "int4", "--group-size", "64")
    assert len(quantized(report)) == 4 + 12
    packed = stored(tmp_path / "int4")
    assert f"{MOE}experts.3.down_proj.weight_packed" in packed
    assert config_of(tmp_path / "int4")["ignore"] == ["lm_head", f"{MOE}gate"] or f"{MOE}gate" not in config_of(tmp_path / "int4")["ignore"]


def test_experts_of_llama_4_come_apart(halfbyte, tmp_path):
    experts = f"{LAYER}feed_forward.experts."
    both, down = matrix(3, 64, 256), matrix(3, 128, 64)  # [E, in, out]
    tensors = LLAMA | {f"{experts}gate_up_proj": both, f"{experts}down_proj": down}
    source = write_model(tmp_path / "llama4", "Llama4ForCausalLM", tensors, model_type="llama4_text")
    for arguments in (["--format", "nf4"], ["--format", "int4", "--group-size", "64"], ["--format", "nf4", "--exclude", "experts"]):
        output = tmp_path / "-".join(arguments)
        report = quantize(halfbyte, source, output, *arguments)
        names = {w["name"] for w in report["weights"]}
        assert f"{experts}2.up_proj.weight" in names and f"{experts}gate_up_proj" not in names
        dense = tmp_path / ("dense" + "-".join(arguments))
        if "--exclude" in arguments:
            dense = output
        else:
            halfbyte("dequantize", output, "-o", dense)
        written = stored(dense)
        if dense == output:
            for e in range(3):
                parts = (("gate", both.data[e, :, :128].T), ("up", both.data[e, :, 128:].T), ("down", down.data[e].T))
                for name, expected in parts:
                    assert np.array_equal(written[f"{experts}{e}.{name}_proj.weight"].data, expected)
            halfbyte("dequantize", output, "-o", tmp_path / "again")
            again = stored(tmp_path / "again")
            assert np.array_equal(again[f"{experts}gate_up_proj"].data, both.data)
            assert np.array_equal(again[f"{experts}down_proj"].data, down.data)
            continue
        for name, expected in (("gate_up_proj", both), ("down_proj", down)):  # together again
            assert written[f"{experts}{name}"].data.shape == expected.data.shape
            error = np.abs(st.to_f32(written[f"{experts}{name}"]) - st.to_f32(expected))
            assert error.max() < 0.04 and error.mean() < 0.01
        assert not any(".experts.0." in name for name in written)
    # transformers loads no experts in layouts of words, and gpt-oss has them in its own form only.
    report = quantize(halfbyte, source, tmp_path / "gptq", "--format", "int4", "--group-size", "64", "--layout", "gptq")
    assert {f"{experts}gate_up_proj", f"{experts}down_proj"} <= reasons(report).keys()
    refused = halfbyte("quantize", source, "-o", tmp_path / "gpt-oss", "--format", "mxfp4", "--layout", "gpt-oss", expect=2)
    assert "nothing to quantize" in refused.stderr and "experts as gpt-oss has them" in refused.stderr


def test_experts_for_vllm(halfbyte, tmp_path):
    int4 = ("--format", "int4", "--group-size", "64", "--reader", "vllm")
    experts = f"{LAYER}mlp.experts."
    tensors = LLAMA | {f"{experts}gate_up_proj": matrix(3, 256, 64), f"{experts}down_proj": matrix(3, 64, 128)}
    source = write_model(tmp_path / "qwen", "Qwen3MoeForCausalLM", tensors, model_type="qwen3_moe")
    report = quantize(halfbyte, source, tmp_path / "out", *int4)
    shapes = {w["name"]: w["shape"] for w in report["weights"]}
    assert shapes[f"{experts}2.up_proj.weight"] == [128, 64] and shapes[f"{experts}0.down_proj.weight"] == [64, 128]
    report = quantize(halfbyte, source, tmp_path / "none", *int4[:-1], "none")
    assert {w["name"] for w in report["weights"]} == shapes.keys()
    report = quantize(halfbyte, source, tmp_path / "four", *int4[:-1], "transformers-4")
    assert "in one tensor" in reasons(report)[f"{experts}gate_up_proj"]
    # Experts whose parts have other names stay as they are.
    granite = f"{LAYER}block_sparse_moe."
    tensors = LLAMA | {f"{granite}input_linear.weight": matrix(3, 256, 64), f"{granite}output_linear.weight": matrix(3, 64, 128)}
    source = write_model(tmp_path / "granite", "GraniteMoeForCausalLM", tensors, model_type="granitemoe")
    report = quantize(halfbyte, source, tmp_path / "dense", *int4)
    assert quantized(report) == sorted(ATTENTION)
    assert "in one tensor" in reasons(report)[f"{granite}input_linear.weight"]


# What a reader is told

LLAVA = (
    {f"language_model.{n}": t for n, t in LLAMA.items()}
    | {f"vision_tower.vision_model.encoder.layers.0.self_attn.{p}_proj.weight": matrix(64, 64) for p in ("q", "k", "v", "out")}
    | {"multi_modal_projector.linear_1.weight": matrix(128, 64)}
)


@pytest.mark.parametrize("arguments", [["--format", "nf4"], ["--format", "int4"]], ids=["nf4", "int4"])
def test_skipped_modules_have_the_names_of_the_reader(halfbyte, tmp_path, arguments):
    text, vision = {"model_type": "llama"}, {"model_type": "clip_vision_model"}
    source = write_model(
        tmp_path / "llava", "LlavaForConditionalGeneration", LLAVA, model_type="llava", text_config=text, vision_config=vision
    )
    report = quantize(halfbyte, source, tmp_path / "out", *arguments)
    assert quantized(report) == sorted(f"language_model.{n}" for n in ATTENTION)
    assert reasons(report)["multi_modal_projector.linear_1.weight"] == "projector"
    assert reasons(report)["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"] == "vision"
    config = config_of(tmp_path / "out")
    told = config.get("llm_int8_skip_modules") or config["ignore"]
    assert {"lm_head", "model.multi_modal_projector.linear_1", "model.vision_tower.encoder.layers.0.self_attn.out_proj"} <= set(told)


def test_a_skipped_name_does_not_cover_more(halfbyte, tmp_path):
    """bitsandbytes' reader takes the end of a name for the name."""
    tensors = {
        "proj_out.weight": matrix(96, 64),
        "model.decoder.embed_tokens.weight": matrix(96, 64),
        "model.decoder.layers.0.self_attn.q_proj.weight": matrix(64, 64),
        "model.encoder.layers.0.self_attn.q_proj.weight": matrix(64, 64),
    }
    source = write_model(tmp_path / "whisper", "WhisperForConditionalGeneration", tensors, model_type="whisper")
    report = quantize(halfbyte, source, tmp_path / "out")
    assert quantized(report) == ["model.decoder.layers.0.self_attn.q_proj.weight"]
    skips = config_of(tmp_path / "out")["llm_int8_skip_modules"]
    assert "proj_out" in skips and "model.encoder.layers.0.self_attn.q_proj" in skips


def test_a_model_that_only_reads_images_is_quantized(halfbyte, tmp_path):
    layer = "vit.encoder.layer.0.attention.attention.query.weight"
    tensors = {layer: matrix(64, 64), "classifier.weight": matrix(10, 64)}
    source = write_model(tmp_path / "vit", "ViTForImageClassification", tensors, model_type="vit")
    report = quantize(halfbyte, source, tmp_path / "out")
    assert quantized(report) == [layer] and reasons(report)["classifier.weight"] == "head"


def test_attention_of_pytorch_is_skipped(halfbyte, tmp_path):
    """Its out_proj is of a class derived from nn.Linear."""
    projector = "multi_modal_projector.cross_attn.multihead_attn"
    tensors = {f"language_model.{n}": t for n, t in LLAMA.items()} | {f"{projector}.out_proj.weight": matrix(64, 64)}
    source = write_model(tmp_path / "aria", "AriaForConditionalGeneration", tensors, model_type="aria")
    quantize(halfbyte, source, tmp_path / "out", "--format", "int4")
    assert f"model.{projector}.out_proj" in config_of(tmp_path / "out")["ignore"]


def test_bare_parameters_are_dense_and_tiny_llama_is_unchanged(halfbyte, tmp_path):
    report = quantize(halfbyte, TINY_LLAMA, tmp_path / "out", "--format", "int4", "--group-size", "128")
    assert report["num_quantized"] == 28
    assert config_of(tmp_path / "out")["ignore"] == ["lm_head"]


# What mlx-lm saves


def test_experts_are_stacked_for_mlx(halfbyte, qwen, tmp_path):
    report = quantize(halfbyte, qwen, tmp_path / "out", "--format", "affine4", "--group-size", "32")
    written = stored(tmp_path / "out")
    up = written[f"{MOE}switch_mlp.up_proj.weight"]
    assert up.dtype == "U32" and list(up.data.shape) == [4, 64, 128 // 8]
    assert not any(".experts." in name for name in written)
    assert all(w["quantized"] for w in report["weights"] if len(w["shape"]) > 1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"][f"{MOE}gate"] == {"group_size": 64, "bits": 8, "mode": "affine"}
    # As if each expert had been quantized by itself.
    own = write_model(tmp_path / "own", "Nobody", {n: t for n, t in ROUTED.items() if "experts" in n})
    quantize(halfbyte, own, tmp_path / "apart", "--format", "affine4", "--group-size", "32", "--layout", "mlx")
    apart = stored(tmp_path / "apart")
    for e in range(4):
        for part in ("weight", "scales", "biases"):
            one = apart[f"{MOE}experts.{e}.up_proj.{part}"].data
            assert np.array_equal(written[f"{MOE}switch_mlp.up_proj.{part}"].data[e], one)


def test_embeddings_are_quantized_for_mlx(halfbyte, llama, tmp_path):
    report = quantize(halfbyte, llama, tmp_path / "out", "--format", "affine4")
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(quantized(report))
    report = quantize(halfbyte, llama, tmp_path / "kept", "--format", "affine4", "--keep-embeddings")
    assert quantized(report) == sorted(ATTENTION)
    assert reasons(report)["lm_head.weight"] == "head"


def test_rows_that_mlx_does_not_quantize(halfbyte, llama, tmp_path):
    odd = LLAMA | {f"{LAYER}mlp.down_proj.weight": matrix(128, 96), f"{LAYER}mlp.up_proj.weight": matrix(96, 128)}
    st.write(llama / "model.safetensors", odd)
    report = quantize(halfbyte, llama, tmp_path / "out", "--format", "affine4")
    assert "whole groups" in reasons(report)[f"{LAYER}mlp.down_proj.weight"] and reasons(report)[f"{LAYER}mlp.up_proj.weight"] == ""
    run = quantize(halfbyte, llama, tmp_path / "named", "--format", "affine4", "--include", "mlp", expect=3)
    assert "96 columns are not a multiple of the group size 64" in run.stderr


def test_mlx_takes_gpt2_the_other_way_round(halfbyte, gpt2, tmp_path):
    quantize(halfbyte, gpt2, tmp_path / "out", "--format", "affine8", "--group-size", "32")
    written = stored(tmp_path / "out")
    assert list(written["model.h.0.attn.c_attn.weight"].data.shape) == [192, 64 // 4]


def test_what_mlx_does_not_load_is_refused_or_left_out(halfbyte, tmp_path):
    vision = {"vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": matrix(64, 64)}
    names = {n.replace("model.", "language_model.model.", 1) if n.startswith("model.") else f"language_model.{n}": t for n, t in LLAMA.items()}
    text = {"model_type": "gemma3_text", "num_hidden_layers": 1}
    source = write_model(
        tmp_path / "in", "Gemma3ForConditionalGeneration", names | vision, model_type="gemma3", text_config=text
    )
    report = quantize(halfbyte, source, tmp_path / "out", "--format", "affine4")
    assert list(vision)[0] in report["left_out"] and list(vision)[0] not in stored(tmp_path / "out")
    source = write_model(tmp_path / "falcon", "FalconH1ForCausalLM", ROUTED, model_type="falcon_h1")
    run = quantize(halfbyte, source, tmp_path / "refused", "--format", "affine4", expect=3)
    assert "mlx-lm does not load" in run.stderr
    source = write_model(tmp_path / "bert", "BertForMaskedLM", {"bert.encoder.layer.0.attention.self.query.weight": matrix(64, 64)}, model_type="bert")
    report = quantize(halfbyte, source, tmp_path / "bert-out", "--format", "affine4")
    assert not report["readers"][0]["loads"] and "BertForMaskedLM" in report["readers"][0]["why_not"]


def test_constants_that_json_does_not_have(halfbyte, tmp_path):
    """Python writes Infinity and NaN into config.json."""
    source = write_model(
        tmp_path / "in", "LlamaForCausalLM", LLAMA, model_type="llama", limits=[float("inf"), float("-inf"), 1.5], text="NaN, \\u0001 \"Infinity"
    )
    assert "[Infinity, -Infinity, 1.5]" in (source / "config.json").read_text()
    assert quantize(halfbyte, source, tmp_path / "out")["architecture"] == "LlamaForCausalLM"
    halfbyte("dequantize", tmp_path / "out", "-o", tmp_path / "dense")
    halfbyte("inspect", tmp_path / "out")
    before, after = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "dense"))
    assert before == after
    (source / "config.json").write_text('{"limits": Infinit}')
    assert "not valid JSON" in halfbyte("quantize", source, "-o", tmp_path / "no", expect=3).stderr


def test_what_transformers_must_make_dense_when_it_loads(halfbyte, llama, tmp_path):
    int4 = ("--format", "int4", "--group-size", "64")
    quantize(halfbyte, llama, tmp_path / "llama-int4", *int4)
    assert "run_compressed" not in config_of(tmp_path / "llama-int4")
    quantize(halfbyte, llama, tmp_path / "zeros", *int4, "--asymmetric")
    assert config_of(tmp_path / "zeros")["run_compressed"] is False
    tensors = {"encoder.block.0.layer.0.SelfAttention.q.weight": matrix(64, 64), "shared.weight": matrix(96, 64)}
    t5 = write_model(tmp_path / "t5", "T5ForConditionalGeneration", tensors, model_type="t5")
    quantize(halfbyte, t5, tmp_path / "t5-out", *int4)
    assert config_of(tmp_path / "t5-out")["run_compressed"] is False


def test_experts_that_must_all_be_quantized(halfbyte, qwen, tmp_path):
    """transformers makes one tensor of them, and loses dense ones in compressed-tensors."""
    int4 = ("--format", "int4", "--group-size", "64")
    for arguments, word in (
        (["--asymmetric"], "without zero points"),
        (["--exclude", "experts"], "excluded"),
        (["--exclude", "experts.0.down_proj"], "excluded"),
    ):
        run = quantize(halfbyte, qwen, tmp_path / "out", *int4, *arguments, expect=USAGE)
        assert "only if all are quantized" in run.stderr and word in run.stderr
        assert not (tmp_path / "out").exists()
    # Others have a module for each, and are told which are dense.
    quantize(halfbyte, qwen, tmp_path / "out", *int4, "--exclude", "experts.0.down_proj", "--reader", "transformers-4")
    ignored = config_of(tmp_path / "out")["ignore"]
    assert f"{MOE}experts.0.down_proj" in ignored and not any("experts.1" in name or "re:" in name for name in ignored)
    quantize(halfbyte, qwen, tmp_path / "all", *int4, "--exclude", "experts", "--reader", "vllm")
    assert any(name.startswith("re:^model") and "experts" in name for name in config_of(tmp_path / "all")["ignore"])


def test_experts_that_cannot_be_divided(halfbyte, tmp_path):
    tensors = LLAMA | {f"{LAYER}feed_forward.experts.gate_up_proj": matrix(3, 64, 255)}
    source = write_model(tmp_path / "odd", "Llama4ForCausalLM", tensors, model_type="llama4_text")
    assert "cannot be divided into gate and up" in quantize(halfbyte, source, tmp_path / "out", expect=3).stderr
