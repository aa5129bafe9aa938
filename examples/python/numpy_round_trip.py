"""A weight as NumPy to 4-bit codes and back, a product with them, and a model on disk.

    numpy_round_trip.py [OUTPUT_DIRECTORY]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import halfbyte

TINY_LLAMA = Path(__file__).resolve().parent.parent / "tiny-llama"


def main() -> None:
    random = np.random.default_rng(1)
    w = random.standard_normal((256, 512), dtype=np.float32)
    for spec in "nf4", "int4,group_size=32", "affine3", "int8,asymmetric,granularity=channel":
        q = halfbyte.quantize(w, spec)
        y = q.dequantize("f32")
        assert y.shape == w.shape and np.array_equal(y, halfbyte.dequantize(q, "f32"))
        error = q.error(w)
        print(f"{spec:36} {q.bits_per_weight:6.3f} bits per weight, relative RMSE {error.relative_rmse:.4f}")

    q = halfbyte.quantize(w, "nf4")
    x = random.standard_normal((3, 512), dtype=np.float32)
    product, expected = halfbyte.qgemm(x, q.pack()), x @ q.dequantize("f32").T
    assert np.allclose(product, expected, rtol=1e-4, atol=1e-3)

    with tempfile.TemporaryDirectory() as temporary:
        output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "tiny-nf4"
        halfbyte.quantize_checkpoint(TINY_LLAMA, output, "nf4")
        checkpoint = halfbyte.Checkpoint(output)
        name = "model.layers.0.mlp.up_proj.weight"
        stored = checkpoint.load_weight(name)
        dense = halfbyte.Checkpoint(TINY_LLAMA).load_dense(name, "f32")
        assert np.array_equal(stored.dequantize("f32"), halfbyte.quantize(dense, stored.spec).dequantize("f32"))
        print(halfbyte.report(output, TINY_LLAMA))


if __name__ == "__main__":
    main()
