#!/usr/bin/env python3
"""Products with 4-bit weights on the CPU by others and by us, in one table, for bench/RESULTS.md: bitsandbytes (NF4 g64,
bf16), ONNX Runtime's MatMulNBits (INT4 g128, f32, accuracy_level unset and 4: the latter rounds x to int8, as our rows with that name), torch's
_weight_int4pack_mm_for_cpu (INT4 g128, bf16), whichever are installed.

    bench/peer_qgemm_cpu.py [NxK ...] [--m 1,2,...] [--transposed] [--threads N] [--library build/release/libhalfbyte.so]

All run in this process, on as many threads, in turn: so they see the same clocks and the same neighbours. Ours is called
through the C interface. Weights rotate over 1.2 GB; a round takes a sample of each, after a pause in which the threads of
the one before fall asleep; the medians of the rounds are printed, in microseconds, and how many times ours they are. "read"
is what torch's sum over the bytes of our weight takes; `halfbyte bench` has a better reader. The first product of each is
compared with the dense one. With --transposed, x [M, N] times the weight [N, K], as in a backward pass: of the others
bitsandbytes alone has it, which decodes the weight and multiplies by torch. What is not installed is said. Exit code 77 without numpy and torch.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path

SHAPES = ["4096x4096", "14336x4096"]
M = [1, 2, 4, 8, 16, 32, 128, 512]
SAMPLE_S, PAUSE_S = 0.02, 0.02
NODES = 4  # of an ONNX model: so the call of a session does not count


def skip(name, error):
    print(f"SKIP: {name}: {error}", file=sys.stderr)


# ---- The C interface, as halfbyte.h has it. A field "spec" is a pointer to a QuantSpec, and so on.


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


def structure(name, fields):
    types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "pointer": ctypes.c_void_p, "table": ctypes.c_float * 16}
    fields = [field.split(":") for field in ("struct_size:i64 " + fields).split()]
    return type(name, (ctypes.Structure,), {"_fields_": [(field, types[kind]) for field, kind in fields]})


QuantSpec = structure("halfbyte_quant_spec", "format:i32 asymmetric:i32 granularity:i32 scale_dtype:i32 double_quant:i32 "
                      "table:table group_size:i64")
WeightView = structure("halfbyte_weight_view", "spec:pointer rows:i64 cols:i64 codes:pointer scales:pointer zeros:pointer "
                       "biases:pointer absmax:pointer map:pointer offset:pointer layout:i64 global_scale:pointer")
PackedWeight = structure("halfbyte_packed_weight", "spec:pointer rows:i64 cols:i64 data:pointer version:i64")
Descriptor = structure("halfbyte_qgemm_descriptor", "spec:pointer variant:pointer m:i64 n:i64 k:i64 alignment:i64 dtype:i32 "
                       "layout:i32 math:i32 tile_m:i32 tile_n:i32 transposed:i32 packed:i32 bias:i32 accumulate:i32 "
                       "early_start:i32")
Arguments = structure("halfbyte_qgemm_args", "x:pointer weight:pointer view:pointer bias:pointer y:pointer")
Preference = structure("halfbyte_plan_preference", "num_threads:i64")
Sku = structure("halfbyte_sku", "op:pointer kernel:pointer backend:pointer dtypes:pointer")


class Halfbyte:
    F16, GROUP = 1, 2
    DTYPES = {"f32": 0, "bf16": 2}
    MATHS = {"auto": 0, "int8": 3}

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.halfbyte_last_error.restype = ctypes.c_char_p

    def call(self, name, *args):
        if getattr(self.library, "halfbyte_" + name)(*args) != 0:
            raise RuntimeError(self.library.halfbyte_last_error().decode())

    def make(self, kind, **fields):
        value = kind()
        self.call(kind.__name__.removeprefix("halfbyte_") + "_init", ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(kind)))
        value.kept = list(fields.values())  # what pointers point to
        for name, field in fields.items():
            setattr(value, name, field if isinstance(field, int) else ctypes.addressof(field))
        return value

    @staticmethod
    def tensor(t):
        kind = {"torch.uint8": (1, 8), "torch.float16": (2, 16), "torch.bfloat16": (4, 16), "torch.float32": (2, 32)}[str(t.dtype)]
        shape = (ctypes.c_int64 * t.dim())(*t.shape)
        view = DLTensor(t.data_ptr(), 1, 0, t.dim(), *kind, 1, shape, None, 0)
        view.kept = t
        return view

    def weights(self, spec, n, k, codes, scales, count):
        """`count` packed weights in one allocation, of codes[i] [n, k / 2] (u8) and scales[i] (f16)."""
        import torch

        each = ctypes.c_int64()
        self.call("packed_weight_bytes", ctypes.byref(spec), ctypes.c_int64(n), ctypes.c_int64(k), ctypes.byref(each))
        stride = -(-each.value // 256) * 256
        memory = torch.empty(stride * count + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        weights = []
        for i in range(count):
            data = memory[start + i * stride:][:each.value]
            weights.append(self.make(PackedWeight, spec=spec, rows=n, cols=k, data=self.tensor(data)))
            view = self.make(WeightView, spec=spec, rows=n, cols=k, codes=self.tensor(codes(i)), scales=self.tensor(scales(i)))
            self.call("reorder_to_packed", ctypes.byref(view), ctypes.byref(weights[-1]), None)
        return weights, memory

    def product(self, spec, n, k, m, dtype, math, transposed, threads, weights, x, y):
        """call(i) for the weight i, and the name of the kernel."""
        import torch

        descriptor = self.make(Descriptor, spec=spec, m=m, n=n, k=k, dtype=self.DTYPES[dtype], math=self.MATHS[math],
                               transposed=int(transposed))
        preference = self.make(Preference, num_threads=threads)
        plan, size, sku = ctypes.c_void_p(), ctypes.c_int64(), Sku(ctypes.sizeof(Sku))
        cpu = (ctypes.c_int32 * 2)(1, 0)  # a DLDevice: two ints by value, which is one of 64 bits
        self.call("qgemm_select", ctypes.c_int64(ctypes.cast(cpu, ctypes.POINTER(ctypes.c_int64))[0]),
                  ctypes.byref(descriptor), ctypes.byref(preference), ctypes.byref(plan))
        self.call("plan_workspace_size", plan, ctypes.byref(size))
        self.call("plan_sku", plan, ctypes.byref(sku))
        memory = torch.empty(size.value + 256, dtype=torch.uint8)
        workspace = ctypes.c_void_p(memory.data_ptr() + -memory.data_ptr() % 256)
        workspace_bytes = ctypes.c_int64(size.value)
        tensors = self.tensor(x), self.tensor(y)
        arguments = [self.make(Arguments, x=tensors[0], weight=weight, y=tensors[1]) for weight in weights]
        run, pointers, kept = self.library.halfbyte_qgemm_run, [ctypes.byref(a) for a in arguments], (memory, descriptor)

        def call(i):
            if run(plan, None, workspace, workspace_bytes, pointers[i % len(pointers)]) != 0:
                raise RuntimeError(self.library.halfbyte_last_error().decode())
            return y

        call.kept = kept
        return call, ctypes.string_at(sku.kernel).decode()


# ---- One row of the table: call(m) makes call(i) -> y, `products` in a call


class Row:
    def __init__(self, name, calls, products=1):
        self.name, self.products = name, products
        self.calls, self.us, self.next = calls, {}, 0

    def sample_us(self, m, count):
        call = self.calls[m]
        call(self.next)
        start = time.perf_counter()
        for i in range(count):
            call(self.next + 1 + i)
        us = (time.perf_counter() - start) * 1e6 / count / self.products
        self.next += count + 1
        return us


def measure(rows, all_m, rounds):
    for m in all_m:
        counts, times = [], []
        for row in rows:
            counts.append(min(1000, max(1, int(SAMPLE_S * 1e6 / (row.sample_us(m, 1) * row.products)))))
            times.append([])
        for _ in range(rounds):
            for row, count, taken in zip(rows, counts, times):
                time.sleep(PAUSE_S)
                taken.append(row.sample_us(m, count))
        for row, taken in zip(rows, times):
            row.us[m] = statistics.median(taken)


def checked(row, m, x, dense, limit):
    """`row`, whose first product is x @ dense. RuntimeError where it is not."""
    import torch

    expected = x.float() @ dense.float()
    y = row.calls[m](0).float()
    error = float(torch.linalg.norm(y - expected) / torch.linalg.norm(expected))
    if not error < limit:
        raise RuntimeError(f"{row.name}, M {m}: wrong by {error:.1e} of the norm")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="NxK")
    parser.add_argument("--m", default=",".join(map(str, M)))
    parser.add_argument("--transposed", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rotation", type=float, default=1200, help="MB of weights")
    parser.add_argument("--library", default=Path(__file__).parent.parent / "build/release/libhalfbyte.so")
    parser.add_argument("--json", help="file: one object a line")
    arguments = parser.parse_args()
    try:
        import numpy as np
        import torch
    except ImportError as error:
        skip("all", error)
        return 77
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    all_m = [int(m) for m in arguments.m.split(",")]
    halfbyte = Halfbyte(arguments.library)
    pool = torch.randint(-2**63, 2**63 - 1, (int(arguments.rotation * 1e6) // 8 + 1,), dtype=torch.int64).view(torch.uint8)
    report = open(arguments.json, "w", encoding="utf-8") if arguments.json else None

    for n, k in (map(int, shape.split("x")) for shape in arguments.shapes):
        count = max(2, pool.numel() // (n * k // 2))
        transposed = arguments.transposed
        x = {m: {"f32": torch.randn(m, n if transposed else k)} for m in all_m}
        for of_m in x.values():
            of_m["bf16"] = of_m["f32"].bfloat16()

        def codes(i):  # [n, k / 2]: two to a byte
            return pool[i * (n * k // 2):][:n * k // 2].view(n, k // 2)

        def of_direction(weight):  # what x is multiplied with
            return weight if transposed else weight.t()

        def ours(spec, scales, dtypes):
            weights, memory = halfbyte.weights(spec, n, k, codes, lambda i: scales, count)
            rows = []
            for dtype, math in dtypes:
                y_type = torch.bfloat16 if dtype == "bf16" else torch.float32
                made = {m: halfbyte.product(spec, n, k, m, dtype, math, transposed, arguments.threads, weights, x[m][dtype],
                                            torch.empty(m, k if transposed else n, dtype=y_type)) for m in all_m}
                rows.append(Row(f"halfbyte {dtype}{'' if math == 'auto' else ' ' + math}", {m: call for m, (call, _) in made.items()}))
                rows[-1].kernels = {m: kernel for m, (_, kernel) in made.items()}
            words = memory[:memory.numel() // count // 8 * 8 * count].view(count, -1).view(torch.int64)
            read = Row("read", dict.fromkeys(all_m, lambda i: torch.sum(words[i % count])))
            return rows, read

        def show(title, rows, read):
            measure([*rows, read], all_m, arguments.rounds)
            print(f"\n{n}x{k} {title}{', transposed' if transposed else ''}, {arguments.threads} threads: us (times {rows[0].name})")
            print(f"{'':<34}" + "".join(f"{'M = ' + str(m):>18}" for m in all_m))
            for row in [*rows, read]:
                print(f"{row.name:<34}" + "".join(
                    f"{row.us[m]:>11.1f} ({row.us[m] / rows[0].us[m]:.2f})".rjust(18) for m in all_m), flush=True)
                for m in all_m if report else []:
                    print(json.dumps({"peer": row.name, "weight": title, "n": n, "k": k, "m": m, "transposed": transposed, "us": round(row.us[m], 2),
                                      "of_ours": round(row.us[m] / rows[0].us[m], 4), "threads": arguments.threads,
                                      "kernel": getattr(row, "kernels", {}).get(m)}), file=report, flush=True)
            slower = [f"{row.name} at M = {m}" for row in rows for m in all_m
                      if not row.name.startswith("halfbyte") and row.us[m] < rows[0].us[m]]
            print("ours is never slower" if not slower else "ours is slower than " + ", ".join(slower))

        # NF4, a scale for 64.
        group = 64
        spec = halfbyte.make(QuantSpec, format=0, granularity=Halfbyte.GROUP, scale_dtype=Halfbyte.F16, group_size=group)
        scales = (torch.rand(n, k // group) * 0.01 + 0.005).half()
        rows, read = ours(spec, scales, [("bf16", "auto")] + [("bf16", "int8")] * (not transposed))
        try:
            import bitsandbytes
            from bitsandbytes.functional import QuantState, get_4bit_type

            table = get_4bit_type("nf4", device="cpu")
            nibbles = torch.stack([codes(0) & 15, codes(0) >> 4], -1).view(n, k)
            dense = of_direction(table[nibbles.long()] * scales.float().repeat_interleave(group, 1))
            checked(rows[0], all_m[0], x[all_m[0]]["bf16"], dense, 1e-2)

            # Packed as bitsandbytes packs the weights of a layer: the first from what quantize_4bit makes, the others are
            # any bytes.
            def state_of(absmax):
                state = QuantState(absmax, torch.Size([n, k]), table, group, "nf4", torch.bfloat16)
                return state

            some, state = ((codes(0) >> 4) | (codes(0) << 4)).view(-1, 1), state_of(scales.float().flatten())
            if not transposed:
                some, state = bitsandbytes.functional._convert_weight_packed_for_cpu(some, state)
            states = []
            for _ in range(count):
                states.append(state_of(state.absmax.clone()))
                states[-1].packing_format_for_cpu = not transposed

            def weight_of(i):
                return some if i == 0 else codes(i % count).view(some.shape)

            def call_of(m):
                if transposed:  # the backward pass of its layer
                    return lambda i: x[m]["bf16"] @ bitsandbytes.functional.dequantize_4bit(weight_of(i), states[i % count])
                return lambda i: bitsandbytes.matmul_4bit(x[m]["bf16"], weight_of(i), quant_state=states[i % count])

            row = Row("bitsandbytes " + bitsandbytes.__version__, {m: call_of(m) for m in all_m})
            rows.append(checked(row, all_m[0], x[all_m[0]]["bf16"], dense, 2e-2))
        except (ImportError, AttributeError, RuntimeError) as error:
            skip("bitsandbytes", error)
        show("nf4 g64", rows, read)
        del rows, read

        # INT4, a scale for 128, codes minus 8.
        group = 128
        spec = halfbyte.make(QuantSpec, format=6, granularity=Halfbyte.GROUP, scale_dtype=Halfbyte.F16, group_size=group)
        scales = (torch.rand(n, k // group) * 0.01 + 0.005).half()
        integers = torch.stack([codes(0) & 15, codes(0) >> 4], -1).view(n, k)
        kinds = [("bf16", "auto"), ("f32", "auto")] + [("f32", "int8"), ("bf16", "int8")] * (not transposed)
        rows, read = ours(spec, scales, kinds)
        dense = of_direction((integers.float() - 8) * scales.float().repeat_interleave(group, 1))
        for row, (dtype, math) in zip(rows, kinds):
            checked(row, all_m[0], x[all_m[0]][dtype], dense, 1e-2 if math == "auto" else 2e-2)
        if transposed:
            show("int4 g128", rows, read)
            continue
        try:
            import onnx
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = arguments.threads
            options.inter_op_num_threads = 1
            options.log_severity_level = 3
            options.add_session_config_entry("session.force_spinning_stop", "1")  # else its threads disturb the next
            scale_data = scales.float().numpy()

            def session(first, level):
                nodes, initializers, outputs = [], [], []
                for i in range(NODES):
                    attributes = {"K": k, "N": n, "bits": 4, "block_size": group}
                    if level is not None:
                        attributes["accuracy_level"] = level
                    nodes.append(onnx.helper.make_node("MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"],
                                                       domain="com.microsoft", **attributes))
                    data = codes((first + i) % count).numpy().reshape(n, k // group, group // 2)
                    initializers += [onnx.numpy_helper.from_array(data, f"w{i}"),
                                     onnx.numpy_helper.from_array(scale_data.reshape(-1), f"s{i}")]
                    outputs.append(onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, ["m", n]))
                graph = onnx.helper.make_graph(
                    nodes, "products", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["m", k])], outputs,
                    initializers)
                model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21),
                                                                     onnx.helper.make_opsetid("com.microsoft", 1)])
                model.ir_version = 10
                return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

            for level in [None, 4]:
                sessions = [session(first, level) for first in range(0, count, NODES)]

                def call_of(m, sessions=sessions):
                    y = [np.empty((m, n), np.float32) for _ in range(NODES)]
                    bindings = []
                    for made in sessions:
                        binding = made.io_binding()
                        binding.bind_cpu_input("x", x[m]["f32"].numpy())
                        for i in range(NODES):
                            binding.bind_output(f"y{i}", "cpu", 0, np.float32, (m, n), y[i].ctypes.data)
                        bindings.append(binding)

                    def call(i):
                        sessions[i % len(sessions)].run_with_iobinding(bindings[i % len(sessions)])
                        return torch.from_numpy(y[0])

                    return call

                name = f"onnxruntime {onnxruntime.__version__} " + ("level unset" if level is None else f"level {level}")
                row = Row(name, {m: call_of(m) for m in all_m}, NODES)
                rows.append(checked(row, all_m[0], x[all_m[0]]["f32"], dense, 2e-2))
        except (ImportError, RuntimeError) as error:
            skip("onnxruntime", error)
        try:
            packed = torch._convert_weight_to_int4pack_for_cpu(integers.int(), 1)
            both = torch.stack([scales.float().t(), torch.zeros(k // group, n)], -1).bfloat16().contiguous()
            parameters = [both.clone() for _ in range(count)]

            def call_of(m):
                return lambda i: torch._weight_int4pack_mm_for_cpu(
                    x[m]["bf16"], packed if i == 0 else codes(i % count).view(packed.shape), group, parameters[i % count])

            row = Row("torch int4pack " + torch.__version__, {m: call_of(m) for m in all_m})
            rows.append(checked(row, all_m[0], x[all_m[0]]["bf16"], dense, 2e-2))
        except (AttributeError, RuntimeError) as error:
            skip("torch int4pack", error)
        show("int4 g128", rows, read)
        del rows, read
    return 0


if __name__ == "__main__":
    sys.exit(main())
