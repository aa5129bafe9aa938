"""Malformed, malicious and merely odd input: each is refused with the right exit code and a message
that says where, or accepted without a difference; never a crash, a hang, or a file left behind."""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from independent import safetensors_io as st

BAD_INPUT, USAGE, IO, EXISTS = 3, 2, 6, 8
# Of the processor, so that a busy machine does not fail the test. What sleeps runs into TIMEOUT.
MAX_SECONDS = 2.0
TIMEOUT = 60
WEIGHT = "model.layers.0.mlp.up_proj.weight"


class Outcome(NamedTuple):
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def message(self):
        return self.stderr.decode()


def processor_seconds(usage):
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="session")
def invoke(cli):
    """Runs the tool on hostile input: it must exit by itself, soon."""

    def run(*arguments, **options):
        command = [cli, *map(str, arguments)]
        before = processor_seconds(resource.getrusage(resource.RUSAGE_CHILDREN))
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, **options)
        seconds = processor_seconds(resource.getrusage(resource.RUSAGE_CHILDREN)) - before
        outcome = Outcome(done.returncode, done.stdout, done.stderr)
        assert outcome.code >= 0, f"killed by signal {-outcome.code}: {outcome.message}"
        assert seconds < MAX_SECONDS, f"took {seconds:.2f} s"
        return outcome

    return run


@pytest.fixture
def out_dir(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.fixture
def refused(invoke, out_dir):
    """Both commands refuse the path with one code, and a message that matches; nothing is left."""

    def check(path, pattern, code=BAD_INPUT):
        before = snapshot(path.parent)
        for arguments in (["inspect", path], ["quantize", path, "-o", out_dir / "out"]):
            outcome = invoke(*arguments)
            what = f"{arguments[0]}: exit {outcome.code}: {outcome.message}"
            assert outcome.code == code, what
            assert re.search(pattern, outcome.message), what
            assert len(outcome.message) < 4096, f"a message of {len(outcome.message)} bytes"
        assert list(out_dir.iterdir()) == []
        assert snapshot(path.parent) == before

    return check


def snapshot(directory):
    return {p: p.lstat().st_mtime_ns for p in directory.rglob("*")}


def raw(header, data=b"", header_bytes=None):
    """A file of any header text and length field."""
    header = header.encode() if isinstance(header, str) else header
    length = len(header) if header_bytes is None else header_bytes
    return length.to_bytes(8, "little") + header + data


def entry(dtype="U8", shape="[4]", offsets="[0,4]"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(data=b"\0" * 4, name="w", **fields):
    """A file of one tensor."""
    return raw(f'{{"{name}":{entry(**fields)}}}', data)


GOOD = entry()
EIGHT = b"\0" * 8
OFFSET = r"(byte|offset|position)\D*\d+"

REFUSED = {
    # F1, F2: no room for a header
    "F1 empty": (b"", r"(?i)byte"),
    "F1 seven bytes": (b"\x02" + b"\0" * 6, r"(?i)byte"),
    "F2 header longer than the file": (raw("{}", header_bytes=3), r"(?i)header"),
    "F2 header of 2^63 bytes": (raw("{}", header_bytes=2**63), r"(?i)header"),
    "F2 header of 2^64 - 1 bytes": (raw("{}", header_bytes=2**64 - 1), r"(?i)header"),
    "F2 header of 2^64 - 8 bytes": (raw("{}", header_bytes=2**64 - 8), r"(?i)header"),
    "F2 header of no bytes": (raw("", EIGHT), r"(?i)header"),
    "F2 header of one byte": (raw("{", EIGHT), r"(?i)header"),
    # F3: text
    "F3 not UTF-8": (raw(b'{"w\xff":' + GOOD.encode() + b"}", EIGHT[:4]), OFFSET),
    "F3 overlong slash": (raw(b'{"w\xc0\xaf":' + GOOD.encode() + b"}", EIGHT[:4]), OFFSET),
    "F3 overlong, three bytes": (
        raw(b'{"w\xe0\x80\xaf":' + GOOD.encode() + b"}", EIGHT[:4]),
        OFFSET,
    ),
    "F3 surrogate in UTF-8": (
        raw(b'{"w\xed\xa0\x80":' + GOOD.encode() + b"}", EIGHT[:4]),
        OFFSET,
    ),
    "F3 beyond U+10FFFF": (
        raw(b'{"w\xf4\x90\x80\x80":' + GOOD.encode() + b"}", EIGHT[:4]),
        OFFSET,
    ),
    "F3 cut UTF-8": (raw(b'{"w\xe2\x82":' + GOOD.encode() + b"}", EIGHT[:4]), OFFSET),
    "F3 lone surrogate escape": (one(name=r"w\ud800"), OFFSET),
    "F3 bad escape": (one(name=r"w\x41"), OFFSET),
    "F3 not JSON": (raw('{"w" = 4}   '), OFFSET),
    "F3 cut JSON": (raw('{"w":{"dtype":"U8"'), OFFSET),
    "F3 only a brace": (raw("{ "), OFFSET),
    "F3 NUL in a string": (raw('{"w\0":' + GOOD + "}", EIGHT[:4]), OFFSET),
    "F3 NUL between tokens": (raw('{"w":\0' + GOOD + "}", EIGHT[:4]), OFFSET),
    "F3 newline in a string": (raw('{"w\n":' + GOOD + "}", EIGHT[:4]), OFFSET),
    "F3 trailing comma": (raw('{"w":' + GOOD + ",}", EIGHT[:4]), OFFSET),
    "F3 trailing comma in a list": (one(shape="[4,]"), OFFSET),
    "F3 comment": (raw('{/* */"w":' + GOOD + "}", EIGHT[:4]), OFFSET),
    "F3 line comment": (raw('{"w":' + GOOD + "//\n}", EIGHT[:4]), OFFSET),
    "F3 NaN": (one(shape="[NaN]"), OFFSET),
    "F3 Infinity": (one(shape="[Infinity]"), OFFSET),
    "F3 leading zero": (one(shape="[04]"), OFFSET),
    "F3 plus sign": (one(shape="[+4]"), OFFSET),
    "F3 hexadecimal": (one(shape="[0x4]"), OFFSET),
    "F3 single quotes": (raw("{'w':" + GOOD + "}", EIGHT[:4]), OFFSET),
    "F3 deep lists": (raw('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"), r"."),
    "F3 deep objects": (raw('{"w":' * 50_000 + "1" + "}" * 50_000), r"."),
    # F4: the outermost value
    "F4 list": (raw("[1,2,3] "), r"(?i)object|\{|byte"),
    "F4 string": (raw('"header"'), r"(?i)object|\{|byte"),
    "F4 number": (raw("12345678"), r"(?i)object|\{|byte"),
    "F4 null": (raw("null    "), r"(?i)object|\{|byte"),
    "F4 byte order mark": (raw(b"\xef\xbb\xbf{}"), r"(?i)object|\{|byte"),
    "F4 second value": (raw("{}{}"), OFFSET),
    "F4 text after the object": (raw("{}  x"), OFFSET),
    "F4 NUL padding": (raw("{}\0\0\0\0\0\0"), OFFSET),
    # F5: duplicate keys
    "F5 tensor": (raw(f'{{"w":{GOOD},"w":{GOOD}}}', EIGHT[:4]), r"(?i)\bw\b.*(duplicate|twice)"),
    "F5 tensor, scanner differential": (
        raw(f'{{"w":{GOOD},"w":{entry("F32", "[1]")}}}', EIGHT[:4]),
        r"(?i)duplicate|twice",
    ),
    "F5 tensor, by escape": (raw(f'{{"w":{GOOD},"\\u0077":{GOOD}}}', EIGHT[:4]), r"(?i)duplicate|twice"),
    "F5 metadata": (
        raw(f'{{"__metadata__":{{}},"w":{GOOD},"__metadata__":{{}}}}', EIGHT[:4]),
        r"(?i)duplicate|twice",
    ),
    "F5 metadata key": (
        raw(f'{{"__metadata__":{{"a":"1","a":"2"}},"w":{GOOD}}}', EIGHT[:4]),
        r"(?i)duplicate|twice",
    ),
    "F5 dtype": (raw('{"w":{"dtype":"U8",' + GOOD[1:] + "}", EIGHT[:4]), r"(?i)duplicate|twice"),
    "F5 offsets, by escape": (
        raw('{"w":{"data\\u005foffsets":[0,4],' + GOOD[1:] + "}", EIGHT[:4]),
        r"(?i)duplicate|twice",
    ),
    # F6: offsets, shapes and entries
    "F6 reversed": (one(offsets="[4,0]"), r"\bw\b"),
    "F6 negative": (one(offsets="[-4,0]"), r"\bw\b"),
    "F6 minus zero": (one(offsets="[-0,4]"), r"\bw\b"),
    "F6 fractional": (one(offsets="[0,4.5]"), r"\bw\b"),
    "F6 float of a whole number": (one(offsets="[0,4.0]"), r"\bw\b"),
    "F6 exponent": (one(offsets="[0,4e0]"), r"\bw\b"),
    "F6 2^64": (one(offsets="[0,18446744073709551616]"), r"\bw\b"),
    "F6 2^64 + 4": (one(offsets="[0,18446744073709551620]"), r"\bw\b"),
    "F6 2^64 - 1": (one(offsets="[0,18446744073709551615]"), r"\bw\b"),
    "F6 1e400": (one(offsets="[0,1e400]"), OFFSET),
    "F6 one": (one(offsets="[4]"), r"\bw\b"),
    "F6 three": (one(offsets="[0,4,4]"), r"\bw\b"),
    "F6 none": (one(offsets="[]"), r"\bw\b"),
    "F6 past the end": (one(shape="[5]", offsets="[0,5]"), r"\bw\b"),
    "F6 strings": (one(offsets='["0","4"]'), r"\bw\b"),
    "F6 null": (one(offsets="null"), r"\bw\b"),
    "F6 nested": (one(offsets="[[0,4]]"), r"\bw\b"),
    "F6 shape of a negative extent": (one(shape="[-4]"), r"\bw\b"),
    "F6 shape of a fraction": (one(shape="[4.0]"), r"\bw\b"),
    "F6 shape of true": (one(shape="[true,4]"), r"\bw\b"),
    "F6 shape of a string": (one(shape='["4"]'), r"\bw\b"),
    "F6 shape null": (one(shape="null"), r"\bw\b"),
    "F6 shape a number": (one(shape="4"), r"\bw\b"),
    "F6 entry a number": (raw('{"w":4}   '), r"\bw\b"),
    "F6 entry a list": (raw('{"w":[0,4]}   '), r"\bw\b"),
    "F6 entry empty": (raw('{"w":{}}'), r"\bw\b"),
    "F6 no dtype": (raw('{"w":{"shape":[4],"data_offsets":[0,4]}}', EIGHT[:4]), r"\bw\b.*dtype"),
    "F6 no shape": (raw('{"w":{"dtype":"U8","data_offsets":[0,4]}}', EIGHT[:4]), r"\bw\b.*shape"),
    "F6 no offsets": (raw('{"w":{"dtype":"U8","shape":[4]}}', EIGHT[:4]), r"\bw\b.*offsets"),
    "F6 dtype a number": (raw('{"w":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}', EIGHT[:4]), r"\bw\b"),
    # F7: the data is tiled by the tensors
    "F7 overlap": (
        raw(f'{{"a":{GOOD},"w":{entry(offsets="[2,6]")}}}', EIGHT[:6]),
        r"\b[aw]\b",
    ),
    "F7 same bytes": (raw(f'{{"a":{GOOD},"w":{GOOD}}}', EIGHT[:4]), r"\b[aw]\b"),
    "F7 hole": (raw(f'{{"a":{GOOD},"w":{entry(offsets="[5,9]")}}}', b"\0" * 9), r"\bw\b|\d"),
    "F7 first offset": (one(b"\0" * 6, offsets="[2,6]"), r"\bw\b|\d"),
    "F7 bytes after the last tensor": (one(b"\0" * 5), r"(?i)\d.*byte|byte.*\d"),
    "F7 bytes and no tensor": (raw("{}", b"\0"), r"(?i)\d.*byte|byte.*\d"),
    "F7 missing bytes": (one(b"\0" * 3), r"\bw\b|\d"),
    # F8: sizes
    "F8 [2, 2^64 - 2]": (one(shape=f"[2,{2**64 - 2}]"), r"\bw\b"),
    "F8 [2, 2^63 - 1] of 4 bytes": (one(dtype="F32", shape=f"[2,{2**63 - 1}]"), r"\bw\b"),
    "F8 4 mod 2^64": (one(shape="[4194305,4194305,211106198978564]"), r"\bw\b"),
    "F8 2^64": (one(shape=f"[{2**64}]"), r"\bw\b"),
    "F8 bits overflow": (one(dtype="F64", shape=f"[{2**61}]", offsets="[0,0]", data=b""), r"\bw\b"),
    "F8 size against shape": (one(shape="[3]"), r"\bw\b"),
    "F8 size against dtype": (one(dtype="F32"), r"\bw\b"),
    # F9: ranks
    "F9 rank 33": (one(shape="[4" + ",1" * 32 + "]"), r"\bw\b"),
    "F9 rank 1,000,000": (one(shape="[4" + ",1" * 999_999 + "]"), r"."),
    # F10, F11: dtypes
    **{
        f"F10 dtype {dtype!r}": (one(dtype=dtype), r"\bw\b")
        for dtype in ("X7", "U4", "I4", "f32", "float32", "", "U8 ", "F8")
    },
    "F11 F4 [3] in 1 byte": (one(dtype="F4", shape="[3]", offsets="[0,1]", data=b"\0"), r"\bw\b"),
    "F11 F4 [3] in 2 bytes": (one(dtype="F4", shape="[3]", offsets="[0,2]", data=b"\0\0"), r"\bw\b"),
    "F11 F6 [3] in 2 bytes": (
        one(dtype="F6_E2M3", shape="[3]", offsets="[0,2]", data=b"\0\0"),
        r"\bw\b",
    ),
    "F11 F6 [5] in 4 bytes": (
        one(dtype="F6_E3M2", shape="[5]", offsets="[0,4]", data=EIGHT[:4]),
        r"\bw\b",
    ),
    # F15: metadata
    **{
        f"F15 metadata {value}": (
            raw(f'{{"__metadata__":{value},"w":{GOOD}}}', EIGHT[:4]),
            r"__metadata__",
        )
        for value in ('"pt"', "[]", "1", '{"a":1}', '{"a":null}', '{"a":["b"]}',
                      '{"a":{}}', '{"a":true}')
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(refused, tmp_path, name):
    content, pattern = REFUSED[name]
    path = tmp_path / "in" / "hostile.safetensors"
    path.parent.mkdir()
    path.write_bytes(content)
    refused(path, pattern)


def test_f1_missing_file(refused, tmp_path):
    refused(tmp_path / "none.safetensors", r"none\.safetensors", IO)


def test_f1_directory_without_a_model(refused, tmp_path):
    (tmp_path / "model").mkdir()
    refused(tmp_path / "model", r"model")


def test_f1_fifo(refused, tmp_path):
    path = tmp_path / "in" / "fifo.safetensors"
    path.parent.mkdir()
    os.mkfifo(path)
    refused(path, r"fifo\.safetensors")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_f1_device(invoke, out_dir, device):
    for arguments in (["inspect", device], ["quantize", device, "-o", out_dir / "out"]):
        outcome = invoke(*arguments)
        assert outcome.code == BAD_INPUT and device in outcome.message
    assert list(out_dir.iterdir()) == []


def test_f1_directory_in_place_of_the_file(refused, tmp_path):
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)
    refused(tmp_path / "model", r"model\.safetensors")


def test_f2_header_above_the_limit(refused, tmp_path):
    """A sparse file that does hold the header."""
    path = tmp_path / "in" / "sparse.safetensors"
    path.parent.mkdir()
    path.write_bytes(raw("{}", header_bytes=100_000_001))
    os.truncate(path, 200_000_000)
    refused(path, r"(?i)header")


# What is odd but valid


def weights():
    """Something to quantize, and something to copy."""
    rng = np.random.default_rng(5)
    return {
        WEIGHT: st.from_f32(rng.standard_normal((2, 65)).astype(np.float32), "BF16"),
        "model.norm.weight": st.from_f32(rng.standard_normal(3).astype(np.float32), "F32"),
        "flag": st.Tensor("U8", np.array([7], np.uint8)),
    }


def header_and_data(tensors, order=None):
    """Tensors one after the other, in any order."""
    header, data = {}, b""
    for name in order or tensors:
        dtype, values = tensors[name]
        end = len(data) + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape)}
        header[name]["data_offsets"] = [len(data), end]
        data += values.tobytes()
    return header, data


def compact(header):
    return json.dumps(header, separators=(",", ":"))


def odd_files():
    header, data = header_and_data(weights())
    text = compact(header)
    yield "F4 leading spaces", raw("   " + text, data), {}
    yield "F4 trailing spaces", raw(text + " " * 21, data), {}
    yield "F3 white space anywhere", raw(json.dumps(header, indent="\t"), data), {}
    yield "F5 escaped names", raw(text.replace("weight", "w\\u0065ight"), data), {}
    yield "reversed header", raw(compact(dict(reversed(header.items()))), data), {}
    for order in itertools.permutations(weights()):
        shuffled, shuffled_data = header_and_data(weights(), order)
        yield f"F12 data order {order}", raw(compact(shuffled), shuffled_data), {}
    for pad in range(8):
        yield f"F12 header padded by {pad}", raw(text + " " * pad, data), {}

    def extra(name, dtype, shape, data_bytes=b""):
        # At the front, where its size shifts all that follows.
        shifted = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data_bytes)]}}
        for key, fields in header.items():
            begin, end = (offset + len(data_bytes) for offset in fields["data_offsets"])
            shifted[key] = fields | {"data_offsets": [begin, end]}
        return raw(compact(shifted), data_bytes + data), {name: (dtype, shape, data_bytes)}

    yield "F9 zero-size", *extra("empty", "F32", [3, 0, 5])
    yield "F9 zero-size, one axis", *extra("empty", "BF16", [0])
    yield "F9 rank 0", *extra("scalar", "F32", [], b"\1\2\3\4")
    yield "F9 rank 9", *extra("high", "U8", [1] * 8 + [3], b"\1\2\3")
    yield "F9 rank 32", *extra("high", "U8", [1] * 31 + [3], b"\1\2\3")
    for dtype, shape, num_bytes in [
        ("BOOL", [3], 3), ("I8", [3], 3), ("U8", [3], 3), ("I16", [3], 6), ("U16", [3], 6),
        ("I32", [3], 12), ("U32", [3], 12), ("I64", [3], 24), ("U64", [3], 24), ("F64", [3], 24),
        ("F8_E4M3", [3], 3), ("F8_E5M2", [3], 3), ("F8_E8M0", [3], 3), ("F8_E4M3FNUZ", [3], 3),
        ("F8_E5M2FNUZ", [3], 3), ("C64", [3], 24), ("F4", [4], 2), ("F6_E2M3", [4], 3),
        ("F6_E3M2", [4], 3), ("F16", [3], 6), ("BF16", [3], 6), ("F32", [3], 12),
    ]:  # fmt: skip
        yield f"F10 {dtype}", *extra("other", dtype, shape, bytes(range(num_bytes)))
    yield "F10 I8 linear weight", *extra("model.layers.1.mlp.up_proj.weight", "I8", [2, 2], b"1234")


ODD = {name: (content, extra) for name, content, extra in odd_files()}


@pytest.fixture(scope="module")
def normal(halfbyte, tmp_path_factory):
    """Tensors of the quantized normal file."""
    path = tmp_path_factory.mktemp("normal")
    st.write(path / "in.safetensors", weights(), {"format": "pt"})
    halfbyte("quantize", path / "in.safetensors", "-o", path / "out.safetensors")
    return st.read(path / "out.safetensors")[0]


def raw_tensors(path):
    """{name: (dtype, shape, bytes)}, dtypes that NumPy lacks included."""
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            fields["dtype"],
            fields["shape"],
            blob[start + fields["data_offsets"][0] : start + fields["data_offsets"][1]],
        )
        for name, fields in header.items()
    }


@pytest.mark.parametrize("name", ODD)
def test_accepted(invoke, normal, tmp_path, name):
    content, extra = ODD[name]
    path, out = tmp_path / "odd.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(content)
    for arguments in (["inspect", path], ["quantize", path, "-o", out]):
        outcome = invoke(*arguments)
        assert outcome.code == 0, outcome.message
    found = raw_tensors(out)
    expected = {
        key: (tensor.dtype, list(tensor.data.shape), tensor.data.tobytes())
        for key, tensor in normal.items()
    }
    assert found == expected | extra


@pytest.mark.parametrize(
    "content",
    [
        raw("{}"),
        raw("{}      "),
        raw('{"__metadata__":{}}'),
        one(b"", shape="[0]", offsets="[0,0]"),
        raw("{" + ",".join(f'"w{i}":{entry("F32", "[0,7]", "[0,0]")}' for i in range(1000)) + "}"),
    ],
    ids=["no tensors", "padded", "only metadata", "0 bytes", "1000 of 0 bytes"],
)
def test_f9_files_without_data(invoke, tmp_path, content):
    path = tmp_path / "empty.safetensors"
    path.write_bytes(content)
    assert invoke("inspect", path).code == 0


def test_f8_zero_among_large_extents(invoke, tmp_path):
    """One answer, whatever the order of the extents."""
    codes = set()
    for shape in itertools.permutations([0, 2**64 - 1, 2]):
        path = tmp_path / "zero.safetensors"
        path.write_bytes(one(b"", shape=str(list(shape)), offsets="[0,0]"))
        codes.add(invoke("inspect", path).code)
    assert len(codes) == 1 and codes <= {0, BAD_INPUT}


def test_f10_asked_for_an_integer_tensor(invoke, out_dir, tmp_path):
    tensors = weights() | {"table": st.Tensor("I64", np.zeros((2, 64), np.int64))}
    path = tmp_path / "in.safetensors"
    st.write(path, tensors)
    outcome = invoke("quantize", path, "-o", out_dir / "out", "--include", "table")
    assert outcome.code == USAGE and "table" in outcome.message and "I64" in outcome.message
    assert list(out_dir.iterdir()) == []


# F13: resources


class Measured(NamedTuple):
    code: int
    seconds: float
    peak_bytes: int


def measure(command):
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Measured(child.returncode, processor_seconds(usage), usage.ru_maxrss * 1024)


HEADER_BYTES = 100_000_000


def write_many_entries(file):
    """A million tensors of one byte, named so that the header is just below its limit."""
    count = 1_000_000
    file.write(bytes(8) + b"{")
    for begin in range(0, count, 10_000):
        text = ",".join(
            f'"{"x" * 25}{i:07}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
            for i in range(begin, begin + 10_000)
        )
        file.write((b"," if begin else b"") + text.encode())
    file.write(b"}")
    header_bytes = file.tell() - 8
    assert 0.9 * HEADER_BYTES < header_bytes <= HEADER_BYTES, header_bytes
    file.write(bytes(count))
    file.seek(0)
    file.write(header_bytes.to_bytes(8, "little"))


def write_spaces(file):
    file.write(HEADER_BYTES.to_bytes(8, "little") + b"{" + b" " * (HEADER_BYTES - 2) + b"}")


def write_long_name(file):
    rest = '":' + GOOD + "}"
    name_bytes = HEADER_BYTES - len(rest) - 2
    file.write(HEADER_BYTES.to_bytes(8, "little") + b'{"' + b"n" * name_bytes + rest.encode())
    file.write(EIGHT[:4])


def write_long_shape(file):
    rest = "]}}"
    start = '{"w":{"dtype":"U8","data_offsets":[0,1],"shape":[1'
    ones = ",1" * ((HEADER_BYTES - len(start) - len(rest)) // 2)
    text = start + ones + rest
    file.write(len(text).to_bytes(8, "little") + text.encode() + b"\0")


def write_deep_lists(file):
    file.write(HEADER_BYTES.to_bytes(8, "little") + b'{"w":' + b"[" * (HEADER_BYTES - 5))


def write_large_metadata(file):
    text = '{"__metadata__":{"a":"' + "m" * 50_000_000 + '"},"w":' + GOOD + "}"
    file.write(len(text).to_bytes(8, "little") + text.encode() + EIGHT[:4])


@pytest.mark.parametrize(
    "write, codes",
    [
        (write_many_entries, {0, BAD_INPUT}),
        (write_spaces, {0, BAD_INPUT}),
        (write_long_name, {0, BAD_INPUT}),
        (write_long_shape, {BAD_INPUT}),
        (write_deep_lists, {BAD_INPUT}),
        (write_large_metadata, {0, BAD_INPUT}),
    ],
)
def test_f13_large_headers(cli, tmp_path, write, codes):
    """Done or refused in 2 s (machines that run tests are allowed twice that) and in 64 MiB + 8x
    the header."""
    path = tmp_path / "large.safetensors"
    with open(path, "wb") as file:
        write(file)
    measured = measure([cli, "inspect", path])
    path.unlink()
    assert measured.code in codes
    assert measured.seconds < 2 * MAX_SECONDS
    assert measured.peak_bytes < (64 << 20) + 8 * HEADER_BYTES


# What a document costs grows with it, and with nothing else: no object is looked through for each of its keys,
# and no list of tensors for each of them.

LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
"""


def measure_small(command):
    """As measure, but not from this process, whose own memory would count for that of the command."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER, *map(str, command)], capture_output=True, timeout=TIMEOUT)
    code, seconds, peak_bytes = done.stdout.split()
    return Measured(int(code), float(seconds), int(peak_bytes)), done.stderr.decode()


def many_tensors(path, names, shape="[2,32]", dtype="BF16", num_bytes=128):
    """A file of zeros, with holes where the file system has them."""
    header = ",".join(
        f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{i * num_bytes},{(i + 1) * num_bytes}]}}'
        for i, name in enumerate(names)
    )
    with open(path, "wb") as file:
        file.write(raw("{" + header + "}"))
        file.truncate(file.tell() + num_bytes * len(names))


def linear_names(count, begin=0):
    return [f"model.layers.{i}.mlp.up_proj.weight" for i in range(begin, begin + count)]


def join(count, text):
    return ",".join(text(i) for i in range(count))


def index_of_objects(path, count):
    many_tensors(path / SHARD, ["w"])
    objects = join(20_000 * count, lambda i: f'"{i}":{{"a":{{}}}}')
    write_index(path, f'{{"metadata":{{{objects}}},"weight_map":{{"w":"{SHARD}"}}}}')


def index_of_tensors(path, count):
    """Of which there is only one."""
    many_tensors(path / SHARD, ["w"])
    names = join(100_000 * count, lambda i: f'"{i:060}":"{SHARD}"')
    write_index(path, f'{{"weight_map":{{{names}}}}}')


def config_of_objects(path, count):
    many_tensors(path / "model.safetensors", linear_names(1))
    (path / "config.json").write_text("{" + join(20_000 * count, lambda i: f'"{i:05}":{{"a":{i}}}') + "}")


def config_of_modules(path, count):
    """A word of its own for the quantization of each."""
    many_tensors(path / "model.safetensors", linear_names(1))
    layers = join(10_000 * count, lambda i: f'"{i}":{{"quant_algo":"x{i}","bits":{i}}}')
    (path / "hf_quant_config.json").write_text(f'{{"quantization":{{"quantized_layers":{{{layers}}}}}}}')


def quant_states(path, count):
    """Descriptions of weights as long as they may be, of many keys."""
    states = "{" + join(5_000, lambda i: f'"{i}":{{}}') + "}"
    names = [f"w{i}.quant_state.bitsandbytes__nf4" for i in range(count)]
    header = {name: {"dtype": "U8", "shape": [len(states)], "data_offsets": [i * len(states), (i + 1) * len(states)]}
              for i, name in enumerate(names)}  # fmt: skip
    (path / "model.safetensors").write_bytes(raw(compact(header), states.encode() * count))


def metadata_of_keys(path, count):
    entries = join(50_000 * count, lambda i: f'"{i}":""')
    (path / "model.safetensors").write_bytes(raw(f'{{"__metadata__":{{{entries}}}}}'))


def small_tensors(path, count):
    many_tensors(path / "model.safetensors", linear_names(4_000 * count))


def small_shards(path, count):
    shards = {f"model-{i:05}.safetensors": linear_names(400, 400 * i) for i in range(5 * count)}
    for file, names in shards.items():
        many_tensors(path / file, names)
    write_index(path, {"weight_map": {name: file for file, names in shards.items() for name in names}})


DOCUMENTS = [
    (index_of_objects, ["inspect"], 0),
    (index_of_tensors, ["inspect"], BAD_INPUT),
    (config_of_objects, ["inspect"], 0),
    (config_of_objects, ["quantize", "--layout", "halfbyte"], 0),
    (config_of_modules, ["inspect"], 0),
    (quant_states, ["inspect"], BAD_INPUT),
    (metadata_of_keys, ["inspect"], 0),
    (small_tensors, ["inspect"], 0),
    (small_tensors, ["quantize"], 0),
    (small_shards, ["quantize", "--shard-size", "1000000"], 0),
]


@pytest.mark.parametrize("write, arguments, code", DOCUMENTS, ids=lambda value: getattr(value, "__name__", None))
def test_time_and_memory_are_linear(cli, tmp_path, write, arguments, code):
    measured = {}
    for size in (1, 2, 4):
        path = tmp_path / f"{size}"
        path.mkdir()
        write(path, size)
        output = [] if arguments[0] == "inspect" else ["-o", tmp_path / f"out{size}"]
        measured[size], message = measure_small([cli, arguments[0], path, *output, *arguments[1:]])
        assert measured[size].code == code, message
    # Quadratic would be 16 times as much. What every run has is counted in favour, and so is noise.
    assert measured[4].seconds < 8 * measured[1].seconds + 0.2, measured
    assert measured[4].peak_bytes < 6 * measured[1].peak_bytes, measured


def test_side_files_are_not_parsed(halfbyte, tmp_path):
    """Whatever is in them: the largest are of the tokenizer."""
    (tmp_path / "in").mkdir()
    many_tensors(tmp_path / "in" / "model.safetensors", linear_names(1))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        (tmp_path / "in" / name).write_bytes(b'{"a": NaN, "a": \xff\0')
    halfbyte("quantize", tmp_path / "in", "-o", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def largest_weight_map(path):
    many_tensors(path / SHARD, ["w"])
    name_bytes = 99_000_000 // 1_000_000 - 10
    with open(path / "model.safetensors.index.json", "w") as file:
        file.write('{"weight_map":{"w":"' + SHARD + '"')
        for begin in range(0, 1_000_000, 10_000):
            file.write("".join(f',"{i:0{name_bytes}}":"a"' for i in range(begin, begin + 10_000)))
        file.write("}}")
    return path


def largest_metadata(path):
    many_tensors(path / SHARD, ["w"])
    with open(path / "model.safetensors.index.json", "w") as file:
        file.write('{"metadata":[' + "{}," * 33_000_000 + '0],"weight_map":{"w":"' + SHARD + '"}}')
    return path


def largest_header(path):
    """As many tensors as there may be, with names that fill the header."""
    count = 1 << 18
    many_tensors(path / "model.safetensors", [f"{i:0320}" for i in range(count)], "[0]", num_bytes=0)
    return path


@pytest.mark.parametrize("write", [largest_weight_map, largest_metadata, largest_header])
def test_the_largest_documents(cli, tmp_path, write):
    """Done or refused in 2 s (machines that run tests are allowed twice that) and 0.9 GB."""
    measured, message = measure_small([cli, "inspect", write(tmp_path)])
    assert measured.code in (0, BAD_INPUT), message
    assert measured.seconds < 2 * MAX_SECONDS
    assert measured.peak_bytes < 900_000_000


# What is written can be read: planning refuses the rest.


def test_more_tensors_than_a_file_may_have(halfbyte, tmp_path, out_dir):
    """Each weight becomes four."""
    path = tmp_path / "in.safetensors"
    many_tensors(path, linear_names((1 << 16) + 1))
    for arguments in ([], ["--dry-run"]):
        message = halfbyte("quantize", path, "-o", out_dir / "out.safetensors", *arguments, expect=BAD_INPUT).stderr
        assert "a file would have 262148 tensors, more than the limit of 262144" in message
    assert not list(out_dir.iterdir())


def test_larger_headers_than_are_read(halfbyte, tmp_path, out_dir):
    (tmp_path / "in").mkdir()
    names = [f"{'n' * 1000}.{i}.weight" for i in range(30_000)]
    many_tensors(tmp_path / "in" / "model.safetensors", names)
    shards = ["--shard-size", "100000"]
    message = halfbyte("quantize", tmp_path / "in", "-o", out_dir / "out", expect=BAD_INPUT).stderr
    assert "header would have" in message and "limit of 100000000" in message and "--shard-size" in message
    assert not list(out_dir.iterdir())
    message = halfbyte("quantize", tmp_path / "in", "-o", out_dir / "out", *shards, expect=BAD_INPUT).stderr
    assert "model.safetensors.index.json would have" in message
    assert not list(out_dir.iterdir())


def test_larger_configs_than_are_read(halfbyte, tmp_path, out_dir):
    """Written with line breaks, it grows."""
    (tmp_path / "in").mkdir()
    many_tensors(tmp_path / "in" / "model.safetensors", linear_names(1))
    nested = "[" * 60 + join(150_000, lambda i: "0") + "]" * 60
    (tmp_path / "in" / "config.json").write_text(f'{{"a":{nested}}}')
    for arguments in ([], ["--dry-run"]):
        message = halfbyte("quantize", tmp_path / "in", "-o", out_dir / "out", *arguments, expect=BAD_INPUT).stderr
        assert re.search(r"config.json: \d+ bytes, more than the limit of 16777216", message)
    assert not list(out_dir.iterdir())


# F14: names


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "/etc/passwd", "a/../../b", "C:\\x", "a\u0000b", "\u001b[31mred",
        "\u001b]0;title\u0007", "line\nbreak", "tab\t", "\u202egnp.exe", "\u2066x\u2069", "\u009b31m",
        "\u007f", "\ufeff", "\U0001f600", "n" * 1_000_000, "{}{0}%s%n", "__metadata__ ",
    ],
    ids=lambda name: ascii(name)[:20],
)  # fmt: skip
def test_f14_names_are_escaped(invoke, tmp_path, out_dir, name):
    """A name is never a path, and what is printed of it cannot steer a terminal."""
    tensors = weights() | {name: st.Tensor("U8", np.zeros(4, np.uint8))}
    path = tmp_path / "in" / "names.safetensors"
    path.parent.mkdir()
    st.write(path, tensors)
    before = snapshot(path.parent)
    inspected = invoke("inspect", path)
    quantized = invoke("quantize", path, "-o", out_dir / "out.safetensors")
    assert inspected.code == quantized.code and inspected.code in (0, BAD_INPUT)
    for outcome in (inspected, quantized):
        for text in (outcome.stdout.decode(), outcome.stderr.decode()):
            assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
            assert "line\nbreak" not in text
    assert snapshot(path.parent) == before
    if quantized.code == 0:
        assert [p.name for p in out_dir.iterdir()] == ["out.safetensors"]
        assert raw_tensors(out_dir / "out.safetensors")[name] == ("U8", [4], EIGHT[:4])


def test_f14_name_of_a_bad_tensor_is_escaped(invoke, tmp_path):
    path = tmp_path / "names.safetensors"
    path.write_bytes(one(name=r"w\u001b[31m\u202e", shape="[3]"))
    outcome = invoke("inspect", path)
    assert outcome.code == BAD_INPUT
    assert not re.search("[\x1b\u202e]", outcome.message)
    assert "w" in outcome.message


# F15: metadata


def test_f15_metadata_is_kept_but_for_our_keys(halfbyte, tmp_path):
    st.write(tmp_path / "in.safetensors", weights(), {"format": "np", "author": '\u00fc\n"x"'})
    out = tmp_path / "out.safetensors"
    halfbyte("quantize", tmp_path / "in.safetensors", "-o", out, "--layout", "bitsandbytes")
    _, metadata = st.read(out)
    assert metadata == {"format": "pt", "author": '\u00fc\n"x"'}


# F16: the index of a sharded model

SHARD, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(path):
    """A valid model of two shards; returns its index."""
    path.mkdir()
    tensors = weights()
    names = sorted(tensors)
    st.write(path / SHARD, {name: tensors[name] for name in names[:1]})
    st.write(path / OTHER, {name: tensors[name] for name in names[1:]})
    (path / "config.json").write_text("{}")
    total_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {names[0]: SHARD} | dict.fromkeys(names[1:], OTHER),
    }
    write_index(path, index)
    return index


def write_index(path, index):
    text = index if isinstance(index, (str, bytes)) else json.dumps(index)
    text = text.encode() if isinstance(text, str) else text
    (path / "model.safetensors.index.json").write_bytes(text)


def remap(path, index, file):
    """All tensors of the first shard are said to be in `file`."""
    for name, shard in index["weight_map"].items():
        if shard == SHARD:
            index["weight_map"][name] = file
    write_index(path, index)


def parent_path(path, index):
    os.rename(path / SHARD, path.parent / "x.safetensors")
    remap(path, index, "../x.safetensors")


def absolute_path(path, index):
    remap(path, index, str(path / SHARD))


def subdirectory(path, index):
    (path / "sub").mkdir()
    os.rename(path / SHARD, path / "sub" / SHARD)
    remap(path, index, f"sub/{SHARD}")


def dot_path(path, index):
    remap(path, index, f"./{SHARD}")


def backslash_path(path, index):
    remap(path, index, f"..\\{SHARD}")


def nul_in_path(path, index):
    remap(path, index, f"{SHARD}\0.txt")


def symlink_out(path, index):
    os.rename(path / SHARD, path.parent / "outside.safetensors")
    os.symlink(path.parent / "outside.safetensors", path / SHARD)


def symlink_loop(path, index):
    (path / SHARD).unlink()
    os.symlink(SHARD, path / SHARD)


def symlink_to_device(path, index):
    (path / SHARD).unlink()
    os.symlink("/dev/zero", path / SHARD)


def missing_shard(path, index):
    (path / SHARD).unlink()


def shard_is_fifo(path, index):
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)


def shard_is_directory(path, index):
    (path / SHARD).unlink()
    (path / SHARD).mkdir()


def shard_is_index(path, index):
    remap(path, index, "model.safetensors.index.json")


def empty_name(path, index):
    remap(path, index, "")


def dot_name(path, index):
    remap(path, index, ".")


def wrong_shard(path, index):
    index["weight_map"]["flag"] = OTHER
    write_index(path, index)


def swapped_shards(path, index):
    os.rename(path / SHARD, path / "t")
    os.rename(path / OTHER, path / SHARD)
    os.rename(path / "t", path / OTHER)


def not_in_the_index(path, index):
    del index["weight_map"][WEIGHT]
    write_index(path, index)


def not_in_any_shard(path, index):
    index["weight_map"]["ghost"] = OTHER
    write_index(path, index)


def in_two_shards(path, index):
    st.write(path / OTHER, weights())


def case_clash(path, index):
    upper = OTHER.replace("model", "MODEL").replace("00002-of", "00001-of")
    os.rename(path / OTHER, path / upper)
    for name, shard in index["weight_map"].items():
        if shard == OTHER:
            index["weight_map"][name] = upper
    write_index(path, index)


def damaged_shard(path, index):
    os.truncate(path / SHARD, os.path.getsize(path / SHARD) - 1)


def replace_index(text):
    def fault(path, index):
        write_index(path, text)

    return fault


def duplicate_in_index(path, index):
    write_index(path, json.dumps(index).replace('"flag":', f'"flag": "{OTHER}", "flag":'))


INDEX_FAULTS = {
    "parent directory": (parent_path, r"\.\./x\.safetensors|flag"),
    "absolute path": (absolute_path, SHARD),
    "separator": (subdirectory, SHARD),
    "dot and separator": (dot_path, SHARD),
    "backslash": (backslash_path, SHARD),
    "NUL": (nul_in_path, SHARD),
    "symlink out of the directory": (symlink_out, SHARD),
    "symlink loop": (symlink_loop, SHARD),
    "symlink to a device": (symlink_to_device, SHARD),
    "missing shard": (missing_shard, SHARD),
    "shard is a FIFO": (shard_is_fifo, SHARD),
    "shard is a directory": (shard_is_directory, SHARD),
    "shard is the index": (shard_is_index, r"index\.json"),
    "empty name": (empty_name, r'file name ""'),
    "name is a dot": (dot_name, r'file name "\."'),
    "tensor in the wrong shard": (wrong_shard, r"flag"),
    "shards swapped": (swapped_shards, r"."),
    "tensor not in the index": (not_in_the_index, re.escape(WEIGHT)),
    "tensor in no shard": (not_in_any_shard, r"ghost"),
    "tensor in two shards": (in_two_shards, r"flag"),
    "case clash": (case_clash, r"(?i)case|MODEL-"),
    "damaged shard": (damaged_shard, SHARD),
    "index is empty": (replace_index(""), r"index\.json"),
    "index is not JSON": (replace_index('{"weight_map": }'), r"index\.json"),
    "index is not UTF-8": (replace_index(b'{"weight_map":{"\xff":"a"}}'), r"index\.json"),
    "index is a list": (replace_index("[]"), r"index\.json"),
    "index without weight_map": (replace_index('{"metadata":{}}'), r"weight_map"),
    "weight_map is a list": (replace_index('{"weight_map":[]}'), r"weight_map"),
    "shard name is a number": (replace_index('{"weight_map":{"flag":1}}'), r"flag|weight_map"),
    "index is deep": (replace_index("[" * 1_000_000), r"index\.json"),
    "duplicate in the index": (duplicate_in_index, r"flag|(?i:duplicate)"),
}


@pytest.mark.parametrize("name", INDEX_FAULTS)
def test_f16_index(refused, tmp_path, name):
    fault, pattern = INDEX_FAULTS[name]
    path = tmp_path / "in" / "model"
    path.parent.mkdir()
    index = sharded(path)
    fault(path, index)
    refused(path, pattern)


def test_f16_valid_index(invoke, out_dir, tmp_path):
    sharded(tmp_path / "model")
    assert invoke("inspect", tmp_path / "model").code == 0
    assert invoke("quantize", tmp_path / "model", "-o", out_dir / "out").code == 0


# F17: damage anywhere


def small_file():
    tensors = {
        WEIGHT: st.from_f32(np.arange(64, dtype=np.float32).reshape(2, 32), "BF16"),
        "b": st.from_f32(np.arange(8, dtype=np.float32), "F32"),
    }
    header, order = st.header_of(tensors)
    text = compact(header).encode()
    text += b" " * (-len(text) % 8)
    return raw(text, b"".join(tensors[name].data.tobytes() for name in order)), len(text)


def test_f17_truncated_anywhere(invoke, tmp_path):
    content, _ = small_file()
    path = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        outcome = invoke("inspect", path)
        assert outcome.code == BAD_INPUT and outcome.message, f"cut to {length} bytes"
    path.write_bytes(content)
    assert invoke("inspect", path).code == 0


def test_f17_flipped_bits(invoke, tmp_path):
    content, header_bytes = small_file()
    path = tmp_path / "flipped.safetensors"
    for bit in range(0, 8 * (8 + header_bytes), 5):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        outcome = invoke("inspect", path)
        assert outcome.code in (0, BAD_INPUT), f"bit {bit}: exit {outcome.code}"
        assert outcome.code == 0 or outcome.message, f"bit {bit}"


# O1, O6: the output


@pytest.fixture
def input_file(tmp_path):
    path = tmp_path / "input.safetensors"
    st.write(path, weights())
    return path


def unchanged(path, content):
    return path.read_bytes() == content


def test_o1_existing_file(invoke, input_file, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    outcome = invoke("quantize", input_file, "-o", out)
    assert outcome.code == EXISTS and "out.safetensors" in outcome.message
    assert out.read_bytes() == b"precious"
    assert invoke("quantize", input_file, "-o", out, "--force").code == 0
    assert WEIGHT + ".absmax" in st.read(out)[0]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("occupied", [False, True])
def test_o1_existing_directory(invoke, tmp_path, occupied):
    sharded(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    if occupied:
        (out / "precious").write_bytes(b"precious")
    before = snapshot(out)
    outcome = invoke("quantize", tmp_path / "model", "-o", out)
    assert outcome.code == EXISTS and "out" in outcome.message
    assert snapshot(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("how", ["itself", "hard link", "symlink", "dotted path"])
def test_o1_output_is_the_input(invoke, input_file, tmp_path, how):
    content = input_file.read_bytes()
    out = tmp_path / "alias.safetensors"
    if how == "itself":
        out = input_file
    elif how == "hard link":
        os.link(input_file, out)
    elif how == "symlink":
        os.symlink(input_file, out)
    else:
        (tmp_path / "d").mkdir()
        out = tmp_path / "d" / ".." / input_file.name
    before = snapshot(tmp_path)
    outcome = invoke("quantize", input_file, "-o", out)
    assert outcome.code in (USAGE, EXISTS) and outcome.message
    assert unchanged(input_file, content) and snapshot(tmp_path) == before

    # With --force it is refused, or the complete new file takes the place of the old one.
    outcome = invoke("quantize", input_file, "-o", out, "--force")
    if outcome.code == 0:
        assert WEIGHT + ".absmax" in st.read(out)[0]
    else:
        assert outcome.code in (USAGE, EXISTS) and outcome.message
        assert unchanged(input_file, content) and snapshot(tmp_path) == before


def test_o1_output_is_the_input_directory(invoke, tmp_path):
    sharded(tmp_path / "model")
    before = {p: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    for arguments in ([], ["--force"]):
        outcome = invoke("quantize", tmp_path / "model", "-o", tmp_path / "model", *arguments)
        if outcome.code != 0:
            assert outcome.code in (USAGE, EXISTS) and outcome.message
            assert {p: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
        else:
            assert arguments == ["--force"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_o1_dangling_symlink(invoke, input_file, tmp_path):
    os.symlink(tmp_path / "elsewhere", tmp_path / "out.safetensors")
    outcome = invoke("quantize", input_file, "-o", tmp_path / "out.safetensors")
    assert outcome.code == EXISTS, outcome.message
    assert not (tmp_path / "elsewhere").exists()


def test_o1_missing_parent(invoke, input_file, tmp_path):
    outcome = invoke("quantize", input_file, "-o", tmp_path / "none" / "out.safetensors")
    assert outcome.code == IO and "none" in outcome.message
    assert [p.name for p in tmp_path.iterdir()] == [input_file.name]


def test_o1_parent_is_a_symlink(invoke, input_file, tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    outcome = invoke("quantize", input_file, "-o", tmp_path / "link" / "out.safetensors")
    assert outcome.code == 0, outcome.message
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["out.safetensors"]


def test_o6_read_only_directory(invoke, unprivileged):
    directory, options = unprivileged
    st.write(directory / "input.safetensors", weights())
    (directory / "locked").mkdir()
    (directory / "locked").chmod(0o555)
    out = directory / "locked" / "out.safetensors"
    outcome = invoke("quantize", directory / "input.safetensors", "-o", out, **options)
    assert outcome.code == IO and "locked" in outcome.message, outcome.message
    assert list((directory / "locked").iterdir()) == []


def test_o6_unreadable_input(invoke, unprivileged):
    directory, options = unprivileged
    path = directory / "secret.safetensors"
    st.write(path, weights())
    path.chmod(0)
    outcome = invoke("inspect", path, **options)
    assert outcome.code == IO and "secret.safetensors" in outcome.message, outcome.message


# The words of GPTQ and AWQ


def gptq_file(path, quantization=None, **changes):
    """A weight [64, 128] in groups of 32, and what is changed or missing of it."""
    tensors = {
        "qweight": st.Tensor("I32", np.zeros((16, 64), np.int32)),
        "qzeros": st.Tensor("I32", np.full((4, 8), 0x77777777, np.int32)),
        "scales": st.from_f32(np.ones((4, 64), np.float32), "F16"),
        "g_idx": st.Tensor("I32", np.arange(128, dtype=np.int32) // 32),
    } | changes
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True} | (quantization or {})
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    module = WEIGHT.removesuffix(".weight")
    st.write(path / "model.safetensors", {f"{module}.{n}": t for n, t in tensors.items() if t is not None})
    return path


def i32(values):
    return st.Tensor("I32", np.array(values, np.int32))


def changed(index, value):
    groups = np.arange(128, dtype=np.int32) // 32
    groups[index] = value
    return st.Tensor("I32", groups)


WRONG_WORDS = {
    "a group that is not there": ({"g_idx": changed(5, 4)}, "column 5 is in group 4, but there are 4 groups"),
    "a negative group": ({"g_idx": changed(127, -1)}, "column 127 is in group -1"),
    "the largest group": ({"g_idx": changed(0, 2**31 - 1)}, "column 0 is in group 2147483647"),
    "too many columns in a group": ({"g_idx": changed(40, 0)}, "group 0 has more than 32 columns"),
    "an index that is too short": ({"g_idx": i32([0] * 64)}, r"must be I32 \[128\]"),
    "an index that is too long": ({"g_idx": i32([0] * 129)}, r"must be I32 \[128\]"),
    "an index of two axes": ({"g_idx": i32([[0] * 128])}, r"must be I32 \[128\]"),
    "an index of another dtype": ({"g_idx": st.Tensor("I64", np.zeros(128, np.int64))}, "the group of each column"),
    "zero points of fewer outputs": ({"qzeros": i32([[0] * 7] * 4)}, r"words \[4, 7\] for 64 outputs"),
    "zero points of fewer groups": ({"qzeros": i32([[0] * 8] * 3)}, r"must be I32 \[4, 8\]"),
    "zero points of one axis": ({"qzeros": i32([0] * 32)}, r"words \[32\] for 64 outputs"),
    "no zero points": ({"qzeros": st.Tensor("I32", np.zeros((4, 0), np.int32))}, r"words \[4, 0\]"),
    "zero points of another dtype": ({"qzeros": st.Tensor("F32", np.zeros((4, 8), np.float32))}, "must be I32"),
    "groups that do not divide the columns": (
        {"qzeros": i32([[0] * 8] * 3), "scales": st.from_f32(np.ones((3, 64), np.float32), "F16"), "g_idx": None},
        "128 columns do not divide into 3 groups",
    ),
    "more groups than columns": (
        {"qzeros": i32([[0] * 8] * 256), "scales": st.from_f32(np.ones((256, 64), np.float32), "F16"), "g_idx": None},
        "256 groups of 128 columns",
    ),
    "no columns": ({"qweight": st.Tensor("I32", np.zeros((0, 64), np.int32))}, "is of an empty weight"),
    "no groups": (
        {"qzeros": i32(np.zeros((0, 8))), "scales": st.from_f32(np.ones((0, 64), np.float32), "F16")},
        "is of an empty weight",
    ),
    "codes that do not fill their words": (
        {
            "qweight": st.Tensor("I32", np.zeros((16, 16), np.int32)),
            "qzeros": i32([[0] * 3] * 4),
            "scales": st.from_f32(np.ones((4, 16), np.float32), "F16"),
        },
        "codes",
    ),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_words_of_gptq(refused, tmp_path, name):
    changes, pattern = WRONG_WORDS[name]
    refused(gptq_file(tmp_path / "in", **changes), pattern)


def test_words_of_gptq_of_huge_extents(invoke, tmp_path):
    """Tensors without bytes: nothing is allocated for what their shapes say."""
    module = WEIGHT.removesuffix(".weight")
    header = {
        f"{module}.{name}": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, dtype, shape in [
            ("qweight", "I32", [2**58, 0]),
            ("scales", "F16", [2**58, 0]),
            ("qzeros", "I32", [2**58, 0]),
            ("g_idx", "I32", [0]),
        ]
    }
    (tmp_path / "in.safetensors").write_bytes(raw(json.dumps(header)))
    outcome = invoke("inspect", tmp_path / "in.safetensors")
    assert outcome.code == BAD_INPUT and "empty weight" in outcome.message


@pytest.mark.parametrize("key", ["bits", "group_size", "sym", "checkpoint_format", "quant_method", "version"])
def test_words_with_odd_configs(invoke, tmp_path, key):
    for number, value in enumerate([None, 0, -1, 2**63, 1e300, "x", [], {}, True, [[]]]):
        path = gptq_file(tmp_path / f"{number}", {key: value})
        assert invoke("inspect", path).code in (0, BAD_INPUT)
        assert invoke("dequantize", path, "-o", tmp_path / f"out{number}").code in (0, BAD_INPUT)


# The tensors of published models: fp8 in rows and in blocks, experts of gpt-oss, block floats


def published(**changes):
    """A weight of each form, and what is changed or missing of them."""
    codes = np.arange(32, dtype=np.uint8)
    tensors = {
        "a.weight": st.Tensor("F8_E4M3", codes[:8].reshape(2, 4)),
        "a.weight_scale": st.from_f32(np.ones((2, 1)), "BF16"),
        "b.weight": st.Tensor("F8_E4M3", codes[:6].reshape(2, 3)),
        "b.weight_scale_inv": st.from_f32(np.ones((1, 1)), "F32"),
        "g.weight": st.Tensor("F8_E4M3", codes[:6].reshape(2, 3)),
        "g.weight_scale_inv": st.Tensor("F8_E8M0", np.full((1, 1), 127, np.uint8)),
        "h.weight": st.Tensor("F8_E5M2", codes[:6].reshape(2, 3)),
        "h.weight_scale": st.from_f32(np.ones((2, 1)), "F32"),
        "x.experts.c_blocks": st.Tensor("U8", codes[:16].reshape(1, 1, 1, 16)),
        "x.experts.c_scales": st.Tensor("U8", np.full((1, 1, 1), 127, np.uint8)),
        "d.weight_packed": st.Tensor("U8", codes[:8].reshape(1, 8)),
        "d.weight_scale": st.Tensor("F8_E4M3", np.full((1, 1), 0x38, np.uint8)),
        "d.weight_global_scale": st.from_f32(np.ones(1), "F32"),
        "e.weight_packed": st.Tensor("U8", codes[:16].reshape(1, 16)),
        "e.weight_scale": st.Tensor("U8", np.full((1, 1), 127, np.uint8)),
        "f.weight": st.Tensor("U8", codes[:8].reshape(1, 8)),
        "f.weight_scale": st.Tensor("F8_E4M3", np.full((1, 1), 0x38, np.uint8)),
        "f.weight_scale_2": st.Tensor("F32", np.array(1, np.float32)),
        "i.weight": st.Tensor("F8_E4M3", codes[:6].reshape(2, 3)),
        "i.scale": st.Tensor("F8_E8M0", np.full((1, 1), 127, np.uint8)),
        "j.weight": st.Tensor("I8", codes[:16].reshape(1, 16).view(np.int8)),
        "j.scale": st.Tensor("F8_E8M0", np.full((1, 1), 127, np.uint8)),
        "k.weight": st.Tensor("F8_E4M3", codes[:32].reshape(1, 32)),
        "k.weight_scale": st.Tensor("U8", np.full((1, 1), 127, np.uint8)),
        "l.weight": st.Tensor("U32", codes[:32].view("<u4").reshape(1, 8)),
        "l.scales": st.Tensor("U8", np.full((1, 1), 127, np.uint8)),
    } | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    header, order = st.header_of(tensors)
    text = compact(header).encode()
    text += b" " * (-len(text) % 8)
    return raw(text, b"".join(tensors[name].data.tobytes() for name in order))


NUM_PUBLISHED = 12


def run_many(cli, tmp_path, contents, *command):
    """The tool on each of many files, several at a time: outcomes in order, none of a signal."""

    def run(number_and_content):
        number, content = number_and_content
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        arguments = [str(path) if each == "IN" else f"{path}.out" if each == "OUT" else each for each in command]
        done = subprocess.run([cli, *arguments], capture_output=True, timeout=TIMEOUT)
        path.unlink()
        assert done.returncode >= 0, f"file {number}: killed by signal {-done.returncode}"
        return Outcome(done.returncode, done.stdout, done.stderr)

    before = processor_seconds(resource.getrusage(resource.RUSAGE_CHILDREN))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(run, enumerate(contents)))
    seconds = processor_seconds(resource.getrusage(resource.RUSAGE_CHILDREN)) - before
    assert seconds < MAX_SECONDS * len(outcomes) / 10, f"{len(outcomes)} files took {seconds:.1f} s"
    return outcomes


def test_published_forms_truncated_anywhere(cli, invoke, tmp_path):
    content = published()
    outcomes = run_many(cli, tmp_path, (content[:length] for length in range(len(content))), "inspect", "IN")
    for length, outcome in enumerate(outcomes):
        assert outcome.code == BAD_INPUT and outcome.message, f"cut to {length} bytes"
    path = tmp_path / "whole.safetensors"
    path.write_bytes(content)
    assert json.loads(invoke("inspect", path, "--json", "-").stdout)["num_quantized"] == NUM_PUBLISHED


def test_published_forms_with_flipped_bits(cli, tmp_path):
    """A bit of every byte: read, or refused with a message; what is read is decoded, too."""
    content = published()

    def flipped(byte):
        changed = bytearray(content)
        changed[byte] ^= 1 << (byte * 3 % 8)
        return bytes(changed)

    outcomes = run_many(cli, tmp_path, map(flipped, range(len(content))), "dequantize", "IN", "-o", "OUT")
    for byte, outcome in enumerate(outcomes):
        assert outcome.code in (0, BAD_INPUT), f"byte {byte}: exit {outcome.code}: {outcome.message}"
        assert outcome.code == 0 or outcome.message, f"byte {byte}"


def u8(*shape):
    return st.Tensor("U8", np.zeros(shape, np.uint8))


WRONG_PUBLISHED = {
    "gpt-oss: scales of fewer groups": ({"x__experts__c_scales": u8(1, 1, 2)}, r"must be U8 \[1, 1, 1\]"),
    "gpt-oss: scales of two axes": ({"x__experts__c_scales": u8(1, 1)}, r"must be U8 \[1, 1, 1\]"),
    "a weight in two forms": ({"a__weight_scale_inv": st.from_f32(np.ones((1, 1)), "F32")}, "two quantized weights"),
    "nvfp4: scales of fewer rows": ({"d__weight_scale": st.Tensor("F8_E4M3", np.zeros((2, 1), np.uint8))}, r"must be F8_E4M3 \[1, 1\]"),
    "nvfp4: rows of no whole groups": ({"d__weight_packed": u8(1, 7)}, "whole groups of 16 codes"),
    "nvfp4: no global scale": ({"d__weight_global_scale": None}, "of one F32"),
    "nvfp4: two global scales": ({"d__weight_global_scale": st.from_f32(np.ones(2), "F32")}, "of one F32"),
    "nvfp4: scales of another dtype": ({"d__weight_scale": st.from_f32(np.ones((1, 1)), "F16")}, "must be F8_E4M3 or U8"),
    "mxfp4: no scales": ({"e__weight_scale": None}, "has no"),
    "mxfp4: rows of no whole groups": ({"e__weight_packed": u8(1, 8)}, "whole groups of 32 codes"),
    "mlx: scales of fewer rows": ({"l__scales": u8(2, 1)}, r"must be U8 \[1, 1\]"),
    "two tensors of scales": ({"i__weight_scale_inv": st.from_f32(np.ones((1, 1)), "F32")}, "two quantized weights"),
    "modelopt: no global scale": ({"f__weight_scale_2": None}, "of one F32"),
    "modelopt: codes of one axis": ({"f__weight": u8(8)}, "whole groups of 16 codes"),
}


@pytest.mark.parametrize("name", WRONG_PUBLISHED)
def test_published_forms_that_do_not_fit(refused, tmp_path, name):
    changes, pattern = WRONG_PUBLISHED[name]
    path = tmp_path / "in" / "in.safetensors"
    path.parent.mkdir()
    path.write_bytes(published(**changes))
    refused(path, pattern)


# Not read: named as quantized by another tool.
NOT_READ = {
    "no scales": {"b__weight_scale_inv": None},
    "scales of bytes": {"b__weight_scale_inv": u8(1, 1)},
    "scales of other blocks": {"b__weight_scale_inv": st.from_f32(np.ones((2, 1)), "F32")},
    "scales of one axis": {"a__weight_scale": st.from_f32(np.ones(2), "BF16")},
    "scales of f64": {"a__weight_scale": st.Tensor("F64", np.ones((2, 1)))},
    "no columns": {"a__weight": st.Tensor("F8_E4M3", np.zeros((2, 0), np.uint8))},
    "module: no scales": {"i__scale": None},
    "module: scales of other blocks": {"i__scale": st.Tensor("F8_E8M0", np.full((2, 1), 127, np.uint8))},
    "module: scales of bytes": {"i__scale": u8(1, 1)},
    "module: a scale for all": {"i__scale": st.from_f32(np.array(1), "F32")},
    "module: no columns": {"i__weight": st.Tensor("F8_E4M3", np.zeros((2, 0), np.uint8))},
    "module: groups of another size": {"j__scale": st.Tensor("F8_E8M0", np.full((1, 2), 127, np.uint8))},
    "module: rows of no whole groups": {"j__weight": st.Tensor("I8", np.zeros((1, 15), np.int8))},
    "module: codes of one axis": {"j__weight": st.Tensor("I8", np.zeros(16, np.int8)), "j__scale": st.Tensor("F8_E8M0", np.full(1, 127, np.uint8))},
    "mxfp8: groups of another size": {"k__weight_scale": u8(1, 2)},
    "mxfp8: scales of one axis": {"k__weight_scale": u8(1)},
    "mlx: a global scale": {"l__global_scale": st.from_f32(np.ones(1), "F32")},
    "mlx: scales of no mode": {"l__scales": u8(1, 3)},
    "mlx: no groups": {"l__scales": u8(1, 0)},
    "mlx: no words": {"l__weight": st.Tensor("U32", np.zeros((1, 0), "<u4")), "l__scales": u8(1, 0)},
    "blocks of 15 bytes": {"x__experts__c_blocks": u8(1, 1, 1, 15)},
    "blocks of three axes": {"x__experts__c_blocks": u8(1, 1, 16)},
}


@pytest.mark.parametrize("name", NOT_READ)
def test_published_forms_that_are_not_read(invoke, tmp_path, name):
    path = tmp_path / "in.safetensors"
    path.write_bytes(published(**NOT_READ[name]))
    document = json.loads(invoke("inspect", path, "--json", "-").stdout)
    assert document["num_quantized"] == NUM_PUBLISHED - 1 and len(document["foreign"]) == 1
    outcome = invoke("dequantize", path, "-o", tmp_path / "out.safetensors")
    assert outcome.code == BAD_INPUT and "halfbyte does not read that" in outcome.message


@pytest.mark.parametrize("block", [
    [64, 64], [64], [64, 64, 1], [0, 64], [-64, 64], [2**20, 2**20], [2**70, 1], [64.5, 64], ["64", 64], [None, None], {"0": 64}, "64x64", None,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("place", ["weight_block_size", "block_structure"])
def test_blocks_of_fp8_that_a_config_names(invoke, tmp_path, place, block):
    """Blocks of two extents that fit are read; others are none, and the weight is named as not read."""
    weights = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}}
    fp8 = place == "weight_block_size"
    entry = {"quant_method": "fp8", place: block} if fp8 else {"quant_method": "compressed-tensors", "config_groups": {"group_0": weights}}
    scales = "a.weight_scale_inv" if fp8 else "a.weight_scale"
    tensors = {"a.weight": st.Tensor("F8_E4M3", np.full((200, 200), 0x38, np.uint8)), scales: st.from_f32(np.ones((4, 4)), "F32")}
    path = tmp_path / "in"
    path.mkdir()
    st.write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"quantization_config": entry}))
    document = json.loads(invoke("inspect", path, "--json", "-").stdout)
    assert document["num_quantized"] == (block == [64, 64]) and len(document["foreign"]) == (block != [64, 64])
    assert invoke("dequantize", path, "-o", tmp_path / "out").code == (0 if block == [64, 64] else BAD_INPUT)
    assert invoke("verify", path).code == (0 if block == [64, 64] and fp8 else 4)


@pytest.mark.parametrize("extent", [2**20, 2**40, 2**58, 2**62, 2**63 - 1])
def test_published_forms_of_huge_extents(invoke, tmp_path, extent):
    """Tensors without bytes: nothing is allocated for what their shapes say, and no product overflows."""
    shapes = {
        "a.weight": ("F8_E4M3", [extent, 0]),
        "a.weight_scale": ("BF16", [extent, 0]),
        "b.weight": ("F8_E4M3", [0, extent]),
        "b.weight_scale_inv": ("F32", [0, extent]),
        "c.experts.d_blocks": ("U8", [extent, extent, 0, 16]),
        "c.experts.d_scales": ("U8", [extent, extent, 0]),
        "c.experts.e_blocks": ("U8", [0, extent, extent, 16]),
        "c.experts.e_scales": ("U8", [0, extent, extent]),
        "d.weight": ("F8_E4M3", [0, extent]),
        "d.scale": ("F8_E8M0", [0, extent // 32]),
        "e.weight": ("I8", [0, extent]),
        "e.scale": ("F8_E8M0", [0, extent // 16]),
        "f.weight": ("U32", [0, extent]),
        "f.scales": ("U8", [0, extent // 8]),
    }
    for names in ([name for name in shapes if name[0] == each] for each in "abcdef"):
        header = {name: {"dtype": shapes[name][0], "shape": shapes[name][1], "data_offsets": [0, 0]} for name in names}
        path = tmp_path / "in.safetensors"
        path.write_bytes(raw(json.dumps(header)))
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # noqa: E731
        for command in (["inspect", path], ["verify", path], ["dequantize", path, "-o", tmp_path / "out", "--force"]):
            assert invoke(*command, preexec_fn=limit).code in (0, BAD_INPUT, 4)
