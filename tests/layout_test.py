"""Every layout and format the command line tool writes, against the independent implementation:
the tensors and configuration on disk, every code, and every decoded weight."""

import filecmp
import json
import shutil
import subprocess
from dataclasses import dataclass

import numpy as np
import pytest

from conftest import LAYOUTS, TINY_LLAMA
from independent import checkpoints, tables, unpack
from independent import encode as enc
from independent import safetensors_io as st

SHORT_DTYPE = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
TORCH_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
LUT4_TABLE = np.array(
    [-1, -0.8, -0.6, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1],
    np.float32,
)


@dataclass(frozen=True)
class Case:
    """One run of `quantize`. What is None is left to the defaults of the layout."""

    source: str  # "tiny-llama", or a function of independent.checkpoints
    layout: str
    format: str
    group_size: int | str | None = None  # "channel" and "tensor" too
    rule: str | None = None
    scale_dtype: str | None = None
    asymmetric: bool = False
    double_quant: bool = False

    def id(self):
        words = [self.source, self.layout, self.format, self.group_size, self.rule]
        words += [self.scale_dtype, self.asymmetric and "asymmetric"]
        words += [self.double_quant and "double-quant"]
        return "-".join(str(word) for word in words if word)

    def arguments(self):
        result = ["--format", self.format, "--layout", self.layout]
        if self.group_size is not None:
            result += ["--group-size", self.group_size]
        if self.rule is not None:
            result += ["--scale-rule", self.rule]
        if self.scale_dtype is not None:
            result += ["--scale-dtype", self.scale_dtype]
        if self.format == "lut4":
            result += ["--table", ",".join(map(str, LUT4_TABLE))]
        return result + ["--asymmetric"] * self.asymmetric + ["--double-quant"] * self.double_quant

    @property
    def granularity(self):
        if self.group_size in ("channel", "tensor"):
            return self.group_size
        if self.format == "fp8" and self.layout in ("compressed-tensors", "modelopt") and self.group_size is None:
            return "channel" if self.layout == "compressed-tensors" else "tensor"
        return "flat" if self.layout == "bitsandbytes" else "group"

    @property
    def blocks(self):
        """Scales are those of 128 rows, too."""
        return self.format == "fp8" and self.layout != "halfbyte" and self.granularity == "group"

    @property
    def resolved_group_size(self):
        if type(self.group_size) is int:
            return self.group_size
        if self.format in enc.BLOCK_FLOATS:
            return enc.BLOCK_FLOATS[self.format]
        if self.blocks:
            return enc.FP8_BLOCK
        return 128 if self.layout in ("compressed-tensors", "gptq", "awq") else 64

    @property
    def resolved_rule(self):
        if self.rule is not None:
            return self.rule
        if self.asymmetric:
            return "minmax"
        if self.format in enc.BLOCK_FLOATS:
            return "absmax"
        if self.format.startswith("affine"):
            return "mlx-edge" if self.layout == "mlx" else "minmax"
        return "half-range" if self.layout in ("compressed-tensors", "gptq", "awq") else "absmax"

    def resolved_scale_dtype(self, tensor):
        if self.scale_dtype is not None:
            return self.scale_dtype
        if self.format in enc.BLOCK_FLOATS:
            return {"nvfp4": "f8_e4m3", "mxfp4": "f8_e8m0"}[self.format]
        if self.layout in ("fp8", "modelopt"):
            return "f32"
        if self.layout in ("mlx", "compressed-tensors"):
            return SHORT_DTYPE[tensor.dtype]
        if self.layout == "bitsandbytes" or self.double_quant:
            return "f32"
        if self.layout in ("gptq", "awq"):
            return "f16"
        # The native layout takes f32 scales by itself where f16 cannot hold them. The scale of a
        # constant affine group says nothing: all its codes are 0.
        scales = self.encode(tensor, "f32").scales
        if self.format.startswith("affine"):
            groups = enc.Groups(st.to_f32(tensor), self.granularity, self.resolved_group_size)
            scales = scales[groups.min != groups.max]
        return "f16" if enc.holds(scales, "f16") else "f32"

    def encode(self, tensor, scale_dtype, fused=()):
        """The weight by the independent encoder. fused: all weights of the same product."""
        dtype = SHORT_DTYPE[tensor.dtype]
        zero_group_scale = enc.EPSILON.get(scale_dtype) if self.layout in ("compressed-tensors", "fp8", "modelopt") else 0
        if self.blocks:
            return enc.encode_fp8_blocks(st.to_f32(tensor), scale_dtype, zero_group_scale)
        if self.layout == "gpt-oss":
            encoded = enc.encode(np.ascontiguousarray(np.swapaxes(st.to_f32(tensor), 1, 2)), self.format)
            encoded.codes = np.swapaxes(encoded.codes, 1, 2)
            return encoded
        if self.format == "nvfp4":
            absmax = max((np.abs(st.to_f32(each)).max(initial=0) for each in fused), default=None)
            return enc.encode_nvfp4(enc.Groups(st.to_f32(tensor), "group", 16), absmax)
        return enc.encode(
            st.to_f32(tensor),
            self.format,
            scale_dtype=scale_dtype,
            granularity=self.granularity,
            group_size=self.resolved_group_size,
            asymmetric=self.asymmetric,
            rule=self.resolved_rule,
            code_scale="unrounded" if self.layout == "mlx" else "stored",
            zero_group_scale=zero_group_scale,
            table=LUT4_TABLE,
        )


def cases():
    for source in ("tiny-llama", "odd"):
        for format in ("nf4", "fp4"):
            yield Case(source, "bitsandbytes", format)
            yield Case(source, "bitsandbytes", format, double_quant=True)
        for format in ("nf4", "fp4_e2m1", "int2", "int3", "int5", "int6"):
            yield Case(source, "halfbyte", format)
        yield Case(source, "halfbyte", "int4", asymmetric=True)
    yield Case("odd", "bitsandbytes", "nf4", 128)
    yield Case("odd", "bitsandbytes", "fp4", 4096)
    yield Case("experts", "bitsandbytes", "nf4", double_quant=True)

    for source in ("tiny-llama", "grouped"):
        for rule in ("half-range", "absmax"):
            yield Case(source, "compressed-tensors", "int4", rule=rule)
        yield Case(source, "compressed-tensors", "int4", asymmetric=True)
        yield Case(source, "compressed-tensors", "int8")
        for format in ("affine2", "affine3", "affine4", "affine8"):
            yield Case(source, "mlx", format)
            yield Case(source, "mlx", format, rule="minmax")
    yield Case("grouped", "compressed-tensors", "int4")
    yield Case("grouped", "compressed-tensors", "int4", 32)
    yield Case("grouped", "compressed-tensors", "int8", asymmetric=True)
    for source in ("grouped", "odd_rows", "experts"):
        yield Case(source, "compressed-tensors", "int4", "channel")
        yield Case(source, "compressed-tensors", "int4", "channel", asymmetric=True)
        yield Case(source, "compressed-tensors", "int8", "channel")
    yield Case("experts", "compressed-tensors", "int4")
    yield Case("experts", "compressed-tensors", "int4", asymmetric=True)
    yield Case("experts", "compressed-tensors", "int8", asymmetric=True)

    for asymmetric in (False, True):
        for format in ("int2", "int3", "int4", "int8"):
            yield Case("words", "gptq", format, asymmetric=asymmetric)
            yield Case("words", "gptq", format, "channel", asymmetric=asymmetric)
        yield Case("tiny-llama", "gptq", "int4", asymmetric=asymmetric)
        yield Case("many_words", "gptq", "int3", asymmetric=asymmetric)
        yield Case("tiny-llama", "awq", "int4", asymmetric=asymmetric)
        yield Case("words", "awq", "int4", asymmetric=asymmetric)
        yield Case("words", "awq", "int4", "channel", asymmetric=asymmetric)
        yield Case("many_words", "awq", "int4", 64, asymmetric=asymmetric)
    yield Case("words", "gptq", "int4", 32, rule="absmax")
    yield Case("many_words", "gptq", "int4", 64)

    yield Case("grouped", "mlx", "affine5")
    yield Case("grouped", "mlx", "affine6")
    yield Case("grouped", "mlx", "affine4", 32)
    yield Case("grouped", "mlx", "affine3", 128)
    yield Case("experts", "mlx", "affine4")
    yield Case("experts", "mlx", "affine5")

    for format in ("fp4", "lut4", "int4", "int8"):
        yield Case("odd", "halfbyte", format)
    for bits in (2, 3, 4, 5, 6, 8):
        yield Case("odd", "halfbyte", f"affine{bits}")
        yield Case("odd", "halfbyte", f"int{bits}", "channel", asymmetric=True)
    yield Case("odd", "halfbyte", "affine4", rule="mlx-edge")
    yield Case("odd", "halfbyte", "affine3", rule="mlx-edge", scale_dtype="f32")
    yield Case("odd", "halfbyte", "int4", rule="half-range")
    yield Case("odd", "halfbyte", "int4", rule="signed-max")
    yield Case("odd", "halfbyte", "int3", rule="signed-max", scale_dtype="bf16")
    for scale_dtype in ("f32", "bf16"):
        yield Case("odd", "halfbyte", "nf4", scale_dtype=scale_dtype)
        yield Case("odd", "halfbyte", "int5", 48, scale_dtype=scale_dtype)
        yield Case("odd", "halfbyte", "affine6", 33, scale_dtype=scale_dtype)
    for group_size in (1, 3, 100_000, "channel", "tensor"):
        yield Case("odd", "halfbyte", "nf4", group_size)
        yield Case("odd", "halfbyte", "int6", group_size)
    yield Case("odd", "halfbyte", "int4", "tensor", asymmetric=True)
    yield Case("odd", "halfbyte", "affine5", "tensor")
    for format in ("nf4", "fp4_e2m1", "lut4", "int3"):
        yield Case("odd", "halfbyte", format, double_quant=True)
    yield Case("odd", "halfbyte", "int4", 16, asymmetric=True, double_quant=True)
    yield Case("odd", "halfbyte", "nf4", "channel", double_quant=True)
    for format in ("nf4", "int3", "affine5"):
        yield Case("experts", "halfbyte", format)
    yield Case("experts", "halfbyte", "nf4", double_quant=True)

    for format in ("nvfp4", "mxfp4"):
        yield Case("tiny-llama", "compressed-tensors", format)
        yield Case("grouped", "compressed-tensors", format)
        yield Case("experts", "compressed-tensors", format)
        yield Case("odd", "halfbyte", format)
        yield Case("experts", "halfbyte", format)
    yield Case("tiny-llama", "modelopt", "nvfp4")
    yield Case("grouped", "modelopt", "nvfp4")

    yield Case("tiny-llama", "compressed-tensors", "fp8")
    for group_size in (None, 128, "tensor"):
        yield Case("blocks", "compressed-tensors", "fp8", group_size)
    yield Case("blocks", "compressed-tensors", "fp8", 128, scale_dtype="f32")
    yield Case("tiny-llama", "modelopt", "fp8")
    yield Case("blocks", "modelopt", "fp8")
    yield Case("tiny-llama", "fp8", "fp8")
    yield Case("blocks", "fp8", "fp8")
    for group_size in (None, 128, "channel", "tensor"):
        yield Case("odd", "halfbyte", "fp8", group_size)
    yield Case("odd", "halfbyte", "fp8", scale_dtype="bf16")
    yield Case("experts", "halfbyte", "fp8")
    yield Case("turned_experts", "gpt-oss", "mxfp4")


CASES = {case.id(): case for case in cases()}


def test_every_layout_has_cases():
    assert set(LAYOUTS) - {case.layout for case in CASES.values()} == set()


class Model:
    """A model directory in memory."""

    def __init__(self, path):
        self.path = path
        self.tensors, self.metadata = st.read_directory(path)
        self.config = json.loads((path / "config.json").read_text())

    def files(self):
        return {str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def source_of(tmp_path_factory):
    models = {}

    def get(name):
        if name not in models:
            path = TINY_LLAMA
            if name != "tiny-llama":
                path = tmp_path_factory.mktemp("source") / name
                checkpoints.write_model(path, getattr(checkpoints, name)())
            models[name] = Model(path)
        return models[name]

    return get


class Run:
    """A source, its quantized form, and what `dequantize` makes of that."""

    def __init__(self, case, source, quantized, dense):
        self.case = case
        self.source = source
        self.quantized = quantized
        self.dense = dense
        self.unpacked = unpack.weights(quantized.tensors, quantized.config)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def run(request, halfbyte, source_of, tmp_path_factory):
    case = request.param
    source = source_of(case.source)
    path = tmp_path_factory.mktemp("run")
    halfbyte("quantize", source.path, "-o", path / "q", *case.arguments())
    halfbyte("dequantize", path / "q", "-o", path / "dense", "--dtype", "f32")
    yield Run(case, source, Model(path / "q"), Model(path / "dense"))
    shutil.rmtree(path)


def selected(source, layout="bitsandbytes"):
    """The weights that are quantized by default: the linear layers, less lm_head; mlx-lm has embeddings too."""
    suffixes = ("_proj.weight",)
    if layout == "mlx" and source.config.get("model_type") == "llama":
        suffixes += ("embed_tokens.weight", "lm_head.weight")
    rank = 3 if layout == "gpt-oss" else 2
    return {
        name for name, tensor in source.tensors.items() if name.endswith(suffixes) and tensor.data.ndim >= rank
    }


def num_groups(case, shape):
    """Shape of the scales."""
    if case.granularity == "tensor":
        return [1]
    if case.granularity == "channel":
        return [*shape[:-1], 1]
    size = case.resolved_group_size
    if case.blocks:
        return [*shape[:-2], *(-(-extent // size) for extent in shape[-2:])]
    if case.granularity == "flat":
        return [-(-int(np.prod(shape)) // size)]
    return [*shape[:-1], -(-shape[-1] // size)]


def expected_parts(case, name, tensor):
    """{key: (dtype, shape)} of a quantized weight. The length of a JSON blob is None."""
    module = name.removesuffix(".weight")
    shape = list(tensor.data.shape)
    groups = num_groups(case, shape)
    scale_count = int(np.prod(groups))
    bits = enc.bits_of(case.format)
    scale_dtype = (enc.FILE_DTYPE | {"f8_e4m3": "F8_E4M3", "f8_e8m0": "F8_E8M0"})[case.resolved_scale_dtype(tensor)]
    if case.format == "fp8" and case.layout != "halfbyte":
        ending = "_scale_inv" if case.layout == "fp8" else "_scale"
        return {name: ("F8_E4M3", shape), f"{name}{ending}": (scale_dtype, [] if case.layout == "modelopt" else groups)}
    if case.layout == "gpt-oss":
        scales = [shape[0], shape[2], shape[1] // 32]
        return {f"{name}_blocks": ("U8", [*scales, 16]), f"{name}_scales": ("U8", scales)}
    if case.format in enc.BLOCK_FLOATS and case.layout != "halfbyte":
        codes = ("U8", [*shape[:-1], shape[-1] // 2])
        scales = ("F8_E4M3" if case.format == "nvfp4" else "U8", groups)
        if case.layout == "modelopt":
            return {name: codes, f"{name}_scale": scales, f"{name}_scale_2": ("F32", [])}
        parts = {f"{name}_packed": codes, f"{name}_scale": scales}
        return parts | ({f"{name}_global_scale": ("F32", [1])} if case.format == "nvfp4" else {})
    if case.layout == "bitsandbytes":
        parts = {
            name: ("U8", [-(-int(np.prod(shape)) // 2), 1]),
            f"{name}.absmax": ("U8" if case.double_quant else "F32", groups),
            f"{name}.quant_map": ("F32", [16]),
            f"{name}.quant_state.bitsandbytes__{case.format}": ("U8", None),
        }
        if case.double_quant:
            parts[f"{name}.nested_absmax"] = ("F32", [-(-scale_count // 256)])
            parts[f"{name}.nested_quant_map"] = ("F32", [256])
    elif case.layout == "compressed-tensors":
        parts = {
            f"{module}.weight_packed": ("I32", [*shape[:-1], -(-shape[-1] * bits // 32)]),
            f"{module}.weight_scale": (scale_dtype, groups),
            f"{module}.weight_shape": ("I64", [len(shape)]),
        }
        if case.asymmetric:
            words = -(-shape[-2] * bits // 32)
            zero_shape = [*shape[:-2], words, groups[-1]]
            parts[f"{module}.weight_zero_point"] = ("I32", zero_shape)
    elif case.layout in ("gptq", "awq"):
        out, width = shape
        parts = {
            f"{module}.qweight": ("I32", [width * bits // 32, out] if case.layout == "gptq" else [width, out // 8]),
            f"{module}.qzeros": ("I32", [groups[-1], out * bits // 32]),
            f"{module}.scales": ("F16", [groups[-1], out]),
        }
        if case.layout == "gptq":
            parts[f"{module}.g_idx"] = ("I32", [width])
    elif case.layout == "mlx":
        parts = {
            name: ("U32", [*shape[:-1], shape[-1] * bits // 32]),
            f"{module}.scales": (scale_dtype, groups),
            f"{module}.biases": (scale_dtype, groups),
        }
    else:
        parts = {
            name: ("U8", [*shape[:-1], -(-shape[-1] * bits // 8)]),
            f"{name}.scales": ("U8" if case.double_quant else scale_dtype, groups),
            f"{name}.quant_spec": ("U8", None),
        }
        if case.double_quant:
            parts[f"{name}.scales_absmax"] = ("F32", [-(-scale_count // 256)])
        if case.asymmetric:
            parts[f"{name}.zeros"] = ("U8", groups)
        if case.format == "nvfp4":
            parts[f"{name}.global_scale"] = ("F32", [1])
        if case.format.startswith("affine"):
            parts[f"{name}.biases"] = (scale_dtype, groups)
        if case.format == "lut4":
            parts[f"{name}.table"] = ("F32", [16])
    return parts


def test_tensors_on_disk(run):
    case = run.case
    expected = {}
    for name, tensor in run.source.tensors.items():
        if name in selected(run.source, case.layout):
            expected |= expected_parts(case, name, tensor)
        else:
            expected[name] = (tensor.dtype, list(tensor.data.shape))
            stored = run.quantized.tensors[name]
            assert stored.data.tobytes() == tensor.data.tobytes(), f"{name} is not a copy"
    assert set(run.quantized.tensors) == set(expected)
    for key, (dtype, shape) in expected.items():
        stored = run.quantized.tensors[key]
        assert stored.dtype == dtype, key
        if shape is not None:
            assert list(stored.data.shape) == shape, key
    assert run.quantized.metadata["format"] == ("mlx" if case.layout == "mlx" else "pt")
    assert set(run.unpacked) == selected(run.source, case.layout)
    for name, unpacked in run.unpacked.items():
        tensor = run.source.tensors[name]
        assert unpacked.spec["shape"] == list(tensor.data.shape)
        assert set(unpacked.keys) == set(expected_parts(case, name, tensor))


def test_every_decoded_weight(run):
    assert set(run.dense.tensors) == set(run.source.tensors)
    for name, unpacked in run.unpacked.items():
        dense = run.dense.tensors[name]
        assert dense.dtype == "F32" and dense.data.shape == unpacked.weights.shape
        ours, theirs = unpacked.weights.view(np.uint32), dense.data.view(np.uint32)
        assert_same(name, "weight", ours, theirs, unpacked.weights, dense.data)
    for name in set(run.source.tensors) - set(run.unpacked):
        assert run.dense.tensors[name].data.shape == run.source.tensors[name].data.shape


def test_every_code(run):
    case = run.case
    for name, unpacked in run.unpacked.items():
        tensor = run.source.tensors[name]
        products = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]
        fused = fused_weights(run.source, name, products)
        encoded = case.encode(tensor, case.resolved_scale_dtype(tensor), fused)
        if encoded.global_scale is not None and case.layout == "modelopt":
            assert abs(encoded.global_scale / unpacked.global_scale - 1) < 2**-22
            assert_same(name, "byte of the scale", encoded.scale_codes, run.quantized.tensors[f"{name}_scale"].data)
            assert_same(name, "code", encoded.codes, unpacked.codes, st.to_f32(tensor))
            continue
        if encoded.global_scale is not None:
            assert encoded.global_scale == unpacked.global_scale, name
        if case.double_quant:
            check_double_quant(name, encoded, unpacked)
        else:
            assert_same(name, "scale", encoded.scales, unpacked.scales)
        if encoded.zeros is not None:
            assert_same(name, "zero point", encoded.zeros, unpacked.zeros)
        elif case.layout == "awq":  # stored of all weights; -8 + 8
            assert np.all(unpacked.zeros == 0), name
        if encoded.biases is not None:
            assert_same(name, "bias", encoded.biases, unpacked.biases)
        assert_same(name, "code", encoded.codes, unpacked.codes, st.to_f32(tensor))


def fused_weights(source, name, products):
    """Those that runtimes multiply by as one: q, k, v; gate, up."""
    module, _, last = name.removesuffix(".weight").rpartition(".")
    for product in products:
        if last in product:
            names = [f"{module}.{each}.weight" for each in sorted(product)]
            return [source.tensors[each] for each in names if each in source.tensors]
    return [source.tensors[name]]


def check_double_quant(name, encoded, unpacked):
    """The offset is a mean whose order of summation is fixed; the rest follows from the offset."""
    stored_codes, stored_absmax, stored_offset = unpacked.double_quant
    offset = enc.fixed_order_mean(encoded.scales.reshape(-1))
    assert stored_offset == float(offset), f"{name}: offset {stored_offset}, expected {offset}"
    codes, absmax, _ = enc.double_quantize(encoded.scales)
    assert_same(name, "absmax of the scales", absmax, stored_absmax)
    assert_same(name, "code of the scale", codes, stored_codes.reshape(-1))


def assert_same(name, what, expected, actual, *values):
    """All elements equal; a failure shows the first that is not."""
    assert expected.shape == actual.shape, f"{name}: shape of each {what}"
    differ = expected != actual
    if differ.any():
        first = tuple(np.argwhere(differ)[0].tolist())
        shown = [str(value[first]) for value in values]
        pytest.fail(
            f"{name}: {differ.sum()} of {differ.size} times another {what}, first at {first}: "
            f"expected {expected[first]}, got {actual[first]}; {' '.join(shown)}"
        )


# What each layout says about itself


def run_once(halfbyte, source, tmp_path, *arguments):
    halfbyte("quantize", source.path, "-o", tmp_path / "q", *arguments)
    return Model(tmp_path / "q")


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("double_quant", [False, True])
def test_bitsandbytes_configuration(halfbyte, source_of, tmp_path, double_quant):
    source = source_of("odd")
    arguments = ["--format", "nf4", "--exclude", r"layers\.1\.mlp\.down"]
    model = run_once(halfbyte, source, tmp_path, *arguments, *["--double-quant"] * double_quant)
    assert without(model.config, "quantization_config") == source.config
    config = model.config["quantization_config"]
    skipped = config.pop("llm_int8_skip_modules")
    assert sorted(skipped) == ["lm_head", "model.layers.1.mlp.down_proj"]
    assert config == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    for name in unpack.weights(model.tensors, model.config):
        tensor = source.tensors[name]
        blob = model.tensors[f"{name}.quant_state.bitsandbytes__nf4"].data.tobytes().decode()
        state = json.loads(blob)
        expected = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": TORCH_DTYPE[tensor.dtype],
            "shape": list(tensor.data.shape),
        }
        if double_quant:
            assert state["nested_offset"] == np.float32(state["nested_offset"])
            expected |= {"nested_blocksize": 256, "nested_dtype": "float32"}
            expected["nested_offset"] = state["nested_offset"]
            nested_map = model.tensors[f"{name}.nested_quant_map"].data
            assert nested_map.tobytes() == tables.DOUBLE_QUANT_MAP.tobytes()
        assert list(state.items()) == list(expected.items())
        assert blob.startswith(json.dumps(without(expected, "nested_offset"))[:-1])
        assert np.array_equal(model.tensors[f"{name}.quant_map"].data, tables.NF4)


def test_bitsandbytes_padding_is_zero(halfbyte, source_of, tmp_path):
    """The spare nibble of an odd number of elements."""
    for format, code in (("nf4", 7), ("fp4", 0)):
        model = run_once(halfbyte, source_of("odd"), tmp_path, "--force", "--format", format)
        packed = model.tensors["model.layers.0.mlp.up_proj.weight"].data
        assert packed[-1, 0] & 15 == code


def test_fp4_table_on_disk(halfbyte, source_of, tmp_path):
    model = run_once(halfbyte, source_of("odd"), tmp_path, "--format", "fp4")
    for key, tensor in model.tensors.items():
        if key.endswith(".quant_map"):
            assert np.array_equal(tensor.data, tables.FP4)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_configuration(
    halfbyte, source_of, tmp_path, strategy, bits, asymmetric
):
    source = source_of("grouped")
    arguments = ["--format", f"int{bits}", "--exclude", r"layers\.1\.mlp\.down"]
    arguments += ["--layout", "compressed-tensors", *["--asymmetric"] * asymmetric]
    if strategy == "channel":
        arguments += ["--group-size", "channel"]
    model = run_once(halfbyte, source, tmp_path, *arguments)
    assert without(model.config, "quantization_config") == source.config
    config = model.config["quantization_config"]
    assert sorted(config.pop("ignore")) == ["lm_head", "model.layers.1.mlp.down_proj"]
    if asymmetric:
        assert config.pop("run_compressed") is False
    weights = {"num_bits": bits, "type": "int", "symmetric": not asymmetric}
    weights |= {"strategy": strategy, "dynamic": False}
    group = config["config_groups"]["group_0"]
    if strategy == "group":
        weights["group_size"] = 128
    elif "group_size" in group["weights"]:
        assert group["weights"].pop("group_size") is None
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": weights,
            }
        },
    }
    for name in selected(source) - {"model.layers.1.mlp.down_proj.weight"}:
        shape = model.tensors[f"{name}_shape"].data
        assert shape.tolist() == list(source.tensors[name].data.shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_configuration(halfbyte, source_of, tmp_path, bits):
    source = source_of("grouped")
    arguments = ["--format", f"affine{bits}", "--exclude", r"layers\.1\.mlp\.down"]
    model = run_once(halfbyte, source, tmp_path, *arguments)
    assert without(model.config, "quantization", "quantization_config") == source.config
    expected = {"group_size": 64, "bits": bits, "mode": "affine"}
    assert model.config["quantization"] == model.config["quantization_config"] == expected


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, "channel"])
@pytest.mark.parametrize("layout, bits", [("gptq", 2), ("gptq", 4), ("awq", 4)])
def test_words_configuration(halfbyte, source_of, tmp_path, layout, bits, group_size, asymmetric):
    source = source_of("tiny-llama")
    arguments = ["--format", f"int{bits}", "--layout", layout, "--group-size", group_size]
    arguments += ["--exclude", r"layers\.1\.mlp\.down", *["--asymmetric"] * asymmetric]
    model = run_once(halfbyte, source, tmp_path, *arguments)
    assert without(model.config, "quantization_config") == source.config
    config = model.config["quantization_config"]
    expected = {"quant_method": layout, "bits": bits, "group_size": -1 if group_size == "channel" else group_size}
    if layout == "awq":
        assert sorted(config.pop("modules_to_not_convert")) == ["lm_head", "model.layers.1.mlp.down_proj"]
        expected |= {"zero_point": True, "version": "gemm", "lm_head": False}
    else:
        assert json.loads((model.path / "quantize_config.json").read_text()) == config
        (modules,) = config.pop("modules_in_block_to_quantize")
        assert set(modules) == {n.removesuffix(".weight") for n in unpack.weights(model.tensors, model.config)}
        expected |= {"sym": not asymmetric, "desc_act": False, "pack_dtype": "int32", "lm_head": False}
        expected |= {"checkpoint_format": "gptq_v2" if asymmetric else "gptq", "block_name_to_quantize": "model.layers"}
    assert config == expected


def test_words_that_do_not_fit(halfbyte, source_of, tmp_path):
    """Words hold whole codes: what does not fill them is refused, or stays dense."""
    source = source_of("grouped")
    arguments = ["quantize", source.path, "-o", tmp_path / "q", "--format", "int4", "--group-size", "64"]
    message = halfbyte(*arguments, "--layout", "awq", expect=3).stderr
    assert "layout awq: 13 rows are not a multiple of 8" in message or "are not a multiple of 8" in message
    halfbyte(*arguments, "--layout", "gptq", "--fallback", "dense")
    assert set(unpack.weights(*(lambda m: (m.tensors, m.config))(Model(tmp_path / "q")))) == {
        "model.layers.1.mlp.down_proj.weight"
    }
    message = halfbyte("quantize", source_of("experts").path, "-o", tmp_path / "e", "--format", "int4",
                       "--layout", "gptq", "--group-size", "64", expect=3).stderr  # fmt: skip
    assert "layout gptq: holds matrices, not tensors of 3 axes" in message


def test_halfbyte_specification(halfbyte, source_of, tmp_path):
    source = source_of("experts")
    for arguments, expected in [
        (
            ["--format", "nf4", "--double-quant"],
            {"format": "nf4", "asymmetric": False, "granularity": "group", "group_size": 64,
             "scale_rule": "absmax", "scale_dtype": "f32", "double_quant": True},
        ),
        (
            ["--format", "int4", "--asymmetric", "--group-size", "channel"],
            {"format": "int4", "asymmetric": True, "granularity": "channel",
             "scale_rule": "minmax", "scale_dtype": "f16", "double_quant": False},
        ),
        (
            ["--format", "affine3", "--group-size", "32", "--scale-rule", "mlx-edge",
             "--scale-dtype", "bf16"],
            {"format": "affine3", "asymmetric": False, "granularity": "group", "group_size": 32,
             "scale_rule": "mlx-edge", "scale_dtype": "bf16", "double_quant": False},
        ),
    ]:  # fmt: skip
        model = run_once(halfbyte, source, tmp_path, "--force", "--layout", "halfbyte", *arguments)
        for name, unpacked in unpack.weights(model.tensors, model.config).items():
            tensor = source.tensors[name]
            spec = dict(unpacked.spec)
            assert spec.pop("version") == 1
            assert spec.pop("shape") == list(tensor.data.shape)
            assert spec.pop("dtype") == SHORT_DTYPE[tensor.dtype]
            if spec["double_quant"]:
                offset = spec.pop("scales_offset")
                assert offset == np.float32(offset)
            if spec["granularity"] != "group":
                spec.pop("group_size", None)
            assert spec == expected


def test_halfbyte_padding_is_zero(halfbyte, source_of, tmp_path):
    """The spare bits of a row hold the code of zero."""
    for format, bits, zero in [("nf4", 4, 7), ("int3", 3, 4), ("int5", 5, 16), ("int6", 6, 32)]:
        arguments = ["--force", "--layout", "halfbyte", "--format", format]
        model = run_once(halfbyte, source_of("odd"), tmp_path, *arguments)
        packed = model.tensors["model.layers.0.mlp.up_proj.weight"].data  # rows of 7 elements
        spare_bits = packed.shape[1] * 8 - 7 * bits
        spare = packed[:, -1] >> (8 - spare_bits)
        assert np.all(spare == zero & ((1 << spare_bits) - 1)), format


def test_scales_that_f16_cannot_hold(halfbyte, tmp_path):
    """The native layout takes f32 scales by itself, and says so."""
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": st.from_f32(x * np.float32(1e-7), "F32"),
        "model.layers.0.mlp.down_proj.weight": st.from_f32(x * np.float32(1e6), "F32"),
        "model.layers.0.mlp.gate_proj.weight": st.from_f32(x, "F32"),
    }
    checkpoints.write_model(tmp_path / "m", tensors)
    result = halfbyte("quantize", tmp_path / "m", "-o", tmp_path / "q", "--layout", "halfbyte")
    assert "f16" in result.stdout + result.stderr
    model = Model(tmp_path / "q")
    for name, unpacked in unpack.weights(model.tensors, model.config).items():
        expected = "f16" if "gate" in name else "f32"
        assert unpacked.spec["scale_dtype"] == expected, name
        encoded = enc.encode(st.to_f32(tensors[name]), "nf4", scale_dtype=expected)
        assert_same(name, "code", encoded.codes, unpacked.codes)
        assert_same(name, "scale", encoded.scales, unpacked.scales)


@pytest.mark.parametrize("format", ["nf4", "int4", "int4-asymmetric", "affine4", "affine8"])
def test_values_near_the_largest_float(cli, tmp_path, format):
    """The range overflows f32: the weights are refused, or decoded within one step."""
    x = np.random.default_rng(2).uniform(-3.2e38, 3.2e38, (4, 128)).astype(np.float32)
    x[:, :2] = [3.3e38, -3.3e38]
    name = "model.layers.0.mlp.up_proj.weight"
    st.write(tmp_path / "in.safetensors", {name: st.Tensor("F32", x)})
    command = [cli, "quantize", tmp_path / "in.safetensors", "-o", tmp_path / "q.safetensors"]
    command += ["--layout", "halfbyte", "--format", *format.replace("-", " --").split()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        assert done.returncode == 3 and name in done.stderr
        return
    unpacked = unpack.weights(st.read(tmp_path / "q.safetensors")[0], {})[name]
    step = 6.6e38 / (2 ** enc.bits_of(unpacked.spec["format"]) - 1)
    error = np.abs(unpacked.weights.astype(np.float64) - x)
    assert error.max() <= step * (2 if format == "nf4" else 1)


# Directories


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "nf4", "--double-quant"],
        ["--format", "int4", "--group-size", "channel"],
        ["--format", "affine4", "--layout", "halfbyte"],
    ],
)
def test_dequantize_restores_the_directory(halfbyte, source_of, tmp_path, arguments):
    source = source_of("odd_rows")
    quantized = run_once(halfbyte, source, tmp_path, *arguments)
    halfbyte("dequantize", quantized.path, "-o", tmp_path / "dense")
    halfbyte("dequantize", quantized.path, "-o", tmp_path / "f32", "--dtype", "f32")
    dense, dense_f32 = Model(tmp_path / "dense"), Model(tmp_path / "f32")
    kept = source.files() - set(checkpoints.SKIPPED_FILES)
    assert quantized.files() - {"model.safetensors.index.json"} == kept
    assert dense.files() == kept
    assert dense.config == source.config
    for name in checkpoints.COPIED_FILES:
        assert (dense.path / name).read_bytes() == checkpoints.COPIED_FILES[name]
    for name, tensor in source.tensors.items():
        assert dense.tensors[name].dtype == tensor.dtype, name
        if name in selected(source):
            rounded = st.from_f32(dense_f32.tensors[name].data, tensor.dtype)
            assert_same(name, "weight", rounded.data, dense.tensors[name].data)
        else:
            assert dense.tensors[name].data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_dequantize_restores_what_words_replaced(halfbyte, source_of, tmp_path, layout):
    source = source_of("words")
    quantized = run_once(halfbyte, source, tmp_path, "--format", "int4", "--layout", layout)
    assert (quantized.path / "quantize_config.json").exists() == (layout == "gptq")
    halfbyte("dequantize", quantized.path, "-o", tmp_path / "dense")
    dense = Model(tmp_path / "dense")
    assert dense.config == source.config
    assert dense.files() == source.files() - set(checkpoints.SKIPPED_FILES)
    for name, tensor in source.tensors.items():
        assert dense.tensors[name].dtype == tensor.dtype, name


def test_dequantize_restores_mlx(halfbyte, source_of, tmp_path):
    source = source_of("grouped")
    quantized = run_once(halfbyte, source, tmp_path, "--format", "affine4")
    halfbyte("dequantize", quantized.path, "-o", tmp_path / "dense")
    dense = Model(tmp_path / "dense")
    assert dense.config == source.config
    assert dense.files() == source.files() - set(checkpoints.SKIPPED_FILES)
    for name, tensor in source.tensors.items():
        assert dense.tensors[name].dtype == tensor.dtype, name


def same_directories(a, b):
    names = sorted(str(p.relative_to(a)) for p in a.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(b)) for p in b.rglob("*") if p.is_file())
    _, mismatch, errors = filecmp.cmpfiles(a, b, names, shallow=False)
    assert not mismatch and not errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "nf4", "--double-quant"],
        ["--format", "fp4"],
        ["--format", "int4", "--asymmetric"],
        ["--format", "affine3"],
        ["--format", "int5"],
        ["--format", "nf4", "--layout", "halfbyte", "--group-size", "tensor"],
        ["--format", "int3", "--layout", "gptq", "--asymmetric"],
        ["--format", "int4", "--layout", "awq"],
    ],
)
def test_any_number_of_threads_gives_the_same_bytes(halfbyte, tmp_path, arguments):
    for threads in (1, 2, 5):
        out = tmp_path / f"q{threads}"
        halfbyte("quantize", TINY_LLAMA, "-o", out, "--threads", threads, *arguments)
        dense = tmp_path / f"dense{threads}"
        halfbyte("dequantize", out, "-o", dense, "--threads", threads)
        same_directories(tmp_path / "q1", out)
        same_directories(tmp_path / "dense1", dense)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "nf4", "--double-quant"],
        ["--format", "int4"],
        ["--format", "affine4"],
        ["--format", "int4", "--layout", "gptq"],
        ["--format", "int4", "--layout", "awq", "--asymmetric"],
    ],
)
def test_shards(halfbyte, source_of, tmp_path, arguments):
    source = source_of("tiny-llama")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source.path / file, sharded)
    checkpoints.write_shards(sharded, source.tensors, source.metadata, 3)
    whole = run_once(halfbyte, source, tmp_path, *arguments)
    halfbyte("quantize", sharded, "-o", tmp_path / "parts", *arguments)
    parts = Model(tmp_path / "parts")
    assert len(list(parts.path.glob("*.safetensors"))) > 1
    same_tensors(whole, parts)
    assert whole.config == parts.config

    for model in (whole, parts):
        halfbyte("dequantize", model.path, "-o", f"{model.path}-dense")
    same_tensors(Model(tmp_path / "q-dense"), Model(tmp_path / "parts-dense"))


def same_tensors(a, b):
    assert set(a.tensors) == set(b.tensors)
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert (tensor.dtype, tensor.data.shape) == (other.dtype, other.data.shape), name
        assert tensor.data.tobytes() == other.data.tobytes(), name


def test_a_single_file(halfbyte, source_of, tmp_path):
    source = source_of("tiny-llama")
    directory = run_once(halfbyte, source, tmp_path, "--format", "nf4")
    out = tmp_path / "q.safetensors"
    halfbyte("quantize", source.path / "model.safetensors", "-o", out, "--format", "nf4")
    tensors, _ = st.read(out)
    assert set(tensors) == set(directory.tensors)
    for name, tensor in tensors.items():
        assert tensor.data.tobytes() == directory.tensors[name].data.tobytes(), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "q.safetensors"]
