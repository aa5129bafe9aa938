"""The programs of examples/python run and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import halfbyte
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "python"
TEXT = ROOT / "examples" / "llama" / "austen.txt"


def run(name, *arguments):
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_numpy_round_trip(tmp_path):
    text = run("numpy_round_trip.py", tmp_path / "nf4")
    assert text.splitlines()[-1].startswith("28 of 39 weights quantized")
    assert halfbyte.Checkpoint(tmp_path / "nf4").find("model.layers.0.mlp.up_proj.weight").spec.format == "nf4"


def test_qat_mlp(tmp_path):
    text = run("qat_mlp.py", tmp_path / "qat.safetensors")
    assert "stored weights are those of the last forward: True" in text
    assert {w.spec.format for w in halfbyte.Checkpoint(tmp_path / "qat.safetensors").weights} == {"int2"}


def test_qlora_tiny_llama():
    text = run("qlora_tiny_llama.py", ROOT / "README.md", 4)
    before, adapters, merged = map(float, re.findall(r"\d\.\d{4}", text))
    assert adapters < before - 0.1 and merged < before  # NF4 rounds away much of what four steps change


def test_transformers_generate():
    text = run("transformers_generate.py", "It is a truth ")
    assert "nf4: model.layers.0" in text and "\nIt is a truth " in text
    assert text.endswith("the saved model writes the same: True\n")


def test_peft_qlora():
    text = run("peft_qlora.py", ROOT / "README.md", 4)
    before, adapters, merged = map(float, re.findall(r"\d\.\d{4}", text))
    assert adapters < before - 0.1 and merged < before


def test_fsdp_qlora():
    """Two processes start where one does, and each keeps half of the weights."""
    results = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
                   EXAMPLES / "fsdp_qlora.py", ROOT / "README.md", "4"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600,
                                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        # Processes of gloo can abort when all is done: see distributed_test.py.
        assert result.returncode == 0 or "SIGABRT" in result.stderr, result.stderr
        numbers = re.findall(r"[\d.]+", result.stdout.partition("README.md: ")[2])
        results.append([float(number.rstrip(".")) for number in numbers if number.strip(".")])
    (before, after, kept, whole, *_), (before_of_two, after_of_two, kept_of_two, *_) = results
    assert after < before - 0.1 and abs(before_of_two - before) <= 2e-4 and abs(after_of_two - after) <= 2e-2
    assert kept == whole == 2 * kept_of_two


def test_dwq_tiny_llama(tmp_path):
    """What is stored is what was trained: codes of rounding, other scales, and a smaller divergence."""
    text = run("dwq_tiny_llama.py", TEXT, "-o", tmp_path / "dwq", "--bits", 2, "--steps", 6, "--validation", 1)
    start, end, before, after = map(float, re.findall(r"\d\.\d{6}", text))
    assert end < 0.8 * start and after < before
    halfbyte.quantize_checkpoint(ROOT / "examples/tiny-llama", tmp_path / "rtn", "affine2", keep_embeddings=True)
    trained, rounded = halfbyte.Checkpoint(tmp_path / "dwq"), halfbyte.Checkpoint(tmp_path / "rtn")
    forms = [[(w.name, w.layout, w.spec) for w in checkpoint.weights] for checkpoint in (trained, rounded)]
    assert forms[0] == forms[1]
    changed = 0
    for weight in trained.weights:
        if weight.spec is not None:
            a, b = trained.load_weight(weight), rounded.load_weight(weight.name)
            assert np.array_equal(a.codes, b.codes)
            changed += int((np.asarray(a.scales) != np.asarray(b.scales)).sum())
    assert changed > 1000

    sys.path.insert(0, str(EXAMPLES))
    try:
        import tiny_llama
    finally:
        sys.path.remove(str(EXAMPLES))
    tokens = tiny_llama.windows(TEXT, 128)[:4]
    with torch.no_grad():
        losses = [tiny_llama.loss(tiny_llama.load(tmp_path / name), tokens).item() for name in ("rtn", "dwq")]
    assert losses[1] < losses[0] - 0.2
