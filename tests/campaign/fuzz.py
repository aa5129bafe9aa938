"""Fuzzing: inputs that are made of good ones, for everything that reads what others wrote.

The targets are tests/campaign/fuzz/*.cc. With --quick they run by a driver of ours in the ordinary build; otherwise by
clang's libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer (preset `fuzz`), where clang can be had. A
finding names the file of the input, and the command that runs it again.
"""

import itertools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

from campaign.base import ROOT, text_of
from independent import safetensors_io as st

SOURCES = Path(__file__).parent / "fuzz"
TARGETS = sorted(path.stem for path in SOURCES.glob("*.cc") if path.stem != "driver")
QUICK_SECONDS, SECONDS = 5, 600  # of a round of a target
LARGEST = {"large": 1 << 20, "header": 1 << 16, "checkpoint": 1 << 16}  # bytes of an input; others 4096

OPTIONS = [  # of quantize, that bring every layout
    [],
    ["--double-quant"],
    ["--format", "fp4"],
    ["--format", "int4", "--group-size", "32"],
    ["--format", "int4", "--group-size", "32", "--asymmetric"],
    ["--format", "affine4", "--group-size", "32"],
    ["--format", "affine3", "--group-size", "32"],
    ["--format", "int4", "--layout", "gptq", "--group-size", "32"],
    ["--format", "int4", "--layout", "gptq", "--group-size", "32", "--asymmetric"],
    ["--format", "int4", "--layout", "awq", "--group-size", "32"],
    ["--format", "nf4", "--layout", "halfbyte", "--double-quant"],
    ["--format", "int5", "--layout", "halfbyte", "--asymmetric"],
]


def checkpoints(section, folder):
    """Small files in every layout."""
    rng = np.random.default_rng(7)
    dense = folder / "dense.safetensors"
    tensors = {
        "model.layers.0.mlp.up_proj.weight": st.from_f32(rng.standard_normal((32, 64)).astype(np.float32), "BF16"),
        "model.norm.weight": st.from_f32(rng.standard_normal(8).astype(np.float32), "F32"),
        "flag": st.Tensor("U8", np.array([7], np.uint8)),
    }
    st.write(dense, tensors, {"format": "pt", "author": "\u00fc"})
    files = [dense]
    for number, options in enumerate(OPTIONS):
        out = folder / f"{number}.safetensors"
        done = section.cli("quantize", dense, "-o", out, "--force-layout", *options)
        if section.check(done.returncode == 0, f"no seed of {options}: {text_of(done.stderr)}"):
            files.append(out)
    return [file.read_bytes() for file in files]


def size(number):
    return struct.pack("<Q", number)


def text(word):
    return size(len(word)) + word


def seeds(section, folder):
    """{target: inputs}, small ones that are good."""
    files = checkpoints(section, folder)
    headers = [file[8 : 8 + int.from_bytes(file[:8], "little")].rstrip() for file in files]
    wholes = [header + b"\0" + file[8 + int.from_bytes(file[:8], "little") :] for header, file in zip(headers, files)]
    configs = [
        b"{}",
        b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}',
        b'{"model_type": "gpt_oss", "tie_word_embeddings": true, "x": NaN, "y": [-Infinity, 1e5]}',
        b'{"quantization": {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": {"bits": 8, "group_size": 32}}}',
        b'{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true,'
        b' "checkpoint_format": "gptq_v2", "desc_act": false}, "text_config": {"torch_dtype": "float16"}}',
        b'{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups":'
        b' {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}}}',
    ]
    indexes = [
        b'{"metadata": {"total_size": 12}, "weight_map": {"a": "f-1.safetensors", "b": "f-2.safetensors"}}',
        b'{"weight_map": {"\\u00e9": "f", "": "g"}, "metadata": {"x": [1.5, null, true, {"weight_map": 1}]}}',
    ]
    states = [
        b'\0{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64]}',
        b'\0{"quant_type": "nf4", "blocksize": 128, "dtype": "float16", "shape": [128, 1], "nested_blocksize": 256,'
        b' "nested_dtype": "float32", "nested_offset": 0.5}',
        b'\1{"version": 1, "format": "nf4", "asymmetric": false, "granularity": "group", "group_size": 64,'
        b' "scale_dtype": "f32", "double_quant": false, "shape": [2, 64], "dtype": "bf16"}',
        b'\1{"version": 1, "format": "lut4", "asymmetric": false, "granularity": "channel", "scale_rule": "absmax",'
        b' "scale_dtype": "f32", "double_quant": false, "shape": [2, 64], "dtype": "f32"}',
    ]
    index = text(b"0.2.0") + size(1) + b"".join(text(word) for word in (b"sm_90a", b"a.cu", b"0" * 32, b"kernel", b""))
    index += size(64) + size(4) + b"0" * 32
    pack = b"halfbyte pack 1\n" + size(68) + size(len(index)) + b"0" * 32 + b"code" + index
    entry = b"halfbyte cubin 1" + text(b"key") + text(b"cubin") + b"0" * 32
    patterns = [
        b"up_proj\n\nmodel.layers.0.mlp.up_proj.weight\nlm_head.weight",
        b"layers\\.[0-9]+\\.mlp\nexperts|(gate|router)\\b\nmodel.layers.10.mlp.experts.3.down_proj.weight",
        b"^(?:a|b{1,3}|[^c-e]*)+$\n(x+x+)+y\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        b"(a)\\1\n.{0,200}z\naa",
    ]
    return {
        "capi": [bytes(section.random.randrange(256) for _ in range(200)) for _ in range(20)],
        "checkpoint": wholes,
        "config": configs,
        "header": headers,
        "index": indexes,
        "large": [bytes([kind, 64, 128, 0]) + text for kind, text in
                  [*((0, header) for header in headers[:3]), *((1, index) for index in indexes),
                   *((2, config) for config in configs), *((3, header) for header in headers[:2])]],
        "pack": [b"\0" + pack, b"\1" + pack, b"\2" + entry, b"\3" + entry],
        "patterns": patterns,
        "quant_state": states,
    }  # fmt: skip


def fuzz_build(section):
    """The build by clang, made where it is missing; None where it cannot be."""
    if section.quick:
        return None
    if shutil.which("clang++-14") is None:
        print("  without libFuzzer, which needs Debian's clang-14 and libclang-rt-14-dev", flush=True)
        return None
    build = ROOT / "build" / "fuzz"
    for command in (["cmake", "--preset", "fuzz"], ["cmake", "--build", "--preset", "fuzz"]):
        if (done := subprocess.run(command, cwd=ROOT, capture_output=True, text=True)).returncode != 0:
            print(f"  {' '.join(command)} fails: without libFuzzer\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
            return None
    return build


def run(section):
    build = fuzz_build(section)
    folder = section.campaign.folder
    with section.directory() as name:
        corpus = Path(name)
        for target, inputs in seeds(section, corpus).items():
            (corpus / target).mkdir()
            for number, content in enumerate(inputs):
                (corpus / target / f"{number:03}").write_bytes(content)
        seconds = QUICK_SECONDS if section.quick else SECONDS
        if section.limit:
            seconds = min(seconds, max(section.limit / len(TARGETS), 1))
        rounds = [0] if section.quick or not section.limit else itertools.count()
        for case in section.cases(f"{target} {number}" for number in rounds for target in TARGETS):
            target, number = case.split()
            artifact = folder / f"fuzz-{target}-{section.seed}-{number}"
            if build is None:
                by_driver(section, target, seconds, int(number), artifact, corpus / target)
            else:
                by_libfuzzer(section, build, target, seconds, int(number), artifact, corpus / target)


def by_driver(section, target, seconds, number, artifact, corpus):
    program = section.build / "tests" / f"fuzz_{target}"
    seed = section.random.randrange(1 << 30) + number
    done = section.program(program, seconds, seed, artifact, SOURCES / "fuzz.dict", corpus, timeout=10 * seconds + 60)
    count = re.search(r"^executions (\d+)$", text_of(done.stdout), re.MULTILINE)
    if count:
        section.count(f"executions {target}", int(count[1]))
    if done.returncode is not None and done.returncode != 0:
        again = f"{program} 0 0 /dev/null {SOURCES / 'fuzz.dict'} {artifact}"
        section.finding(f"{text_of(done.stderr)[-1000:].strip()}; again: {again}")


def by_libfuzzer(section, build, target, seconds, number, artifact, corpus):
    program = build / "tests" / f"fuzz_{target}"
    found = section.campaign.folder / "corpus" / target  # what earlier runs found
    found.mkdir(parents=True, exist_ok=True)
    most = LARGEST.get(target, 4096)
    # What an address sanitizer needs itself is beside the 64 MiB + 8 times the input of one allocation.
    options = [f"-max_total_time={seconds:.0f}", f"-seed={int(number) + 1}", f"-max_len={most}", "-timeout=2",
               f"-malloc_limit_mb={64 + 8 * most // (1 << 20)}", "-rss_limit_mb=2048", "-print_final_stats=1",
               f"-dict={SOURCES / 'fuzz.dict'}", f"-exact_artifact_path={artifact}"]  # fmt: skip
    done = section.program(program, *options, found, corpus, timeout=10 * seconds + 120,
                           env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"})  # fmt: skip
    count = re.search(r"number_of_executed_units: *(\d+)", text_of(done.stderr))
    if count:
        section.count(f"executions {target}", int(count[1]))
    if done.returncode is not None and done.returncode != 0:
        section.finding(f"{text_of(done.stderr)[-3000:].strip()}; again: {program} {artifact}")
