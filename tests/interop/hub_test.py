"""The main job as people do it: a snapshot in the cache of the Hugging Face hub is quantized, loaded, and generates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
import zoo
from readers import READERS

BY_NAME = {reader.name: reader for reader in READERS}


def snapshot(model, cache):
    """As the hub's client keeps it: links into `blobs`, and a name for the revision."""
    root = cache / f"models--tiny--{model.name}"
    revision = root / "snapshots" / ("0" * 40)
    saved = cache / "saved"
    model.save(saved)
    for folder in (revision, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision.name)
    for number, file in enumerate(sorted(saved.iterdir())):
        blob = root / "blobs" / f"{number:064x}"
        file.rename(blob)
        (revision / file.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    return revision


def generate(model):
    text = torch.arange(3, 11)[None]
    with torch.no_grad():
        return model.generate(input_ids=text, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=False)


@pytest.mark.parametrize("layout", ["bitsandbytes", "compressed-tensors", "mlx"])
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GPT2LMHeadModel", "LlavaForConditionalGeneration"])
def test_main_job(cli, tmp_path, name, layout):
    source, reader = snapshot(zoo.model(name), tmp_path / "cache"), BY_NAME[layout]
    form = next(iter(reader.formats.values()))
    command = [cli, "quantize", source, "-o", tmp_path / "out", "--layout", layout, *form, "--json", tmp_path / "report"]
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if (name, layout) == ("GPT2LMHeadModel", "compressed-tensors"):  # whose reader has no quantized Conv1D
        assert run.returncode == 2 and "Conv1D" in run.stderr and not (tmp_path / "out").exists()
        return
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith("quantized") and run.stdout.splitlines()[-1].startswith("loads in")
    report = json.loads((tmp_path / "report").read_text())
    assert report["num_quantized"] > 0 and not any((tmp_path / "out" / f).is_symlink() for f in ("config.json", "model.safetensors"))

    words = [str(cli), "dequantize", str(tmp_path / "out"), "-o", str(tmp_path / "dense"), *reader.dequantize]
    subprocess.run(words, check=True, capture_output=True)
    quantized, dense = reader.load(tmp_path / "out"), reader.load_dense(tmp_path / "dense")
    (weights, outputs), (dense_weights, dense_outputs) = reader.read(quantized), reader.read(dense)
    assert weights.keys() == dense_weights.keys()
    for tensor, weight in weights.items():
        assert reader.equal(weight, dense_weights[tensor]), tensor
    for output, value in outputs.items():
        assert reader.distance(value, dense_outputs[output]) <= reader.tolerance(value), output
    if layout != "mlx":
        assert torch.equal(generate(quantized), generate(dense))
