#!/usr/bin/env python3
"""transformers loads what the tool writes: examples/tiny-llama, quantized to the layouts of bitsandbytes and
compressed-tensors, gives the logits of the dense model whose weights are what `halfbyte dequantize` makes of it.

    HALFBYTE_CLI=build/release/halfbyte python3 tests/interop/transformers_check.py

Both models compute in bf16, but not in the same order. How much that may matter is measured on the dense
model: its error in bf16 is what evaluating it in f32 changes. Each of the two lies about that far from the f32
logits, so that they may differ by twice as much, at most and on average (root mean square).

Exit code 77 where a package or a GPU is missing.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "examples" / "tiny-llama"
CLI = os.environ.get("HALFBYTE_CLI", str(ROOT / "build" / "release" / "halfbyte"))
WINDOWS, LENGTH = 8, 256  # of text
MARGIN = 2.0

CASES = {  # name: options, layout
    "bnb nf4": ("--format nf4", "bitsandbytes"),
    "bnb nf4 double": ("--format nf4 --double-quant", "bitsandbytes"),
    "bnb fp4": ("--format fp4", "bitsandbytes"),
    "ct int4": ("--format int4", "compressed-tensors"),
    "ct int8": ("--format int8", "compressed-tensors"),
    "ct int4 asymmetric": ("--format int4 --asymmetric", "compressed-tensors"),
    "ct nvfp4": ("--format nvfp4", "compressed-tensors"),
    "ct mxfp4": ("--format mxfp4", "compressed-tensors"),
    "ct fp8": ("--format fp8", "compressed-tensors"),
}

try:
    import bitsandbytes
    import compressed_tensors
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print(f"SKIP: {error}")
    sys.exit(77)
DEVICE = "cuda"
if not torch.cuda.is_available():
    print("SKIP: no GPU")
    sys.exit(77)


def halfbyte(*arguments):
    subprocess.run([CLI, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, timeout=120)


def text():
    """Bytes are the tokens of this model."""
    data = (ROOT / "README.md").read_bytes()[: WINDOWS * LENGTH]
    return torch.tensor(list(data), device=DEVICE).view(WINDOWS, LENGTH)


def load(directory, dtype=torch.bfloat16):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, device_map={"": DEVICE}, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(text()).logits.double()


def run_compressed(directory):
    """Whether transformers is to hold the model compressed until its first use."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    return config.get("run_compressed", True)


def linears(model):
    """Those that are quantized: all but lm_head."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]


def check_quantized(model, layout, compressed):
    """Before the first use: compressed-tensors makes a module dense then, or at once if the configuration says so."""
    found = linears(model)
    assert len(found) == 28, f"{len(found)} linear modules"
    for name, module in found:
        if layout == "bitsandbytes":
            assert isinstance(module, bitsandbytes.nn.Linear4bit), f"{name} is a {type(module)}"
            assert module.weight.dtype == torch.uint8 and module.weight.quant_state is not None, name
        elif not compressed:
            assert module.weight.is_floating_point() and not hasattr(module, "weight_packed"), name
        else:
            assert module.quantization_scheme is not None, name
            assert module.quantization_status == compressed_tensors.quantization.QuantizationStatus.COMPRESSED, name
            codes = module.weight_packed if hasattr(module, "weight_packed") else module.weight
            assert codes.dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn), f"{name}: {codes.dtype}"


def num_different_weights(model, dense, layout):
    """Of the weights that the quantized model computes with."""
    count = 0
    for (_, module), (_, reference) in zip(linears(model), linears(dense), strict=True):
        weight = module.weight.data
        if layout == "bitsandbytes":
            weight = bitsandbytes.functional.dequantize_4bit(weight, module.weight.quant_state)
        count += int((weight.view_as(reference.weight) != reference.weight).sum())
    return count


def distance(a, b):
    """The largest difference, and its root mean square."""
    return (a - b).abs().max().item(), (a - b).square().mean().sqrt().item()


def check(name, options, layout, original, folder):
    quantized, dense = folder / "quantized", folder / "dense"
    halfbyte("quantize", MODEL, "-o", quantized, "--layout", layout, *options.split())
    halfbyte("dequantize", quantized, "-o", dense)
    model = load(quantized)
    check_quantized(model, layout, run_compressed(quantized))
    actual = logits(model)
    dense_model = load(dense)
    expected = logits(dense_model)
    exact = logits(load(dense, torch.float32))
    noise, difference, effect = distance(expected, exact), distance(actual, expected), distance(expected, original)
    different = num_different_weights(model, dense_model, layout)
    passed = all(d <= MARGIN * n for d, n in zip(difference, noise)) and torch.isfinite(actual).all().item()
    print(
        f"{name:<20} {difference[0]:9.4f} {difference[1]:9.5f} {noise[0]:9.4f} {noise[1]:9.5f} "
        f"{effect[0]:9.4f} {effect[1]:9.5f} {different:9d}  {'pass' if passed else 'FAIL'}",
        flush=True,
    )
    return passed


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(
        f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}, compressed-tensors "
        f"{compressed_tensors.__version__}, torch {torch.__version__}\n"
        f"Differences of logits, largest and root mean square: from the dense model; that model's bf16 from its f32\n"
        f"(at most {MARGIN:g} times that is allowed); what quantizing changes; weights that differ from the dense ones\n"
        f"{'':<20} {'dense':>19} {'bf16 noise':>19} {'quantizing':>19} {'weights':>9}"
    )
    original = logits(load(MODEL))
    failed = []
    for name, (options, layout) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                passed = check(name, options, layout, original, Path(folder))
            except Exception as error:  # the other cases are worth knowing too
                print(f"{name:<20} FAIL: {type(error).__name__}: {error}", flush=True)
                passed = False
        if not passed:
            failed.append(name)
    print("all pass" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
