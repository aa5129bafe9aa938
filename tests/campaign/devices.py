"""A CUDA driver whose calls fail, one after the other: no memory, kernels that trap, a device that is lost.

The driver is that of $HALFBYTE_PROXY_DRIVER (scripts/gpu_check.sh devices: the machine's own), else the stand-in of
tests/stub, whose kernels do nothing. Between it and the tool is driver_proxy.cc.
"""

import hashlib
import os
import shutil
from pathlib import Path

from campaign.base import CODES, TINY_LLAMA, text_of

# What such a call can answer: CUDA_ERROR_ of this name.
RESULTS = {"OUT_OF_MEMORY": 2, "ECC_UNCORRECTABLE": 214, "ILLEGAL_ADDRESS": 700, "LAUNCH_FAILED": 719, "UNKNOWN": 999}
NO_MEMORY = ("cuMemAlloc_v2", "cuMemHostAlloc", "cuModuleLoadData", "cuStreamCreate", "cuEventCreate")
# After these nothing runs on the device in the process: every later call fails too.
STICKY = ("ECC_UNCORRECTABLE", "ILLEGAL_ADDRESS", "LAUNCH_FAILED")
# What is called to give back or to ask may fail without harm; destructors push a context to give back.
HARMLESS = ("cuMemFree_v2", "cuMemFreeHost", "cuStreamDestroy_v2", "cuCtxPopCurrent_v2", "cuModuleUnload", "cuGetErrorName",
            "cuGetErrorString", "cuMemGetInfo_v2", "cuPointerGetAttributes", "cuDriverGetVersion", "cuEventDestroy_v2",
            "cuDeviceGetName", "cuDeviceTotalMem_v2",
            "cuCtxPushCurrent_v2")  # fmt: skip

COMMANDS = {
    "quantize": ["quantize", "{model}", "-o", "{out}", "--format", "nf4", "--no-verify", "--threads", "2"],
    "affine": ["quantize", "{model}", "-o", "{out}", "--format", "affine4", "--no-verify", "--threads", "2"],
    "dequantize": ["dequantize", "{nf4}", "-o", "{out}", "--threads", "2"],
}


def digest(path):
    """Of all files of an output; None where there is none."""
    if not path.exists():
        return None
    total = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        total.update(file.name.encode() + (file.read_bytes() if file.is_file() else b""))
    return total.hexdigest()


def run(section):
    proxy = Path(os.environ.get("HALFBYTE_PROXY", section.build / "tests" / "libdriver_proxy.so"))
    environment = {**os.environ, "HALFBYTE_CUDA_DRIVER": str(proxy)}
    if "HALFBYTE_PROXY_DRIVER" not in environment:
        environment["HALFBYTE_PROXY_DRIVER"] = str(section.build / "tests" / "libstub_cuda.so")
        environment["HALFBYTE_NVRTC"] = str(section.build / "tests" / "libstub_nvrtc.so")
    with section.directory() as name:
        work = Path(name)
        environment["HALFBYTE_CACHE_DIR"] = str(work / "cache")
        section.cli("quantize", TINY_LLAMA, "-o", work / "nf4", "--format", "nf4", "--device", "cpu")
        places = {"model": TINY_LLAMA, "nf4": work / "nf4", "out": work / "out"}
        for command, words in COMMANDS.items():
            attack(section, command, [word.format(**places) for word in words], work, environment)


def attack(section, command, words, work, environment):
    def start(**more):
        return section.cli(*words, "--device", "cuda:0", env={**environment, **more})

    start()  # fills the cache of kernels
    shutil.rmtree(work / "out", ignore_errors=True)
    counts_path = work / "counts"
    counts_path.unlink(missing_ok=True)
    plain = start(HALFBYTE_PROXY_COUNTS=str(counts_path))
    if not section.check(plain.returncode == 0, f"{command} without faults: {text_of(plain.stderr)}"):
        return
    expected = digest(work / "out")
    counts = dict(line.split() for line in counts_path.read_text().splitlines())
    before = sorted(path.name for path in work.iterdir())
    cases = []
    for function, count in sorted(counts.items()):
        for index in range(int(count)):
            for result in RESULTS:
                for duration in ("once", "ever"):
                    if (result == "OUT_OF_MEMORY") == (function in NO_MEMORY):
                        cases.append(f"{command}:{function}:{index}:{result}:{duration}")
    if section.quick:
        cases = section.random.sample(cases, min(60, len(cases)))
    for case in section.cases(cases):
        _, function, index, result, duration = case.split(":")
        shutil.rmtree(work / "out", ignore_errors=True)
        fail = f"{function}:{index}:{RESULTS[result]}" + (":ever" if duration == "ever" else "")
        done = start(HALFBYTE_PROXY_FAIL=fail)
        section.count("faults")
        message = text_of(done.stderr)
        again = f"HALFBYTE_PROXY_FAIL={fail}: {message}"
        found = digest(work / "out")
        if done.returncode == 0:
            section.check(found == expected, f"exit 0 with other bytes; {again}")
            smaller = function in NO_MEMORY and result == "OUT_OF_MEMORY"  # blocks of half the size are tried
            retried = result not in STICKY or duration == "once"  # a block is done again where the call failed
            section.check(smaller or retried or function in HARMLESS, f"exit 0 after a failure; {again}")
        else:
            section.check(done.returncode in (CODES["DEVICE"], CODES["NO_MEMORY"]), f"exit {done.returncode}; {again}")
            section.check(found is None, f"an output after exit {done.returncode}; {again}")
            named = "CUDA_ERROR" in message or "memory" in message or "cuInit" in message or "device" in message
            section.check(named, f"the message does not name the error; {again}")
        left = sorted(path.name for path in work.iterdir() if path.name != "out")
        section.check(left == [name for name in before if name != "out"], f"left: {left}; {again}")
