"""The golden vectors of the real libraries, and facts worked out by hand, against the independent
encoder and unpackers. Needs no build: it shows that the yardstick of layout_test.py is straight."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import LAYOUTS
from independent import encode as enc
from independent import safetensors_io as st
from independent import tables, unpack, words

GOLDEN = json.loads((Path(__file__).parent / "golden" / "formats.json").read_text())


def f32(values):
    return np.array(values, np.float32)


def ramp(case):
    return f32([(case["x0"] + i) / case["step"] for i in range(case["count"])])


def u32(words):
    return np.array([int(word, 16) for word in words], "<u4")


def bits_of(values):
    return [f"{bits:08X}" for bits in f32(values).view(np.uint32)]


# bitsandbytes


def bitsandbytes_tensors(case, shape):
    name = f"w.quant_state.bitsandbytes__{case['format']}"
    state = {"quant_type": case["format"], "blocksize": case["block"], "dtype": "float32"}
    state["shape"] = shape
    return {
        "w": st.Tensor("U8", np.frombuffer(bytes.fromhex(case["packed"]), "u1")[:, None]),
        "w.absmax": st.Tensor("F32", np.frombuffer(bytes.fromhex(case["absmax_le"]), "<f4")),
        "w.quant_map": st.Tensor("F32", tables.BY_NAME[case["format"]]),
        name: st.Tensor("U8", np.frombuffer(json.dumps(state).encode(), "u1")),
    }


@pytest.mark.parametrize("name", ["bnb_nf4", "bnb_fp4", "bnb_nf4_odd", "bnb_nf4_32", "bnb_fp4_32"])
def test_bitsandbytes(name):
    case = GOLDEN[name]
    w = f32(case["w"]) if "w" in case else ramp(case)
    encoded = enc.encode(w, case["format"], granularity="flat", group_size=case["block"])
    unpacked = unpack.bitsandbytes(bitsandbytes_tensors(case, list(w.shape)), "w")
    assert np.array_equal(encoded.codes, unpacked.codes)
    assert np.array_equal(encoded.scales, unpacked.scales)
    table = tables.BY_NAME[case["format"]]
    assert np.array_equal(unpacked.weights, table[encoded.codes] * encoded.scales[0, 0])


def test_bitsandbytes_nested():
    case = GOLDEN["bnb_nested"]
    tolerance = case["tolerance"]
    codes, absmax, offset = enc.double_quantize(f32(case["absmax"]))
    assert codes.tolist() == case["codes"]
    assert absmax == pytest.approx([case["nested_absmax"]], rel=tolerance)
    assert offset == pytest.approx(case["offset"], rel=tolerance)
    decoded = unpack.double_dequantize(codes, absmax, offset, tables.DOUBLE_QUANT_MAP)
    assert decoded == pytest.approx(case["decoded"], abs=1e-5)


def test_double_quant_map():
    entries = tables.DOUBLE_QUANT_MAP
    assert len(entries) == 256 and np.all(np.diff(entries) > 0)
    assert entries[127] == 0 and entries[255] == 1
    digest = hashlib.sha256(entries.astype("<f4").tobytes()).hexdigest()
    assert digest.startswith("e732639a65f497b4")


# compressed-tensors


@pytest.mark.parametrize("name", ["ct_sym", "ct_asym"])
def test_compressed_tensors(name):
    case = GOLDEN[name]
    w = f32(case["w"])
    rows, cols = w.shape
    encoded = enc.encode(
        w,
        "int4",
        group_size=case["group"],
        rule="half-range" if case["symmetric"] else "minmax",
        asymmetric=not case["symmetric"],
    )
    tensors = {
        "P.weight_packed": st.Tensor("I32", u32(case["packed_u32"]).view("<i4").reshape(rows, -1)),
        "P.weight_scale": st.Tensor("F32", f32(case["scale"])[:, None]),
        "P.weight_shape": st.Tensor("I64", np.array([rows, cols])),
    }
    if not case["symmetric"]:
        packed = u32(case["zp_packed_u32"]).view("<i4")[:, None]
        tensors["P.weight_zero_point"] = st.Tensor("I32", packed)
    args = {
        "num_bits": case["bits"],
        "symmetric": case["symmetric"],
        "strategy": "group",
        "group_size": case["group"],
    }
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": args}}}}
    unpacked = unpack.compressed_tensors(tensors, "P.weight", config)
    assert unpacked.codes.tolist() == encoded.codes.tolist() == case["q"]
    assert np.array_equal(unpacked.scales, encoded.scales)
    zeros = np.zeros((rows, 1), int)
    if not case["symmetric"]:
        zeros = encoded.zeros
        assert zeros[:, 0].tolist() == unpacked.zeros[:, 0].tolist() == case["zp"]
    assert np.array_equal(unpacked.weights, f32(encoded.codes - zeros) * encoded.scales)


def test_compressed_tensors_packing():
    case = GOLDEN["ct_pack_int8"]
    codes = unpack.bit_stream(u32(case["packed_u32"]), case["bits"], len(case["q"]))
    assert (codes.astype(int) - 128).tolist() == case["q"]


def test_gptq_packing():
    """Of codes (8 k + n) % 16 of input k and output n; of zero points; of 0..7 repeated, in 3 bits."""
    case = GOLDEN["gptq_pack"]
    codes = (8 * np.arange(8)[:, None] + np.arange(8)) % 16
    assert np.array_equal(words.pack(codes, 4)[0].view("<u4"), u32(case["qweight_u32"]))
    assert np.array_equal(words.unpack(u32(case["qweight_u32"]).view("<i4")[None], 4), codes)
    for version in (1, 2):
        middle = np.full((8, 1), 8 - (version == 1))
        assert words.pack(middle, 4).view("<u4") == u32([case[f"qzeros_sym_v{version}"]])
        scales, zeros = np.ones((8, 1)), np.array(case["zeros"])[:, None]
        tensors = words.gptq_tensors("P", codes.T, scales, zeros, 4, np.zeros(8), version)
        assert tensors["P.qzeros"].data.view("<u4") == u32([case[f"qzeros_v{version}"]])
    repeated = np.arange(32)[:, None] % 8
    assert np.array_equal(words.pack(repeated, 3)[:, 0].view("<u4"), u32(case["int3_u32"]))
    for bits in (2, 3, 4, 5, 6, 8):
        codes = np.random.default_rng(bits).integers(0, 2**bits, (96, 5))
        for planar in (False, True):
            assert np.array_equal(words.unpack(words.pack(codes, bits, planar), bits, planar), codes)
        if bits in (2, 4, 8):
            assert np.array_equal(words.pack(codes, bits), words.pack(codes, bits, planar=True))


def test_awq_packing():
    case = GOLDEN["awq_pack"]
    codes = np.array([case["codes"]])
    assert words.pack_awq(codes)[0].view("<u4") == u32(case["qweight_u32"])
    assert np.array_equal(words.unpack_awq(words.pack_awq(codes)), codes)


def test_compressed_tensors_of_a_bf16_weight():
    """The library rounds the quotient to bf16 before it rounds to a code; the contract does not."""
    w = st.to_f32(st.from_f32(f32(GOLDEN["ct_sym"]["w"]), "BF16"))
    encoded = enc.encode(w, "int4", group_size=8, rule="half-range", scale_dtype="bf16")
    assert encoded.scales[:, 0] == pytest.approx([0.10693359] * 2, abs=1e-8)
    quotient = st.to_f32(st.from_f32(w / encoded.scales, "BF16"))
    assert enc.integer_codes(quotient, 0, -8, 7).tolist() == GOLDEN["ct_sym"]["q"]
    # -0.80078125 / 0.10693359 = -7.4886, in bf16 -7.5
    assert encoded.codes.tolist() == [[7, -7, 0, 0, -3, 6, 1, -5], GOLDEN["ct_sym"]["q"][1]]


# MLX


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(bits):
    case = GOLDEN[f"mlx_{bits}"]
    x = f32([(i - 10) / 16 for i in range(32)])
    encoded = enc.encode(x, f"affine{bits}", group_size=32, rule="mlx-edge", code_scale="unrounded")
    tensors = {
        "P.weight": st.Tensor("U32", u32(case["u32"])[None]),
        "P.scales": st.Tensor("F32", f32([[case["scale"]]])),
        "P.biases": st.Tensor("F32", f32([[case["bias"]]])),
    }
    config = {"quantization": {"bits": bits, "group_size": 32, "mode": "affine"}}
    unpacked = unpack.mlx(tensors, "P.weight", config)
    assert np.array_equal(unpacked.codes[0], encoded.codes)
    assert encoded.scales == pytest.approx(case["scale"], rel=1e-7)
    assert encoded.biases == case["bias"]
    expected = f32(encoded.codes) * f32(case["scale"]) + f32(case["bias"])
    assert np.array_equal(unpacked.weights[0], expected)


def test_mlx_bf16_rounds_the_scale_after_the_codes():
    x = f32([(i - 10) / 16 for i in range(32)])
    options = dict(group_size=32, rule="mlx-edge", code_scale="unrounded")
    exact = enc.encode(x, "affine4", **options)
    rounded = enc.encode(x, "affine4", scale_dtype="bf16", **options)
    assert np.array_equal(exact.codes, rounded.codes)
    assert rounded.scales == pytest.approx(-0.130859375, abs=0)


@pytest.mark.parametrize(
    "w, scale, bias, codes",
    [
        ([-1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2], -0.2, 2, [15, 12, 10, 9, 8, 5, 2, 0]),
        ([-3, -2.5, -2, -1], 0.13636364, -3, [0, 4, 7, 15]),
        ([1, 2, 2.5, 3], -0.13636364, 3, [15, 7, 4, 0]),
        ([0, 0, 0], -1e-7, 0, [0, 0, 0]),
        ([2.5, 2.5], -1e-7, 2.5, [0, 0]),
        ([0, 1, 0, 0, 0, 0, 0, 0], -0.06666667, 1, [15, 0] + [15] * 6),
    ],
)
def test_mlx_edge(w, scale, bias, codes):
    encoded = enc.encode(f32(w), "affine4", rule="mlx-edge")
    assert encoded.scales[0, 0] == pytest.approx(scale, rel=1e-6)
    assert encoded.biases[0, 0] == bias
    assert encoded.codes.tolist() == codes


# Other packers of the same codes


def test_onnxruntime_blocks():
    case = GOLDEN["ort_nbits_sym"]
    encoded = enc.encode(ramp(case), "int4", group_size=32, rule=case["rule"])
    packed = np.frombuffer(bytes.fromhex(case["packed"]), "u1")
    assert encoded.scales[0, 0] == f32(case["scale"])
    assert np.array_equal(encoded.codes + 8, unpack.bit_stream(packed, 4, 32))

    case = GOLDEN["ort_nbits_asym"]
    encoded = enc.encode(ramp(case), "int4", group_size=32, asymmetric=True)
    packed = np.frombuffer(bytes.fromhex(case["packed"]), "u1")
    assert encoded.scales[0, 0] == f32(case["scale"])
    assert encoded.zeros[0, 0] + 8 == case["zp"]
    assert np.array_equal(encoded.codes + 8, unpack.bit_stream(packed, 4, 32))


# The native layout


def halfbyte_tensors(codes, bits, spec, **parts):
    """Packs the rows of stored codes as one integer each, element i at bit i * bits."""
    row_bytes = -(-codes.shape[-1] * bits // 8)
    packed = b"".join(
        sum(int(code) << (i * bits) for i, code in enumerate(row)).to_bytes(row_bytes, "little")
        for row in codes.reshape(-1, codes.shape[-1])
    )
    packed = np.frombuffer(packed, "u1").reshape(*codes.shape[:-1], row_bytes)
    spec = {"version": 1, "asymmetric": False, "double_quant": False, "dtype": "f32", **spec}
    tensors = {
        "w": st.Tensor("U8", packed),
        "w.quant_spec": st.Tensor("U8", np.frombuffer(json.dumps(spec).encode(), "u1")),
    }
    for suffix, data in parts.items():
        tensors[f"w.{suffix}"] = st.Tensor("U8" if data.dtype == np.uint8 else "F32", data)
    return tensors


def test_halfbyte_asymmetric_with_tails():
    codes = np.random.default_rng(3).integers(0, 8, (2, 3, 5))
    scales = f32([0.5, 2, 3, 0.25, 1, 7, 9, 11, 13, 15, 17, 19]).reshape(2, 3, 2)
    zeros = np.arange(12, dtype=np.uint8).reshape(2, 3, 2) % 8
    spec = {"format": "int3", "asymmetric": True, "granularity": "group", "group_size": 3}
    spec |= {"scale_dtype": "f32", "shape": [2, 3, 5]}
    unpacked = unpack.halfbyte(halfbyte_tensors(codes, 3, spec, scales=scales, zeros=zeros), "w")
    assert np.array_equal(unpacked.codes, codes - 4)
    group = np.arange(5) // 3
    expected = (codes - zeros[..., group].astype(int)) * scales[..., group]
    assert np.array_equal(unpacked.weights, f32(expected))


def test_halfbyte_one_scale_and_a_flat_stream():
    codes = np.random.default_rng(4).integers(0, 16, (3, 5))
    table = f32(np.linspace(-2, 3, 16))
    spec = {"format": "lut4", "scale_dtype": "f32", "shape": [3, 5], "group_size": 4}
    tensors = halfbyte_tensors(
        codes, 4, spec | {"granularity": "tensor"}, scales=f32([0.5]), table=table
    )
    assert np.array_equal(unpack.halfbyte(tensors, "w").weights, table[codes] * f32(0.5))

    scales = f32([1, 2, 4, 8])
    flat = codes.reshape(-1)
    tensors = halfbyte_tensors(flat, 4, spec | {"granularity": "flat"}, scales=scales, table=table)
    expected = table[flat] * scales[np.arange(15) // 4]
    assert np.array_equal(unpack.halfbyte(tensors, "w").weights.reshape(-1), expected)


def test_halfbyte_double_quantization():
    codes = np.random.default_rng(5).integers(0, 16, (300, 4))
    absmax = np.random.default_rng(6).random((300, 2), np.float32) + f32(0.5)
    quantized, block_absmax, offset = enc.double_quantize(absmax)
    spec = {"format": "nf4", "granularity": "group", "group_size": 2, "scale_dtype": "f32"}
    spec |= {"shape": [300, 4], "double_quant": True, "scales_offset": float(offset)}
    tensors = halfbyte_tensors(
        codes, 4, spec, scales=quantized.reshape(300, 2), scales_absmax=block_absmax
    )
    unpacked = unpack.halfbyte(tensors, "w")
    block = np.repeat(block_absmax, 256)[:600]
    scales = tables.DOUBLE_QUANT_MAP[quantized] * block + offset
    assert np.abs(scales - absmax.reshape(-1)).max() < 0.01
    expected = tables.NF4[codes] * np.repeat(scales.reshape(300, 2), 2, axis=1)
    assert np.array_equal(unpacked.weights, expected)


# Code books


def table_formats():
    """The formats of formats.def that have sixteen values of their own."""
    rows = (Path(__file__).parent.parent / "include" / "halfbyte" / "formats.def").read_text()
    names = re.findall(r"^HALFBYTE_FORMAT\((\w+), table,", rows, re.M)
    return [name for name in names if name != "lut4"]


@pytest.mark.parametrize("name", table_formats())
def test_code_book(name):
    """Values by code, and the codes of numbers on and around each middle of two values: exact arithmetic."""
    case = GOLDEN[f"table_{name}"]
    assert bits_of(tables.BY_NAME[name]) == case["values"]
    numbers = np.array([int(word, 16) for word in case["codes"]], "<u4").view("<f4")
    assert enc.table_codes(numbers, name).tolist() == list(case["codes"].values())


def test_fp8():
    """torch 2.15, float8_e4m3fn: x / (absmax / 448), cast, and what is decoded; a cast saturates here."""
    case = GOLDEN["fp8_torch"]
    encoded = enc.encode(ramp(case)[None], "fp8", granularity="channel")
    assert encoded.scales.astype("<f4").tobytes().hex() == case["scale_le"]
    assert encoded.codes.tobytes().hex() == case["codes_hex"]
    numbers = np.array([int(word, 16) for word in case["codes"]], "<u4").view("<f4")
    assert enc.e4m3_codes(numbers).tolist() == list(case["codes"].values())


@pytest.mark.parametrize("document", ["README.md", "docs/formats.md", "docs/numerics.md", "CHANGELOG.md"])
def test_documents_name_every_table(document):
    text = (Path(__file__).parent.parent / document).read_text()
    missing = [name for name in table_formats() if f"`{name}`" not in text]
    assert not missing, f"{document} does not name {missing}"


@pytest.mark.parametrize("document", ["README.md", "docs/formats.md", "CHANGELOG.md"])
def test_documents_name_every_layout(document):
    text = (Path(__file__).parent.parent / document).read_text()
    missing = [name for name in LAYOUTS if f"`{name}`" not in text]
    assert not missing, f"{document} does not name {missing}"


# NF4


def test_nf4_table():
    expected = (
        "BF800000 BF3239B1 BF066B30 BECA32A0 BE91A24D BE3D353F BDBA7871 00000000 "
        "3DA2FAFF 3E24CAE3 3E7C04DD 3EAD033A 3EE1A4B8 3F1007AB 3F3913B3 3F800000"
    )
    assert bits_of(tables.NF4) == expected.split()


def test_nf4_thresholds():
    """Each is the largest f32 not above the true midpoint: it takes the lower code, its successor
    the upper one."""
    thresholds = np.array(
        [
            0xBF591CD9, 0xBF1C5271, 0xBEEB8480, 0xBEADEA77, 0xBE703CED, 0xBE0D38BC, 0xBD3A7871,
            0x3D22FAFF, 0x3DF64862, 0x3E5067E0, 0x3E9582D4, 0x3EC753F9, 0x3F006D03, 0x3F248DAF,
            0x3F5C89D9,
        ],
        np.uint32,
    ).view(np.float32)  # fmt: skip
    above = np.nextafter(thresholds, np.float32(2))
    assert enc.table_codes(thresholds, "nf4").tolist() == list(range(15))
    assert enc.table_codes(above, "nf4").tolist() == list(range(1, 16))
    disputed = np.array(
        [0xBF591CD8, 0xBF1C5270, 0xBEADEA76, 0xBE703CEC, 0x3F006D04, 0x3F5C89DA, 0x3DF64863],
        np.uint32,
    ).view(np.float32)
    assert enc.table_codes(disputed, "nf4").tolist() == [1, 2, 4, 5, 13, 15, 9]


def test_nf4_vector():
    encoded = enc.encode(f32([-2, -1, -0.5, -0.0, 0.1, 0.5, 1, 2]), "nf4")
    assert encoded.scales.tolist() == [[2]]
    assert encoded.codes.tolist() == [0, 2, 4, 7, 8, 10, 12, 15]
    low_first = np.frombuffer(bytes.fromhex("2074A8FC"), "u1")
    high_first = np.frombuffer(bytes.fromhex("02478ACF"), "u1")
    assert unpack.bit_stream(low_first, 4, 8).tolist() == encoded.codes.tolist()
    assert unpack.high_nibble_first(high_first, 8).tolist() == encoded.codes.tolist()
    expected = [-2, -1.0501461, -0.568882763, 0, 0.159160599, 0.492224604, 0.881419659, 2]
    assert np.array_equal(tables.NF4[encoded.codes] * f32(2), f32(expected))


def test_zero_group():
    zeros = np.zeros(64, np.float32)
    for format, code in [("nf4", 7), ("fp4", 0), ("fp4_e2m1", 0), ("int4", 0), ("int8", 0)]:
        encoded = enc.encode(zeros, format)
        assert not encoded.scales.any() and np.all(encoded.codes == code)
    encoded = enc.encode(zeros, "affine4")
    assert encoded.scales.tolist() == [[1]] and not encoded.biases.any()


# FP4


def test_fp4_ties_go_toward_zero():
    order = [0, 1, 6, 7, 4, 5, 2, 3]
    values = tables.FP4_MAGNITUDES[order].astype(np.float64)
    midpoints = (values[:-1] + values[1:]) / 2
    assert enc.table_codes(midpoints, "fp4").tolist() == order[:-1]
    assert enc.table_codes(-midpoints, "fp4").tolist() == [8 | code for code in order[:-1]]
    above = np.nextafter(midpoints, 2)
    assert enc.table_codes(above, "fp4").tolist() == order[1:]
    assert enc.table_codes(f32([0, -0.0, -1e-4]), "fp4").tolist() == [0, 0, 8]
    assert not np.signbit(tables.FP4[8])


def test_e2m1_ties_go_to_the_even_code():
    midpoints = f32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    assert enc.table_codes(midpoints, "fp4_e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert enc.table_codes(-midpoints, "fp4_e2m1").tolist() == [8, 10, 10, 12, 12, 14, 14]
    below, above = np.nextafter(midpoints, f32(0)), np.nextafter(midpoints, f32(9))
    assert enc.table_codes(below, "fp4_e2m1").tolist() == list(range(7))
    assert enc.table_codes(above, "fp4_e2m1").tolist() == list(range(1, 8))


# Integers


@pytest.mark.parametrize(
    "x, scale, zero_point, bounds, codes",
    [
        ([-7, -3.5, -0.5, 0.5, 1.5, 2.5, 3.49, 7], 1, 0, (-8, 7), [-7, -4, 0, 0, 2, 2, 3, 7]),
        (
            [0.25, 0.75, 1.25, 1.75, -0.25, -0.75, -1.25, 63.25, 64, -64.25],
            0.5, 0, (-128, 127), [0, 2, 2, 4, 0, -2, -2, 126, 127, -128],
        ),
        ([0.00150000001, 0.0175000001, 0.057500001], 0.00100000005, 0, (-128, 127), [2, 18, 58]),
        ([0.1, 0.2, 0.3, -0.4], 0.1, 0, (-10, 10), [1, 2, 3, -4]),
        ([1, 2, -3, 4], 1, 0, (-10, 10), [1, 2, -3, 4]),
        ([15, 1, 0.5, -1], 0.5, 0, (-10, 10), [10, 2, 1, -2]),
        ([0.05, 0.10, 0.15, -0.20], 0.1, 0, (-10, 10), [0, 1, 2, -2]),
        ([0.5, 1.5, 2.5, -0.5], 1, 1, (-8, 7), [1, 3, 3, 1]),
        ([0.5, 1.5, 2.5, -0.5], 1, 3, (-8, 7), [3, 5, 5, 3]),
    ],
)  # fmt: skip
def test_integer_rounding(x, scale, zero_point, bounds, codes):
    assert enc.integer_codes(f32(x) / f32(scale), zero_point, *bounds).tolist() == codes


def test_integer_rounding_in_f64():
    quotient = np.array([0.15, 2.5000000001]) / np.array([0.1, 1.0])
    assert enc.integer_codes(quotient, 0, -8, 7).tolist() == [1, 3]


def test_int4_bytes():
    low_first = np.frombuffer(bytes.fromhex("4188AAFB"), "u1")
    codes = unpack.bit_stream(low_first, 4, 8).astype(int) - 8
    assert codes.tolist() == [-7, -4, 0, 0, 2, 2, 3, 7]


def test_int8_vector():
    encoded = enc.encode(f32([-1, -0.5, 0.00390625, 0.1, 0.25, 0.5, 0.75, 1]), "int8")
    assert bits_of(encoded.scales[0]) == ["3C010204"]
    assert encoded.codes.tolist() == [-127, -64, 0, 13, 32, 64, 95, 127]


def test_symmetric_scales():
    one = np.ones(8, np.float32)
    assert bits_of(enc.encode(one, "int4").scales[0]) == ["3E124925"]
    assert bits_of(enc.encode(one, "int4", rule="half-range").scales[0]) == ["3E088889"]


def test_absmax_maps_to_the_largest_code():
    absmax = np.random.default_rng(1).random((100_000, 1), np.float32) + f32(1e-3)
    pairs = np.concatenate([absmax, -absmax], axis=1)
    assert np.array_equal(enc.encode(pairs, "int4").codes, [[7, -7]] * len(pairs))
    assert np.array_equal(enc.encode(pairs, "int8").codes, [[127, -127]] * len(pairs))


def test_int4_asymmetric_vector():
    x = f32([-1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2])
    encoded = enc.encode(x, "int4", asymmetric=True)
    assert bits_of(encoded.scales[0]) == ["3E4CCCCD"]
    assert encoded.zeros[0, 0] + 8 == 5
    assert (encoded.codes + 8).tolist() == [0, 3, 5, 6, 7, 10, 13, 15]


@pytest.mark.parametrize(
    "x, bits, scale, zero_point",
    [
        ([-0.5, 2], 4, 2.5 / 15, -5),
        ([-0.5, 2], 8, 2.5 / 255, -77),
        ([0, 1], 8, 1 / 255, -128),
        ([1, 3], 8, 3 / 255, -128),
        ([5, 5], 8, 5 / 255, -128),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, 7 / 255, -128),
    ],
)
def test_asymmetric_ranges_contain_zero(x, bits, scale, zero_point):
    encoded = enc.encode(f32(x), f"int{bits}", asymmetric=True)
    assert encoded.scales[0, 0] == pytest.approx(scale, rel=1e-7)
    assert encoded.zeros[0, 0] == zero_point
    decoded = f32(encoded.codes - encoded.zeros[0, 0]) * encoded.scales[0, 0]
    assert np.abs(decoded - f32(x)).max() <= encoded.scales[0, 0] / 2 * (1 + 1e-6)


def test_uint8_vector():
    encoded = enc.encode(f32(range(8)), "int8", asymmetric=True)
    assert (encoded.codes + 128).tolist() == [0, 36, 73, 109, 146, 182, 219, 255]


# Affine


@pytest.mark.parametrize(
    "w, scale, bias, codes",
    [
        ([0, 0.5, 1.5, 2.5, 3.5, 7.5, 14.5, 15], 1, 0, [0, 0, 2, 2, 4, 8, 14, 15]),
        ([3.14] * 8, 1, 3.14, [0] * 8),
        ([-3, -2.5, -2, -1], 0.13333334, -3, [0, 4, 7, 15]),
    ],
)
def test_affine_minmax(w, scale, bias, codes):
    encoded = enc.encode(f32(w), "affine4")
    assert encoded.scales[0, 0] == f32(scale)
    assert encoded.biases[0, 0] == f32(bias)
    assert encoded.codes.tolist() == codes


def test_mlx_bytes():
    packed = np.frombuffer(bytes.fromhex("3A17E592"), "u1")
    assert unpack.bit_stream(packed, 4, 8).tolist() == [0xA, 3, 7, 1, 5, 0xE, 2, 9]
    assert packed.view("<u4")[0] == 0x92E5173A


# Scales that underflow


@pytest.mark.parametrize("scale_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("format", ["nf4", "fp4_e2m1", "int4", "int8"])
def test_scale_of_a_nonzero_group_is_not_zero(format, scale_dtype):
    encoded = enc.encode(f32([0, 2.0**-149, 0]), format, scale_dtype=scale_dtype)
    assert encoded.scales[0, 0] == f32(enc.SMALLEST_SUBNORMAL[scale_dtype])


# The error that theory expects of N(0, 1) weights


@pytest.mark.parametrize(
    "format, options, snr_db",
    [
        ("nf4", dict(group_size=32), 21.18),
        ("nf4", dict(group_size=64), 20.73),
        ("nf4", dict(group_size=128, scale_dtype="f16"), 20.39),
        ("fp4", dict(group_size=64), 18.28),
        ("fp4_e2m1", dict(group_size=64), 19.52),
        ("int4", dict(group_size=64), 19.36),
        ("int4", dict(group_size=64, rule="half-range"), 19.76),
        ("int4", dict(group_size=64, rule="signed-max", scale_dtype="f16"), 20.46),
        ("int4", dict(group_size=64, asymmetric=True, scale_dtype="f16"), 20.82),
        ("int3", dict(group_size=64), 12.00),
        ("int2", dict(group_size=64), 2.88),
        ("int8", dict(group_size=64), 44.54),
        ("affine4", dict(group_size=64), 20.95),
        ("affine3", dict(group_size=64), 14.33),
        ("affine2", dict(group_size=64), 6.94),
        ("affine8", dict(group_size=64), 45.56),
        ("affine4", dict(group_size=64, rule="mlx-edge", scale_dtype="f16"), 20.83),
        ("affine3", dict(group_size=64, rule="mlx-edge", scale_dtype="f16"), 14.41),
        ("affine2", dict(group_size=64, rule="mlx-edge", scale_dtype="f16"), 8.08),
    ],
)
def test_error_on_normal_weights(format, options, snr_db):
    x = np.random.default_rng(20240607).standard_normal((1 << 13, 128), np.float32)
    encoded = enc.encode(x, format, **options)
    groups = enc.Groups(x, "group", options["group_size"])
    codes = encoded.codes.reshape(groups.rows.shape)
    if format in tables.BY_NAME:
        decoded = tables.BY_NAME[format][codes] * groups.spread(encoded.scales)
    else:
        zeros = 0 if encoded.zeros is None else groups.spread(encoded.zeros)
        decoded = f32(codes - zeros) * groups.spread(encoded.scales)
        if encoded.biases is not None:
            decoded += groups.spread(encoded.biases)
    noise = np.sum((decoded - x).astype(np.float64) ** 2)
    measured = 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / noise)
    assert measured == pytest.approx(snr_db, abs=0.03)


# Containers


def test_safetensors_example():
    """The bytes that the format's own documentation example has."""
    tensors = {"w": st.Tensor("U8", np.zeros((6, 1), np.uint8))}
    header, _ = st.header_of(tensors, {"format": "pt"})
    text = json.dumps(header, separators=(",", ":"))
    assert len(text) == 86 and text == (
        '{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[6,1],"data_offsets":[0,6]}}'
    )


def test_safetensors_round_trip(tmp_path):
    x = f32([0, 1, -2.5, 3e-5])
    tensors = {
        "bf16": st.from_f32(x, "BF16"),
        "f16": st.from_f32(x.reshape(2, 2), "F16"),
        "f32": st.from_f32(x, "F32"),
        "i64": st.Tensor("I64", np.array([3, 4])),
        "empty": st.Tensor("U8", np.zeros((0, 5), np.uint8)),
        "scalar": st.Tensor("F32", np.array(7, np.float32)),
    }
    path = tmp_path / "t.safetensors"
    st.write(path, tensors, {"format": "pt"})
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    back, metadata = st.read(path)
    assert metadata == {"format": "pt"}
    assert back.keys() == tensors.keys()
    for name, (dtype, data) in tensors.items():
        assert back[name].dtype == dtype and np.array_equal(back[name].data, data)


def test_bf16_conversion():
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x80000000], np.uint32)
    bits = st.f32_to_bf16(x.view(np.float32))
    assert bits.tolist() == [0x3F80, 0x3F82, 0x3F81, 0, 0x8000]
    patterns = np.arange(0x7F80, dtype=np.uint16)
    assert np.array_equal(st.f32_to_bf16(st.bf16_to_f32(patterns)), patterns)
