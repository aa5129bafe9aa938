"""Tensors of PyTorch in halfbyte itself: arrays in, tensors out, on CPU and CUDA; streams; what has no memory."""

import copy
import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import halfbyte

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
UP = "model.layers.0.mlp.up_proj.weight"
WORDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}

pytestmark = pytest.mark.parametrize("device", DEVICES)


def randn(*shape, device, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def same(a, b):
    return torch.equal(a.cpu(), b.cpu()) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("spec", ["nf4", "int4,asymmetric,group_size=32", "affine5,scale_dtype=bf16", "int8,granularity=tensor", "nf4,granularity=flat,double_quant"])
def test_tensors_in_tensors_out(dtype, spec, device):
    x = randn(5, 192, device=device, dtype=dtype)
    q = halfbyte.quantize(x, spec)
    assert q.framework == "torch" and q.dtype == WORDS[dtype] and q.device == ("cpu" if device == "cpu" else "cuda:0")
    y = q.dequantize()
    assert type(y) is torch.Tensor and y.dtype == dtype and y.device == x.device and y.shape == x.shape
    assert q.codes.device == x.device and q.codes.dtype == torch.uint8
    if dtype != torch.bfloat16:
        host = halfbyte.quantize(x.cpu().numpy(), spec)
        assert np.array_equal(host.codes, q.codes.cpu().numpy())
        assert np.array_equal(host.dequantize(), y.cpu().numpy())
    error = q.error(x)
    assert error.relative_rmse == pytest.approx(float((q.dequantize("f64") - x.double()).norm() / x.double().norm()), rel=1e-3)
    out = torch.full_like(x, float("nan"))
    assert q.dequantize(out=out) is out and same(out, y)


def test_parts_share_memory(device):
    q = halfbyte.quantize(randn(4, 128, device=device), "int4")
    codes, scales = q.codes, q.scales
    assert codes.data_ptr() == q.codes.data_ptr()
    again = halfbyte.QuantizedTensor(q.spec, q.shape, codes=codes, scales=scales)
    assert again.codes.data_ptr() == codes.data_ptr()
    del q, again
    gc.collect()
    codes.zero_()
    packed = halfbyte.quantize(randn(4, 128, device=device), "int4").pack()
    again = halfbyte.PackedTensor.of("int4", 4, 128, packed.data)
    assert again.data.data_ptr() == packed.data.data_ptr() and again.framework == "torch"


def test_copies(device):
    q = halfbyte.quantize(randn(4, 128, device=device), "affine4,scale_dtype=bf16")
    for again in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), q.to(device), q.to("cpu").to(device)):
        assert again.framework == "torch" and same(again.codes, q.codes) and same(again.scales, q.scales)
        assert again.codes.device == q.codes.device
    packed = q.pack()
    for again in (pickle.loads(pickle.dumps(packed)), packed.to("cpu"), packed.to("cpu").to(device)):
        assert same(again.data, packed.data) and again.framework == "torch"
    if device == "cpu":
        assert type(q.as_framework("numpy").codes) is np.ndarray
        assert torch.equal(halfbyte.quantize(np.ones((2, 64), np.float32)).as_framework("torch").dequantize(), torch.ones(2, 64))


@pytest.mark.parametrize("layout", ["halfbyte", "bitsandbytes", "compressed-tensors", "mlx"])
def test_layouts(layout, device):
    q = halfbyte.quantize(randn(64, 128, device=device), "nf4")
    packed = q.pack()
    if layout == "halfbyte":
        parts = {"codes": q.codes, "scales": q.scales}
    else:
        parts = packed.unpack(layout)
        assert all(part.device == q.codes.device for part in parts.values())
    again = halfbyte.reorder("nf4", 64, 128, layout, **parts)
    assert same(again.data, packed.data) and again.data.device == q.codes.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions(dtype, device):
    x, dy = randn(6, 128, device=device, dtype=dtype), randn(6, 128, device=device, dtype=dtype, seed=1)
    linear = halfbyte.quantize_linear(x, granularity="channel", axis=0)
    y = halfbyte.dequantize_linear(*linear)
    assert y.dtype == dtype and float((y - x).abs().max()) < 0.05 and linear.codes.dtype == torch.int8
    dx = halfbyte.quantize_linear_backward(linear.descriptor, x, dy, linear.scale)
    assert same(dx, dy)
    fake = halfbyte.fake_quantize(x, mask=True, granularity="group", group_size=64)
    assert same(halfbyte.fake_quantize_backward(fake.descriptor, dy, mask=fake.mask), dy)
    assert halfbyte.fake_quantize_learned_backward(fake.descriptor, x, dy, fake.scale)[1].shape == fake.scale.shape
    state = halfbyte.observe(x)
    assert float(state.max) == float(x.max()) and state.max.device == x.device
    affine = halfbyte.affine_init(x)
    assert float((halfbyte.affine_qdq(*affine) - x).abs().max()) < 0.5
    w = halfbyte.quantize(randn(96, 128, device=device), "int4")
    product = halfbyte.qgemm(x, w.pack())
    reference = x.double() @ w.dequantize("f64").T
    assert product.dtype == dtype and float((product.double() - reference).norm() / reference.norm()) < 1e-2
    codes, scales = halfbyte.quantize_nf4(x)
    assert same(halfbyte.dequantize_nf4(codes, scales), halfbyte.quantize(x, "nf4,granularity=flat").dequantize("f32").ravel())


def test_strided_tensors(device):
    x = randn(128, 6, device=device)
    assert same(halfbyte.quantize(x.T, "int4").codes, halfbyte.quantize(x.T.contiguous(), "int4").codes)
    w = halfbyte.quantize(randn(96, 128, device=device), "int4").pack()
    assert same(halfbyte.qgemm(x.T, w), halfbyte.qgemm(x.T.contiguous(), w))


def test_dtypes_and_devices_of_torch(device):
    q = halfbyte.quantize(randn(2, 64, device=device))
    assert q.dequantize(torch.float16).dtype == torch.float16
    assert q.to(torch.device("cpu")).device == "cpu"
    assert halfbyte.QgemmDescriptor(spec="nf4", n=1, k=1, dtype=torch.bfloat16).dtype == "bf16"


def test_gradients_are_not_recorded(device):
    x = randn(2, 64, device=device).requires_grad_()
    y = halfbyte.quantize(x).dequantize()
    assert not y.requires_grad


def test_tensors_without_memory(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2, 64, device=device)
    with pytest.raises(TypeError, match="x must be a plain tensor"):
        halfbyte.quantize(fake)
    for bad in (torch.zeros(2, 64, device="meta"), torch.zeros(2, 64, device=device).to_sparse(), torch.zeros(2, 64, dtype=torch.complex64, device=device)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            halfbyte.quantize(bad)
    negative = torch.zeros(2, 64, dtype=torch.complex64, device=device).conj().imag
    with pytest.raises(ValueError, match="resolve_neg"):
        halfbyte.quantize(negative)


def test_leaks(device):
    def live():
        gc.collect()
        return torch.cuda.memory_allocated() if device == "cuda" else sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    x = randn(256, 256, device=device)

    def work():
        q = halfbyte.quantize(x, "affine4")
        halfbyte.qgemm(x, q.pack())
        q.codes, q.dequantize(), q.pack().data, q.as_framework("torch")

    work()
    before = live()
    for _ in range(100):
        work()
    assert live() == before


def test_checkpoints(device, tmp_path):
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", "int4", devices=device)
    checkpoint = halfbyte.Checkpoint(tmp_path / "q")
    q = checkpoint.load_weight(UP, torch.device(device))
    assert q.framework == "torch" and q.codes.device.type == device
    assert same(q.codes, torch.from_numpy(checkpoint.load_weight(UP).codes))
    dense = checkpoint.load_dense("model.norm.weight", device=torch.device(device))
    assert dense.dtype == torch.bfloat16 and dense.device.type == device
    assert same(dense, checkpoint.load_dense("model.norm.weight", framework="torch"))
    with halfbyte.CheckpointWriter(tmp_path / "w.safetensors") as writer:
        writer.set("norm", dense)
        writer.set("up.weight", q)
    again = halfbyte.Checkpoint(tmp_path / "w.safetensors")
    assert same(again.load_dense("norm", framework="torch"), dense)
    assert same(again.load_weight("up.weight", framework="torch").codes, q.codes)


def test_streams(device):
    """Work goes to the current stream of PyTorch, or to the one that is given."""
    if device == "cpu":
        pytest.skip("no streams")
    x, w = randn(512, 1024, device=device), halfbyte.quantize(randn(1024, 1024, device=device), "int4").pack()
    wanted = halfbyte.qgemm(x, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for given in (None, stream, stream.cuda_stream):
        source, y = torch.zeros_like(x), torch.zeros_like(wanted)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            source.copy_(x)
            if given is None:
                halfbyte.qgemm(source, w, out=y)
        if given is not None:
            halfbyte.qgemm(source, w, out=y, stream=given)
        stream.synchronize()
        assert torch.equal(y, wanted)


def test_a_graph_captures_runs(device):
    if device == "cpu":
        pytest.skip("no graphs")
    x, w = randn(8, 1024, device=device), halfbyte.quantize(randn(1024, 1024, device=device), "nf4").pack()
    y = torch.zeros(8, 1024, device=device)
    halfbyte.qgemm(x, w, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        halfbyte.qgemm(x, w, out=y)
    x.copy_(randn(8, 1024, device=device, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, halfbyte.qgemm(x, w))
