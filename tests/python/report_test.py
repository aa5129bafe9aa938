"""halfbyte.report: what it says of checkpoints, how it looks, and what it imports."""

import subprocess
import sys
import types
from pathlib import Path

import halfbyte
import numpy as np
import pytest
from halfbyte import _report

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    output = tmp_path_factory.mktemp("report") / "affine3"
    halfbyte.quantize_checkpoint(MODEL, output, "affine3", keep_embeddings=True)
    return output


def named(report, name):
    (row,) = (row for row in report.rows if row["name"] == name)
    return row


NAME = "model.layers.2.mlp.down_proj.weight"


def test_rows(quantized):
    report = halfbyte.report(quantized)
    row = named(report, NAME)
    assert row | {"spec": None} == {
        "name": NAME, "shape": (256, 768), "format": "affine3", "group_size": 64, "bits_per_weight": 3.5,
        "bytes": 256 * 768 * 3.5 / 8, "layer": 2, "kind": "down_proj", "module": None, "relative_rmse": None,
        "snr_db": None, "max_error": None, "spec": None}
    dense = named(report, "lm_head.weight")
    assert dense["format"] == "bf16" and dense["spec"] is None and dense["layer"] is None and dense["kind"] == "lm_head"
    assert len(report.rows) == 39 and report.num_bytes == sum(row["bytes"] for row in report.rows)
    checkpoint = halfbyte.Checkpoint(quantized)
    assert report.num_bytes == sum(w.num_bytes for w in checkpoint.weights)
    assert halfbyte.report(checkpoint).rows == report.rows
    size = sum(np.prod(w.shape) for w in checkpoint.weights)
    assert report.bits_per_weight == pytest.approx(8 * report.num_bytes / size)


def test_errors_are_those_of_compare(quantized):
    report = halfbyte.report(quantized, MODEL)
    compared = {row.name: row for row in halfbyte.compare_checkpoints(MODEL, quantized)}
    for row in report.rows:
        if row["spec"] is None:
            assert row["relative_rmse"] is None
            continue
        expected = compared[row["name"]]
        assert row["max_error"] == expected.max_error
        assert row["relative_rmse"] == pytest.approx(expected.relative_rmse, rel=1e-9)
        assert row["snr_db"] == pytest.approx(expected.snr_db, rel=1e-9)
    exact = halfbyte.report(quantized, halfbyte.Checkpoint(quantized))
    assert named(exact, NAME)["relative_rmse"] == 0 and named(exact, NAME)["snr_db"] == np.inf


def test_histogram(quantized):
    report = halfbyte.report(quantized)
    counts = report.histogram(NAME)
    codes = halfbyte.Checkpoint(quantized).load_weight(NAME).codes
    bits = np.unpackbits(np.asarray(codes), axis=1, bitorder="little")[:, : 768 * 3].reshape(-1, 3)
    assert counts.keys() == {NAME}
    assert np.array_equal(counts[NAME], np.bincount(bits @ np.array([1, 2, 4]), minlength=8))
    assert len(report.histogram()) == 28
    with pytest.raises(ValueError, match="lm_head"):
        report.histogram("lm_head.weight")


@pytest.mark.parametrize("bits, shape", [(2, (3, 7)), (3, (5, 11)), (5, (4, 8)), (6, (1, 1)), (8, (2, 3)), (4, (3, 5))])
def test_padding_is_not_counted(bits, shape):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, shape)
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(shape[0], -1).astype(np.uint8)
    packed = np.packbits(np.pad(stream, ((0, 0), (0, -stream.shape[1] % 8)), constant_values=1), axis=1,
                         bitorder="little")
    assert np.array_equal(_report._count(packed, bits, shape, False), np.bincount(codes.ravel(), minlength=1 << bits))
    flat = np.packbits(np.pad(stream.ravel(), (0, -stream.size % 8), constant_values=1), bitorder="little")
    assert np.array_equal(_report._count(flat, bits, shape, True), np.bincount(codes.ravel(), minlength=1 << bits))


def test_table_of_text(quantized, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    report = halfbyte.report(quantized, MODEL)
    table = report.table
    assert len(table) == 39 and table["name"][0] == report.rows[0]["name"] and "module" not in table.columns
    lines = repr(report).splitlines()
    assert len(lines) == 41 and len({line.index("affine3") for line in lines if "affine3" in line}) == 1
    assert lines[-1] == ("28 of 39 weights quantized, 1,643,008 bytes, "
                         f"{report.bits_per_weight:.4g} bits per weight")
    html = report._repr_html_()
    assert html.count("<tr>") == 40 and "256 x 768" in html
    strange = _report.Table(["<a>"], [["b&c"]])
    assert "&lt;a&gt;" in strange._repr_html_() and "b&amp;c" in strange._repr_html_()


def test_table_of_pandas(quantized, monkeypatch):
    class DataFrame(dict):
        def __init__(self, data, columns):
            super().__init__(data)
            self.columns = columns

    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=DataFrame))
    table = halfbyte.report(quantized, MODEL).table
    assert isinstance(table, DataFrame) and len(table["bytes"]) == 39 and table.columns == list(table)


def test_plots(quantized, monkeypatch):
    """What is drawn: by axes that note it, as matplotlib need not be there."""

    class Axes:
        def __init__(self):
            self.lines, self.bars, self.barhs, self.text = [], [], [], {}

        def plot(self, x, y, marker, label):
            self.lines.append((label, x, y))

        def bar(self, x, height):
            self.bars.append((list(x), height))

        def barh(self, y, width, left, label):
            self.barhs.append((label, width))

        def set(self, **text):
            self.text |= text

        def legend(self):
            pass

        def invert_yaxis(self):
            pass

    report = halfbyte.report(quantized, MODEL)
    axes = report.plot_error(Axes())
    assert {label for label, _, _ in axes.lines} == {f"{k}_proj" for k in ("q", "k", "v", "o", "gate", "up", "down")}
    assert all(x == (0, 1, 2, 3) for _, x, _ in axes.lines)
    (down,) = (y for label, _, y in axes.lines if label == "down_proj")
    assert down[2] == named(report, NAME)["relative_rmse"]
    axes = report.plot_codes(ax=Axes())
    assert len(axes.bars[0][0]) == 8 and axes.bars[0][1].sum() == pytest.approx(1)
    axes = report.plot_sizes(Axes())
    assert [label for label, _ in axes.barhs] == ["quantized", "dense"]
    assert sum(width.sum() for _, width in axes.barhs) == report.num_bytes
    with pytest.raises(ValueError, match="reference"):
        halfbyte.report(quantized).plot_error(Axes())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot_sizes()


def test_what_is_refused():
    with pytest.raises(TypeError, match="source must be .* got int"):
        halfbyte.report(3)
    with pytest.raises(TypeError, match="reference must be"):
        halfbyte.report(MODEL, 3)
    with pytest.raises(halfbyte.Error, match="nowhere"):
        halfbyte.report("nowhere")


def test_import_is_light():
    program = "import sys, halfbyte; print([m for m in ('pandas', 'matplotlib', 'tqdm', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
