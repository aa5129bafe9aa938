"""The forms that models are published in, in the readers: fp8 and block floats in compressed-tensors, fp8 in blocks, gpt-oss.

As readers_test.py, for a few architectures: the reader loads what the tool writes without a complaint, its own code makes the
weights of it that `halfbyte dequantize` makes, to the bit, and its outputs are those of the dequantized dense model, within
the tolerance of readers.py. Without a GPU transformers makes all of these dense when it loads them.
"""

import pytest
import readers
from readers_test import DENSE, EQUAL, Bench

from zoo import model


class Published(readers.CompressedTensors):
    formats = {
        "fp8": ["--format", "fp8"],
        "fp8 tensor": ["--format", "fp8", "--group-size", "tensor"],
        "fp8 blocks": ["--format", "fp8", "--group-size", "128"],
        "nvfp4": ["--format", "nvfp4"],
        "mxfp4": ["--format", "mxfp4"],
    }


class Fp8(readers.Transformers):
    name, formats = "fp8", {"fp8": ["--format", "fp8"]}


class GptOss(readers.Transformers):
    name, formats = "gpt-oss", {"mxfp4": ["--format", "mxfp4"]}


CELLS = [("LlamaForCausalLM", Published, form, EQUAL) for form in Published.formats]
CELLS += [("DeepseekV3ForCausalLM", Published, form, EQUAL) for form in ("fp8", "fp8 blocks")]
CELLS += [(name, Fp8, "fp8", EQUAL) for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")]
CELLS += [("GptOssForCausalLM", GptOss, "mxfp4", DENSE)]  # attention


@pytest.fixture(scope="module")
def bench(cli, tmp_path_factory):
    return Bench(cli, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name,reader,form,kind", CELLS, ids=["-".join((c[0], c[1].name, c[2])).replace(" ", "-") for c in CELLS])
def test_loads(bench, name, reader, form, kind):
    verdict = bench.verdict(reader(), model(name), form)
    assert verdict.kind == kind, verdict.text
    if kind == DENSE:
        assert verdict.share > 0.8, verdict.text
