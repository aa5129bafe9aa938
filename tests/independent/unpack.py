"""Unpackers: from the tensors of a quantized checkpoint to codes, scales and f32 weights.

`weights(tensors, config)` finds every quantized weight of a model directory in any of the layouts.
A weight is decoded as the contract says, each operation one f32 rounding:
table: value * scale; integer: (q - zero point) * scale; affine: q * scale, then + bias.
"""

import json
from dataclasses import dataclass, field

import numpy as np

from . import safetensors_io as st
from . import words
from .encode import BLOCK_FLOATS, E4M3, E4M3_VALUES, FILE_DTYPE, FP8_BLOCK, bits_of, block_rows
from .tables import BY_NAME, DOUBLE_QUANT_BLOCK, DOUBLE_QUANT_MAP

MXFP8_GROUP = 32


@dataclass
class Unpacked:
    """Group values have the shape [rows, groups]; codes and weights that of the dense weight."""

    spec: dict  # format, granularity, group_size, ...
    codes: np.ndarray
    scales: np.ndarray
    weights: np.ndarray
    zeros: np.ndarray | None = None
    biases: np.ndarray | None = None
    dtype: str | None = None  # of the dense weight, where the layout records it
    keys: list = field(default_factory=list)  # of all its parts
    global_scale: np.float32 | None = None  # nvfp4
    double_quant: tuple | None = None  # (codes, absmax, offset) of the scales


def bit_stream(packed, bits, count):
    """Codes of little-endian bit streams along the last axis: element i at bit i * bits."""
    data = np.ascontiguousarray(packed).view(np.uint8)
    planes = np.unpackbits(data, axis=-1, bitorder="little")[..., : count * bits]
    planes = planes.reshape(*data.shape[:-1], count, bits)
    return (planes << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def high_nibble_first(packed, count):
    data = packed.reshape(-1)
    return np.stack([data >> 4, data & 15], axis=1).reshape(-1)[:count]


def _spread(per_group, cols, group_size):
    return np.repeat(per_group, group_size, axis=1)[:, :cols]


def _decode(spec, codes, scales, zeros=None, biases=None, table=None, **extra):
    """Codes [rows, cols] with group values [rows, groups], as `spec` cuts them."""
    shape = spec["shape"]
    if spec["granularity"] in ("tensor", "flat"):
        rows = codes.reshape(1, -1)
        scales = scales.reshape(1, -1)
    else:
        rows = codes.reshape(-1, shape[-1])
    cols = rows.shape[1]
    size = cols if spec["granularity"] in ("tensor", "channel") else spec["group_size"]
    per_group = (len(rows), -(-cols // size))
    scales = scales.reshape(per_group)
    scale = _spread(scales, cols, size)
    assert scale.dtype == np.float32

    if table is not None:
        weights = table[rows] * scale
    elif biases is not None:
        biases = biases.reshape(per_group)
        weights = rows.astype(np.float32) * scale + _spread(biases, cols, size)
    else:
        if zeros is not None:
            zeros = zeros.reshape(per_group).astype(np.int32)
        offset = 0 if zeros is None else _spread(zeros, cols, size)
        weights = (rows.astype(np.int32) - offset).astype(np.float32) * scale
    return Unpacked(
        spec, codes.reshape(shape), scales, weights.reshape(shape), zeros, biases, **extra
    )


def double_dequantize(codes, absmax, offset, table):
    block = np.repeat(absmax, DOUBLE_QUANT_BLOCK)[: codes.size]
    return table[codes.reshape(-1)] * block + np.float32(offset)


def block_float(format, packed, scale_codes, global_scale=None, **extra):
    """Of nvfp4 and mxfp4: two codes in a byte, the first in its low half. weight = value * (scale / global scale)."""
    cols = packed.shape[-1] * 2
    if format == "nvfp4":
        assert np.all(scale_codes < 0x7F)
        scales = E4M3[scale_codes] / np.float32(global_scale)
    else:
        assert np.all(scale_codes < 0xFF)
        scales = np.ldexp(np.float32(1), scale_codes.astype(np.int32) - 127)
    spec = {
        "format": format,
        "granularity": "group",
        "group_size": BLOCK_FLOATS[format],
        "shape": [*packed.shape[:-1], cols],
    }
    codes = bit_stream(packed, 4, cols)
    return _decode(spec, codes, scales, table=BY_NAME[format], global_scale=global_scale, **extra)


def compressed_tensors_floats(tensors, name, config):
    """nvfp4-pack-quantized and mxfp4-pack-quantized. `name` is P.weight."""
    entry = config["quantization_config"]
    args = entry["config_groups"]["group_0"]["weights"]
    format = entry["format"].removesuffix("-pack-quantized")
    assert args["num_bits"] == 4 and args["type"] == "float" and args["symmetric"]
    assert args["strategy"] == ("tensor_group" if format == "nvfp4" else "group")
    assert args["group_size"] == BLOCK_FLOATS[format]
    keys = [f"{name}_packed", f"{name}_scale"]
    assert tensors[keys[1]].dtype == ("F8_E4M3" if format == "nvfp4" else "U8")
    global_scale = None
    if format == "nvfp4":
        keys.append(f"{name}_global_scale")
        (global_scale,) = tensors[keys[2]].data
    return block_float(format, tensors[keys[0]].data, tensors[keys[1]].data, global_scale, keys=keys)


def modelopt(tensors, name):
    """`name` is P.weight; the reciprocal of the global scale is stored."""
    keys = [name, f"{name}_scale", f"{name}_scale_2"]
    assert tensors[keys[1]].dtype == "F8_E4M3" and tensors[keys[2]].data.shape == ()
    global_scale = np.float32(1) / tensors[keys[2]].data[()]
    return block_float("nvfp4", tensors[name].data, tensors[keys[1]].data, global_scale, keys=keys)


def deepseek_experts(tensors, name):
    """mxfp4 beside fp8: `name` is P.weight, two codes in a byte of I8, and its scales are P.scale."""
    keys = [name, name.removesuffix(".weight") + ".scale"]
    codes, scales = (tensors[key] for key in keys)
    assert (codes.dtype, scales.dtype) == ("I8", "F8_E8M0")
    return block_float("mxfp4", codes.data.view(np.uint8), scales.data, keys=keys)


def fp8(tensors, name, config):
    """`name` is P.weight: codes of E4M3, a scale for the tensor, a row, or blocks. Scales of E8M0 are powers of two."""
    entry, block = config["quantization_config"], [FP8_BLOCK, FP8_BLOCK]
    if entry["quant_method"] in ("fp8", "mxfp8"):
        assert entry["fmt"] in ("e4m3", "e5m2")
        block = entry["weight_block_size"]
        of_module = name.removesuffix(".weight") + ".scale"  # DeepSeek-V4
        keys, strategy = [name, of_module if of_module in tensors else f"{name}_scale_inv"], "block" if block else "tensor"
    elif entry["quant_method"] == "modelopt":
        assert entry["quant_algo"] in ("FP8", "MXFP8")
        keys, strategy = [name, f"{name}_scale"], "tensor" if entry["quant_algo"] == "FP8" else "group"
    else:
        args = entry["config_groups"]["group_0"]["weights"]
        assert (args["num_bits"], args["type"]) == (8, "float")
        keys, strategy = [name, f"{name}_scale"], args["strategy"]
        assert entry["format"] == ("mxfp8-quantized" if strategy == "group" else "float-quantized")
        block = args.get("block_structure", block)
    codes, scale = tensors[name], tensors[keys[1]]
    assert codes.dtype in ("F8_E4M3", "F8_E5M2")
    table = E4M3_VALUES
    if codes.dtype == "F8_E5M2":  # the upper half of f16
        table = (np.arange(256, dtype="<u2") << 8).view("<f2").astype(np.float32)
    shape = list(codes.data.shape)
    if scale.dtype in ("F8_E8M0", "U8"):
        assert np.all(scale.data < 0xFF)
        scales = np.ldexp(np.float32(1), scale.data.astype(np.int32) - 127)
        if scale.data.shape == (*shape[:-1], shape[-1] // MXFP8_GROUP):  # of rows, whatever the blocks of the others
            strategy = "group"
    else:
        scales = st.to_f32(scale)
    spec = {"format": "fp8", "granularity": strategy, "group_size": None, "shape": shape}
    if strategy == "block":
        assert scales.shape[-2:] == (-(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        scales = block_rows(scales, shape[-2], block[0])
        spec |= {"granularity": "group", "group_size": block[1]}
    elif strategy == "group":
        assert scale.dtype in ("F8_E8M0", "U8") and scales.shape == (*shape[:-1], shape[-1] // MXFP8_GROUP)
        spec |= {"group_size": MXFP8_GROUP}
    else:
        of_tensor = (1,) if entry["quant_method"] == "compressed-tensors" else ()
        assert scales.shape == (of_tensor if strategy == "tensor" else (*shape[:-1], 1))
    return _decode(spec, codes.data, scales, table=table, keys=keys)


def gpt_oss(tensors, name):
    """`name` is X.gate_up_proj: [experts, out, in], of which the model has the transpose."""
    keys = [f"{name}_blocks", f"{name}_scales"]
    blocks, scales = (tensors[key].data for key in keys)
    assert blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape
    found = block_float("mxfp4", blocks.reshape(*blocks.shape[:2], -1), scales, keys=keys)
    found.codes, found.weights = (np.swapaxes(each, 1, 2) for each in (found.codes, found.weights))
    found.spec["shape"] = list(found.codes.shape)
    return found


def bitsandbytes(tensors, name):
    """`name` is P.weight; its parts are P.weight.absmax, ..."""
    states = [k for k in tensors if k.startswith(f"{name}.quant_state.bitsandbytes__")]
    assert len(states) == 1, states
    state = json.loads(tensors[states[0]].data.tobytes())
    assert states[0].endswith(state["quant_type"])
    keys = [name, f"{name}.absmax", f"{name}.quant_map", states[0]]
    count = int(np.prod(state["shape"], dtype=np.int64))
    codes = high_nibble_first(tensors[name].data, count)
    absmax = tensors[f"{name}.absmax"].data
    nested = f"{name}.nested_absmax" in tensors
    double_quant = None
    if nested:
        keys += [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        double_quant = (absmax, tensors[f"{name}.nested_absmax"].data, state["nested_offset"])
        absmax = double_dequantize(*double_quant, tensors[f"{name}.nested_quant_map"].data)
    spec = {
        "format": state["quant_type"],
        "granularity": "flat",
        "group_size": state["blocksize"],
        "shape": state["shape"],
    }
    # Code 8 of fp4 decodes to +0: a table that holds -0 is read as +0.
    table = tensors[f"{name}.quant_map"].data + np.float32(0)
    return _decode(
        spec,
        codes,
        absmax,
        table=table,
        dtype=state["dtype"],
        keys=keys,
        double_quant=double_quant,
    )


def experts4bit(tensors, name, config):
    """`name` is X.gate_up_proj or X.down_proj: codes [E, bytes], scales [E, groups]; the rest is in the config."""
    keys = [name, name.removesuffix("_proj") + "_absmax"]
    codes, absmax = (tensors[key].data for key in keys)
    hidden, count = config["hidden_size"], 2 * codes.shape[1]
    rows = hidden if name.endswith("down_proj") else count // hidden
    spec = {
        "format": config["quantization_config"]["bnb_4bit_quant_type"],
        "granularity": "flat",
        "group_size": count // absmax.shape[1],
        "shape": [len(codes), rows, count // rows],
    }
    table = BY_NAME[spec["format"]] + np.float32(0)
    return _decode(spec, high_nibble_first(codes, len(codes) * count), absmax.reshape(-1), table=table, keys=keys)


def compressed_tensors(tensors, name, config):
    """`name` is P.weight; its parts are P.weight_packed, ..."""
    args = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    if args.get("type") == "float":
        return compressed_tensors_floats(tensors, name, config)
    bits = args["num_bits"]
    keys = [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
    shape = tensors[keys[2]].data.tolist()
    codes = bit_stream(tensors[keys[0]].data, bits, shape[-1]).astype(np.int32) - 2 ** (bits - 1)
    scale = tensors[keys[1]]
    zeros = None
    if not args["symmetric"]:
        keys.append(f"{name}_zero_point")
        # Packed along the output axis: the words run down the rows of a group.
        packed = np.moveaxis(tensors[keys[3]].data, -2, -1)
        zeros = np.moveaxis(bit_stream(packed, bits, shape[-2]), -1, -2).astype(np.int32)
        zeros -= 2 ** (bits - 1)
    spec = {
        "format": f"int{bits}",
        "asymmetric": not args["symmetric"],
        "granularity": args["strategy"],
        "group_size": args.get("group_size"),
        "shape": shape,
    }
    assert codes.shape == tuple(shape)
    return _decode(spec, codes, st.to_f32(scale), zeros, dtype=scale.dtype, keys=keys)


def mlx(tensors, name, config):
    """`name` is P.weight; its parts are P.weight, P.scales, P.biases."""
    module = name.removesuffix(".weight")
    quantization = config["quantization"]
    args = quantization.get(module, quantization)
    packed = tensors[name].data
    if (mode := args.get("mode", "affine")) != "affine":
        return mlx_floats(mode, packed, tensors[f"{module}.scales"], args, [name, f"{module}.scales"])
    cols = packed.shape[-1] * 32 // args["bits"]
    codes = bit_stream(packed, args["bits"], cols)
    scales, biases = tensors[f"{module}.scales"], tensors[f"{module}.biases"]
    assert scales.data.shape[-1] * args["group_size"] == cols
    spec = {
        "format": f"affine{args['bits']}",
        "granularity": "group",
        "group_size": args["group_size"],
        "shape": list(codes.shape),
    }
    return _decode(
        spec,
        codes,
        st.to_f32(scales),
        biases=st.to_f32(biases),
        dtype=scales.dtype,
        keys=[name, f"{module}.scales", f"{module}.biases"],
    )


def mlx_floats(mode, packed, scales, args, keys):
    """The modes without biases: a byte for the scale of a group."""
    assert scales.dtype == "U8" and (args["bits"], args["group_size"]) == {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = np.ascontiguousarray(packed).view(np.uint8)  # little-endian words
    if mode != "mxfp8":
        return block_float(mode, codes, scales.data, 1, keys=keys)
    assert np.all(scales.data < 0xFF)
    powers = np.ldexp(np.float32(1), scales.data.astype(np.int32) - 127)
    spec = {"format": "fp8", "granularity": "group", "group_size": MXFP8_GROUP, "shape": list(codes.shape)}
    return _decode(spec, codes, powers, table=E4M3_VALUES, keys=keys)


def gptq(tensors, name, config):
    """`name` is P.weight; its parts are P.qweight, P.qzeros, P.scales and, in most files, P.g_idx."""
    args = config["quantization_config"]
    bits, middle = args["bits"], 2 ** (args["bits"] - 1)
    module = name.removesuffix(".weight")
    keys = [f"{module}.qweight", f"{module}.qzeros", f"{module}.scales"]
    planar = args["checkpoint_format"] == "gptq_p" or bits in (5, 6, 7)
    codes = words.unpack(tensors[keys[0]].data, bits, planar).T
    stored = words.unpack(np.ascontiguousarray(tensors[keys[1]].data.T), bits, planar)
    zeros = (stored + (args["checkpoint_format"] == "gptq")) % 2**bits
    scales = tensors[keys[2]]
    size = codes.shape[1] if args["group_size"] == -1 else args["group_size"]
    if f"{module}.g_idx" in tensors:
        keys.append(f"{module}.g_idx")
        assert np.array_equal(tensors[keys[3]].data, np.arange(codes.shape[1]) // size)
    assert not args["sym"] or np.all(zeros == middle)
    spec = {
        "format": f"int{bits}",
        "asymmetric": not args["sym"],
        "granularity": "channel" if args["group_size"] == -1 else "group",
        "group_size": args["group_size"],
        "shape": list(codes.shape),
    }
    return _decode(
        spec,
        codes - middle,
        np.ascontiguousarray(st.to_f32(scales).T),
        None if args["sym"] else zeros - middle,
        dtype=scales.dtype,
        keys=keys,
    )


def awq(tensors, name, config):
    """`name` is P.weight; its parts are P.qweight, P.qzeros, P.scales."""
    args = config["quantization_config"]
    assert args["version"] == "gemm" and args["bits"] == 4
    module = name.removesuffix(".weight")
    keys = [f"{module}.qweight", f"{module}.qzeros", f"{module}.scales"]
    codes = words.unpack_awq(tensors[keys[0]].data).T
    zeros = words.unpack_awq(tensors[keys[1]].data).T
    scales = tensors[keys[2]]
    spec = {
        "format": "int4",
        "asymmetric": True,
        "granularity": "channel" if args["group_size"] == -1 else "group",
        "group_size": args["group_size"],
        "shape": list(codes.shape),
    }
    return _decode(
        spec, codes - 8, np.ascontiguousarray(st.to_f32(scales).T), zeros - 8, dtype=scales.dtype, keys=keys
    )


def halfbyte(tensors, name):
    """`name` is P.weight; its parts are P.weight.scales, ..."""
    keys = [name, f"{name}.scales", f"{name}.quant_spec"]

    def part(suffix):
        keys.append(f"{name}.{suffix}")
        return tensors[keys[-1]]

    spec = json.loads(tensors[keys[2]].data.tobytes())
    assert spec["version"] == 1
    format, shape = spec["format"], spec["shape"]
    bits = bits_of(format)
    count = int(np.prod(shape, dtype=np.int64))
    cols = count if spec["granularity"] == "flat" else shape[-1]
    codes = bit_stream(tensors[name].data, bits, cols)

    scales = tensors[keys[1]]
    if format in BLOCK_FLOATS:
        assert scales.dtype == {"nvfp4": "F8_E4M3", "mxfp4": "F8_E8M0"}[format]
        assert spec["scale_dtype"] == {"nvfp4": "f8_e4m3", "mxfp4": "f8_e8m0"}[format]
        global_scale = part("global_scale").data[0] if format == "nvfp4" else None
        # Rows may have a short group.
        scale_codes = scales.data.reshape(-1, scales.data.shape[-1])
        values = (
            E4M3[scale_codes] / global_scale
            if format == "nvfp4"
            else np.ldexp(np.float32(1), scale_codes.astype(np.int32) - 127)
        )
        return _decode(
            spec, codes, values, table=BY_NAME[format], dtype=spec["dtype"], keys=keys, global_scale=global_scale
        )
    double_quant = None
    if spec["double_quant"]:
        absmax = part("scales_absmax").data
        double_quant = (scales.data.reshape(-1), absmax, spec["scales_offset"])
        scale_values = double_dequantize(*double_quant, DOUBLE_QUANT_MAP)
    else:
        assert scales.dtype == FILE_DTYPE[spec["scale_dtype"]]
        scale_values = st.to_f32(scales)

    zeros = biases = table = None
    if format.startswith("int"):
        qmin = -(2 ** (bits - 1))
        codes = codes.astype(np.int32) + qmin
        if spec["asymmetric"]:
            zeros = part("zeros").data.astype(np.int32) + qmin
    elif format.startswith("affine"):
        biases = st.to_f32(part("biases"))
    else:
        table = part("table").data if format == "lut4" else E4M3_VALUES if format == "fp8" else BY_NAME[format]
    return _decode(
        spec,
        codes,
        scale_values,
        zeros,
        biases,
        table,
        dtype=spec["dtype"],
        keys=keys,
        double_quant=double_quant,
    )


def weights(tensors, config):
    """{name: Unpacked} of every quantized weight; `config` is the parsed config.json."""
    found = {}
    method = config.get("quantization_config", {}).get("quant_method")
    for key in tensors:
        if key.endswith(".quant_spec"):
            name = key.removesuffix(".quant_spec")
            found[name] = halfbyte(tensors, name)
        elif ".quant_state.bitsandbytes__" in key:
            name = key.split(".quant_state.")[0]
            found[name] = bitsandbytes(tensors, name)
        elif method == "bitsandbytes" and key.endswith("_proj") and key.removesuffix("_proj") + "_absmax" in tensors:
            found[key] = experts4bit(tensors, key, config)
        elif method == "compressed-tensors" and key.endswith("_packed"):
            name = key.removesuffix("_packed")
            found[name] = compressed_tensors(tensors, name, config)
        elif method == "modelopt" and key.endswith("_scale_2"):
            name = key.removesuffix("_scale_2")
            found[name] = modelopt(tensors, name)
        elif method in ("fp8", "mxfp8") and key.endswith("_scale_inv"):
            name = key.removesuffix("_scale_inv")
            found[name] = fp8(tensors, name, config)
        elif method == "fp8" and key.endswith(".scale"):
            name = key.removesuffix(".scale") + ".weight"
            found[name] = deepseek_experts(tensors, name) if tensors[name].dtype == "I8" else fp8(tensors, name, config)
        elif method in ("compressed-tensors", "modelopt") and f"{key}_scale" in tensors and tensors[key].dtype in ("F8_E4M3", "F8_E5M2"):
            found[key] = fp8(tensors, key, config)
        elif method == "mxfp4" and key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            found[name] = gpt_oss(tensors, name)
        elif method in ("gptq", "awq") and key.endswith(".qweight"):
            name = key.removesuffix(".qweight") + ".weight"
            found[name] = (gptq if method == "gptq" else awq)(tensors, name, config)
        elif "quantization" in config and key.endswith(".scales"):
            name = key.removesuffix(".scales") + ".weight"
            found[name] = mlx(tensors, name, config)
    return found
