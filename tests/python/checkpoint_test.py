"""Checkpoints from Python, end to end on examples/tiny-llama: read, quantize, repack, write, convert, compare."""

import json
import pickle
from pathlib import Path

import halfbyte
import numpy as np
import pytest
from independent import encode as enc
from independent import safetensors_io as st
from independent import unpack

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
LAYOUTS = {"halfbyte": "nf4", "bitsandbytes": "nf4", "compressed-tensors": "int4", "mlx": "affine4", "gptq": "int4", "awq": "int4"}


@pytest.fixture(scope="module")
def tensors():
    return st.read(MODEL / "model.safetensors")[0]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A directory of each layout."""
    made = {}
    for layout, format in LAYOUTS.items():
        made[layout] = tmp_path_factory.mktemp("models") / layout
        options = {"asymmetric": True} if layout == "awq" else {}
        halfbyte.quantize_checkpoint(MODEL, made[layout], format, layout=layout, **options)
    return made


def f32(array):
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.astype(np.float32)


# Reading


def test_what_a_checkpoint_has(tensors):
    checkpoint = halfbyte.Checkpoint(MODEL)
    assert checkpoint.is_directory and not checkpoint.foreign
    assert {each.name: (each.dtype, each.shape) for each in checkpoint.tensors} == {name: (each.dtype, each.data.shape) for name, each in tensors.items()}
    assert [each.name for each in checkpoint.weights] == sorted(tensors)
    weight = checkpoint.find(UP)
    assert (weight.dtype, weight.layout, weight.spec, weight.bits_per_weight) == ("bf16", None, None, 16)
    assert checkpoint.find("nothing") is None
    assert "dense bf16" in repr(weight) and "0 quantized" in repr(checkpoint)
    assert len(halfbyte.Checkpoint(str(MODEL / "model.safetensors")).weights) == len(tensors)


def test_dense_weights(tensors):
    checkpoint = halfbyte.Checkpoint(MODEL)
    stored = tensors[UP].data
    assert np.array_equal(checkpoint.load_dense(UP), stored)  # bf16 as uint16
    wanted = f32(stored)
    assert np.array_equal(checkpoint.load_dense(UP, "f32"), wanted)
    assert np.array_equal(checkpoint.decode(checkpoint.find(UP), np.float64), wanted)
    assert np.array_equal(checkpoint.decode(UP, begin=1000, count=77), wanted.ravel()[1000:1077])
    out = np.full(77, np.nan, np.float32)
    assert checkpoint.decode(UP, begin=1000, count=77, out=out) is out and np.array_equal(out, wanted.ravel()[1000:1077])
    assert checkpoint.read(UP).tobytes() == stored.tobytes()
    tensor = next(each for each in checkpoint.tensors if each.name == UP)
    assert checkpoint.read(tensor, 8, 6).tobytes() == stored.tobytes()[8:14]
    assert checkpoint.read(tensor, 8, out=bytearray(stored.nbytes - 8)) == stored.tobytes()[8:]


def test_what_is_not_there():
    checkpoint = halfbyte.Checkpoint(MODEL)
    for call in (
        lambda: checkpoint.load_dense("nothing"),
        lambda: checkpoint.load_weight("nothing"),
        lambda: checkpoint.load_weight(UP),  # dense
        lambda: checkpoint.read("nothing"),
        lambda: checkpoint.decode(UP, begin=-1),
        lambda: checkpoint.decode(UP, begin=1, count=768 * 256),
        lambda: checkpoint.decode(UP, out=np.zeros(3, np.float32)),
        lambda: checkpoint.load_dense(UP, framework="numpi"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert caught.value.code == "USAGE", caught.value
    for bad in (12, None):
        with pytest.raises(TypeError):
            halfbyte.Checkpoint(bad)
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.Checkpoint(MODEL / "nothing.safetensors")
    assert caught.value.code == "IO" and "nothing.safetensors" in str(caught.value)


def test_damaged_files(tmp_path):
    data = bytearray((MODEL / "model.safetensors").read_bytes())
    data[0:8] = (2**60).to_bytes(8, "little")
    (tmp_path / "bad.safetensors").write_bytes(data[:1000])
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.Checkpoint(tmp_path / "bad.safetensors")
    assert caught.value.code == "BAD_INPUT" and "bad.safetensors" in str(caught.value)


# Quantizing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_as_its_own_reader_has_it(layout, quantized):
    checkpoint = halfbyte.Checkpoint(quantized[layout])
    weight = checkpoint.find(UP)
    assert weight.layout == layout and weight.spec.format == LAYOUTS[layout]
    q = checkpoint.load_weight(UP)
    assert (q.spec, q.shape, q.device, q.framework) == (weight.spec, weight.shape, "cpu", "numpy")
    files = {name: each for path in sorted(quantized[layout].glob("*.safetensors")) for name, each in st.read(path)[0].items()}
    config = json.loads((quantized[layout] / "config.json").read_text())
    wanted = unpack.weights(files, config)
    name = next(name for name in wanted if name.startswith(UP.removesuffix(".weight")))
    assert np.allclose(q.dequantize("f32"), wanted[name].weights, rtol=1e-6)
    assert np.array_equal(checkpoint.load_dense(UP, "f32"), q.dequantize("f32"))
    assert np.array_equal(pickle.loads(pickle.dumps(q)).codes, q.codes)
    assert np.array_equal(checkpoint.load_weight(UP, slice=(1, 128, 256)).dequantize("f32"), q.dequantize("f32")[:, 128:])
    with pytest.raises(TypeError, match="slice must be None or"):
        checkpoint.load_weight(UP, slice=(1, 2))
    if layout != "gptq":
        packed = q.pack()
        x = np.eye(q.cols, dtype=np.float32)
        assert np.allclose(halfbyte.qgemm(x, packed), q.dequantize("f32").T, rtol=1e-6)


def test_quantize_has_the_codes_of_the_contract(tensors, tmp_path):
    report = halfbyte.quantize_checkpoint(MODEL, str(tmp_path / "q"), "int4", layout="halfbyte", group_size=32, scale_dtype="f32", scale_rule="half-range", num_threads=1)
    q = halfbyte.Checkpoint(tmp_path / "q").load_weight(UP)
    wanted = enc.encode(f32(tensors[UP].data), "int4", group_size=32, rule="half-range")
    assert np.array_equal(q.scales, wanted.scales) and q.encoding.scale_rule == "half-range"
    again = halfbyte.quantize(f32(tensors[UP].data), "int4,group_size=32", encoding="half-range")
    assert np.array_equal(q.codes, again.codes)
    row = next(each for each in report.weights if each.name == UP)
    error = again.error(f32(tensors[UP].data))
    assert row.measured and row.relative_rmse == pytest.approx(error.relative_rmse) and row.snr_db == pytest.approx(error.snr_db)
    assert row.max_error == error.max_error and row.spec == q.spec and row.quantized
    assert report.num_quantized == sum(each.quantized for each in report.weights)
    assert report.output_bytes < report.source_bytes and report.layout == "halfbyte" and report.devices == "cpu"
    assert next(each for each in report.weights if not each.quantized).reason
    assert f"{report.num_quantized} of {len(report.weights)} weights" in repr(report) and "relative RMSE" in repr(row)
    assert all(each.why_not == "" or each.why_not in repr(each) for each in report.readers)


def test_options(tmp_path):
    report = halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", include=["up_proj"], exclude=[r"layers\.1"], dry_run=True)
    assert not (tmp_path / "q").exists()
    assert report.total_seconds > report.run_seconds > 0 and report.time_note == "" and report.bottleneck
    names = [each.name for each in report.weights if each.quantized]
    assert names and all("up_proj" in name and "layers.1." not in name for name in names)
    report = halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", dry_run=True, devices=(), choose_devices=True)
    assert (report.devices, report.device_note) == ("cpu", "input below 1 GiB")
    with pytest.raises(ValueError, match="devices must differ, got cpu twice"):
        halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="devices: device must be cpu, cuda or cuda:N, got"):
        halfbyte.dequantize_checkpoint(MODEL, tmp_path / "q", devices="gpu")
    with pytest.raises(TypeError, match="no option grup_size; it has asymmetric, "):
        halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", grup_size=32)
    for options in ({"group_size": 0}, {"layout": "nothing"}, {"format": "nf5"}, {"nonfinite": "ignore"}, {"reader": "x"}):
        with pytest.raises(ValueError):
            halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", **options)
    with pytest.raises(TypeError, match="include must be a list of str"):
        halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", include="up_proj")
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "q")
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.quantize_checkpoint(MODEL, tmp_path / "q")
    assert caught.value.code == "EXISTS"
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", "int8", force=True)
    assert halfbyte.Checkpoint(tmp_path / "q").find(UP).spec.format == "int8"


def test_dequantize_and_compare(quantized, tmp_path):
    report = halfbyte.dequantize_checkpoint(quantized["halfbyte"], tmp_path / "dense", dtype="f32")
    dense = halfbyte.Checkpoint(tmp_path / "dense")
    q = halfbyte.Checkpoint(quantized["halfbyte"]).load_weight(UP)
    assert np.array_equal(dense.load_dense(UP), q.dequantize("f32")) and report.layout == "halfbyte"
    rows = halfbyte.compare_checkpoints(MODEL, tmp_path / "dense")
    row = next(each for each in rows if each.name == UP)
    source = halfbyte.Checkpoint(MODEL).load_dense(UP, "f32")
    assert row.relative_rmse == pytest.approx(q.error(source).relative_rmse) and row.problem == ""
    assert [each.snr_db for each in rows] == sorted(each.snr_db for each in rows)
    st.write(tmp_path / "one.safetensors", {UP: st.Tensor("F32", source[:5])})
    worst = halfbyte.compare_checkpoints(MODEL, tmp_path / "one.safetensors")[0]
    assert worst.problem and worst.problem in repr(worst)


@pytest.mark.parametrize("layout", ["mlx", "awq", "compressed-tensors", "gptq"])
def test_convert_keeps_the_codes(layout, tmp_path):
    spec = {"mlx": "affine4"}.get(layout, "int4")
    options = {"asymmetric": True} if layout == "awq" else {}
    dtype = "f16" if layout in ("awq", "gptq") else "bf16"
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "a", spec, layout="halfbyte", group_size=64, scale_dtype=dtype, **options)
    report = halfbyte.convert_checkpoint(tmp_path / "a", tmp_path / "b", layout, requantize=layout == "mlx")
    assert report.layout == layout
    a, b = (halfbyte.Checkpoint(tmp_path / name).load_weight(UP) for name in "ab")
    assert np.array_equal(a.dequantize("f32"), b.dequantize("f32"))
    if layout != "mlx":
        assert np.array_equal(a.codes, b.codes)
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.convert_checkpoint(tmp_path / "a", tmp_path / "c", "bitsandbytes")
    assert caught.value.code == "BAD_INPUT" and not (tmp_path / "c").exists()


def test_forms_of_experts(tmp_path):
    """The writer makes Experts4bit of [E, out, in], and convert of that one tensor again."""
    name, config = "model.layers.0.mlp.experts.gate_up_proj", {"model_type": "qwen3_moe", "dtype": "float32", "hidden_size": 64}
    w = np.random.default_rng(1).standard_normal((2, 32, 64)).astype(np.float32)
    q = halfbyte.quantize(w, "nf4,granularity=flat,group_size=64")
    with halfbyte.CheckpointWriter(tmp_path / "a", "bitsandbytes", config=config, experts4bit=True, reader="none") as writer:
        writer.set(name, q)
    assert {tensor.name for tensor in halfbyte.Checkpoint(tmp_path / "a").tensors} == {name, name.replace("proj", "absmax")}
    halfbyte.convert_checkpoint(tmp_path / "a", tmp_path / "b", "bitsandbytes", experts="parametrize")
    for path in ("a", "b"):
        assert np.array_equal(halfbyte.Checkpoint(tmp_path / path).load_weight(name).dequantize("f32"), q.dequantize("f32"))
    with pytest.raises(ValueError, match="form of experts 'stacked'"):
        halfbyte.convert_checkpoint(tmp_path / "a", tmp_path / "c", "bitsandbytes", experts="stacked")
    writer = halfbyte.CheckpointWriter(tmp_path / "c", "mlx", experts4bit=True)
    writer.set("w", w)
    with pytest.raises(ValueError, match="layout mlx has no Experts4bit"):
        writer.finish()


def test_a_base_in_a_form_that_is_not_written(tmp_path):
    """config.json of the output would say other blocks and scales than a copy of the weight has."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}
    for form, dtype in (("scales of F8_E8M0", "F8_E8M0"), ("blocks of 64 x 64", "F32"), ("codes of E5M2", "BF16")):
        base = tmp_path / dtype
        base.mkdir()
        scales = st.Tensor(dtype, np.full((2, 2), 127, np.uint8)) if dtype == "F8_E8M0" else st.from_f32(np.ones((2, 2), np.float32), dtype)
        codes = st.Tensor("F8_E5M2" if dtype == "BF16" else "F8_E4M3", np.full((128, 128), 0x38, np.uint8))
        st.write(base / "model.safetensors", {"a.weight": codes, "a.weight_scale_inv": scales})
        (base / "config.json").write_text(json.dumps({"quantization_config": fp8}))
        (weight,) = halfbyte.Checkpoint(base).weights
        assert weight.scale_rows == 64 and "in blocks of 64x64" in repr(weight)
        writer = halfbyte.CheckpointWriter(tmp_path / "out", "fp8", base=base, reader="none")
        writer.set("b", np.ones(4, np.float32))
        with pytest.raises(halfbyte.Error, match=f"has {form}, which layout fp8 reads and does not write"):
            writer.finish()
    assert weight.note == form and np.all(halfbyte.Checkpoint(base).load_dense("a.weight", "f32") == 0.5)
    with pytest.raises(halfbyte.Error, match="are of E5M2, which no format of halfbyte has"):
        halfbyte.Checkpoint(base).load_weight("a.weight")


def test_verify_and_repair(tmp_path):
    path, mended = tmp_path / "q", tmp_path / "mended"
    halfbyte.quantize_checkpoint(MODEL, path, "nvfp4")
    assert halfbyte.verify_checkpoint(path) == []
    with pytest.raises(ValueError, match="no weights of one product with several global scales"):
        halfbyte.repair_checkpoint(path, mended)
    tensors, metadata = st.read(path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    scale = tensors[f"{name}_global_scale"]
    tensors[f"{name}_global_scale"] = st.Tensor(scale.dtype, scale.data * np.float32(2))
    st.write(path / "model.safetensors", tensors, metadata)
    fault = halfbyte.verify_checkpoint(path)[0]
    assert fault.rule == "global-scale-mismatch" and fault.text and fault.rule in repr(fault)
    assert fault.name.startswith("model.layers.0.self_attn.")
    (weight,) = halfbyte.repair_checkpoint(path, mended)
    assert weight.name == name and weight.num_scales > 0 and name in repr(weight)
    assert weight.global_scale_before == 2 * weight.global_scale == 2 * scale.data.reshape(())
    assert halfbyte.verify_checkpoint(mended) == []
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.repair_checkpoint(path, mended)
    assert caught.value.code == "EXISTS"
    assert len(halfbyte.repair_checkpoint(path, mended, force=True)) == 1
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.verify_checkpoint(path, progress=lambda *_: False)
    assert caught.value.code == "CANCELLED"
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.repair_checkpoint(path, tmp_path / "other", progress=lambda *_: False)
    assert caught.value.code == "CANCELLED" and not (tmp_path / "other").exists()


# Progress


def test_progress_is_called(tmp_path):
    calls = []
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", progress=lambda *at: calls.append(at))
    phases = list(dict.fromkeys(phase for phase, _, _ in calls))
    assert "quantize" in phases and "verify" in phases
    assert all(0 <= done <= total for _, done, total in calls)


def test_an_interrupted_run_is_resumed(tmp_path):
    """By the functions, and by a writer whose functions are called for what is missing only."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = {"shard_bytes": 200_000, "num_threads": 1}
    syncs = []

    def interrupt(phase, done, total):
        syncs.append(phase == "sync")
        return sum(syncs) <= 4

    def content(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    halfbyte.quantize_checkpoint(MODEL, whole, **options)
    with pytest.raises(halfbyte.Error, match=r"[1-4] of .* files are complete and kept") as interrupted:
        halfbyte.quantize_checkpoint(MODEL, out, progress=interrupt, **options)
    num_complete = int(str(interrupted.value).split("(")[1].split()[0])  # a sync that takes long is reported again
    with pytest.raises(ValueError, match="options/format is nf4 there and fp4 here"):
        halfbyte.quantize_checkpoint(MODEL, out, "fp4", unfinished="resume", **options)
    with pytest.raises(ValueError, match="must be one of keep, resume, discard"):
        halfbyte.quantize_checkpoint(MODEL, out, unfinished="yes", **options)
    assert halfbyte.quantize_checkpoint(MODEL, out, unfinished="resume", **options).num_resumed_files == num_complete
    assert content(out) == content(whole)

    dense = np.random.default_rng(1).standard_normal((6, 64, 128)).astype(np.float32)

    def write(to, fails_at=None, **options):
        made = []

        def make(i):
            if i == fails_at:
                raise RuntimeError("no power")
            made.append(i)
            return halfbyte.quantize(dense[i], "nf4")

        writer = halfbyte.CheckpointWriter(to, shard_bytes=1, identity="a test", **options)
        for i in range(len(dense)):
            writer.set(f"w{i}.weight", lambda i=i: make(i), spec="nf4", shape=(64, 128))
        writer.finish()
        return made

    assert write(tmp_path / "w") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="no power"):
        write(tmp_path / "again", fails_at=4)
    assert write(tmp_path / "again", unfinished="resume") == [4, 5]
    assert content(tmp_path / "again") == content(tmp_path / "w")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "out", "w", "whole"]


@pytest.mark.parametrize("work", ["quantize", "dequantize", "convert", "compare", "write"])
def test_progress_cancels_and_raises(work, quantized, tmp_path):
    def run(progress):
        to = tmp_path / "out"
        if work == "quantize":
            halfbyte.quantize_checkpoint(MODEL, to, progress=progress)
        elif work == "dequantize":
            halfbyte.dequantize_checkpoint(quantized["mlx"], to, progress=progress)
        elif work == "convert":
            halfbyte.convert_checkpoint(quantized["mlx"], to, "halfbyte", progress=progress)
        elif work == "compare":
            halfbyte.compare_checkpoints(MODEL, MODEL, progress=progress)
        else:
            writer = halfbyte.CheckpointWriter(to, base=MODEL, progress=progress)
            writer.finish()

    with pytest.raises(halfbyte.Error) as caught:
        run(lambda *_: False)
    assert caught.value.code == "CANCELLED" and list(tmp_path.iterdir()) == []

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="progress must be a function"):
        run(3)


def test_a_bar_is_silent_on_short_work(tmp_path, capfd):
    halfbyte.quantize_checkpoint(MODEL, tmp_path / "q", progress=True)
    assert capfd.readouterr() == ("", "")


def test_a_line_where_there_is_no_tqdm(monkeypatch, capsys):
    import sys

    from halfbyte import _progress

    monkeypatch.setattr(_progress, "_QUIET_SECONDS", 0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    bar = _progress.Bar()
    for done in (0, 1, 1, 4):
        bar("quantize", done, 4)
    bar("verify", 2, 4)
    bar.close()
    assert capsys.readouterr().err == "\rquantize: 0 %\rquantize: 25 %\rquantize: 100 %\n\rverify: 50 %\n"


# Writing


@pytest.mark.parametrize("layout, spec", [("halfbyte", "int4,group_size=32"), ("mlx", "affine4,scale_dtype=bf16"), ("bitsandbytes", "nf4,granularity=flat")])
def test_writer(layout, spec, tensors, tmp_path):
    weights = {name: f32(each.data) for name, each in tensors.items()}
    made = {name: halfbyte.quantize(w, spec) for name, w in weights.items() if w.ndim == 2 and "proj" in name}
    calls = []

    def make(name):
        def weight():
            calls.append(name)
            return made[name]

        return weight

    config = json.loads((MODEL / "config.json").read_text())
    with halfbyte.CheckpointWriter(tmp_path / "out", layout, config=config) as writer:
        for at, (name, w) in enumerate(weights.items()):
            if name not in made:
                writer.set(name, w)
            elif at % 2:
                writer.set(name, made[name])
            else:
                writer.set(name, make(name), spec=spec, shape=w.shape)
    assert writer.report.num_quantized == len(made) and set(calls) < set(made) and calls
    checkpoint = halfbyte.Checkpoint(tmp_path / "out")
    for name, w in weights.items():
        if name in made:
            q = checkpoint.load_weight(name)
            assert np.array_equal(q.dequantize("f32"), made[name].dequantize("f32"))
        else:
            assert np.array_equal(checkpoint.load_dense(name, "f32"), w)
    with pytest.raises(ValueError, match="finished"):
        writer.set("more", weights[NORM])
    with pytest.raises(ValueError, match="finished"):
        writer.finish()


def test_writer_over_a_base(quantized, tmp_path):
    q = halfbyte.Checkpoint(quantized["halfbyte"]).load_weight(UP)
    trained = halfbyte.QuantizedTensor(q.spec, q.shape, q.dtype, codes=q.codes, scales=q.scales.copy())
    trained.scales[...] = trained.scales // 2 if trained.scales.dtype == np.uint16 else trained.scales / 2
    writer = halfbyte.CheckpointWriter(tmp_path / "out", base=quantized["halfbyte"])
    writer.set(UP, trained)
    report = writer.finish()
    assert report is writer.report
    rows = halfbyte.compare_checkpoints(quantized["halfbyte"], tmp_path / "out")
    assert [each.name for each in rows if each.max_error] == [UP]


def test_writer_of_one_file(tmp_path):
    with halfbyte.CheckpointWriter(tmp_path / "w.safetensors") as writer:
        writer.set("a", np.arange(6, dtype=np.float16).reshape(2, 3))
        writer.set("b", np.arange(6, dtype=np.int64)[::2])
        writer.set("c.weight", halfbyte.quantize(np.ones((4, 64), np.float32)))
    checkpoint = halfbyte.Checkpoint(tmp_path / "w.safetensors")
    assert np.array_equal(checkpoint.load_dense("a"), [[0, 1, 2], [3, 4, 5]])
    assert np.array_equal(checkpoint.read("b").view(np.int64), [0, 2, 4])
    assert np.array_equal(checkpoint.load_weight("c.weight").dequantize(), np.ones((4, 64)))


def test_writers_that_give_up(tmp_path):
    with pytest.raises(ZeroDivisionError), halfbyte.CheckpointWriter(tmp_path / "a.safetensors") as writer:
        writer.set("a", np.zeros(3, np.float32))
        1 / 0
    assert writer.report is None
    writer = halfbyte.CheckpointWriter(tmp_path / "b.safetensors")
    writer.set("w.weight", lambda: 1 / 0, spec="nf4", shape=(2, 64))
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    writer = halfbyte.CheckpointWriter(tmp_path / "c.safetensors")
    writer.set("w.weight", lambda: np.zeros(3), spec="nf4", shape=(2, 64))
    with pytest.raises(TypeError, match="weight must be a QuantizedTensor, got ndarray"):
        writer.finish()
    writer = halfbyte.CheckpointWriter(tmp_path / "d.safetensors")
    writer.set("w.weight", lambda: halfbyte.quantize(np.zeros((2, 64), np.float32), "int4"), spec="nf4", shape=(2, 64))
    with pytest.raises(ValueError, match="w.weight"):
        writer.finish()
    writer = halfbyte.CheckpointWriter(tmp_path / "e.safetensors", "mlx")
    with pytest.raises(ValueError, match="nf4"):
        writer.set("w.weight", halfbyte.quantize(np.zeros((2, 64), np.float32), "nf4"))
    with pytest.raises(TypeError, match="needs its spec and shape"):
        writer.set("w.weight", lambda: None)
    with pytest.raises(TypeError, match="unpack"):
        writer.set("w.weight", halfbyte.quantize(np.zeros((2, 64), np.float32)).pack())
    with pytest.raises(TypeError, match="weight must be an array"):
        writer.set("w.weight", [1.0])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_a_writer_holds_is_freed(tmp_path):
    import gc
    import weakref

    class Big(np.ndarray):
        pass

    w = np.zeros((2, 64), np.float32).view(Big)
    alive = weakref.ref(w)
    writer = halfbyte.CheckpointWriter(tmp_path / "w.safetensors")
    writer.set("w", w)
    del w
    gc.collect()
    assert alive() is not None
    writer.finish()
    del writer
    gc.collect()
    assert alive() is None
