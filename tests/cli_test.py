"""The command line tool as a user meets it: what it prints, writes and returns."""

import json
import math
import os
import pty
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import LAYOUTS, ROOT, TINY_LLAMA
from independent import safetensors_io as st

MODEL = TINY_LLAMA
NUM_LINEAR = 28  # 4 layers of 7 projections; lm_head, the embedding and 9 norms stay dense

OK, BUG, USAGE, BAD_INPUT, VERIFY, DEVICE, IO, NO_MEMORY, EXISTS, CANCELLED = 0, 1, 2, 3, 4, 5, 6, 7, 8, 130

# What the machine has must not decide what is tested.
NO_DRIVER = {**os.environ, "HALFBYTE_CUDA_DRIVER": "/nowhere/libcuda.so.1"}
NO_CUDA = {**NO_DRIVER, "HALFBYTE_NVRTC": "/nowhere/libnvrtc.so"}


@pytest.fixture(scope="session", autouse=True)
def use_cli(cli):
    global CLI
    CLI = str(cli)


def run(*args, code=OK, **options):
    """Runs the tool, checks its exit code and returns the finished process."""
    result = subprocess.run([CLI, *map(str, args)], capture_output=True, text=True, timeout=60, **options)
    assert result.returncode == code, f"{args}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    if code == OK:
        assert result.stderr == ""
    else:
        assert result.stderr.startswith("halfbyte: error: ")
    return result


def fails(*args, code, **options):
    """The error message of a run that must fail with `code`."""
    result = run(*args, code=code, **options)
    assert result.stdout == ""
    return result.stderr


def run_json(*args, code=OK, **options):
    document = json.loads(run(*args, "--json", "-", code=code, **options).stdout)
    assert document["schema_version"] == 1
    assert document["command"] == args[0]
    assert document["ok"] == (code == OK)
    return document


def linear(rows, cols):
    """A weight in bf16."""
    return st.from_f32(np.random.default_rng(0).standard_normal((rows, cols)) * 0.02, "BF16")


def write_file(path, tensors):
    st.write(path, tensors)
    return path


@pytest.fixture(scope="module")
def nf4(tmp_path_factory):
    """tiny-llama in nf4, and what the run printed."""
    output = tmp_path_factory.mktemp("nf4") / "out"
    text = run("quantize", MODEL, "-o", output, "--format", "nf4").stdout
    return output, text


# Help, version, doctor


def test_version_and_help():
    assert re.fullmatch(r"halfbyte \d+\.\d+\.\d+\n", run("--version").stdout)
    assert "Usage: halfbyte" in run("--help").stdout
    for command in ["quantize", "dequantize", "inspect", "compare", "ptx", "precompile", "bench", "doctor"]:
        text = run(command, "--help").stdout
        assert f"halfbyte {command}" in text and "--json" in text
    text = run("quantize", "--help").stdout
    for word in ["nf4", "affine8", "compressed-tensors", "half-range", "keep-dense", "--double-quant"]:
        assert word in text
    assert [word for word in LAYOUTS if word not in text] == []


def test_doctor():
    text = run("doctor").stdout
    document = run_json("doctor")
    assert f"halfbyte {document['version']}\n" == run("--version").stdout
    assert document["num_threads"] >= 1 and document["memory_bytes"] > 2**28
    assert document["simd_target"] in document["compiled_targets"]
    for label, value in [
        ("version", document["version"]),
        ("build", document["build_type"]),
        ("compiler", document["compiler"]),
        ("SIMD", document["simd_target"]),
        ("threads", str(document["num_threads"])),
        ("memory", "GiB"),
    ]:
        (line,) = [line for line in text.splitlines() if line.startswith(label)]
        assert value in line


def test_doctor_on_cuda():
    cuda = run_json("doctor")["cuda"]
    assert cuda["usable"] == (cuda["problem"] == "")
    assert cuda["usable"] == any(device["problem"] == "" for device in cuda["devices"])
    lines = run("doctor").stdout.splitlines()
    values = {line[:13].rstrip(): line[13:] for line in lines}
    assert values["CUDA"] == (cuda["problem"] or "usable")
    for label, name in [("driver", "driver"), ("NVRTC", "nvrtc")]:
        path, version = cuda[f"{name}_path"], cuda[f"{name}_version"]
        found = f"{path} (CUDA {version // 1000}.{version % 1000 // 10})"
        assert values[label] == (found if path else "not found")
    no_cache = f"none: {cuda['cache_problem']}" if cuda["cache_problem"] else "none"
    assert values["kernel cache"] == (cuda["cache_directory"] or no_cache)
    for device in cuda["devices"]:
        line = values[f"cuda:{device['index']}"]
        assert line.startswith(device["name"]) and line.endswith(device["problem"] or "GiB")


def test_doctor_without_cuda():
    cuda = run_json("doctor", env=NO_CUDA)["cuda"]
    assert cuda["usable"] is False and cuda["devices"] == []
    assert "/nowhere/libcuda.so.1" in cuda["problem"]
    assert (cuda["driver_path"], cuda["nvrtc_path"], cuda["cache_directory"]) == ("", "", "")
    lines = run("doctor", env=NO_CUDA).stdout.splitlines()
    assert f"CUDA         {cuda['problem']}" in lines
    assert "driver       not found" in lines and "NVRTC        not found" in lines
    assert "kernel cache none" in lines


# ptx: what needs NVRTC is in ptx_test.py


def test_ptx_lists_the_kernels():
    document = run_json("ptx", env=NO_CUDA)
    assert document["targets"] == []
    kernels = {kernel["name"]: kernel for kernel in document["kernels"]}
    assert {"quantize_groups", "quantize_spans", "value_range", "dequantize"} <= set(kernels)
    keys = {key["name"]: key for key in kernels["quantize_groups"]["keys"]}
    assert (keys["group-size"]["default"], sorted(keys["group-size"]["values"])) == ("64", ["128", "256", "32", "64"])
    assert (keys["table"]["default"], keys["table"]["open"]) == ("", True)
    assert keys["asymmetric"]["values"] == ["no", "yes"]
    assert kernels["dequantize"]["target"] == "" and kernels["qgemm_sm90_large"]["target"] == "sm_90a"
    text = run("ptx", env=NO_CUDA).stdout
    for kernel in document["kernels"]:
        only = f" For {kernel['target']} only." if kernel["target"] else ""
        assert f"{kernel['op']} --kernel {kernel['name']}: {kernel['description']}{only}\n" in text
        for key in kernel["keys"]:
            assert re.search(rf"^  --{key['name']} +{re.escape(key['description'])}", text, re.M)
    assert re.search(r"^--arch +none: no NVRTC", text, re.M)


def test_ptx_describes_plain_kernels(tmp_path):
    description = json.loads(run("ptx", "quantize", "--describe", "--format", "int4", "--asymmetric", env=NO_CUDA).stdout)
    assert description["kernel"] == "halfbyte_quantize" and description["config"]["asymmetric"] == "yes"
    names = [parameter["name"] for parameter in description["parameters"]]
    assert names == ["x", "codes", "scales", "zeros", "biases", "counts", "rows", "cols", "group_size"]
    zeros, biases = (description["parameters"][names.index(name)] for name in ("zeros", "biases"))
    assert (zeros["type"], zeros["optional"], biases["optional"]) == ("u8", False, True)
    file = tmp_path / "description.json"
    run("ptx", "quantize", "--describe", "--arch", "sm_90a", "-o", file, env=NO_CUDA)
    assert json.loads(file.read_text())["target"] == "sm_90a"
    message = fails("ptx", "quantize", "--describe", "--kernel", "value_range", code=USAGE, env=NO_CUDA)
    assert "value_range" in message and "plain" in message
    assert "OP" in fails("ptx", "--describe", code=USAGE, env=NO_CUDA)


def test_ptx_without_nvrtc(tmp_path):
    message = fails("ptx", "quantize", "--arch", "sm_90a", "-o", tmp_path / "x", code=DEVICE, env=NO_CUDA)
    assert "no NVRTC" in message and os.listdir(tmp_path) == []


# precompile


@pytest.fixture(scope="module")
def with_stubs(stubs):
    """Environments with the stand-ins of tests/stub: for NVRTC, and for the driver without NVRTC."""
    nvrtc = {**NO_CUDA, "HALFBYTE_NVRTC": str(stubs / "libstub_nvrtc.so")}
    driver = {**NO_CUDA, "HALFBYTE_CUDA_DRIVER": str(stubs / "libstub_cuda.so"), "HALFBYTE_CACHE_DIR": ""}
    return nvrtc, driver


def test_precompile(tmp_path, with_stubs):
    nvrtc, driver = with_stubs
    pack = tmp_path / "kernels.hbk"
    # Of all ops but qgemm, whose kernels take half a minute.
    page = (ROOT / "docs/kernels.md").read_text()
    counts = {op: int(a) + int(b) for op, a, b in re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", page, re.M) if op != "qgemm"}
    text = run("precompile", "--arch", "sm_90a,sm_80", "--ops", ",".join(counts), "-o", pack, env=nvrtc).stdout
    num_kernels = int(re.search(r"^kernels +(\d+) for sm_90a, sm_80$", text, re.M)[1])
    assert num_kernels == sum(counts.values())
    assert re.search(rf"^output +{pack} \([\d.]+ MiB\)$", text, re.M)
    assert os.listdir(tmp_path) == ["kernels.hbk"]

    environment = {**driver, "HALFBYTE_KERNEL_PACK": str(pack)}
    document = run_json("doctor", env=environment)
    assert document["cuda"]["usable"] is True and document["cuda"]["nvrtc_path"] == ""
    (found,) = document["cuda"]["kernel_packs"]
    assert (found["path"], found["version"]) == (str(pack), document["version"])
    assert (found["num_kernels"], found["num_matching"]) == (num_kernels, num_kernels)
    assert found["targets"] == ["sm_80", "sm_90a"]
    text = run("doctor", env=environment).stdout
    assert re.search(rf"^kernel pack +{pack}: {num_kernels} kernels for sm_80 sm_90a$", text, re.M)
    assert re.search(r"^cuda:0 +Stub, capability 9.0 \(sm_90a\)", text, re.M)
    # The pack has what this needs; the kernels of the stub do nothing, so that nothing is verified.
    weights = ["quantize", MODEL, "--device", "cuda", "--no-verify"]
    run(*weights, "-o", tmp_path / "out", "--format", "int4", env=environment)
    # A user's table is in no pack.
    table = ["--format", "lut4", "--table", ",".join(map(str, range(16)))]
    message = fails(*weights, "-o", tmp_path / "lut4", *table, code=DEVICE, env=environment)
    assert "is in no loaded kernel pack" in message and "precompile --arch sm_90a" in message

    other = {**environment, "STUB_CUDA_CAPABILITY": "75"}
    assert "kernels of this library for sm_75" in run_json("doctor", env=other)["cuda"]["problem"]


def test_precompile_a_part_with_any_number_of_jobs(tmp_path, with_stubs):
    nvrtc, _ = with_stubs
    part = ["--arch=sm_90a", "--ops=dequantize", "--formats=nf4,int8", "--dtypes=f16"]
    packs = []
    for jobs in [1, 2, 5, 100]:
        packs.append(tmp_path / f"{jobs}.hbk")
        document = run_json("precompile", *part, "--jobs", jobs, "-o", packs[-1], env=nvrtc)
        # nf4, int8 and int8 with zero points; whole groups, others, unaligned.
        assert (document["num_kernels"], document["num_jobs"]) == (9, min(jobs, 9))
        assert document["num_bytes"] == packs[-1].stat().st_size
        assert packs[-1].read_bytes() == packs[0].read_bytes()
    assert len(os.listdir(tmp_path)) == 4

    message = fails("precompile", *part, "-o", packs[0], code=EXISTS, env=nvrtc)
    assert "1.hbk" in message and "--force" in message
    run("precompile", *part, "--force", "-o", packs[0], env=nvrtc)
    assert packs[0].read_bytes() == packs[1].read_bytes()


def test_precompile_refuses(tmp_path, with_stubs):
    nvrtc, driver = with_stubs
    to = ["-o", tmp_path / "kernels.hbk"]
    for options, words in [
        (["--arch", "sm_91"], ["sm_91", "sm_75"]),
        (["--arch", "sm_90a", "--ops", "quantise"], ["quantise", "dequantize, fake_quantize, observe"]),
        (["--arch", "sm_90a", "--formats", "nf5"], ["nf5", "fp4_e2m1"]),
        (["--arch", "sm_90a", "--formats", "nf4,lut4"], ["lut4", "table"]),
        (["--arch", "sm_90a", "--dtypes", "f8"], ["f8", "bf16"]),
        (["--arch", "sm_90a", "--jobs", "-1"], ["--jobs"]),
        ([], ["--arch"]),
    ]:
        message = fails("precompile", *options, *to, code=USAGE, env=nvrtc)
        assert all(word in message for word in words), message
    few = ["precompile", "--arch", "sm_90a", "--ops", "dequantize"]
    assert "no NVRTC" in fails(*few, *to, code=DEVICE, env=driver)
    fails(*few, "-o", tmp_path / "none/k.hbk", code=IO, env=nvrtc)
    # What a worker finds wrong is told as if there were none.
    for jobs in [1, 3]:
        broken = {**nvrtc, "STUB_NVRTC_RESULT": "5"}
        message = fails(*few, "--jobs", jobs, *to, code=DEVICE, env=broken)
        assert message.count("halfbyte: error: ") == 1 and "nvrtcCompileProgram of NVRTC 13.0" in message
    assert os.listdir(tmp_path) == []


def test_precompile_cancelled_leaves_nothing(tmp_path, with_stubs):
    slow = {**with_stubs[0], "STUB_NVRTC_SLEEP_MS": "50"}
    for jobs in [1, 4]:
        command = [CLI, "precompile", "--arch", "sm_90a", "--ops", "quantize", "--jobs", str(jobs), "-o", str(tmp_path / "k.hbk")]
        process = subprocess.Popen(command, env=slow, stderr=subprocess.PIPE, text=True)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)  # to the parent alone
        assert process.wait(timeout=20) == CANCELLED
        assert "cancelled" in process.stderr.read()
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number, code, words", [(signal.SIGKILL, NO_MEMORY, "fewer --jobs"), (signal.SIGSEGV, BUG, "signal 11")])
def test_precompile_tells_how_a_worker_ended(tmp_path, with_stubs, number, code, words):
    slow = {**with_stubs[0], "STUB_NVRTC_SLEEP_MS": "50"}
    command = [CLI, "precompile", "--arch", "sm_90a", "--ops", "quantize", "--jobs", "2", "-o", str(tmp_path / "k.hbk")]
    process = subprocess.Popen(command, env=slow, stderr=subprocess.PIPE, text=True)
    children = []
    while not children and process.poll() is None:
        time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), number)
    assert process.wait(timeout=20) == code
    assert words in process.stderr.read()
    assert os.listdir(tmp_path) == []


def test_kernel_packs_that_cannot_be_used(tmp_path, with_stubs):
    bad = tmp_path / "bad.hbk"
    bad.write_bytes(b"no pack")
    environment = {**with_stubs[1], "HALFBYTE_KERNEL_PACK": str(bad)}
    cuda = run_json("doctor", env=environment)["cuda"]
    assert cuda["usable"] is False and cuda["kernel_packs"] == []
    assert "bad.hbk" in cuda["kernel_pack_problem"] and "no kernel pack" in cuda["problem"]
    assert re.search(r'^kernel pack +kernel pack ".*bad\.hbk": it is no kernel pack$', run("doctor", env=environment).stdout, re.M)
    message = fails("quantize", MODEL, "-o", tmp_path / "out", "--device", "cuda", code=BAD_INPUT, env=environment)
    assert "bad.hbk" in message
    assert run_json("doctor", env={**NO_CUDA, "HALFBYTE_KERNEL_PACK": ""})["cuda"]["kernel_packs"] == []


# bench


CASE = ["bench", "qgemm", "--shape", "96x128", "--format", "nf4", "--dtype", "bf16"]


def run_lines(*arguments, env):
    """The line of the run, and the rows."""
    head, *rows = [json.loads(line) for line in run(*arguments, "--json", "-", env=env).stdout.splitlines()]
    return head, rows


def test_bench_lists():
    head, rows = run_lines("bench", "--list", env=NO_CUDA)
    names = [row["op"] for row in rows]
    assert head["ok"] and names[0] == "quantize" and {"observe", "qgemm", "latency", "memory", "checkpoint"} <= set(names)
    for device in ["cpu", "cuda"]:
        _, rows = run_lines("bench", "all", "--list", "--device", device, env=NO_CUDA)
        problems = [row["problem"] for row in rows]
        assert len(set(problems)) == len(problems) > 100
        ops = {problem.split()[0] for problem in problems}
        assert ops == set(names) - {"qgemm", "latency", "memory", "checkpoint", "tensor_parallel"}
    text = run("bench", "quantize", "observe", "--list", "--format", "nf4", "--filter", "8192x8192 nf4 g64", env=NO_CUDA).stdout
    assert text.splitlines() == [f"quantize 8192x8192 nf4 g64 {dtype}" for dtype in ["bf16", "f16", "f32"]]
    assert "one of all, quantize" in fails("bench", "quantise", "--device", "cpu", code=USAGE, env=NO_CUDA)
    assert "no list of problems" in fails("bench", "qgemm", "--list", "--device", "cpu", code=USAGE, env=NO_CUDA)
    assert "goes with no other" in fails("bench", "qgemm", "observe", "--device", "cpu", code=USAGE, env=NO_CUDA)
    assert "--m: only with qgemm" in fails("bench", "observe", "--m", "1", "--device", "cpu", code=USAGE, env=NO_CUDA)
    assert "no problem" in fails("bench", "observe", "--filter", "nothing", "--device", "cpu", code=USAGE, env=NO_CUDA)


def test_bench_measures_an_op_on_the_cpu():
    case = ["bench", "affine_qdq_backward", "--device", "cpu", "--threads", "2", "--quick", "--filter", "bf16 u4 group 128"]
    head, (row,) = run_lines(*case, env=NO_CUDA)
    assert (head["command"], head["ok"], head["device"], head["num_threads"]) == ("bench", True, "cpu", 2)
    assert (row["op"], row["problem"], row["device"]) == ("affine_qdq_backward", "bf16 u4 group 128", "cpu")
    assert row["failure"] == "" and row["backend"].startswith("cpu") and row["correct"] is None
    assert row["read_bytes"] == 8192 * 8192 * 5 // 2 and row["write_bytes"] == 8192 * 8192 // 128 * 8
    assert row["median_us"] > 0 and row["spread"] >= 0 and row["ceiling"] == "move"
    assert math.isclose(row["share"], row["ceiling_us"] / row["median_us"], rel_tol=1e-6)
    assert math.isclose(row["gb_per_s"], (row["read_bytes"] + row["write_bytes"]) / row["median_us"] / 1000, rel_tol=1e-6)
    lines = run(*case, env=NO_CUDA).stdout.splitlines()
    assert re.match(r"device +cpu", lines[0]) and len(lines) == 3
    assert lines[1].split() == ["problem", "us", "spread", "GB/s", "move", "read", "copy", "kernel"]
    assert lines[2].startswith("affine_qdq_backward bf16 u4 group 128")


def test_bench_explains_on_the_cpu():
    cases = run_json(*CASE, "--explain", "--device", "cpu", env=NO_CUDA)["cases"]
    rows = [1, 2, 4, 8, 16, 32, 128, 512]
    assert len(cases) == 2 * len(rows)
    for case, (direction, m) in zip(cases, [(d, m) for d in ["forward", "transposed"] for m in rows]):
        assert (case["shape"], case["n"], case["k"]) == ("96x128", 96, 128)
        assert (case["direction"], case["m"], case["dtype"]) == (direction, m, "bf16")
        reasons = {choice["variant"]: choice["reason"] for choice in case["variants"]}
        assert reasons["qgemm_ref"] == ""
    text = run(*CASE, "--explain", "--device", "cpu", "--m", "1,3", "--direction", "forward", env=NO_CUDA).stdout
    assert re.findall(r"^\S.*", text, re.M) == ["96x128 nf4 g64 f16 bf16 forward M 1", "96x128 nf4 g64 f16 bf16 forward M 3"]
    assert len(re.findall(r"^  qgemm_\w+ +is chosen$", text, re.M)) == 2


def test_f32_with_scales_that_no_layout_stores_with_it(with_stubs):
    """No kernel of a pack is for these, but for those that take everything."""
    cuda = {**with_stubs[1], "HALFBYTE_NVRTC": with_stubs[0]["HALFBYTE_NVRTC"]}
    case = ["bench", "qgemm", "--explain", "--shape", "96x128", "--format", "int4", "--dtype", "f32", "--m", "1,16,100"]
    for scales, takes in [("f16", True), ("bf16", False)]:
        for case_of in run_json(*case, "--scale-dtype", scales, env=cuda)["cases"]:
            reasons = {choice["variant"]: choice["reason"] for choice in case_of["variants"]}
            assert reasons["qgemm_simt"] == ""
            for variant in ["qgemm_sm80", "qgemm_sm90_split"]:
                assert (reasons[variant] == "") is takes
                assert takes or reasons[variant].startswith("x and the weight must go together as in a layout")


def test_bench_explains_views(with_stubs):
    """On a CUDA device they are packed above 8 rows of x; on the CPU, always."""
    cuda = {**with_stubs[1], "HALFBYTE_NVRTC": with_stubs[0]["HALFBYTE_NVRTC"]}
    case = [*CASE, "--explain", "--view", "bitsandbytes", "--m", "1,8,9,64,65,512"]
    for case_of in run_json(*case, env=cuda)["cases"]:
        assert case_of["layout"] == "bitsandbytes"
        packs = {choice["variant"]: choice["packs"] for choice in case_of["variants"] if not choice["reason"]}
        if case_of["m"] <= 8:
            assert packs == {"qgemm_simt": False}
        else:
            assert packs["qgemm_sm80"] and not packs["qgemm_simt"]
    text = run(*case, "--direction", "forward", env=cuda).stdout
    chosen = re.findall(r"^  (qgemm_\w+) +is chosen(, packs the view first)?$", text, re.M)
    assert [(variant == "qgemm_simt", packs != "") for variant, packs in chosen] == 2 * [(True, False)] + 4 * [(False, True)]
    assert text.startswith("96x128 nf4 g64 f16 bitsandbytes bf16 forward M 1\n")
    for case_of in run_json(*case, "--device", "cpu", env=NO_CUDA)["cases"]:
        packs = {choice["variant"]: choice["packs"] for choice in case_of["variants"] if not choice["reason"]}
        assert packs.pop("qgemm_ref") is False and all(packs.values())
    assert "--explain" in fails(*CASE, "--view", "mlx", "--device", "cpu", code=USAGE, env=NO_CUDA)
    assert "transposed" in fails(*CASE, "--explain", "--view", "gptq", "--device", "cpu", code=USAGE, env=NO_CUDA)


def test_bench_cases():
    def cases(*options):
        arguments = ["bench", "qgemm", "--explain", "--device", "cpu", "--m", "1", "--direction", "forward", *options]
        return run_json(*arguments, env=NO_CUDA)["cases"]

    assert len(cases()) == 2 * 2  # shapes, formats
    layers = {case["shape"]: (case["n"], case["k"]) for case in cases("--model", "llama-8b,llama-70b")}
    assert layers["llama-8b qkv"] == (6144, 4096) and layers["llama-8b gate_up"] == (28672, 4096)
    assert layers["llama-70b o"] == (8192, 8192) and layers["llama-70b down"] == (8192, 28672)
    one = cases("--shape", "64x64", "--dtype", "f32", "--format", "int4", "--group-size", "32,64", "--asymmetric")
    assert [case["spec"]["group_size"] for case in one] == [32, 64] and all(case["spec"]["asymmetric"] for case in one)
    (channel,) = cases("--shape", "64x64", "--dtype", "f16", "--format", "int8", "--group-size", "channel")
    assert channel["spec"]["granularity"] == "channel" and channel["spec"]["format"] == "int8"


def test_bench_measures(tmp_path, with_stubs):
    """Kernels of the stand-ins do nothing: that is noticed, and the report is there all the same."""
    environment = {**with_stubs[0], **with_stubs[1], "HALFBYTE_NVRTC": with_stubs[0]["HALFBYTE_NVRTC"],
                   "HALFBYTE_CUBLAS": "/nowhere/libcublas.so", "STUB_LOG": str(tmp_path / "log")}
    report = tmp_path / "report.json"
    case = [*CASE, "--m", "1,20", "--variant", "qgemm_simt", "--direction", "both", "--lora", "16", "--json", report]
    result = run(*case, code=VERIFY, env=environment)
    assert "4 of 4 cases are wrong" in result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("96x128")]
    assert result.stdout.count("  with a low-rank adapter of rank 16: -, - of plain\n") == 4
    assert len(lines) == 4 and all(re.search("- WRONG: must be at most [56]e-03", line) for line in lines)
    assert re.search(r"^cuBLAS +no cuBLAS .*/nowhere/libcublas.so", result.stdout, re.M)
    document, *rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert document["ok"] is False and document["error"]["code"] == "VERIFY" and document["device"] == "Stub"
    assert [(row["direction"], row["m"]) for row in rows] == [
        ("forward", 1), ("forward", 20), ("transposed", 1), ("transposed", 20)]
    for row in rows:
        assert row["op"] == "qgemm" and row["device"] == "Stub" and row["problem"].startswith("96x128 nf4 g64 f16 bf16 ")
        assert row["lora"] == 16 and row["lora_us"] is None
        assert row["cublas_us"] is None and row["error"] is None and row["correct"] is False
        assert row["kernel"].startswith("qgemm_simt") and row["weight_bytes"] >= 96 * 128 // 2 * 1.0625

    assert "--device cuda: " in fails(*CASE, code=DEVICE, env=NO_CUDA)
    message = fails(*CASE, "--threads", "1", code=USAGE, env=environment)
    assert "--threads" in message and "--device cuda" in message


def test_bench_cliffs_cases(with_stubs):
    """Both sides of every border of tiles, odd shapes, four weights; what is asked for restricts it."""
    environment = {**with_stubs[1], "HALFBYTE_NVRTC": with_stubs[0]["HALFBYTE_NVRTC"]}

    def cases(*options):
        return run_json("bench", "qgemm", "--cliffs", "--explain", *options, env=environment)["cases"]

    def values(of, *names):
        return {tuple(case[name] for name in names) for case in of}

    default = cases()
    rows = {m for (m,) in values(default, "m")}
    assert {border + side for border in [8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048] for side in [-1, 0, 1]} <= rows
    assert {3, 5, 24, 48, 96, 192, 320, 384, 768, 1536} <= rows
    assert {(4098, 4098), (4096, 4100), (4097, 4096), (4099, 4099), (1024, 1024), (2048, 2048), (1536, 2048), (128256, 4096),
            (28672, 4096)} <= values(default, "n", "k")  # fmt: skip
    assert {(case["spec"]["format"], case["spec"]["group_size"], case["spec"]["double_quant"]) for case in default} == {
        ("nf4", 64, False), ("int4", 128, False), ("affine4", 32, False), ("nf4", 64, True)}  # fmt: skip
    assert values(default, "direction", "dtype") == {("forward", "bf16"), ("transposed", "bf16")}
    assert max(m for m, n in values(default, "m", "n") if n == 128256) == 129  # what takes long is left out
    assert len({case["shape"] for case in default if case["spec"]["format"] == "affine4"}) == 2

    given = cases("--shape", "128256x4096", "--m", "2048", "--direction", "forward")
    assert len(given) == 4 and values(given, "n", "m", "direction") == {(128256, 2048, "forward")}
    layers = cases("--model", "llama-70b", "--format", "int4", "--m", "1")
    assert len(layers) == 4 * 2 and all(case["shape"].startswith("llama-70b ") for case in layers)
    assert "--lora" in fails("bench", "qgemm", "--cliffs", "--lora", "8", code=USAGE, env=environment)


def test_bench_experts_on_the_cpu():
    case = ["bench", "qgemm", "--device", "cpu", "--shape", "96x128", "--format", "nf4", "--m", "1,20", "--quick"]
    experts = ["--experts", "4", "--top-k", "2", "--skew", "1", "--threads", "1"]
    _, rows = run_lines(*case, *experts, env=NO_CUDA)
    assert [(row["direction"], row["m"]) for row in rows] == [(direction, m) for direction in ("forward", "transposed") for m in (1, 20)]
    for row in rows:
        assert row["op"] == "qgemm_grouped" and row["failure"] == "" and row["ceiling"] == "read"
        assert row["problem"] == f"E4 top 2, 96x128 nf4 g64 f16 {row['direction']} {row['m']} tokens"
        assert (row["experts"], row["top_k"], row["skew"], row["n"], row["k"]) == (4, 2, 1, 96, 128)
        assert row["used_experts"] == (2 if row["m"] == 1 else 4) and row["flops"] == 2 * row["m"] * 2 * 96 * 128
        assert min(row[name] for name in ("median_us", "ceiling_us", "loop_us", "route_us")) > 0
        assert math.isclose(row["share"], row["ceiling_us"] / row["median_us"], rel_tol=1e-6)
    for y, directions in (("sum", "both"), ("swiglu", "forward")):
        _, rows = run_lines(*case, *experts, "--y", y, "--direction", directions, env=NO_CUDA)
        assert len(rows) == (4 if directions == "both" else 2)
        assert all(row["failure"] == "" and row["y"] == y and row["problem"].startswith(f"E4 top 2, 96x128 {y} nf4") for row in rows)
    assert "--y swiglu: only with --direction forward" in fails(*case, *experts, "--y", "swiglu", code=USAGE, env=NO_CUDA)
    for options in (["--top-k", "2"], ["--skew", "1"], ["--y", "sum"]):
        assert "--top-k, --skew and --y: only with --experts" in fails(*case, *options, code=USAGE, env=NO_CUDA)
    for options in (["--cliffs"], ["--explain"], ["--lora", "8"]):
        message = fails(*case, "--experts", "4", *options, code=USAGE, env=NO_CUDA)
        assert "--experts: not with --cliffs, --explain and --lora" in message
    message = fails(*case, "--experts", "2", "--top-k", "3", code=USAGE, env=NO_CUDA)
    assert "--top-k: at most as many as --experts, got 3 of 2" in message
    for option in ("--experts", "--top-k", "--skew"):
        assert f"{option}: only with qgemm" in fails("bench", "observe", option, "1", "--device", "cpu", code=USAGE, env=NO_CUDA)


def test_bench_cliffs_on_the_cpu():
    case = ["bench", "qgemm", "--cliffs", "--device", "cpu", "--shape", "96x128", "--format", "nf4", "--m", "1,3,128,129"]
    default = run_json("bench", "qgemm", "--cliffs", "--explain", "--device", "cpu", env=NO_CUDA)["cases"]
    assert {row["dtype"] for row in default} == {"bf16", "f32"}
    case += ["--dtype", "f32", "--threads", "1"]
    document, rows = run_lines(*case, "--direction", "forward", env=NO_CUDA)
    assert [row["m"] for row in rows] == [1, 3, 128, 129]
    for row in rows:
        assert row["failure"] == "" and row["cublas_us"] is None and row["ceiling"] == "goal"
        assert math.isclose(row["ceiling_us"], row["read_us"] / 0.7, rel_tol=1e-6)
        assert math.isclose(row["plain_of_goal"], row["plain_us"] / row["ceiling_us"], rel_tol=1e-6)
        assert "correct" not in row and "error" not in row
    assert [row["jump"] is None for row in rows] == [True, True, True, False]
    assert math.isclose(rows[3]["jump"], rows[3]["plain_us"] / rows[2]["plain_us"], rel_tol=1e-6)
    summary = document["summary"]
    worst = max(rows[2:], key=lambda row: row["plain_of_goal"])
    assert (summary["worst"], summary["worst_problem"]) == (worst["plain_of_goal"], worst["problem"])
    assert (summary["worst_jump"], summary["worst_jump_problem"]) == (rows[3]["jump"], rows[3]["problem"])
    within = sum(row["plain_of_goal"] <= 1.15 for row in rows[2:])
    assert (summary["rows"], summary["within"], summary["share_within"]) == (2, within, within / 2)
    lines = run(*case, "--direction", "transposed", env=NO_CUDA).stdout.splitlines()
    assert len([line for line in lines if line.startswith("96x128")]) == 4
    assert [re.split(r"  +", line)[0] for line in lines[-3:]] == ["M >= 128", "worst", "worst jump"]


def test_bench_measures_the_cpu():
    case = [*CASE, "--device", "cpu", "--m", "1,3", "--threads", "2", "--quick"]
    document, rows = run_lines(*case, env=NO_CUDA)
    assert (document["device"], document["num_threads"]) == ("cpu", 2)
    assert [(row["direction"], row["m"]) for row in rows] == [
        ("forward", 1), ("forward", 3), ("transposed", 1), ("transposed", 3)]
    for row in rows:
        assert row["kernel"].startswith("qgemm_") and row["backend"].startswith("cpu") and row["failure"] == ""
        assert row["median_us"] == row["plain_us"] and row["spread"] >= 0
        assert math.isclose(row["share"], row["floor_of_plain"], rel_tol=1e-6)
        assert row["weight_bytes"] >= 96 * 128 // 2 * 1.0625
        assert row["correct"] is True and 0 < row["error"] <= row["error_limit"]
        rates = {rate["name"]: rate for rate in row["rates"]}
        assert set(rates) <= {"fma", "bf16_dot", "amx_bf16"} and "fma" in rates
        flops = 2e6 * row["m"] * row["n"] * row["k"] / row["plain_us"]
        for rate in rates.values():
            assert rate["flops"] > 1e8 and math.isclose(rate["share"], flops / rate["flops"], rel_tol=1e-6)
        best_us = 2e6 * row["m"] * row["n"] * row["k"] / max(rate["flops"] for rate in rates.values())
        assert math.isclose(row["floor_us"], max(row["read_us"], best_us), rel_tol=1e-6)
        assert math.isclose(row["read_of_plain"], row["read_us"] / row["plain_us"], rel_tol=1e-6)
        assert 0 < row["read_of_plain"] and 0 < row["floor_of_plain"]
        for absent in ["chained_us", "read_chained_us", "cublas_us", "cublas_flops"]:
            assert row[absent] is None
    us = {(row["direction"], row["m"]): row["plain_us"] for row in rows}
    for row in rows:
        expected = row["plain_us"] / us[row["direction"], 1]
        assert math.isclose(row["plain_of_one_row"], expected, rel_tol=1e-6)
        if row["direction"] == "transposed":
            assert math.isclose(row["forward_of_plain"], us["forward", row["m"]] / row["plain_us"], rel_tol=1e-6)
        else:
            assert row["forward_of_plain"] is None

    # Only products of f32 operands count for them.
    case = [*CASE[:-1], "f32", "--device", "cpu", "--m", "2", "--direction", "forward", "--variant", "qgemm_ref", "--quick"]
    _, (row,) = run_lines(*case, env=NO_CUDA)
    assert row["dtype"] == "f32" and row["kernel"] == "qgemm_ref" and row["correct"] is True
    assert [rate["name"] for rate in row["rates"]] == ["fma"]

    lines = run(*case, env=NO_CUDA).stdout.splitlines()
    assert re.match(r"device +cpu \(\w+, \d+ threads\)$", lines[0])
    titles, values = lines[-2].split(), lines[-1].split()
    assert titles[-9:] == ["read", "r/p", "p/p1", "fma", "dot", "amx", "f/p", "fw/p", "error"]
    assert values[:6] == ["96x128", "nf4", "g64", "f16", "f32", "forward"]
    assert all(float(value) > 0 for value in [values[8], *values[10:12]]) and values[9].endswith("%") and values[14:16] == ["-", "-"]

    # Of a few elements of y each may be close to zero.
    few = ["--format", "nf4,int4", "--dtype", "bf16,f32", "--m", "1,2", "--direction", "forward", "--quick"]
    _, rows = run_lines("bench", "qgemm", "--device", "cpu", "--shape", "1x4096,2x512", *few, env=NO_CUDA)
    assert len(rows) == 16 and all(row["correct"] is True for row in rows)

    # A variant that does not take the case is a line, and no failure.
    _, (row,) = run_lines(*case[:-2], "qgemm_simt", env=NO_CUDA)
    assert "it is for CUDA devices" in row["failure"] and row["plain_us"] is None and row["kernel"] == ""


# inspect


def test_inspect_dense():
    stored = {name: tensor.data for name, tensor in st.read_directory(MODEL)[0].items()}
    document = run_json("inspect", MODEL)
    assert document["valid"] is True and document["is_directory"] is True
    assert [weight["name"] for weight in document["weights"]] == sorted(stored)
    assert document["num_quantized"] == 0
    assert document["num_bytes"] == sum(2 * array.size for array in stored.values())
    for weight in document["weights"]:
        assert weight["shape"] == list(stored[weight["name"]].shape)
        assert (weight["dtype"], weight["layout"], weight["bits_per_weight"]) == ("bf16", None, 16)
        (part,) = [document["tensors"][index] for index in weight["parts"]]
        assert (part["name"], part["dtype"], part["file"]) == (weight["name"], "BF16", "model.safetensors")
    text = run("inspect", MODEL).stdout
    assert re.search(r"^lm_head\.weight +\[256, 256\] +BF16 +- +- +- +16\.000 +131072$", text, re.M)
    assert re.search(r"^valid +yes$", text, re.M)
    file_text = run("inspect", MODEL / "model.safetensors").stdout
    assert file_text == text


def test_inspect_quantized(nf4):
    document = run_json("inspect", nf4[0])
    assert document["num_quantized"] == NUM_LINEAR
    # Codes and one f32 scale for 64 weights, and the names of bitsandbytes' quant_state beside them.
    assert 4.5 <= document["bits_per_weight"] < 4.6
    weights = {weight["name"]: weight for weight in document["weights"]}
    spec = weights["model.layers.1.mlp.up_proj.weight"]["spec"]
    assert (spec["format"], spec["group_size"], spec["scale_dtype"]) == ("nf4", 64, "f32")
    assert weights["model.layers.1.mlp.up_proj.weight"]["layout"] == "bitsandbytes"
    assert weights["model.layers.1.mlp.up_proj.weight"]["shape"] == [768, 256]
    assert weights["lm_head.weight"]["spec"] is None
    text = run("inspect", nf4[0]).stdout
    assert re.search(
        r"mlp\.up_proj\.weight +\[768, 256\] +F32\+U8 +nf4 +64 flat +bitsandbytes +4\.\d+ ", text
    )


def test_inspect_invalid(tmp_path):
    blob = (MODEL / "model.safetensors").read_bytes()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(blob[:-1])
    assert "broken.safetensors" in fails("inspect", broken, code=BAD_INPUT)
    document = run_json("inspect", broken, code=BAD_INPUT)
    assert document["valid"] is False
    assert document["error"]["code"] == "BAD_INPUT"
    assert "broken.safetensors" in document["error"]["message"]
    assert "missing" in fails("inspect", tmp_path / "missing", code=IO)
    fails("inspect", tmp_path, code=BAD_INPUT)  # a directory without a checkpoint


def test_hostile_names_are_escaped(tmp_path):
    name = "a\x1b[31m\u202e\x7f\u0085\n.weight"
    path = write_file(tmp_path / "x.safetensors", {name: linear(4, 64)})
    for text in [
        run("inspect", path).stdout,
        run("quantize", path, "-o", tmp_path / "out", "--include", ".").stdout,
        run("inspect", path, "--json", "-").stdout,
    ]:
        assert text.isascii() and all(char == "\n" or " " <= char <= "~" for char in text)
        assert r"a\u001b[31m\u202e" in text
    assert run_json("inspect", path)["weights"][0]["name"] == name


# quantize, dequantize, compare


def test_quantize_report(nf4):
    output, text = nf4
    row = re.search(
        r"^model\.layers\.0\.mlp\.up_proj\.weight +\[768, 256\] +nf4 +64 flat +4\.\d+ .*$", text, re.M
    )
    max_error, rmse, snr = map(float, row.group(0).split()[-3:])
    assert 0 < max_error < 1 and abs(snr + 20 * math.log10(rmse)) < 0.01 and 18 < snr < 25
    assert len(re.findall(r" nf4 ", text)) == NUM_LINEAR
    for pattern in [
        rf"^quantized +{NUM_LINEAR} weights, 9\d\.\d% of the bytes, 4\.\d+ bits per weight$",
        r"^dense +11 weights",
        r"^layout +bitsandbytes$",
        r"^bytes +6558208 -> \d+ \(6\.25 MiB -> \d\.\d\d MiB\)$",
        r"^device +cpu \(input below 1 GiB\)$",
        r"^time +run \d+\.\d\d s, sync \d+\.\d\d s, verify \d+\.\d\d s; "
        r"limited by (compute|read|write|verify|sync) \(run: compute \d+ %, read \d+ %, write \d+ %\)$",
        rf"^output +{re.escape(str(output))}$",
    ]:
        assert re.search(pattern, text, re.M), pattern


@pytest.mark.parametrize("format", ["nf4", "affine4"])
def test_layers_of_other_dtypes_stay_dense_and_are_named(tmp_path, format):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors, metadata = st.read_directory(MODEL)
    tensors[name] = st.Tensor("F64", np.ones(tensors[name].data.shape))
    (tmp_path / "in").mkdir()
    st.write(tmp_path / "in" / "model.safetensors", tensors, metadata)
    shutil.copy(MODEL / "config.json", tmp_path / "in")
    done = run_json("quantize", tmp_path / "in", "-o", tmp_path / "out", "--format", format)
    weights = {weight["name"]: weight for weight in done["weights"]}
    assert not weights[name]["quantized"] and weights[name]["reason"] == "dtype F64"
    assert f"dtype F64: 1 ({name})" in run("quantize", tmp_path / "in", "--format", format, "--dry-run").stdout


def test_quantize_json_agrees_with_numpy(tmp_path):
    document = run_json("quantize", MODEL, "-o", tmp_path / "q", "--format", "int4")
    assert document["layout"] == "compressed-tensors" and document["dry_run"] is False
    weights = {weight["name"]: weight for weight in document["weights"]}
    quantized = [weight for weight in weights.values() if weight["quantized"]]
    assert len(quantized) == document["num_quantized"] == NUM_LINEAR
    assert sum(weight["source_bytes"] for weight in quantized) == document["quantized_source_bytes"]
    assert document["quantized_share"] == document["quantized_source_bytes"] / document["source_bytes"]
    assert weights["model.norm.weight"]["reason"] == "not selected"
    assert "max_error" not in weights["model.norm.weight"]

    run("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "f32")
    before, after = (
        {name: st.to_f32(tensor).astype(np.float64) for name, tensor in st.read_directory(path)[0].items()}
        for path in (MODEL, tmp_path / "d")
    )
    rows = run_json("compare", MODEL, tmp_path / "d")["rows"]
    assert sorted(row["name"] for row in rows) == sorted(before)
    for row in rows:
        error = np.abs(after[row["name"]] - before[row["name"]])
        assert row["max_error"] == error.max()
        assert error.flat[row["max_error_index"]] == error.max()
        rmse = math.sqrt((error**2).sum() / (before[row["name"]] ** 2).sum())
        assert row["relative_rmse"] == pytest.approx(rmse, rel=1e-9)
        if rmse == 0:
            assert row["snr_db"] is None  # JSON has no infinity
        else:
            assert row["snr_db"] == pytest.approx(-20 * math.log10(rmse), rel=1e-9)
            report = weights[row["name"]]
            for field in ["max_error", "max_error_index", "relative_rmse", "snr_db"]:
                assert report[field] == pytest.approx(row[field], rel=1e-9)


def test_compare_text(nf4):
    lines = run("compare", MODEL, nf4[0]).stdout.splitlines()
    snr = [float(line.split()[-1]) for line in lines if "_proj" in line]
    assert len(snr) == NUM_LINEAR and snr == sorted(snr)
    assert sum(line.endswith(" exact") for line in lines) == 11 + 1  # and the summary
    assert f"worst SNR    {snr[0]:.2f} dB" in lines
    (mean,) = [float(line.split()[2]) for line in lines if line.startswith("mean SNR")]
    assert mean == pytest.approx(sum(snr) / len(snr), abs=0.02)

    document = run_json("compare", MODEL, MODEL)
    assert document["num_exact"] == document["num_compared"] == 39
    assert document["worst_snr_db"] is None and document["num_problems"] == 0
    assert "worst SNR    exact\n" in run("compare", MODEL, MODEL).stdout


def test_compare_problems(tmp_path):
    a = write_file(tmp_path / "a", {"same": linear(2, 8), "only_a": linear(2, 8), "shape": linear(2, 8)})
    b = write_file(tmp_path / "b", {"same": linear(2, 8), "only_b": linear(2, 8), "shape": linear(2, 4)})
    result = run("compare", a, b, code=VERIFY)
    assert "3 of 4 weights could not be compared" in result.stderr
    problems = result.stdout.splitlines()[:3]
    assert sorted(line.split(":")[0] for line in problems) == ["only_a", "only_b", "shape"]
    assert "[2, 8]" in result.stdout and "[2, 4]" in result.stdout
    document = run_json("compare", a, b, code=VERIFY)
    assert [row["name"] for row in document["rows"] if not row["problem"]] == ["same"]
    assert document["num_problems"] == 3 and document["error"]["code"] == "VERIFY"


def test_dry_run_writes_nothing_and_predicts_the_run(tmp_path, nf4):
    text = run("quantize", MODEL, "--dry-run").stdout
    assert "nothing written (dry run)" in text and "memory" in text
    assert "max error" not in text and "SNR" not in text
    assert list(tmp_path.iterdir()) == []

    plan = run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run")
    run_report = run_json("quantize", MODEL, "-o", tmp_path / "out")
    for field in ["source_bytes", "output_bytes", "bits_per_weight", "num_quantized", "layout"]:
        assert plan[field] == run_report[field], field
    assert plan["peak_buffer_bytes"] > 0
    assert not any(weight["measured"] for weight in plan["weights"])

    text = run("dequantize", nf4[0], "-o", tmp_path / "dense", "--dry-run").stdout
    assert "dequantized" in text and not (tmp_path / "dense").exists()


TIMES = ["run_seconds", "verify_seconds", "read_seconds", "write_seconds", "compute_seconds", "total_seconds"]


@pytest.mark.parametrize("options", [[], ["--format", "nvfp4"], ["--format", "int4", "--group-size", "32", "--device", "cpu", "--threads", "1"], ["--shard-size", "100KB", "--threads", "2"]])
def test_dry_run_estimates_the_time(tmp_path, options):
    plan = run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run", *options)
    assert all(0 < plan[field] < 60 for field in TIMES), [plan[field] for field in TIMES]
    assert plan["total_seconds"] > plan["run_seconds"] and plan["time_note"] == ""
    assert plan["bottleneck"] in ("read", "compute", "write", "verify", "sync")
    assert list(tmp_path.iterdir()) == [], "files of a sample have no name"
    report = run_json("quantize", MODEL, "-o", tmp_path / "out", *options)
    assert report["total_seconds"] > report["run_seconds"] and report["time_note"] == ""
    assert run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run", "--no-verify", *options)["verify_seconds"] == 0


def test_dry_run_estimates_without_a_place_to_write(tmp_path):
    document = run_json("quantize", MODEL, "--dry-run")
    assert document["total_seconds"] > 0 and document["time_note"] == "no output is named: written to memory instead"
    text = run("quantize", MODEL, "--dry-run").stdout
    assert re.search(r"^time +about \d+\.\d\d s \(run \S+ s, sync \S+ s, verify \S+ s\); limited by \w+ \(run: ", text, re.M)
    assert re.search(r"^sample +no output is named: written to memory instead$", text, re.M)
    for directory in [tmp_path / "missing", Path("/proc")]:
        document = run_json("quantize", MODEL, "-o", directory / "out", "--dry-run")
        assert document["total_seconds"] > 0
        assert document["time_note"].startswith(f'cannot create a file in "{directory}": ')
        assert document["time_note"].endswith(": written to memory instead")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_estimates_what_no_layout_holds(tmp_path):
    """Weights of the sample that cannot be quantized, which the run looks at by itself."""
    values = np.ones((64, 64), np.float32)
    values[3, 5] = np.inf
    weights = {"a_proj.weight": st.from_f32(values, "BF16"), "b_proj.weight": linear(64, 64)}
    path = write_file(tmp_path / "in.safetensors", weights)
    assert run_json("quantize", path, "--dry-run", "--include", ".")["total_seconds"] > 0
    fails("quantize", path, "-o", tmp_path / "out.safetensors", "--include", ".", code=BAD_INPUT)


def test_options_reach_the_specification(tmp_path):
    def spec(*options):
        document = run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run", *options)
        weights = [weight for weight in document["weights"] if weight["quantized"]]
        (found,) = {json.dumps(weight["spec"] | weight["encoding"]) for weight in weights}
        return document["layout"], json.loads(found)

    layout, found = spec("--format", "int4", "--asymmetric", "--group-size", "32")
    assert layout == "compressed-tensors"
    assert (found["asymmetric"], found["group_size"], found["scale_rule"]) == (True, 32, "minmax")
    layout, found = spec("--format", "int8", "--group-size", "channel", "--scale-rule", "absmax")
    assert (found["granularity"], found["group_size"], found["scale_rule"]) == ("channel", None, "absmax")
    layout, found = spec("--format", "affine3")
    assert (layout, found["scale_rule"], found["code_scale"]) == ("mlx", "mlx-edge", "unrounded")
    layout, found = spec("--format", "nf4", "--layout", "halfbyte", "--scale-dtype", "bf16")
    assert (layout, found["granularity"], found["scale_dtype"]) == ("halfbyte", "group", "bf16")
    layout, found = spec("--double-quant")
    assert (layout, found["double_quant"]) == ("bitsandbytes", True)
    values = [i / 8 - 1 for i in range(16)]
    layout, found = spec("--format", "lut4", "--table", ",".join(map(str, values)))
    assert (layout, found["format"], found["table"]) == ("halfbyte", "lut4", values)


def test_include_and_exclude(tmp_path):
    def quantized(*options):
        document = run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run", *options)
        return {weight["name"] for weight in document["weights"] if weight["quantized"]}

    # Brackets and commas belong to the expression; each option takes one.
    assert quantized("--include", "[01].self_attn.[kq]_proj") == {
        f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "kq"
    }
    assert quantized("--include", "k_proj", "--include", "q_proj", "--exclude", r"layers\.[1-3]") == {
        f"model.layers.0.self_attn.{name}_proj.weight" for name in "kq"
    }
    assert quantized("--include", "lm_head") == {"lm_head.weight"}
    assert len(quantized("--exclude", "mlp")) == 16
    assert "(" in fails("quantize", MODEL, "-o", tmp_path / "out", "--include", "(", code=USAGE)

    document = run_json("quantize", MODEL, "-o", tmp_path / "out", "--dry-run", "--exclude", "mlp")
    (weight,) = [w for w in document["weights"] if w["name"] == "model.layers.0.mlp.up_proj.weight"]
    assert weight["reason"] == "excluded"


def test_fallback(tmp_path):
    path = write_file(
        tmp_path / "in.safetensors", {"good_proj.weight": linear(8, 256), "odd_proj.weight": linear(8, 100)}
    )
    output = tmp_path / "out.safetensors"
    message = fails("quantize", path, "-o", output, "--format", "int4", "--include", ".", code=BAD_INPUT)
    assert "odd_proj.weight" in message and "100" in message and "128" in message
    assert os.listdir(tmp_path) == ["in.safetensors"]

    text = run(
        "quantize", path, "-o", output, "--format", "int4", "--include", ".", "--fallback", "dense"
    ).stdout
    assert re.search(r"^  fallback: .*100.*: 1 \(odd_proj\.weight\)$", text, re.M)
    weights = {weight["name"]: weight for weight in run_json("inspect", output)["weights"]}
    assert weights["odd_proj.weight"]["layout"] is None
    assert weights["good_proj.weight"]["layout"] == "compressed-tensors"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite(tmp_path, value):
    weights = np.ones((8, 64), np.float32)
    weights[3, 5] = weights[3, 6] = value
    path = write_file(
        tmp_path / "in.safetensors", {"bad.weight": st.Tensor("F32", weights), "good.weight": linear(8, 64)}
    )
    output = tmp_path / "out.safetensors"
    message = fails("quantize", path, "-o", output, "--include", ".", code=BAD_INPUT)
    assert "bad.weight" in message and re.search(r"\b2\b", message) and str(3 * 64 + 5) in message
    assert os.listdir(tmp_path) == ["in.safetensors"]

    text = run("quantize", path, "-o", output, "--include", ".", "--nonfinite", "keep-dense").stdout
    assert re.search(r"^  non-finite: .*\(bad\.weight\)$", text, re.M)
    weights = {weight["name"]: weight for weight in run_json("inspect", output)["weights"]}
    assert weights["bad.weight"]["layout"] is None and weights["good.weight"]["layout"] == "bitsandbytes"


def test_dequantize(tmp_path, nf4):
    text = run("dequantize", nf4[0], "-o", tmp_path / "f16", "--dtype", "f16").stdout
    assert re.search(rf"^dequantized +{NUM_LINEAR} weights", text, re.M)
    run("dequantize", nf4[0], "-o", tmp_path / "default")
    dtypes = lambda path: {weight["dtype"] for weight in run_json("inspect", path)["weights"]}
    assert dtypes(tmp_path / "f16") == {"f16", "bf16"}  # what had been dense stays as it was
    assert dtypes(tmp_path / "default") == {"bf16"}
    assert "quantization_config" not in json.loads((tmp_path / "default/config.json").read_text())


def test_no_verify(tmp_path, nf4):
    text = run("quantize", MODEL, "-o", tmp_path / "out", "--no-verify").stdout
    assert "not verified" in text and "SNR" not in text
    assert (tmp_path / "out/model.safetensors").read_bytes() == (nf4[0] / "model.safetensors").read_bytes()


def test_same_bytes_for_any_thread_count(tmp_path):
    source = MODEL / "model.safetensors"
    for threads in [1, 2, 5]:
        run("quantize", source, "-o", tmp_path / f"{threads}", "--threads", threads)
    assert len({(tmp_path / f"{threads}").read_bytes() for threads in [1, 2, 5]}) == 1


# Wrong usage and outputs


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["subcommand"]),
        (["frobnicate"], ["frobnicate"]),
        (["inspect"], ["PATH"]),
        (["quantize", "{in}"], ["--output"]),
        (["quantize", "{in}", "-o", "{out}", "--bogus"], ["--bogus"]),
        (["quantize", "{in}", "-o", "{out}", "--format", "nf5"], ["nf5", "fp4_e2m1"]),
        (["quantize", "{in}", "-o", "{out}", "--layout", "gguf"], ["gguf", "bitsandbytes"]),
        (["quantize", "{in}", "-o", "{out}", "--group-size", "6x"], ["--group-size", "6x", "channel"]),
        (["quantize", "{in}", "-o", "{out}", "--group-size", "0"], ["group size", "got 0"]),
        (["quantize", "{in}", "-o", "{out}", "--group-size", "-64"], ["-64"]),
        (["quantize", "{in}", "-o", "{out}", "--scale-rule", "max"], ["max", "half-range"]),
        (["quantize", "{in}", "-o", "{out}", "--scale-dtype", "f8"], ["f8", "bf16"]),
        (["quantize", "{in}", "-o", "{out}", "--importance", "{in}"], ["--importance", "--search"]),
        (
            ["quantize", "{in}", "-o", "{out}", "--layout", "halfbyte", "--search", "--group-size", "tensor"],
            ["search", "tensor"],
        ),
        (["quantize", "{in}", "-o", "{out}", "--threads", "-1"], ["--threads", "-1"]),
        (["quantize", "{in}", "-o", "{out}", "--threads", "two"], ["--threads", "two"]),
        (["quantize", "{in}", "-o", "{out}", "--nonfinite", "skip"], ["--nonfinite", "keep-dense"]),
        (["quantize", "{in}", "-o", "{out}", "--fallback", "f16"], ["--fallback", "dense"]),
        (["quantize", "{in}", "-o", "{out}", "--device", "tpu"], ["--device", "tpu"]),
        (["quantize", "{in}", "-o", "{out}", "--device", "cuda:x"], ["--device", "cuda:x"]),
        (["dequantize", "{in}", "-o", "{out}", "--device", "cuda:"], ["--device", "auto", "cuda:N"]),
        (["compare", "{in}", "{in}", "--device", "gpu"], ["--device", "gpu"]),
        (["quantize", "{in}", "-o", "{out}", "--format", "lut4"], ["lut4", "--table"]),
        (["quantize", "{in}", "-o", "{out}", "--table", "1,2"], ["--table"]),
        (["quantize", "{in}", "-o", "{out}", "--format", "lut4", "--table", "-1,x"], ["--table", "x"]),
        (["quantize", "{in}", "-o", "{out}", "--format", "lut4", "--table", "-1,0"], ["16", "2"]),
        (
            ["quantize", "{in}", "-o", "{out}", "--format", "nf4", "--asymmetric"],
            ["asymmetric", "zero point"],
        ),
        (["dequantize", "{in}", "-o", "{out}", "--dtype", "i8"], ["i8"]),
        (["ptx", "quantise", "--arch", "sm_90a"], ["quantise", "dequantize, fake_quantize, observe"]),
        (["ptx", "quantize"], ["--arch"]),
        (["ptx", "quantize", "--kernel", "x", "--arch", "sm_90a"], ["'x'", "quantize_groups", "value_range"]),
        (["ptx", "dequantize", "--kernel", "value_range", "--arch", "sm_90a"], ["value_range", "quantize"]),
        (["ptx", "dequantize", "--format", "nf5", "--arch", "sm_90a"], ["nf5", "fp4_e2m1"]),
        (["ptx", "quantize", "--dtype", "i8", "--arch", "sm_90a"], ["i8", "bf16"]),
        (["ptx", "quantize", "--kernel", "quantize_groups", "--group-size", "7", "--arch", "sm_90a"], ["7", "128"]),
        (["ptx", "dequantize", "--format", "lut4", "--arch", "sm_90a"], ["lut4", "table"]),
        (["ptx", "--kernel", "linear_fused", "--arch", "sm_90a"], ["OP"]),
        (["ptx", "dequantize", "--operation", "backward", "--arch", "sm_90a"], ["dequantize", "operation", "format"]),
        (["bench"], ["OP"]),
        (["bench", "quantise"], ["quantise", "quantize", "qgemm"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--shape", "4096"], ["--shape", "NxK", "4096"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--shape", "64x0"], ["--shape", "64x0"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--model", "llama-7b"], ["--model", "llama-7b", "llama-8b"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--m", "-1"], ["m must be", "-1"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--format", "nf5"], ["nf5", "fp4_e2m1"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--dtype", "f64"], ["dtype", "f64"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--direction", "up"], ["--direction", "transposed"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--variant", "x"], ["variant", "'x'", "qgemm_simt"]),
        (["bench", "qgemm", "--explain", "--device=cpu", "--double-quant"], ["--double-quant", "--format"]),
    ],
)
def test_wrong_usage(tmp_path, args, words):
    args = [arg.format(**{"in": MODEL, "out": tmp_path / "out"}) for arg in args]
    message = fails(*args, code=USAGE)
    assert all(word in message for word in words), message
    assert re.search(r"^Try 'halfbyte .*--help'\.$", message, re.M)
    assert list(tmp_path.iterdir()) == []


def test_device_is_never_a_silent_choice(tmp_path, nf4):
    problem = run_json("doctor", env=NO_DRIVER)["cuda"]["problem"]
    for arguments in [["quantize", MODEL], ["quantize", MODEL, "--dry-run"], ["dequantize", nf4[0]]]:
        for device in ["cuda", "cuda:1"]:
            message = fails(
                *arguments, "-o", tmp_path / "out", "--device", device, code=DEVICE, env=NO_DRIVER
            )
            assert f"--device {device}: " in message and problem in message
            assert list(tmp_path.iterdir()) == []
    text = run("quantize", MODEL, "-o", tmp_path / "out", "--device", "cpu").stdout
    assert re.search(r"^device +cpu$", text, re.M)
    for words in ["gpu", "cpu,cpu", "cuda,cuda:0", "cpu,", "auto,cpu"]:
        assert f"got '{words}'" in fails("quantize", MODEL, "-o", tmp_path / "x", "--device", words, code=USAGE)
    for words in ["cpu,cuda:0", "cuda:all"]:
        fails("quantize", MODEL, "-o", tmp_path / "x", "--device", words, code=DEVICE, env=NO_DRIVER)
    assert not (tmp_path / "x").exists()
    message = fails("compare", MODEL, MODEL, "--device", "cuda:0", code=DEVICE)
    assert "--device cuda:0" in message and "compare runs on the CPU" in message
    assert run_json("compare", MODEL, MODEL, "--device", "cpu")["device"] == "cpu"


def test_auto_takes_cuda_for_large_input_only(tmp_path):
    document = run_json("quantize", MODEL, "--dry-run")
    assert (document["device"], document["device_note"]) == ("cpu", "input below 1 GiB")
    # A dry run reads the header and a sample, so a hole will do.
    entry = {"dtype": "BF16", "shape": [32768, 16384], "data_offsets": [0, 2**30]}
    header = json.dumps({"a_proj.weight": entry}).encode()
    large = tmp_path / "large" / "model.safetensors"
    large.parent.mkdir()
    large.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(large, 8 + len(header) + 2**30)
    problem = run_json("doctor", env=NO_DRIVER)["cuda"]["problem"]
    for path in [large, large.parent]:
        document = run_json("quantize", path, "--dry-run", env=NO_DRIVER)
        assert document["device"] == "cpu"
        assert document["device_note"] in ("faster without CUDA, as measured", problem)
        text = run("quantize", path, "--search", "--dry-run", env=NO_DRIVER).stdout  # slower than a device is fed
        assert f"device       cpu ({problem})" in text.splitlines()


def test_existing_output(tmp_path):
    source = MODEL / "model.safetensors"
    output = tmp_path / "out.safetensors"
    output.write_text("precious")
    message = fails("quantize", source, "-o", output, code=EXISTS)
    assert "out.safetensors" in message and output.read_text() == "precious"
    run("quantize", source, "-o", output, "--force")
    assert run_json("inspect", output)["num_quantized"] == NUM_LINEAR

    directory = tmp_path / "dir"
    run("quantize", MODEL, "-o", directory)
    (directory / "mine").write_text("precious")
    fails("quantize", MODEL, "-o", directory, code=EXISTS)
    assert (directory / "mine").read_text() == "precious"
    assert '"mine"' in fails("quantize", MODEL, "-o", directory, "--force", code=EXISTS)
    assert (directory / "mine").read_text() == "precious"
    (directory / "mine").unlink()
    run("quantize", MODEL, "-o", directory, "--force")
    assert run_json("inspect", directory)["num_quantized"] == NUM_LINEAR
    assert sorted(os.listdir(tmp_path)) == ["dir", "out.safetensors"]


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link"])
def test_output_is_the_input(tmp_path, kind):
    source = tmp_path / "in.safetensors"
    shutil.copy(MODEL / "model.safetensors", source)
    output = source if kind == "same" else tmp_path / "link"
    if kind == "symlink":
        output.symlink_to(source)
    elif kind == "hard link":
        output.hardlink_to(source)
    for force in [[], ["--force"]]:
        result = subprocess.run(
            [CLI, "quantize", source, "-o", output, *force], capture_output=True, text=True
        )
        assert result.returncode in (USAGE, EXISTS) and "halfbyte: error: " in result.stderr
        assert source.read_bytes() == (MODEL / "model.safetensors").read_bytes()


def test_missing_parent(tmp_path):
    assert "nowhere" in fails("quantize", MODEL, "-o", tmp_path / "nowhere/out", code=IO)


def test_read_only_directory(unprivileged):
    directory, options = unprivileged
    shutil.copy(MODEL / "model.safetensors", directory / "in.safetensors")
    directory.chmod(0o555)
    command = ["halfbyte", "quantize", "in.safetensors", "-o", "out.safetensors"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, **options)
    assert result.returncode == IO, result.stderr
    assert "out.safetensors" in result.stderr and "Permission denied" in result.stderr
    assert os.listdir(directory) == ["in.safetensors"]


# JSON


def test_json_file(tmp_path):
    path = tmp_path / "report.json"
    text = run("inspect", MODEL, "--json", path).stdout
    assert text == run("inspect", MODEL).stdout
    assert json.loads(path.read_text()) == run_json("inspect", MODEL)

    path.write_text("old")
    assert "report.json" in fails("inspect", MODEL, "--json", path, code=EXISTS)
    assert path.read_text() == "old"
    run("inspect", MODEL, "--json", path, "--force")
    assert json.loads(path.read_text())["ok"] is True
    assert os.listdir(tmp_path) == ["report.json"]

    # Known before the work begins, and no output is left.
    fails("quantize", MODEL, "-o", tmp_path / "out", "--json", tmp_path / "none/x", code=IO)
    assert os.listdir(tmp_path) == ["report.json"]

    fails("inspect", tmp_path, "--json", tmp_path / "failed.json", code=BAD_INPUT)
    assert json.loads((tmp_path / "failed.json").read_text())["error"]["code"] == "BAD_INPUT"


def test_json_replaces_files_only(tmp_path):
    for force in [[], ["--force"]]:
        message = fails("inspect", MODEL, "--json", "/dev/null", *force, code=EXISTS)
        assert "--json: " in message and "is a device" in message and "- is standard output" in message
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode)


def test_json_never_replaces_the_output(tmp_path):
    output = tmp_path / "out.safetensors"
    source = MODEL / "model.safetensors"
    for path in (output, tmp_path / "none" / ".." / output.name):
        message = fails("quantize", source, "-o", output, "--json", path, code=USAGE)
        assert "--json" in message and "is the output" in message
    (tmp_path / "loop").symlink_to("loop")
    for path, code in (("x" * 300, IO), ("loop", EXISTS), ("loop/x", IO)):
        assert "--json" in fails("quantize", source, "-o", output, "--json", tmp_path / path, code=code)
    assert os.listdir(tmp_path) == ["loop"]


# Terminals, signals, streams, locale


def run_on_terminal(*args, environment=None):
    """stdout (a pipe) and what a terminal at stderr has received."""
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [CLI, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, **(environment or {})},
    )
    os.close(terminal)
    received = b""
    try:
        while chunk := os.read(master, 65536):
            received += chunk
    except OSError:  # the other side is closed
        pass
    os.close(master)
    stdout = process.communicate(timeout=60)[0].decode()
    assert process.returncode == OK, received
    return stdout, received.decode()


def test_progress(tmp_path):
    stdout, bar = run_on_terminal("quantize", MODEL, "-o", tmp_path / "a", environment={"NO_COLOR": "1"})
    assert "\r" not in stdout
    assert re.search(r"\rquantize +\d+% \[#*\.*\]  \S+ \S?i?B / \S+ MiB  \S+ \S+/s  ETA (\d+:\d\d|-:--)", bar)
    assert re.search(r"100% \[#+\]", bar) and re.search(r"\rverify +\d+%", bar)
    assert "\x1b" not in bar and "\n" not in bar
    assert all(len(line) <= 79 for line in bar.split("\r"))
    assert bar.endswith("\r" + " " * 79 + "\r")
    assert run_on_terminal("quantize", MODEL, "-o", tmp_path / "b", "--progress", "never")[1] == ""
    # run() checks that stderr is empty where it is not a terminal.
    run("quantize", MODEL, "-o", tmp_path / "c", "--progress", "auto")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """2 GiB of zeros, without the disk space."""
    path = tmp_path_factory.mktemp("large") / "in.safetensors"
    rows, cols = 2**18, 2**12
    header = {"proj.weight": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [0, 2 * rows * cols]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 2 * rows * cols)
    return path


def start_long_run(large, output):
    """A run that is at work: its temporary output exists."""
    process = subprocess.Popen(
        [CLI, "quantize", large, "-o", output, "--threads", "1", "--include", "."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test runner in the background may have them ignored.
        preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGHUP)],
    )
    deadline = time.monotonic() + 30
    while not list(output.parent.glob(".out*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process


def communicate_soon(process):
    """Of a cancelled run: it ends within half a second, on machines that run tests within four times that."""
    sent = time.monotonic()
    result = process.communicate(timeout=30)
    assert time.monotonic() - sent < 2
    return result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_cancels(tmp_path, large, number):
    process = start_long_run(large, tmp_path / "out.safetensors")
    process.send_signal(number)
    stdout, stderr = communicate_soon(process)
    assert process.returncode == CANCELLED, stderr
    assert stdout == "" and stderr.startswith("halfbyte: error: ") and "cancel" in stderr
    assert list(tmp_path.iterdir()) == []


def test_signal_cancels_the_copy_of_a_large_file(tmp_path):
    """Once the weights are written, when only other files are left to copy: 16 GiB of zeros here, without the space."""
    shutil.copytree(MODEL, tmp_path / "in")
    with (tmp_path / "in" / "tokenizer.model").open("wb") as file:
        file.truncate(2**34)
    if shutil.disk_usage(tmp_path).free < 2**34 + 2**30:
        pytest.skip("16 GiB are not free")
    command = [CLI, "quantize", tmp_path / "in", "-o", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    written = 0
    while written < 64 * 2**20:  # more than the weights
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
        written = int(re.search(r"wchar: (\d+)", Path(f"/proc/{process.pid}/io").read_text())[1])
    process.send_signal(signal.SIGTERM)
    stdout, stderr = communicate_soon(process)
    assert process.returncode == CANCELLED, stderr
    assert stderr == "halfbyte: error: copy was cancelled\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_more_shards_than_descriptors(tmp_path):
    rng = np.random.default_rng(5)
    names = [f"model-{i + 1:05}-of-00300.safetensors" for i in range(300)]
    (tmp_path / "in").mkdir()
    index = {}
    for i, name in enumerate(names):
        weight = st.from_f32(rng.standard_normal((8, 64)), "BF16")
        index[f"model.layers.{i}.mlp.up_proj.weight"] = name
        write_file(tmp_path / "in" / name, {f"model.layers.{i}.mlp.up_proj.weight": weight})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (tmp_path / "in" / "model.safetensors.index.json").write_text(text)
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))}
    run("quantize", tmp_path / "in", "-o", tmp_path / "out", **few)
    run("dequantize", tmp_path / "out", "-o", tmp_path / "dense", **few)
    rows = run_json("compare", tmp_path / "in", tmp_path / "dense", **few)["rows"]
    assert len(rows) == 300 and all(15 < row["snr_db"] < 40 for row in rows)


def test_second_signal_kills(tmp_path, large):
    process = start_long_run(large, tmp_path / "out.safetensors")
    process.send_signal(signal.SIGSTOP)  # so that both are pending at once
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    try:
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
    except ProcessLookupError:
        pass
    process.communicate(timeout=30)
    assert process.returncode in (CANCELLED, -signal.SIGINT)
    assert not (tmp_path / "out.safetensors").exists()


def test_failed_standard_output():
    with open("/dev/full", "w") as full:
        result = subprocess.run([CLI, "inspect", MODEL], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == IO
    assert result.stderr == "halfbyte: error: cannot write to standard output: No space left on device\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([CLI, "inspect", MODEL], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert result.returncode == IO and "Broken pipe" in result.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, nf4, closed):
    # A data file that got descriptor 1 or 2 would have the report written into it.
    output = tmp_path / "out"
    subprocess.run(["sh", "-c", f'"$0" quantize "$1" -o "$2" {closed}', CLI, MODEL, output], check=True)
    assert (output / "model.safetensors").read_bytes() == (nf4[0] / "model.safetensors").read_bytes()


def test_locale_changes_nothing(tmp_path, nf4):
    locale = tmp_path / "locale"
    locale.mkdir()
    built = (
        shutil.which("localedef")
        and subprocess.run(
            ["localedef", "-i", "de_DE", "-f", "UTF-8", locale / "de_DE.UTF-8"], capture_output=True
        ).returncode
        == 0
    )
    if not built:
        pytest.skip("needs localedef and the de_DE locale")
    environment = {**os.environ, "LC_ALL": "de_DE.UTF-8", "LOCPATH": str(locale), "TZ": "Asia/Tokyo"}
    table = ["--format", "lut4", "--table", ",".join(str(i / 8 - 0.5) for i in range(16))]
    for options in [["--format", "nf4"], table]:
        arguments = ["quantize", MODEL / "model.safetensors", *options]
        run(*arguments, "-o", tmp_path / "a", "--force")
        text = run(*arguments, "-o", tmp_path / "b", "--force", env=environment).stdout
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert re.search(r"run \d+\.\d\d s", text)
    assert json.loads(run("inspect", nf4[0], "--json", "-", env=environment).stdout)["ok"]
