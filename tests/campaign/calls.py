"""A process that calls every function of halfbyte.h with wrong arguments: python -m campaign.calls LIBRARY SEED FIRST LAST.

The functions, structures and types are those of the header, which is parsed. Wrong is everything that the library can
see: NULL, enumerators, sizes, struct_size, ranks, strides and addresses that are misaligned, out of range or overflow.
Left out is what it cannot: handles that were destroyed, pointers to nothing, tensors longer than their memory.
Standard error names the call before it is made. Exit code 1: a status that is not documented, a failure without a
text, or a failure that changed a result.
"""

import ctypes
import os
import random
import re
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "include" / "halfbyte"
SCALARS = {
    "char": ctypes.c_char, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
STATUSES = {0, 2, 3, 4, 5, 6, 7, 8, 9, 130}  # BUG is none that a caller may see
ARENA_BYTES = 1 << 20


# What fits the handles that are made, by the name of the argument: (code, bits, extents), None: no tensor. Codes and
# scales differ by the operation.
MATRIX = (2, 32, [8, 64])
FITTING = {
    "x": [MATRIX, MATRIX, (2, 32, [2, 64]), (2, 32, [512])], "y": [MATRIX, MATRIX, (2, 32, [2, 8]), (2, 32, [512])],
    "w": [MATRIX], "dy": [MATRIX], "dx": [MATRIX], "mask": [None], "zero_point": [None], "dzero_point": [None],
    "codes": [(0, 8, [8, 64]), (1, 8, [256]), (1, 8, [8, 32])],
    "scales": [(2, 32, [8]), (2, 32, [8, 1])], "zeros": [None, None, (1, 8, [8])],
    "biases": [None, (2, 32, [8, 1])], "scale": [(2, 32, [])], "dscale": [(2, 32, [])], "bias": [None],
    "min": [(2, 32, [])], "max": [(2, 32, [])], "num_batches": [(0, 64, [])], "dscales": [(2, 32, [8, 1])],
    "dbiases": [(2, 32, [8, 1])], "absmax": [None, (2, 32, [1])], "map": [None], "offset": [None],
    "scale_m": [None], "scale_v": [None], "bias_m": [None], "bias_v": [None], "data": [(1, 8, [4096])],
    "dense": [MATRIX], "experts": [(0, 32, [4, 2])], "offsets": [(0, 32, [3])], "slots": [(0, 32, [8]), None],
    "routing_weights": [None], "forward_x": [None], "routing_grad": [None],
}  # fmt: skip


class Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Header:
    """halfbyte.h: functions {name: (result, [(type, name)])}, structures {name: [(type, name, length)]}."""

    def __init__(self):
        text = re.sub(r"/\*.*?\*/|^#.*?$", "", (INCLUDE / "halfbyte.h").read_text(), flags=re.DOTALL | re.MULTILINE)
        text = " ".join(text.split())
        self.enums = set(re.findall(r"typedef int32_t (\w+);", text))
        self.callbacks = {
            name: self.parameters(arguments) for name, arguments in re.findall(r"typedef int \(\*(\w+)\)\((.*?)\);", text)
        }
        self.structures = {}
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", text):
            fields = []
            for declaration in filter(None, map(str.strip, body.split(";"))):
                first, *more = declaration.split(",")
                kind, word, length = re.fullmatch(r"(.*?)(\w+)(?:\[(\d+)\])?", first).groups()
                fields.append((kind.strip(), word, int(length or 1)))
                fields += [(kind.strip(), other.strip(), 1) for other in more]
            self.structures[name] = fields
        self.handles = set(re.findall(r"typedef struct (\w+) \w+;", text)) - set(self.structures)
        self.functions = {
            name: (result.strip(), self.parameters(arguments))
            for result, name, arguments in re.findall(r"HALFBYTE_API ([^;(]*?)\b(halfbyte_\w+)\((.*?)\);", text)
        }
        self.types = {}

    @staticmethod
    def parameters(text):
        if text.strip() == "void":
            return []
        pairs = []
        for parameter in text.split(","):
            kind, name, length = re.fullmatch(r"(.*?)(\w+)(\[\d+\])?", parameter.strip()).groups()
            pairs.append((kind.strip() + ("*" if length else ""), name))
        return pairs

    def type_of(self, kind):
        """The ctypes type of a C type."""
        if kind.endswith("*"):
            return ctypes.c_void_p
        kind = kind.removeprefix("const ")
        if kind in SCALARS:
            return SCALARS[kind]
        if kind in self.enums:
            return ctypes.c_int32
        if kind in self.callbacks:
            return ctypes.c_void_p
        if kind == "DLDevice":
            return Device
        if kind not in self.types:
            fields = [
                (name, self.type_of(of) * length if length > 1 else self.type_of(of))
                for of, name, length in self.structures[kind]
            ]
            self.types[kind] = type(kind, (ctypes.Structure,), {"_fields_": fields})
        return self.types[kind]


class Caller:
    def __init__(self, library, header):
        self.header = header
        self.library = ctypes.CDLL(library)
        self.functions = {}
        for name, (result, parameters) in header.functions.items():
            function = getattr(self.library, name)
            function.argtypes = [header.type_of(kind) for kind, _ in parameters]
            function.restype = None if result == "void" else header.type_of(result)
            self.functions[name] = function
        self.arena = ctypes.create_string_buffer(ARENA_BYTES + 64)
        self.base = (ctypes.addressof(self.arena) + 63) // 64 * 64
        self.handles = {}
        self.plans = {}  # of each operation
        self.make_handles()

    # ---- Handles that live as long as the process

    def initialised(self, name, **fields):
        """A structure with its defaults, and these."""
        value = self.header.type_of(name)()
        function = self.functions.get(f"{name}_init")
        if function:
            function(ctypes.addressof(value), ctypes.sizeof(value))
        else:
            value.struct_size = ctypes.sizeof(value)
        for field, content in fields.items():
            setattr(value, field, content)
        self.kept.append(value)
        return ctypes.addressof(value)

    def make(self, name, *arguments):
        slot = ctypes.c_void_p()
        status = self.functions[name](*arguments, ctypes.addressof(slot))
        if status == 0:
            kind = self.header.functions[name][1][-1][0].removesuffix("**")
            self.handles.setdefault(kind, []).append(slot.value)
        return slot.value

    def make_handles(self):
        self.kept = []
        cpu = Device(1, 0)
        extents = (ctypes.c_int64 * 2)(8, 64)
        self.kept.append(extents)
        shape = ctypes.addressof(extents)
        spec = self.initialised("halfbyte_quant_spec")
        preference = self.initialised("halfbyte_plan_preference", num_threads=1)
        linear = {"shape": shape, "ndim": 2}
        fields = {
            "quantize": {"spec": spec, "rows": 8, "cols": 64},
            "dequantize": {"spec": spec, "rows": 8, "cols": 64},
            "qgemm": {"spec": spec, "n": 8, "k": 64, "m": 2, "dtype": 0},
            "route": {"tokens": 4, "top_k": 2, "num_experts": 3},
            "qgemm_grouped": {"spec": spec, "num_experts": 3, "n": 8, "k": 64, "m": 2, "dtype": 0},
            "affine_init": {"rows": 8, "cols": 64},
            "affine_qdq": {"rows": 8, "cols": 64},
            "affine_qdq_backward": {"rows": 8, "cols": 64},
        }
        for name, (_, parameters) in self.header.functions.items():
            match = re.fullmatch(r"halfbyte_(\w+)_select", name)
            if match:
                descriptor = parameters[1][0].removeprefix("const ").removesuffix("*")
                given = fields.get(match[1], linear)
                self.plans[f"halfbyte_{match[1]}"] = self.make(
                    name, cpu, self.initialised(descriptor, **given), preference
                )
        qgemm = self.initialised("halfbyte_qgemm_descriptor", **fields["qgemm"])
        self.make("halfbyte_qgemm_plans_create", cpu, qgemm, preference)
        weight = self.make("halfbyte_quantized_weight_create", spec, shape, 2, 0, cpu)
        self.make("halfbyte_quantized_weight_pack", weight, 0, None)
        self.make("halfbyte_qgemm_explain", cpu, qgemm)
        grouped = self.initialised("halfbyte_qgemm_grouped_descriptor", **fields["qgemm_grouped"])
        self.make("halfbyte_qgemm_grouped_explain", cpu, grouped)
        self.make("halfbyte_quantized_weight_to_linear", weight, None)
        self.make("halfbyte_writer_create", b"written", None)
        self.make("halfbyte_stream_create", cpu)
        self.make("halfbyte_memory_create", cpu, 4096)
        self.make("halfbyte_cuda_query")
        self.make("halfbyte_checkpoint_open", b"model.safetensors")
        options = self.initialised("halfbyte_quantize_options", dry_run=1)
        self.make("halfbyte_quantize_checkpoint", b"model.safetensors", b"planned", options)
        self.make("halfbyte_compare_checkpoints", b"model.safetensors", b"model.safetensors", None)
        self.make("halfbyte_verify_checkpoint", b"model.safetensors", None)

    # ---- Arguments

    def number(self, bits, signed):
        r = self.random
        values = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33, 64, 127, 128, 255, 256, 1000]
        if r.random() < 0.6:
            return r.choice(values)
        edge = 1 << r.choice([7, 8, 15, 16, 31, 32, 33, 40, 62, 63])
        value = edge + r.randrange(-2, 3)
        value = -value if signed and r.random() < 0.5 else value
        value &= (1 << bits) - 1
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    def at(self, num_bytes=0, alignment=16):
        """An address in the arena with so much memory behind it."""
        room = (ARENA_BYTES - num_bytes) // alignment
        return self.base + alignment * self.random.randrange(max(room, 1))

    def tensor(self, name):
        r = self.random
        if name in FITTING and r.random() < 0.8:
            fitting = r.choice(FITTING[name])
            return fitting and self.fitting_tensor(*fitting)
        code, bits = r.choice([(2, 32), (2, 32), (2, 64), (2, 16), (4, 16), (0, 8), (1, 8), (0, 32), (0, 64), (1, 4), (0, 4)])
        if r.random() < 0.05:
            code, bits = r.randrange(256), r.randrange(256)
        value = Tensor(None, self.device(), 0, code, bits, 1 if r.random() < 0.97 else r.randrange(65536))
        ndim = r.choice([0, 1, 1, 2, 2, 2, 3, 4, 8, 9, 32])
        extents = [r.choice([1, 1, 2, 4, 8, 8, 64, 64, 3, 0, 5, 32]) for _ in range(ndim)]
        while (total := self.product(extents)) * max(bits, 8) // 8 > ARENA_BYTES // 4:
            extents[extents.index(max(extents))] = 1
        data = self.at(total * max(bits, 8) // 8 + 64, 64)
        wrong = r.random()
        strides = None
        if wrong < 0.05 and ndim:
            extents[r.randrange(ndim)] = r.choice([-1, -(1 << 63), -(1 << 31)])
        elif wrong < 0.1 and ndim > 1:  # more bytes than there are numbers
            extents[0], extents[1] = 1 << 62, r.choice([3, 1 << 40, (1 << 62) + 1])
        elif wrong < 0.14:
            data = None
        elif wrong < 0.18:
            data += r.randrange(1, 8)
        elif wrong < 0.22 and ndim:
            strides = [r.choice([1 << 62, -(1 << 63), (1 << 63) - 1]) for _ in range(ndim)]
            extents = [max(extent, 2) for extent in extents]
            extents = [min(extent, 4) for extent in extents[:2]] + [2] * max(0, ndim - 2) if ndim < 9 else extents
        elif wrong < 0.26:
            ndim = r.choice([-1, 33, 64, 1 << 30, (1 << 31) - 1, -(1 << 31)])
        elif r.random() < 0.2:
            strides = [1] * len(extents)
            for axis in range(len(extents) - 1, 0, -1):
                strides[axis - 1] = strides[axis] * max(extents[axis], 1)
        value.data, value.ndim = data, ndim
        value.byte_offset = r.choice([0] * 20 + [4, 64, 1])
        value.shape = self.list_of(ctypes.c_int64, extents)
        value.strides = None if strides is None else self.list_of(ctypes.c_int64, strides)
        if r.random() < 0.03:
            value.shape = r.choice([None, value.shape + 4])
        return self.keep(value)

    def fitting_tensor(self, code, bits, extents):
        """Of values that are no floats of another size; its own part of the arena, so that few overlap."""
        value = Tensor(self.at(4096, 4096), Device(1, 0), len(extents), code, bits, 1)
        value.shape = self.list_of(ctypes.c_int64, extents)
        return self.keep(value)

    @staticmethod
    def product(extents):
        total = 1
        for extent in extents:
            total *= extent
        return total

    def list_of(self, kind, values):
        values = list(values)
        array = (kind * max(len(values), 64))(*values)
        self.kept.append(array)
        return ctypes.addressof(array)

    def device(self):
        r = self.random
        if r.random() < 0.9:
            return Device(1, 0)
        return Device(r.choice([0, 1, 2, 3, 4, 8, 13, -1, 1 << 30]), r.choice([0, 0, 1, -1, 1 << 30]))

    def keep(self, value):
        """The address of a copy with room behind, as struct_size may say more than there is."""
        memory = ctypes.create_string_buffer(ctypes.sizeof(value) + 8192)
        address = (ctypes.addressof(memory) + 15) // 16 * 16
        ctypes.memmove(address, ctypes.addressof(value), ctypes.sizeof(value))
        self.kept.append(memory)
        return address

    def structure(self, name):
        """The address of a structure: with its defaults and a few fields drawn, or with all drawn."""
        r = self.random
        value = self.header.type_of(name)()
        init = self.functions.get(f"{name}_init")
        fields = self.header.structures[name]
        if init and r.random() < 0.9:
            init(ctypes.addressof(value), ctypes.sizeof(value))
            optional = [field for field in fields[1:] if not field[0].endswith("*")]
            drawn = [field for field in fields[1:] if field[0].endswith("*") and r.random() < 0.98]
            drawn += r.sample(optional, min(len(optional), r.choice([0, 0, 0, 1, 1, 2, 4])))
        else:
            drawn = fields
        for kind, field, length in drawn:
            if length > 1:
                setattr(value, field, type(getattr(value, field))(*[self.value(kind, field) for _ in range(length)]))
            else:
                setattr(value, field, self.value(kind, field))
        size = ctypes.sizeof(value)
        if fields[0][1] == "struct_size":
            wrong = [0, 1, 7, 8, 9, size - 1, size - 4, size + 1, size + 8, 4096, 4097, 1 << 32, (1 << 64) - 1]
            value.struct_size = size if r.random() < 0.93 else r.choice([*wrong, r.randrange(size + 16)])
        for count in ("num_include", "num_exclude", "num_targets", "num_ops", "num_formats", "num_dtypes"):
            if hasattr(value, count):
                setattr(value, count, r.choice([0, 0, 1, 2, -1, -(1 << 63)]))
        return self.keep(value)

    def text(self):
        words = [b"", b"nf4", b"int4", b"bf16", b"cuda:1", b"cuda:99999999999", b"quantize", b"sm_90a", b"format", b"%s%n"]
        words += [b"minmax", b"auto", b"mlx", b"min-max", b"vllm", b"\xff\xfe", b"x" * 5000, b"model.safetensors", b"model"]
        words += [b"nowhere/at/all", b"output", b".", b"(", b"a{1,999999}", b"model.layers.0.mlp.up_proj.weight"]
        word = ctypes.create_string_buffer(self.random.choice(words))
        self.kept.append(word)
        return ctypes.addressof(word)

    def value(self, kind, name):
        """One argument or field."""
        r = self.random
        const = kind.startswith("const ")
        bare = kind.removeprefix("const ").strip()
        if not bare.endswith("*"):
            if bare in ("float", "double"):
                return r.choice([0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 99.99, 101.0])
            if bare == "DLDevice":
                return self.device()
            if bare in self.header.callbacks:
                return r.choice([None, self.callback(bare)])
            if bare in self.header.structures:
                return self.header.type_of(bare).from_address(self.structure(bare))
            if name in ("rows", "cols", "n") and r.random() < 0.7:
                return {"rows": 8, "cols": 64, "n": 512}[name]
            # Numbers of what a pointer leads to, which nobody can check.
            if name in ("num_bytes", "workspace_bytes", "num_settings", "num_groups"):
                most = 4 if name == "num_settings" else 4096
                return r.choice([0, 1, 2, 4, 16, 64, 100, most, -1, -(1 << 63)][: 3 if name == "num_settings" else 10])
            kind = self.header.type_of(bare)
            if kind is ctypes.c_int32:
                return r.choice([0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, -1, self.number(32, True)])
            return self.number(8 * ctypes.sizeof(kind), kind is ctypes.c_int64)
        target = bare[:-1].strip()
        if target == "halfbyte_plan" and self.plan and r.random() < 0.8:
            return self.plan
        if r.random() < (0.15 if name in ("encoding", "range", "status", "execution", "preference") else 0.03):
            return None
        if target in self.header.handles:  # a handle is never made up
            known = self.handles.get(target)
            return r.choice(known) if known else None
        if target == "DLTensor":
            address = self.tensor(name)
            return address if address is None or r.random() < 0.98 else address + 4
        if target in self.header.structures:
            if target == "halfbyte_kernel_setting":
                settings = [self.text() for _ in range(16)]
                return self.list_of(ctypes.c_void_p, settings)
            address = self.structure(target)
            return address if r.random() < 0.98 else address + r.choice([1, 4])
        if target == "char":
            return self.text() if const else self.at(8192)
        if target in ("char* const", "const char* const"):
            return self.list_of(ctypes.c_void_p, [self.text() if r.random() < 0.9 else None for _ in range(8)])
        if target == "void":
            if name == "stream":
                return None
            return self.at(4096 + 64, r.choice([64, 64, 64, 1]))
        if name in ("shape", "scale_shape", "code_shape", "state_shape") and const:
            return self.list_of(ctypes.c_int64, [r.choice([1, 2, 8, 64, 0, -1]) for _ in range(64)])
        if name == "table":
            return self.list_of(ctypes.c_float, [i / 16 for i in range(16)])
        slot = ctypes.create_string_buffer(b"\xa5" * 65536, 65536)  # arrays of up to 4096 numbers, and results
        self.kept.append(slot)
        address = (ctypes.addressof(slot) + 15) // 16 * 16
        if target.endswith("*"):
            self.slots.append((address, target))
        return address if r.random() < 0.98 or target.endswith("*") else address + 1

    def callback(self, name):
        result = self.random.choice([0, 0, 1])
        kinds = [self.header.type_of(kind) for kind, _ in self.header.callbacks[name]]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(lambda *_: result)
        self.kept.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value

    # ---- Calls

    def call(self, seed, number):
        self.random = r = random.Random(f"{seed} {number}")
        self.kept, self.slots = [], []
        names = [name for name in self.functions if name != "halfbyte_kernel_pack_load"]
        name = r.choice(names)
        result, parameters = self.header.functions[name]
        self.plan = self.plans.get(re.sub(r"_(run|can_implement)$", "", name))
        arguments = []
        for kind, parameter in parameters:
            if name.endswith(("_destroy", "_close")):
                arguments.append(None)
            else:
                arguments.append(self.value(kind, parameter))
        if name.endswith("_run") and r.random() < 0.6:  # with memory of its own
            arguments[2:4] = [None, 0]
        if name.endswith("_init") and arguments[0] is not None and name not in ("halfbyte_affine_init",):
            arguments[1] = r.choice([0, 7, 8, 9, 4096, 4097, 1 << 63, r.randrange(256)])
        os.write(2, f"{number} {name}\n".encode())
        value = self.functions[name](*arguments)
        if result == "halfbyte_status":
            self.check(name, value)

    def check(self, name, status):
        text = ctypes.string_at(self.functions["halfbyte_last_error"]())
        if status not in STATUSES:
            sys.exit(f"{name} gives status {status}: {text}")
        if status != 0 and not text:
            sys.exit(f"{name} gives status {status} without a text")
        for address, target in self.slots:
            held = ctypes.c_void_p.from_address(address).value
            if status != 0 and held != 0xA5A5A5A5A5A5A5A5:
                sys.exit(f"{name} fails with {status} and changes a result")
            ends = {"halfbyte_checkpoint*": "halfbyte_checkpoint_close"}
            end = ends.get(target, target.replace(" ", "").removesuffix("*") + "_destroy")
            if status == 0 and end in self.functions and held != 0xA5A5A5A5A5A5A5A5:
                self.functions[end](held)


def main():
    library, seed, first, last = sys.argv[1:]
    header = Header()
    caller = Caller(library, header)
    handles = caller.kept  # which the handles may point to
    for number in range(int(first), int(last)):
        caller.call(seed, number)
    del handles


if __name__ == "__main__":
    main()
