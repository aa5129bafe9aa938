"""A strict safetensors reader and writer.

bfloat16 has no NumPy type: its tensors are held as uint16 bit patterns.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_HEADER_BYTES = 100_000_000

# How each dtype is held in memory. The 8-bit floats and bfloat16 are bit patterns.
STORAGE = {
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


class FormatError(Exception):
    pass


class Tensor(NamedTuple):
    dtype: str  # as the file spells it
    data: np.ndarray


def _unique(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormatError("duplicate key in the header")
    return result


def _check(condition, message):
    if not condition:
        raise FormatError(message)


def _is_extent(value):
    return type(value) is int and value >= 0


def read(path):
    """Returns ({name: Tensor}, metadata). Raises FormatError for anything the format forbids."""
    blob = Path(path).read_bytes()
    _check(len(blob) >= 8, "shorter than the length field")
    header_bytes = int.from_bytes(blob[:8], "little")
    _check(header_bytes <= min(len(blob) - 8, MAX_HEADER_BYTES), "header longer than the file")
    header = json.loads(blob[8 : 8 + header_bytes].decode("utf-8"), object_pairs_hook=_unique)
    _check(type(header) is dict, "header is not an object")
    data = memoryview(blob)[8 + header_bytes :]

    metadata = header.pop("__metadata__", {})
    _check(
        type(metadata) is dict and all(type(v) is str for v in metadata.values()),
        "__metadata__ is not an object of strings",
    )

    tensors = {}
    spans = []
    for name, entry in header.items():
        _check(set(entry) == {"dtype", "shape", "data_offsets"}, f"{name}: keys {sorted(entry)}")
        _check(entry["dtype"] in STORAGE, f"{name}: dtype {entry['dtype']}")
        shape, offsets = entry["shape"], entry["data_offsets"]
        _check(type(shape) is list and all(map(_is_extent, shape)), f"{name}: shape {shape}")
        _check(
            type(offsets) is list and len(offsets) == 2 and all(map(_is_extent, offsets)),
            f"{name}: offsets {offsets}",
        )
        begin, end = offsets
        num_elements = 1
        for extent in shape:
            num_elements *= extent
        storage = STORAGE[entry["dtype"]]
        _check(begin <= end <= len(data), f"{name}: offsets {offsets} of {len(data)} bytes")
        _check(end - begin == num_elements * storage.itemsize, f"{name}: size against shape")
        spans.append((begin, end))
        values = np.frombuffer(bytes(data[begin:end]), storage).reshape(shape)
        tensors[name] = Tensor(entry["dtype"], values)

    position = 0
    for begin, end in sorted(spans):
        _check(begin == position, f"hole or overlap at byte {position} of the data")
        position = end
    _check(position == len(data), f"{len(data) - position} bytes after the last tensor")
    return tensors, metadata


def header_of(tensors, metadata=None):
    """The header object and the tensors in file order: wide dtypes first, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].data.itemsize, name))
    header = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name in order:
        dtype, data = tensors[name]
        header[name] = {
            "dtype": dtype,
            "shape": list(data.shape),
            "data_offsets": [position, position + data.nbytes],
        }
        position += data.nbytes
    return header, order


def write(path, tensors, metadata=None):
    header, order = header_of(tensors, metadata)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            dtype, data = tensors[name]
            assert data.dtype == STORAGE[dtype], (name, dtype, data.dtype)
            file.write(np.ascontiguousarray(data).tobytes())


def read_directory(path):
    """All tensors of a model directory, sharded or not, and the metadata of its first file."""
    path = Path(path)
    index_path = path / "model.safetensors.index.json"
    if not index_path.exists():
        return read(path / "model.safetensors")
    index = json.loads(index_path.read_text(), object_pairs_hook=_unique)
    tensors = {}
    metadata = None
    for file in sorted(set(index["weight_map"].values())):
        shard, shard_metadata = read(path / file)
        metadata = shard_metadata if metadata is None else metadata
        for name, tensor in shard.items():
            _check(index["weight_map"].get(name) == file, f"{name} is not indexed in {file}")
            tensors[name] = tensor
    _check(set(tensors) == set(index["weight_map"]), "index names tensors that no shard has")
    total_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
    _check(index["metadata"]["total_size"] == total_bytes, "total_size of the index")
    return tensors, metadata


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest even. x has no NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16)


def to_f32(tensor):
    """The exact values of a floating tensor that f32 can hold."""
    if tensor.dtype == "BF16":
        return bf16_to_f32(tensor.data)
    assert tensor.dtype in ("F16", "F32"), tensor.dtype
    return tensor.data.astype(np.float32)


def from_f32(x, dtype):
    """Rounds f32 values to a floating dtype, to nearest even."""
    if dtype == "BF16":
        return Tensor(dtype, f32_to_bf16(x))
    with np.errstate(over="ignore"):
        return Tensor(dtype, np.asarray(x, np.float32).astype(STORAGE[dtype]))
