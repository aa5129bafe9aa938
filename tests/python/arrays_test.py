"""Arrays in and out: every kind of array, without copies; outputs that are given, streams, threads, memory, errors."""

import array
import copy
import ctypes
import gc
import pickle
import sys
import threading
import time
import tracemalloc

import halfbyte
import numpy as np
import pytest
from independent import encode as enc
from independent import safetensors_io as st
from independent import tables, unpack

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

SPECS = [
    "nf4", "fp4", "fp4_e2m1,group_size=32", "int4", "int4,asymmetric,group_size=33", "int8,granularity=channel",
    "int3,granularity=flat,group_size=37", "int2,granularity=tensor", "affine4,scale_dtype=bf16", "affine5,scale_dtype=f16",
]  # fmt: skip


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)



def poisoned(*shape, dtype=np.float32):
    made = np.empty(shape, dtype)
    made.view(np.uint8)[...] = 0xA5
    return made


# Values: against an implementation of its own


def independent(x, spec):
    s = halfbyte.QuantSpec.parse(spec)
    return enc.encode(x, s.format, granularity=s.granularity, group_size=s.group_size, asymmetric=s.asymmetric, scale_dtype=s.scale_dtype)


def codes_of(q):
    """The codes as the independent encoder has them."""
    spec, flat = q.spec, q.spec.granularity == "flat"
    stored = unpack.bit_stream(q.codes, spec.bits, q.rows * q.cols if flat else q.cols).reshape(q.shape)
    return stored.astype(int) - (2 ** (spec.bits - 1) if spec.format.startswith("int") else 0)


def scales_f32(part):
    return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if part.dtype == np.uint16 else part.astype(np.float32)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (2, 3, 65)])
def test_quantize_has_the_codes_of_the_contract(spec, shape):
    x = random(*shape, seed=hash((spec, shape)) % 1000)
    q = halfbyte.quantize(x, spec)
    wanted = independent(x, spec)
    assert np.array_equal(codes_of(q), wanted.codes)
    assert np.array_equal(scales_f32(q.scales).ravel(), wanted.scales.ravel())
    if q.spec.has_zeros:
        assert np.array_equal(q.zeros.astype(int).ravel() - 2 ** (q.spec.bits - 1), wanted.zeros.ravel())
    if q.spec.has_biases:
        assert np.array_equal(scales_f32(q.biases).ravel(), wanted.biases.ravel())
    parts = q.spec.part_shapes(q.rows, q.cols)
    assert (q.codes.shape, q.scales.shape) == parts
    assert (q.zeros is None, q.biases is None) == (not q.spec.has_zeros, not q.spec.has_biases)
    assert q.num_bytes == sum(part.nbytes for part in (q.codes, q.scales, q.zeros, q.biases) if part is not None)
    assert q.bits_per_weight == 8 * q.num_bytes / x.size


def test_quantize_searches_scales_by_importance():
    w = np.random.default_rng(7).normal(size=(64, 256)).astype(np.float32)
    importance = np.geomspace(1, 1000, 256, dtype=np.float32)
    searched = halfbyte.Encoding(search=True)
    assert str(searched) == "Encoding(search=True)" and searched.search and not halfbyte.Encoding().search
    plain, alike, by = (
        halfbyte.quantize(w, "nf4", encoding=encoding, importance=weights)
        for encoding, weights in [(None, None), (searched, None), (searched, importance)]
    )
    assert alike.error(w).snr_db > plain.error(w).snr_db + 0.5
    error = [(importance * (q.dequantize() - w) ** 2).sum() for q in (plain, alike, by)]
    assert error[0] > error[1] > error[2]
    assert by.encoding.search
    for wrong in (importance[:255], importance[None], importance.astype(np.float64)):
        with pytest.raises(ValueError, match=r"importance must be f32 \[256\]"):
            halfbyte.quantize(w, "nf4", encoding=searched, importance=wrong)
    with pytest.raises(ValueError, match="importance is for searched scales"):
        halfbyte.quantize(w, "nf4", importance=importance)
    with pytest.raises(halfbyte.Error, match="must be finite and not negative, got -1 at index 0"):
        halfbyte.quantize(w, "nf4", encoding=searched, importance=-importance)


@pytest.mark.parametrize("spec", [*SPECS, "nf4,double_quant", "int4,granularity=flat,group_size=64,double_quant"])
def test_error_is_that_of_the_decoded_weight(spec):
    x = random(33, 192)
    q = halfbyte.quantize(x, spec)
    difference = q.dequantize("f32").astype(np.float64) - x
    error = q.error(x)
    assert error.relative_rmse == pytest.approx(np.sqrt((difference**2).sum() / (x.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert error.snr_db == pytest.approx(-20 * np.log10(error.relative_rmse))
    assert error.max_error == np.abs(difference).max()
    assert np.abs(difference).ravel()[error.max_error_index] == error.max_error
    assert "relative RMSE" in repr(q)
    assert q.error(x.astype(np.float16)).relative_rmse == pytest.approx(error.relative_rmse, rel=0.02)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_block_floats(format):
    """Scales are bytes; nvfp4 has a global scale beside them. Parts make the same weight again."""
    x = random(5, 96)
    x[0, :48] = 0
    q = halfbyte.quantize(x, format)
    wanted = enc.encode(x, format)
    assert np.array_equal(codes_of(q), wanted.codes)
    assert q.scales.dtype == np.uint8 and np.array_equal(q.scales, wanted.scale_codes)
    assert q.spec.has_global_scale == (format == "nvfp4") == (q.global_scale is not None)
    parts = {"codes": q.codes, "scales": q.scales}
    if format == "nvfp4":
        assert q.global_scale.tolist() == [wanted.global_scale]
        parts["global_scale"] = q.global_scale
    again = halfbyte.QuantizedTensor(str(q.spec), x.shape, **parts)
    value = tables.BY_NAME[format][wanted.codes] * np.repeat(wanted.scales, q.spec.group_size, axis=1)
    assert np.array_equal(again.dequantize("f32"), value) and np.array_equal(q.dequantize("f32"), value)
    plan = halfbyte.QuantizePlan.select("cpu", halfbyte.QuantizeDescriptor(spec=format, rows=5, cols=96))
    outputs = {name: np.zeros_like(part) for name, part in parts.items()}
    plan.run(x=x, **outputs)
    assert all(np.array_equal(outputs[name], part) for name, part in parts.items())
    packed = q.pack()
    again = packed.unpack()
    assert all(np.array_equal(getattr(again, name), part) for name, part in parts.items())
    rows = np.eye(96, dtype=np.float32)[:7]
    assert np.allclose(halfbyte.qgemm(rows, packed), value.T[:7], rtol=1e-6)


def test_error_of_what_is_exact():
    x = np.eye(4, dtype=np.float32)
    assert halfbyte.quantize(x, "int8").error(x) == (0.0, 0, 0.0, np.inf)
    with pytest.raises(ValueError, match=r"f32 \(4, 4\) or .* got f32 \(2, 4\)") as caught:
        halfbyte.quantize(x, "int8").error(x[:2])
    assert caught.value.argument == "x"


# Kinds of arrays


class OnlyInterface:
    def __init__(self, of):
        self.of = of

    @property
    def __array_interface__(self):
        return self.of.__array_interface__


class OnlyDlpack:
    def __init__(self, of):
        self.of = of

    def __dlpack__(self, **options):
        return self.of.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.of.__dlpack_device__()


@pytest.mark.parametrize("wrap", [memoryview, OnlyInterface, OnlyDlpack, lambda x: array.array("f", x.ravel().tolist())])
def test_whoever_has_memory_is_taken(wrap):
    x = random(1, 130)
    q = halfbyte.quantize(wrap(x), "int4")
    assert np.array_equal(q.codes.ravel(), halfbyte.quantize(x, "int4").codes.ravel())
    assert type(q.codes) is np.ndarray and type(q.dequantize()) is np.ndarray


@pytest.mark.parametrize("dtype, word", [(np.float16, "f16"), (np.float32, "f32"), (np.float64, "f64")])
def test_floating_dtypes(dtype, word):
    x = random(3, 65).astype(dtype)
    q = halfbyte.quantize(x, "affine4")
    assert q.dtype == word and q.dequantize().dtype == dtype
    for other in (np.float16, np.float32, np.float64):
        assert q.dequantize(other).dtype == other


@pytest.mark.skipif(ml_dtypes is None, reason="needs ml_dtypes")
def test_bf16_of_ml_dtypes():
    x = random(3, 128).astype(ml_dtypes.bfloat16)
    q = halfbyte.quantize(x, "affine4,scale_dtype=bf16")
    assert q.dtype == "bf16" and q.scales.dtype == q.biases.dtype == q.dequantize().dtype == ml_dtypes.bfloat16
    same = halfbyte.quantize(x.view(np.uint16), "affine4,scale_dtype=bf16")
    assert same.dtype == "bf16" and same.scales.dtype == np.uint16 and same.dequantize().dtype == np.uint16
    assert np.array_equal(same.scales, q.scales.view(np.uint16)) and np.array_equal(same.codes, q.codes)
    out = np.zeros(x.shape, ml_dtypes.bfloat16)
    assert q.dequantize(out=out) is out
    assert np.array_equal(out.view(np.uint16), same.dequantize())
    assert pickle.loads(pickle.dumps(q)).scales.dtype == ml_dtypes.bfloat16


def test_arrays_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    x = random(5, 130)
    q, wanted = halfbyte.quantize(jnp.asarray(x), "affine4,scale_dtype=bf16"), halfbyte.quantize(x, "affine4,scale_dtype=bf16")
    assert q.framework == "dlpack" and q.scales.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(q.codes), wanted.codes) and np.array_equal(np.asarray(q.dequantize()), wanted.dequantize())
    assert {type(each) for each in (q.codes, q.dequantize(), q.pack().data, halfbyte.quantize_linear(jnp.asarray(x)).codes)} == {type(jnp.asarray(x))}
    w = halfbyte.quantize(jnp.eye(64), "int8").pack()
    assert np.array_equal(halfbyte.qgemm(jnp.ones((2, 64)), w), np.ones((2, 64)))
    assert np.array_equal(pickle.loads(pickle.dumps(q)).codes, wanted.codes)
    with pytest.raises(ValueError, match="immutable"):
        q.dequantize(out=jnp.asarray(x))


def test_arrays_of_cupy():
    cupy = pytest.importorskip("cupy")
    if not halfbyte.cuda_info().usable:
        pytest.skip("no CUDA device")
    x = random(64, 192)
    on_device = cupy.asarray(x)
    for spec in ("nf4", "int4,asymmetric", "affine4,scale_dtype=f16", "nf4,double_quant"):
        q, wanted = halfbyte.quantize(on_device, spec), halfbyte.quantize(x, spec)
        assert q.device == "cuda:0" and type(q.codes) is cupy.ndarray
        assert np.array_equal(q.codes.get(), wanted.codes) and np.array_equal(q.dequantize().get(), wanted.dequantize())
        packed = q.pack()
        assert np.array_equal(packed.data.get(), wanted.pack().data)
        y = cupy.zeros((3, 64), cupy.float32)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            assert halfbyte.qgemm(cupy.ones((3, 192), cupy.float32), packed, out=y) is y
            stream.synchronize()
        assert np.allclose(y.get(), np.ones((3, 192)) @ wanted.dequantize().T, rtol=1e-4, atol=1e-3)
        host = q.to("cpu")
        assert type(host.codes) is np.ndarray and np.array_equal(host.codes, wanted.codes)
        assert np.array_equal(host.to("cuda").to("cpu").codes, wanted.codes)
        assert np.array_equal(pickle.loads(pickle.dumps(q)).codes, wanted.codes)
        assert q.error(on_device).relative_rmse == pytest.approx(wanted.error(x).relative_rmse)
    linear, wanted = halfbyte.quantize_linear(on_device, granularity="channel", axis=0), halfbyte.quantize_linear(x, granularity="channel", axis=0)
    assert np.array_equal(linear.codes.get(), wanted.codes)
    assert np.array_equal(halfbyte.dequantize_linear(*linear).get(), halfbyte.dequantize_linear(*wanted))
    assert np.array_equal(halfbyte.quantize(on_device[::2, ::-1], "int4").codes.get(), halfbyte.quantize(x[::2, ::-1], "int4").codes)
    with pytest.raises(ValueError):
        q.dequantize(out=np.zeros((64, 192), np.float32))


def test_read_only_and_strided_inputs():
    x = random(64, 130)
    x.flags.writeable = False
    wanted = halfbyte.quantize(np.ascontiguousarray(x[::2, ::-1].T), "int4")
    assert np.array_equal(halfbyte.quantize(x[::2, ::-1].T, "int4").codes, wanted.codes)
    assert np.array_equal(halfbyte.quantize(bytes_view(x), "int4").codes, halfbyte.quantize(x.copy(), "int4").codes)


def test_buffers_without_strides():
    x = (ctypes.c_float * 64)(*random(64))
    assert np.array_equal(halfbyte.quantize(x, "nf4").codes, halfbyte.quantize(np.array(x), "nf4").codes)
    rows = ((ctypes.c_float * 64) * 2)()
    rows[1][3] = 5
    assert halfbyte.value_range(rows).max == 5
    out = ((ctypes.c_float * 64) * 2)()
    q = halfbyte.quantize(np.array(rows), "int8")
    q.dequantize(out=out)
    assert np.array_equal(np.array(out), q.dequantize())


def test_parts_that_are_dlpack():
    x = random(4, 64)
    q, wanted = halfbyte.quantize(x, "int4,asymmetric").as_framework("dlpack"), halfbyte.quantize(x, "int4,asymmetric")
    for part in ("codes", "scales", "zeros"):
        assert np.array_equal(np.from_dlpack(getattr(q, part)), getattr(wanted, part))
    assert np.array_equal(np.from_dlpack(q.dequantize()), wanted.dequantize())
    assert np.array_equal(np.from_dlpack(q.pack().data), wanted.pack().data)


def read_only(x):
    x.flags.writeable = False
    return x


def test_what_is_read_may_be_read_only():
    x, scale = random(4, 64), read_only(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    zero_point = read_only(np.arange(4, dtype=np.int32))
    options = {"granularity": "channel", "axis": 0}
    found = halfbyte.quantize_linear(x, scale, zero_point, **options)
    assert np.array_equal(found.codes, halfbyte.quantize_linear(x, scale.copy(), zero_point.copy(), **options).codes)
    found = halfbyte.fake_quantize(x, scale, zero_point, **options)
    assert np.array_equal(found.y, halfbyte.fake_quantize(x, scale.copy(), zero_point.copy(), **options).y)
    plan = halfbyte.QuantizeLinearPlan.select("cpu", halfbyte.LinearDescriptor(shape=[64], computed=True))
    with pytest.raises(halfbyte.UsageError, match="scale: the array is read-only"):
        plan.run(x=x[0], scale=read_only(np.zeros((), np.float32)), codes=np.empty(64, np.int8))


def test_values_equal_none_never():
    assert halfbyte.QuantSpec() != None and halfbyte.observe(random(2, 3)) != None  # noqa: E711
    assert hash(halfbyte.FakeQuantizeDescriptor(shape=[3], computed=True, observer=halfbyte.ObserverConfig("min-max")))
    x = random(4, 64)
    found = halfbyte.fake_quantize(x, state=halfbyte.observe(x), observer="min-max")
    assert np.array_equal(found.y, halfbyte.fake_quantize(x).y)


def test_outputs_that_overlap_what_is_read():
    x = random(8, 64)
    memory = np.zeros(8 * 64 * 4, np.uint8)
    q = halfbyte.quantize(x, "nf4")
    codes = memory[: q.codes.nbytes].reshape(q.codes.shape)
    codes[...] = q.codes
    given = halfbyte.QuantizedTensor("nf4", (8, 64), codes=codes, scales=q.scales)
    with pytest.raises(halfbyte.UsageError, match="y must not overlap in.codes|in.codes must not overlap y"):
        given.dequantize(out=memory.view(np.float32).reshape(8, 64))


def test_the_error_is_against_the_shape_of_the_weight():
    w = random(64, 128)
    with pytest.raises(halfbyte.UsageError, match=r"x must be the dense weight, f32 \(64, 128\) .* got f32 \(128, 64\)"):
        halfbyte.quantize(w, "nf4").error(w.T)


def bytes_view(x):
    return np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)  # read-only


def test_a_read_only_output_is_refused():
    q = halfbyte.quantize(random(2, 64))
    out = np.zeros((2, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: the array is read-only") as caught:
        q.dequantize(out=out)
    assert caught.value.argument == "out"
    assert not out.any()


@pytest.mark.parametrize("x", [[1.0, 2.0], (1.0,), 1.0, "nf4", {}])
def test_what_is_no_array(x):
    with pytest.raises(TypeError, match="x must be an array"):
        halfbyte.quantize(x)


@pytest.mark.parametrize("dtype", [">f4", "complex64", "bool", "U3"])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(ValueError):
        halfbyte.quantize(np.zeros((2, 64), dtype))


def test_integers_are_no_weights():
    with pytest.raises(ValueError) as caught:
        halfbyte.quantize(np.zeros((2, 64), np.int32))
    assert caught.value.code == "USAGE" and isinstance(caught.value, halfbyte.Error)


# No copies


def test_parts_share_memory():
    x = random(8, 64)
    q = halfbyte.quantize(x, "int4")
    codes, scales = q.codes, q.scales
    assert np.shares_memory(codes, q.codes)
    again = halfbyte.QuantizedTensor(q.spec, q.shape, codes=codes, scales=scales)
    codes[...] ^= 0xFF
    scales *= 2
    assert np.array_equal(again.dequantize(), q.dequantize())
    assert not np.array_equal(again.dequantize(), halfbyte.quantize(x, "int4").dequantize())
    del q, again
    gc.collect()
    codes[...] = 0  # it outlives the tensors
    packed = halfbyte.quantize(x, "int4").pack()
    assert np.shares_memory(packed.data, halfbyte.PackedTensor.of("int4", 8, 64, packed.data).data)


def test_memory_of_the_caller_lives_as_long_as_the_tensor():
    codes, scales = np.zeros((2, 32), np.uint8), np.ones((2, 1), np.float32)
    q = halfbyte.QuantizedTensor("int4", (2, 64), codes=codes, scales=scales)
    wanted = q.dequantize()
    del codes, scales
    gc.collect()
    fill = [np.full((2, 32), 0xFF, np.uint8) for _ in range(50)]
    assert np.array_equal(q.dequantize(), wanted), len(fill)


def test_outputs_that_are_given():
    x = random(4, 128)
    q = halfbyte.quantize(x, "nf4")
    for dtype in (np.float16, np.float32, np.float64):
        out = poisoned(4, 128, dtype=dtype)
        assert halfbyte.dequantize(q, out=out) is out
        assert np.array_equal(out, q.dequantize(dtype))
    memory = poisoned(q.spec.packed_bytes(4, 128) + 255, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 256 :][: q.spec.packed_bytes(4, 128)]
    packed = q.pack(out=memory)
    assert np.shares_memory(packed.data, memory) and np.array_equal(memory, q.pack().data)
    with pytest.raises(ValueError, match="y"):
        q.dequantize(out=np.zeros((4, 127), np.float32))


# Packed weights and layouts


@pytest.mark.parametrize("spec", ["nf4", "nf4,double_quant", "int4,asymmetric,group_size=32", "int8,granularity=channel", "affine4,scale_dtype=f16", "int4,granularity=flat,group_size=13"])
@pytest.mark.parametrize("layout", ["halfbyte", "bitsandbytes", "compressed-tensors", "mlx"])
def test_packed_and_back(spec, layout):
    q = halfbyte.quantize(random(37, 130), spec)
    packed = q.pack()
    assert (packed.rows, packed.cols, packed.spec, packed.device) == (37, 130, q.spec, "cpu")
    try:
        parts = packed.unpack(layout)
    except ValueError as error:
        assert layout == "bitsandbytes" and "4 bits" in str(error) or "group" in str(error) or "layout" in str(error)
        return
    if layout == "halfbyte":
        assert all(np.array_equal(getattr(parts, name), getattr(q, name)) for name in ("codes", "scales", "zeros", "biases") if getattr(q, name) is not None)
        parts = {name: getattr(q, name) for name in ("codes", "scales", "zeros", "biases")}
        parts |= {name: getattr(q, f"scales_{name}") for name in ("absmax", "map", "offset")}
    again = halfbyte.reorder(q.spec, 37, 130, layout, **parts)
    assert np.array_equal(again.data, packed.data)


def test_mlx_and_bitsandbytes_parts_are_those_of_their_files():
    x = random(8, 128)
    q = halfbyte.quantize(x, "affine4")
    parts = q.pack().unpack("mlx")
    assert parts["codes"].shape == (8, 16) and parts["scales"].shape == parts["biases"].shape == (8, 2)
    tensors = {"P.weight": st.Tensor("U32", parts["codes"]), "P.scales": st.Tensor("F32", parts["scales"]), "P.biases": st.Tensor("F32", parts["biases"])}
    decoded = unpack.mlx(tensors, "P.weight", {"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}})
    assert np.array_equal(decoded.weights, q.dequantize())
    nf4 = halfbyte.quantize(x, "nf4")
    codes = unpack.high_nibble_first(nf4.pack().unpack("bitsandbytes")["codes"], x.size)
    assert np.array_equal(codes.reshape(x.shape), codes_of(nf4))


@pytest.mark.parametrize("spec", ["nf4", "int4,group_size=32,asymmetric", "affine4", "int8,granularity=channel", "mxfp4"])
def test_rows_of_several_weights_as_one(spec):
    w = random(32 + 96 + 21, 192)
    parts = [halfbyte.quantize(each, spec).pack() for each in np.split(w, [32, 128])]
    joined = halfbyte.concat_rows(parts)
    assert np.array_equal(joined.data, halfbyte.quantize(w, spec).pack().data)
    assert (joined.rows, joined.cols, joined.spec, joined.framework) == (149, 192, parts[0].spec, "numpy")
    x = random(3, 192)
    beside = np.concatenate([halfbyte.qgemm(x, each) for each in parts], axis=1)
    assert np.allclose(halfbyte.qgemm(x, joined), beside, rtol=1e-5, atol=1e-5)
    assert np.array_equal(halfbyte.concat_rows(tuple(parts[:1])).data, parts[0].data)


def test_rows_that_do_not_go_together():
    w = random(48, 64)
    packed, other = halfbyte.quantize(w, "int4").pack(), halfbyte.quantize(w, "int8").pack()
    for weights, text in (
        ([], "weights must have at least one weight"),
        ([packed, packed], r"weights\[0\].rows must be a multiple of 32 but for the last weight, got 48"),
        ([halfbyte.quantize(random(32, 64), "int4").pack(), other], r"weights\[1\].spec.format must be int4"),
        ([halfbyte.quantize(w, "nf4,double_quant").pack()], "double quantized"),
    ):
        with pytest.raises(ValueError, match=text):
            halfbyte.concat_rows(weights)
    for wrong in (packed, [packed.data], "int4"):
        with pytest.raises(TypeError):
            halfbyte.concat_rows(wrong)


@pytest.mark.parametrize("spec", ["nf4", "affine3,group_size=128", "int8,granularity=channel", "nvfp4"])
def test_parts_of_a_weight(spec):
    q = halfbyte.quantize(random(96, 832), spec)
    for axis, begin, end in ((0, 32, 96), (1, 384, 832), (1, 0, 832)):
        part, cut = q.slice(axis, begin, end), q.pack().slice(axis, begin, end)
        dense = q.dequantize("f32")
        assert np.array_equal(part.dequantize("f32"), dense[begin:end] if axis == 0 else dense[:, begin:end])
        assert np.array_equal(part.pack().data, cut.data) and (cut.rows, cut.cols) == part.shape
    columns = [q.pack().slice(1, begin, end) for begin, end in ((0, 384), (384, 832))]
    assert np.array_equal(halfbyte.concat_cols(columns).data, q.pack().data)
    assert np.array_equal(q.slice(0, 5, 7).codes, q.codes[5:7])  # where a packed weight is not cut


def test_parts_that_there_are_not():
    q = halfbyte.quantize(random(96, 320), "nf4")
    for call, text in (
        (lambda: q.slice(1, 32, 320), "element 32 is not the first of a group of 64"),
        (lambda: q.slice(2, 0, 1), r"slice.axis must be an axis of \[96, 320\], got 2"),
        (lambda: q.slice(0, 0, 97), "slice must lie within the 96 elements of axis 0, got 0 to 97"),
        (lambda: q.pack().slice(0, 5, 96), "multiples of 32, got 5"),
        (lambda: q.pack().slice(1, 0, 1 << 60), "within the 320 elements of axis 1"),
        (lambda: q.pack().slice(3, 0, 1), "slice.axis must be an axis of"),
        (lambda: halfbyte.concat_cols([q.pack().slice(0, 0, 32), q.pack()]), r"weights\[1\].rows must be 32"),
        (lambda: halfbyte.concat_cols([]), "at least one weight"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_experts_are_packed_one_by_one():
    x = random(3, 32, 64)
    q = halfbyte.quantize(x, "int4")
    assert (q.num_experts, q.rows, q.cols) == (3, 96, 64)
    for expert in range(3):
        assert np.array_equal(q.pack(expert).data, halfbyte.quantize(x[expert], "int4").pack().data)
    with pytest.raises(ValueError, match="expert must be 0 to 2, got 3"):
        q.pack(3)


def test_expanded_has_no_double_quantization():
    q = halfbyte.quantize(random(16, 512), "nf4,double_quant")
    assert q.scales.dtype == np.uint8 and q.scales_map.shape == (256,)
    plain = q.expanded()
    assert plain.scales.dtype == np.float32 and not plain.spec.double_quant and plain.scales_map is None
    assert np.array_equal(plain.dequantize(), q.dequantize())
    scales = halfbyte.double_dequantize(q.scales, q.scales_absmax, q.scales_offset[0], q.scales_map)
    assert np.array_equal(scales, plain.scales)


# Copies


@pytest.mark.parametrize("spec", ["nf4,double_quant", "int4,asymmetric", "affine4,scale_dtype=bf16"])
@pytest.mark.parametrize("way", [lambda of: pickle.loads(pickle.dumps(of)), copy.deepcopy, lambda of: of.to("cpu")])
def test_copies(spec, way):
    q = halfbyte.quantize(random(4, 128), spec, encoding=None)
    again = way(q)
    assert (again.spec, again.shape, again.dtype, again.encoding) == (q.spec, q.shape, q.dtype, q.encoding)
    assert np.array_equal(again.dequantize(), q.dequantize())
    assert np.array_equal(way(q.pack()).data, q.pack().data)


def test_encodings():
    x = random(4, 128)
    assert halfbyte.quantize(x, "int4").encoding == halfbyte.Encoding("absmax")
    half_range = halfbyte.quantize(x, "int4", encoding="half-range")
    assert half_range.encoding.scale_rule == "half-range"
    assert np.array_equal(half_range.scales, enc.encode(x, "int4", rule="half-range").scales)


# Errors


def parts(**changes):
    given = {"codes": np.zeros((2, 32), np.uint8), "scales": np.ones((2, 1), np.float32)} | changes
    return {name: part for name, part in given.items() if part is not None}


@pytest.mark.parametrize(
    "given, text",
    [
        (parts(codes=np.zeros(63, np.uint8)), "codes must be 64 elements of u8"),
        (parts(codes=np.zeros((2, 32), np.int8)), "codes must be 64 elements of u8"),
        (parts(scales=np.ones((2, 2), np.float32)), "scales must be 2 elements of f32"),
        (parts(scales=np.ones((2, 1), np.float64)), "scales must be 2 elements of f32"),
        (parts(zeros=np.zeros((2, 1), np.uint8)), "zeros must be empty"),
    ],
)
def test_parts_that_do_not_fit(given, text):
    with pytest.raises(ValueError, match=text) as caught:
        halfbyte.QuantizedTensor("int4", (2, 64), **given)
    assert caught.value.code == "USAGE"


def test_errors_have_codes_and_fields():
    x = random(4, 64)
    x[1, 3] = np.inf
    with pytest.raises(halfbyte.Error, match="1 non-finite elements, the first at index 67") as caught:
        halfbyte.quantize(x)
    assert caught.value.code == "BAD_INPUT" and not isinstance(caught.value, ValueError)
    with pytest.raises(halfbyte.Error, match="f16 cannot hold 1 of 4 scales") as caught:
        halfbyte.quantize(np.full((4, 64), 1.0, np.float32) * [[1e9], [1], [1], [1]], "nf4,scale_dtype=f16")
    assert caught.value.code == "BAD_INPUT"
    with pytest.raises(ValueError, match="group_size") as caught:
        halfbyte.QuantSpec.parse("nf4,group_size=0")
    assert isinstance(caught.value, halfbyte.UsageError)
    q = halfbyte.quantize(random(4, 64))
    plan = halfbyte.DequantizePlan.select("cpu", halfbyte.QuantizeDescriptor(spec="nf4", rows=4, cols=64))
    with pytest.raises(ValueError, match="y") as caught:
        plan.run(codes=q.codes, scales=q.scales, y=np.zeros((4, 63), np.float32))
    assert (caught.value.kind, caught.value.argument) == ("invalid-argument", "y")
    assert "4, 64" in caught.value.expected and "4, 63" in caught.value.actual
    with pytest.raises(ValueError, match="scales must have 16 bytes, got 8") as caught:
        plan.run(codes=q.codes, scales=q.scales[:2], y=np.zeros((4, 64), np.float32))
    assert (caught.value.argument, caught.value.expected, caught.value.actual) == ("scales", "have 16 bytes", "8")


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: halfbyte.QuantizedTensor("int4", (2, 64), scales=np.ones((2, 1), np.float32)), "needs codes"),
        (lambda: halfbyte.QuantizedTensor("int4", (2, 64), **parts(), absmax=None), "no part absmax"),
        (lambda: halfbyte.quantize(random(1, 64), 4), "spec must be a QuantSpec or the text of one, got int"),
        (lambda: halfbyte.quantize(random(1, 64), num_threads="2"), "incompatible function arguments"),
        (lambda: halfbyte.dequantize(random(1, 64)), "q must be a QuantizedTensor, got ndarray"),
        (lambda: halfbyte.qgemm(random(1, 64), random(64, 64)), "weight must be a PackedTensor, got ndarray"),
        (lambda: halfbyte.reorder("int4", 2, 64), "needs codes"),
        (lambda: halfbyte.reorder("int4", 2, 64, kodes=random(1)), "no part kodes"),
        (lambda: halfbyte.quantize(random(1, 64)).dequantize(3), "dtype must be a dtype or one of"),
    ],
)
def test_wrong_types(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_a_device_that_is_not_there():
    if halfbyte.cuda_info().usable:
        pytest.skip("has one")
    q = halfbyte.quantize(random(2, 64))
    with pytest.raises(halfbyte.Error) as caught:
        q.to("cuda")
    assert caught.value.code == "DEVICE" and not isinstance(caught.value, ValueError)
    with pytest.raises(ValueError):
        q.to("tpu")


# Threads and memory


def test_the_gil_is_released():
    """A Python thread makes progress while another is in the library: the interpreter itself switches threads too seldom."""
    x, counts, stop = random(4096, 4096), [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0.0005)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(1000)
        during, end = 0, time.monotonic() + 30
        while not during and time.monotonic() < end:  # a busy machine may not run the thread within one call
            before = counts[0]
            halfbyte.quantize(x, "nf4", num_threads=1)
            during = counts[0] - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert during


def test_threads_share_tensors_and_plans():
    x = random(64, 256)
    wanted = halfbyte.quantize(x, "int4").dequantize()
    problems = []

    def work():
        try:
            for _ in range(50):
                q = halfbyte.quantize(x, "int4")
                assert np.array_equal(q.dequantize(), wanted)
                assert np.array_equal(halfbyte.qgemm(np.eye(256, dtype=np.float32), q.pack()), wanted.T)
        except Exception as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_nothing_leaks():
    x, y = random(8, 128), np.zeros((8, 128), np.float32)
    q = halfbyte.quantize(x, "affine4,scale_dtype=bf16")
    packed = q.pack()

    def work():
        made = halfbyte.quantize(x, "affine4")
        made.codes, made.scales, made.biases, made.error(x), repr(made)
        halfbyte.QuantizedTensor(q.spec, q.shape, codes=q.codes, scales=q.scales, biases=q.biases)
        q.dequantize(out=y)
        q.dequantize("bf16")
        q.pack().data
        halfbyte.qgemm(x, packed)
        halfbyte.quantize_linear(x)
        with pytest.raises(ValueError):
            halfbyte.QuantizedTensor(q.spec, q.shape, codes=q.codes[:1], scales=q.scales, biases=q.biases)

    for _ in range(20):
        work()
    gc.collect()
    before, count = tracemalloc_bytes(), len(gc.get_objects())
    references = [sys.getrefcount(each) for each in (x, y, q, packed)]
    for _ in range(1000):
        work()
    gc.collect()
    assert [sys.getrefcount(each) for each in (x, y, q, packed)] == references
    assert len(gc.get_objects()) - count < 200
    assert tracemalloc_bytes() - before < 100_000
    tracemalloc.stop()


def tracemalloc_bytes():
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_memory_of_the_library_is_freed():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    x = random(1024, 1024)
    for _ in range(3):
        halfbyte.quantize(x).pack()
    before = resident()
    for _ in range(200):
        halfbyte.quantize(x).pack().data  # 1.2 MB each
    assert resident() - before < 40e6
