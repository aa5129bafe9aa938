"""The same bytes on a CUDA device as on the CPU, file by file. Skipped where no device is usable."""

import filecmp
import json

import numpy as np
import pytest

from independent import checkpoints
from independent import safetensors_io as st

TABLE = ",".join(str(i / 8 - 1) for i in range(16))

# Source, options of quantize.
CASES = [
    ("odd", "--format nf4"),
    ("odd", "--format fp4 --group-size 4096 --double-quant"),
    ("odd", "--format nf4 --layout halfbyte --group-size 100 --scale-dtype bf16"),
    ("odd", "--format fp4_e2m1 --group-size 33"),
    ("odd", f"--format lut4 --table={TABLE} --group-size 3"),
    ("odd", "--format int3 --group-size channel --asymmetric"),
    ("odd", "--format int6 --group-size tensor"),
    ("odd", "--format affine5 --layout halfbyte --group-size tensor"),
    ("odd", "--format int4 --layout halfbyte --group-size 16 --asymmetric --double-quant"),
    ("odd", "--format int8 --layout halfbyte --scale-rule signed-max"),
    ("grouped", "--format int4"),
    ("grouped", "--format int8 --asymmetric"),
    ("grouped", "--format affine3"),
    ("grouped", "--format affine8 --scale-rule minmax"),
    ("experts", "--format int4 --asymmetric"),
    ("experts", "--format nf4 --double-quant"),
    ("odd", "--format fp8 --layout halfbyte"),
    ("blocks", "--format fp8"),
    ("blocks", "--format fp8 --group-size 128"),
    ("blocks", "--format fp8 --layout fp8"),
    ("turned_experts", "--format mxfp4 --layout gpt-oss"),
    # Several blocks of several workers.
    ("large", "--format nf4 --double-quant"),
    ("large", "--format int4 --asymmetric"),
    ("large", "--format int5 --group-size tensor"),
    ("large", "--format fp8 --layout fp8"),
]


def large():
    """Weights of more than one block on a CUDA device (8 Mi elements), in rows that it does not divide."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return {
        "model.layers.0.mlp.up_proj.weight": st.from_f32(normal(2051, 9216), "BF16"),
        "model.layers.0.mlp.down_proj.weight": st.from_f32(normal(1031, 8320), "F32"),
        "lm_head.weight": st.from_f32(normal(300, 9216), "F16"),
    }


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("source") / name
            make = large if name == "large" else getattr(checkpoints, name)
            checkpoints.write_model(made[name], make(), num_shards=2)
        return made[name]

    return get


def run_on(halfbyte, device, command, source, output, *options):
    """Runs on the device, checks that the report says so, and returns the report."""
    arguments = [command, source, "-o", output, "--device", device, *options, "--json", "-"]
    report = json.loads(halfbyte(*arguments).stdout)
    assert report["device"] == device
    return report


def assert_same(a, b):
    files = sorted(str(path.relative_to(a)) for path in a.rglob("*") if path.is_file())
    assert files == sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    assert filecmp.cmpfiles(a, b, files, shallow=False) == (files, [], [])


@pytest.mark.parametrize("source, options", CASES, ids=lambda value: value.replace(f"={TABLE}", ""))
def test_same_bytes_as_on_the_cpu(halfbyte, device, source_of, tmp_path, source, options):
    options = options.split()
    reports = [
        run_on(halfbyte, name, "quantize", source_of(source), tmp_path / f"q-{name}", *options)
        for name in ("cpu", device)
    ]
    assert reports[0]["num_quantized"] > 0
    assert reports[0]["weights"] == reports[1]["weights"]
    assert_same(tmp_path / "q-cpu", tmp_path / f"q-{device}")
    for name in ("cpu", device):
        run_on(halfbyte, name, "dequantize", tmp_path / "q-cpu", tmp_path / f"dense-{name}")
    assert_same(tmp_path / "dense-cpu", tmp_path / f"dense-{device}")


@pytest.mark.parametrize("options", ["--format nf4 --double-quant", "--format nvfp4", "--format int5 --group-size tensor",
                                     "--format fp8 --layout fp8"])
def test_devices_side_by_side_write_the_same_bytes(halfbyte, device, source_of, tmp_path, options):
    together = f"cpu,{device}"
    reports = [run_on(halfbyte, name, "quantize", source_of("large"), tmp_path / f"q-{name}", *options.split())
               for name in ("cpu", together)]
    assert reports[0]["weights"] == reports[1]["weights"]
    assert_same(tmp_path / "q-cpu", tmp_path / f"q-{together}")
    run_on(halfbyte, "cpu", "dequantize", tmp_path / "q-cpu", tmp_path / "dense-cpu")
    run_on(halfbyte, together, "dequantize", tmp_path / "q-cpu", tmp_path / f"dense-{together}")
    assert_same(tmp_path / "dense-cpu", tmp_path / f"dense-{together}")


def test_auto_says_what_it_chose(halfbyte, device, tmp_path):
    """Of input that is large enough, by a measurement."""
    rng = np.random.default_rng(0)
    weight = st.from_f32(rng.standard_normal((1 << 14, 1 << 14), np.float32), "F32")  # 1 GiB
    st.write(tmp_path / "in.safetensors", {"model.layers.0.mlp.up_proj.weight": weight})
    arguments = ["quantize", tmp_path / "in.safetensors", "-o", tmp_path / "out", "--force", "--no-verify", "--json", "-"]
    for options in (["--search"], ["--format", "nvfp4"], ["--format", "int8"], ["--format", "int8", "--threads", "1"]):
        report = json.loads(halfbyte(*arguments, *options).stdout)
        assert report["device"] in ("cpu", f"cpu,{device}")
        assert (report["device"] == "cpu") == ("faster without" in report["device_note"])


def test_all_devices(halfbyte, device, source_of, tmp_path):
    usable = [of["index"] for of in json.loads(halfbyte("doctor", "--json", "-").stdout)["cuda"]["devices"] if not of["problem"]]
    run_on(halfbyte, "cpu", "quantize", source_of("large"), tmp_path / "cpu")
    report = json.loads(halfbyte("quantize", source_of("large"), "-o", tmp_path / "all", "--device", "cuda:all", "--json",
                                 "-").stdout)
    assert report["device"] == ",".join(f"cuda:{index}" for index in usable) and report["compute_seconds"] > 0
    assert report["copy_seconds"] > 0
    assert_same(tmp_path / "cpu", tmp_path / "all")


def test_nonfinite_elements_are_found(halfbyte, device, tmp_path):
    tensors = large()
    data = tensors["model.layers.0.mlp.down_proj.weight"].data
    data[1030, 7] = np.nan  # of the second block
    data[1030, 9] = np.inf
    st.write(tmp_path / "in.safetensors", tensors)
    arguments = ["quantize", tmp_path / "in.safetensors", "-o", tmp_path / "out"]
    messages = [halfbyte(*arguments, "--device", name, expect=3).stderr for name in ("cpu", device)]
    assert messages[0] == messages[1]
    assert "2 elements" in messages[0] and str(1030 * 8320 + 7) in messages[0]
    assert not (tmp_path / "out").exists()


def test_dequantizes_to_any_dtype(halfbyte, device, source_of, tmp_path):
    run_on(halfbyte, device, "quantize", source_of("experts"), tmp_path / "q", "--format", "affine4")
    for dtype in ("f32", "f16", "bf16"):
        for name in ("cpu", device):
            run_on(halfbyte, name, "dequantize", tmp_path / "q", tmp_path / f"{dtype}-{name}", "--dtype", dtype)
        assert_same(tmp_path / f"{dtype}-cpu", tmp_path / f"{dtype}-{device}")


def test_same_bytes_for_any_thread_count(halfbyte, device, source_of, tmp_path):
    for threads in (1, 3, 16):
        run_on(halfbyte, device, "quantize", source_of("large"), tmp_path / f"{threads}", "--threads", threads)
    assert_same(tmp_path / "1", tmp_path / "3")
    assert_same(tmp_path / "1", tmp_path / "16")
