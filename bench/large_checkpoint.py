#!/usr/bin/env python3
"""A checkpoint with the tensors of DeepSeek-V3 (671 B weights), quantized: how long the plan takes for all of it, and how
near a run on a part of it comes to its floor.

    bench/large_checkpoint.py [--halfbyte PROGRAM] [--directory /dev/shm] [--bytes 32e9] [--device cuda] [--format nf4]

1. Planning: FP8 with a scale for each block, as published (more than 90,000 tensors), and bf16, whose files are holes: they
   take no space. The time of a dry run, its measurement of a sample included, and the memory that it takes.
2. A run: the first layers in bf16, random, of about --bytes. Its time beside the longest of reading the input, writing
   the output, both by as many threads, and verifying, each measured here.
Prints lines of JSON.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path

LAYERS, DENSE_LAYERS, EXPERTS, HIDDEN, FFN, EXPERT_FFN, VOCAB = 61, 3, 256, 7168, 18432, 2048, 129280
CONFIG = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": LAYERS,
          "hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "vocab_size": VOCAB}
FILE_BYTES = 4.3e9
PIECE = 16 << 20


def weights():
    """Names and shapes, layer by layer: those with block scales, and those without."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN), False
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        attention = {"q_a_proj": (1536, HIDDEN), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, HIDDEN),
                     "kv_b_proj": (32768, 512), "o_proj": (HIDDEN, 16384)}
        for module, shape in attention.items():
            yield f"{name}.self_attn.{module}.weight", shape, True
        for norm, size in [("self_attn.q_a_layernorm", 1536), ("self_attn.kv_a_layernorm", 512), ("input_layernorm", HIDDEN),
                           ("post_attention_layernorm", HIDDEN)]:
            yield f"{name}.{norm}.weight", (size,), False

        def feed_forward(block, size):
            for module, shape in [("gate_proj", (size, HIDDEN)), ("up_proj", (size, HIDDEN)), ("down_proj", (HIDDEN, size))]:
                yield f"{block}.{module}.weight", shape, True

        if layer < DENSE_LAYERS:
            yield from feed_forward(f"{name}.mlp", FFN)
            continue
        yield f"{name}.mlp.gate.weight", (EXPERTS, HIDDEN), False
        yield f"{name}.mlp.gate.e_score_correction_bias", (EXPERTS,), False
        yield from feed_forward(f"{name}.mlp.shared_experts", EXPERT_FFN)
        for expert in range(EXPERTS):
            yield from feed_forward(f"{name}.mlp.experts.{expert}", EXPERT_FFN)
    yield "model.norm.weight", (HIDDEN,), False
    yield "lm_head.weight", (VOCAB, HIDDEN), False


def tensors(fp8):
    for name, shape, has_scales in weights():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if fp8 and has_scales:
            yield name, "F8_E4M3", shape, count
            blocks = tuple(ceil(extent / 128) for extent in shape)
            yield name + "_scale_inv", "F32", blocks, 4 * blocks[0] * blocks[1]
        else:
            yield name, "BF16", shape, 2 * count


def make(directory, fp8, most_bytes=None):
    """Files of about FILE_BYTES. Without most_bytes holes, else random finite values."""
    directory.mkdir()
    files, in_file, total = [[]], 0, 0
    for tensor in tensors(fp8):
        if most_bytes and total >= most_bytes:
            break
        if in_file > FILE_BYTES:
            files.append([])
            in_file = 0
        files[-1].append(tensor)
        in_file += tensor[3]
        total += tensor[3]
    index = {}

    def write(number):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        header, offset = {}, 0
        for tensor, dtype, shape, num_bytes in files[number]:
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
            offset += num_bytes
            index[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            if most_bytes is None:
                file.truncate(8 + len(text) + offset)
                return
            piece = bytearray(os.urandom(PIECE))
            piece[1::2] = bytes(byte & 0x80 | 0x3C for byte in piece[1::2])  # bf16 of about 0.01
            for at in range(0, offset, PIECE):
                file.write(memoryview(piece)[:offset - at])

    with ThreadPoolExecutor(min(16, os.cpu_count())) as pool:
        list(pool.map(write, range(len(files))))
    config = dict(CONFIG)
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                         "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total, len(index), len(files)


def run(command):
    """The report of the tool, the seconds of its process, and its peak memory."""
    start = time.monotonic()
    process = subprocess.Popen([*command, "--json", "-"], stdout=subprocess.PIPE)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command}: exit code {process.returncode}")
    return json.loads(text), seconds, usage.ru_maxrss * 1024


def rate(paths, into=None):
    """Bytes a second of reading all files by as many threads as there are CPUs, in pieces; with `into` of writing files of
    their sizes there."""
    tasks = [(path, at) for path in paths for at in range(0, path.stat().st_size, PIECE)]
    descriptors = {path: os.open(into / path.name, os.O_WRONLY | os.O_CREAT) if into else os.open(path, os.O_RDONLY)
                   for path in paths}
    zeros = bytes(PIECE)

    def work(task):
        path, at = task
        num_bytes = min(PIECE, path.stat().st_size - at)
        if into:
            return os.pwrite(descriptors[path], memoryview(zeros)[:num_bytes], at)
        return os.preadv(descriptors[path], [bytearray(num_bytes)], at)

    start = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = sum(pool.map(work, tasks))
    if into:
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    seconds = time.monotonic() - start
    for descriptor in descriptors.values():
        os.close(descriptor)
    return done / seconds


def say(**fields):
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--halfbyte", default=os.environ.get("HALFBYTE_CLI", "halfbyte"))
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--bytes", type=float, default=32e9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--format", default="nf4")
    options = parser.parse_args()
    if options.bytes < 3e9:
        parser.error("--bytes: must be at least 3e9: the embedding comes first, 1.9 GB")
    work = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        for fp8 in (True, False):
            total, num_tensors, num_files = make(work / "holes", fp8)
            command = [options.halfbyte, "quantize", work / "holes", "--format", options.format, "--dry-run"]
            report, seconds, peak = run([*command, "--device", "cpu"])
            say(what="plan", weights="fp8" if fp8 else "bf16", tensors=num_tensors, files=num_files, source_bytes=total,
                seconds=seconds, peak_bytes=peak, estimate_seconds=report["total_seconds"])
            shutil.rmtree(work / "holes")

        total, num_tensors, num_files = make(work / "in", False, options.bytes)
        command = [options.halfbyte, "quantize", work / "in", "-o", work / "out", "--format", options.format]
        for verify in (True, False):
            report, seconds, peak = run([*command, "--device", options.device, *([] if verify else ["--no-verify"])])
            inputs, outputs = (sorted((work / name).glob("*.safetensors")) for name in ("in", "out"))
            (work / "written").mkdir()
            read, write = rate(inputs), rate(outputs, work / "written")
            shutil.rmtree(work / "written")
            floor = {"read": total / read, "write": report["output_bytes"] / write, "verify": report["verify_seconds"]}
            longest = max(floor, key=floor.get)
            say(what="run", device=report["device"], verified=verify, tensors=num_tensors, files=num_files, source_bytes=total,
                seconds=seconds, gb_per_s=total / seconds / 1e9, floor=longest, floor_seconds=floor[longest],
                ratio=seconds / floor[longest], read_gb_per_s=read / 1e9, write_gb_per_s=write / 1e9,
                verify_seconds=report["verify_seconds"], run_seconds=report["run_seconds"], limited_by=report["bottleneck"],
                peak_bytes=peak)
            shutil.rmtree(work / "out")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
