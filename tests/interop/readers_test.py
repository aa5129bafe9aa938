"""What the readers make of what the tool writes, and the tool of what they write.

    HALFBYTE_CLI=build/release/halfbyte PYTHON -m pytest tests/interop/readers_test.py --full --write docs/compatibility.md

A cell is an architecture (zoo.py), a layout and a format. Its model is quantized, loaded by the reader, and compared with
the dense model that `halfbyte dequantize` makes of it: all weights to the bit, and the outputs. A cell passes if its verdict
is that of docs/compatibility.md, which --write writes. PYTHON has what requirements.txt names.
"""

import json
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import readers
import torch
import transformers
import zoo
from readers import READERS, Unreadable, Wrong

TABLE = zoo.ROOT / "docs" / "compatibility.md"
EQUAL, DENSE, REFUSED, CANNOT, FAILURE = "loads, equal", "kept dense, said so", "refused", "cannot", "**FAILURE**"
USAGE, BAD_INPUT = 2, 3  # exit codes of the tool
LOSS = 0.25  # of a quantized weight, at most, relative to its norm: that of random weights in 4 bits is about 0.1


@dataclass
class Verdict:
    kind: str
    text: str = ""
    share: float = 1.0  # of the elements of linear layers and experts, those that are quantized


def words(error):
    """One line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# --- One cell


class Bench:
    """Models of the zoo on the disk, and what a reader makes of them dense: kept from one cell to the next."""

    def __init__(self, cli, folder):
        self.cli, self.folder, self.kept = cli, folder, {}

    def tool(self, *arguments):
        command = [str(self.cli), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def checkpoint(self, model):
        """The directory of a model that zoo.build made."""
        path = self.folder / model.name
        if not path.exists():
            model.save(path)
        return path

    def dense(self, reader, model):
        """(weights, outputs, names of linear layers and experts) of the dense model in the reader. Raises Unreadable."""
        key = (reader.name if reader.name == "mlx" else "transformers", model.name)
        if key not in self.kept:
            self.kept = {k: v for k, v in self.kept.items() if k[1] == model.name}
            try:
                loaded = reader.load_dense(self.checkpoint(model))
                linear = reader.linear(loaded)
            except Unreadable as error:
                self.kept[key] = error
            except Exception as error:
                self.kept[key] = Unreadable(f"{reader.packages[0]} fails on the dense model: {words(error)}")
            else:
                self.kept[key] = self.read(reader, loaded, model) + (linear,)
        if isinstance(self.kept[key], Unreadable):
            raise self.kept[key]
        return self.kept[key]

    def read(self, reader, loaded, model):
        """Models that were drawn may want inputs that `outputs` does not make."""
        try:
            return reader.read(loaded)
        except Exception:
            if model.name in zoo.MODELS:
                raise
            return reader.read(loaded, with_outputs=False)

    def verdict(self, reader, model, form):
        try:
            original = self.dense(reader, model)
        except Unreadable as error:
            return Verdict(CANNOT, str(error))
        with self.scratch() as folder:
            quantized, dense = folder / "quantized", folder / "dense"
            report = folder / "report.json"
            result = self.tool("quantize", self.checkpoint(model), "-o", quantized, "--layout", reader.name, *reader.formats[form], "--json", report)
            if result.returncode:
                refused = result.returncode in (USAGE, BAD_INPUT) and "error: " in result.stderr
                return Verdict(REFUSED if refused else FAILURE, first_line(result.stderr))
            try:
                return compare(self, reader, quantized, dense, original, json.loads(report.read_text()))
            except Exception as error:
                return Verdict(FAILURE, str(error) if isinstance(error, Wrong) else words(error))

    def scratch(self):
        import tempfile

        class Folder(tempfile.TemporaryDirectory):
            def __enter__(self):
                return Path(super().__enter__())

        return Folder(dir=self.folder)


def first_line(stderr):
    """What the tool says, without the paths of this run."""
    line = next(iter(stderr.strip().splitlines()), "nothing").removeprefix("halfbyte: ").removeprefix("error: ")
    return re.sub(r'"/[^"]*"', "the model", line)


def compare(bench, reader, quantized, dense, of_original, report):
    """The verdict on a model that the tool quantized. Raises what is wrong."""
    original, original_outputs, linear = of_original
    if {"reader": reader.said, "loads": True, "why_not": ""} not in report["readers"]:
        raise Wrong(f"the report does not say that it loads in {reader.said}")
    weights, outputs = reader.read(reader.load(quantized), original_outputs is not None)
    with_outputs = outputs is not None
    result = bench.tool("dequantize", quantized, "-o", dense, *reader.dequantize)
    if result.returncode:
        raise Wrong(f"dequantize: {first_line(result.stderr)}")
    try:
        expected, expected_outputs = reader.read(reader.load_dense(dense), with_outputs)
    except Exception as error:
        raise Wrong(f"the dequantized model does not load: {words(error)}") from error

    for names, what in ((expected.keys() - weights.keys(), "lacks"), (weights.keys() - expected.keys(), "has, but should not,")):
        if names:
            raise Wrong(f"the quantized model {what} {', '.join(sorted(names)[:3])}")
    for name, weight in weights.items():
        if not reader.equal(weight, expected[name]):
            raise Wrong(f"{name} is not what dequantize gives ({reader.distance(weight, expected[name]):.2g} of its norm)")
    changed = set()
    for name, weight in expected.items():
        if tuple(weight.shape) != tuple(original[name].shape):
            raise Wrong(f"{name} is {tuple(weight.shape)}, not {tuple(original[name].shape)}")
        distance = reader.distance(weight, original[name])
        if distance > LOSS:
            raise Wrong(f"{name} lost {distance:.2g} of its norm")
        if distance > 0:
            changed.add(name)
    for name, output in outputs.items() if with_outputs else ():
        distance = reader.distance(output, expected_outputs[name])
        if not distance <= reader.tolerance(output):
            raise Wrong(f"{name} of the model differ from those of the dequantized one by {distance:.2g} of their norm")

    def elements(names):
        return sum(torch.Size(original[name].shape).numel() for name in names)

    share = elements(changed & linear) / max(elements(linear), 1)
    if share > 0.99:
        return Verdict(EQUAL, "" if with_outputs else "outputs not compared")
    return Verdict(DENSE, said(report, reader.beside), share)


def said(report, beside):
    """Why the report says that weights stay dense: the reason of most of their elements."""
    reasons = Counter()
    for weight in report["weights"]:
        if not weight["quantized"] and weight["reason"] not in {"", "not selected"} | beside:
            reasons[weight["reason"]] += torch.Size(weight["shape"]).numel()
    if not reasons:
        raise Wrong("weights stay dense in silence")
    return reasons.most_common(1)[0][0]


# --- Which cells

CELLS = [(name, reader, form) for name in zoo.MODELS for reader in READERS for form in reader.formats]


def identifier(value):
    return value.replace(" ", "-") if isinstance(value, str) else value.name


def pytest_generate_tests(metafunc):
    if "cell" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    cells = CELLS
    if option("--random"):
        drawn = zoo.draw(option("--random"), option("--seed"))
        cells = [(name, reader, next(iter(reader.formats))) for name in drawn for reader in READERS]
    elif not option("--full"):
        chosen = set(random.Random(option("--seed")).sample(range(len(CELLS)), min(option("--count"), len(CELLS))))
        cells = [cell for i, cell in enumerate(CELLS) if i in chosen]
    metafunc.parametrize("cell", cells, ids=["-".join(map(identifier, cell)) for cell in cells])


@pytest.fixture(scope="session")
def bench(cli, tmp_path_factory):
    torch.set_num_threads(2)
    return Bench(cli, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def verdicts(pytestconfig):
    """Cell -> verdict, of this run: written when it ends."""
    found = {}
    yield found
    path = pytestconfig.getoption("--write")
    if path and len(found) == len(CELLS):
        Path(path).write_text(page(found))


def test_loads(cell, bench, verdicts, pytestconfig):
    name, reader, form = cell
    verdict = verdicts[name, reader.name, form] = bench.verdict(reader, zoo.model(name), form)
    print(f"{name}, {reader.name}, {form}: {verdict.kind} {verdict.text} {verdict.share:.0%}")
    assert verdict.kind != FAILURE, verdict.text
    if not pytestconfig.getoption("--random") and not pytestconfig.getoption("--write"):
        row = re.search(rf"^\| {zoo.model(name).title} \|.*", TABLE.read_text(), re.MULTILINE)
        assert row, f"{TABLE.name} has no row for {name}"
        cell = row[0].split("|")[2 + READERS.index(reader)]
        assert verdict.kind in cell, f"{TABLE.name} says {cell.strip()}, found {verdict.kind}: {verdict.text}"


# --- The table


def page(verdicts):
    """docs/compatibility.md."""
    versions = readers.versions()
    notes = {}

    def note(verdict):
        if not verdict.text:
            return ""
        return f" ({notes.setdefault(verdict.text, len(notes) + 1)})"

    def cell(name, reader):
        found = defaultdict(list)
        for form in reader.formats:
            verdict = verdicts[name, reader.name, form]
            kind = verdict.kind if verdict.kind != DENSE else f"{DENSE}: {verdict.share:.0%} quantized"
            found[kind + note(verdict)].append(form)
        return "; ".join(f"{kind} ({', '.join(forms)})" if len(found) > 1 else kind for kind, forms in found.items())

    def heading(reader):
        return f"{reader.name}: {', '.join(f'{package} {versions[package]}' for package in reader.packages)}"

    rows = [f"| {zoo.model(name).title} | {' | '.join(cell(name, reader) for reader in READERS)} |" for name in zoo.MODELS]
    lines = [
        INTRODUCTION.format(
            formats="\n".join(f"- {reader.name}: {', '.join(reader.formats)}" for reader in READERS),
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
            equal=EQUAL, dense=DENSE, refused=REFUSED, cannot=CANNOT, failure=FAILURE.strip("*"),
        ),
        f"| | {' | '.join(map(heading, READERS))} |",
        f"|---|{'---|' * len(READERS)}",
        *rows,
        "\n## Notes\n",
        *(f"{number}. {text}" for text, number in notes.items()),
    ]
    return "\n".join(lines) + "\n"


INTRODUCTION = """# What loads where

`tests/interop/readers_test.py` wrote this page. Each row is an architecture of transformers, built tiny and with random
weights: some with tied embeddings, some in several files, in bf16, f16 or f32. For each layout and format the test runs
`halfbyte quantize` with its defaults, loads the result in the reader, and compares it with the dense model that
`halfbyte dequantize` makes of it. Readers: {versions}, on the CPU.

Formats:

{formats}

The forms that models are published in have a test of their own, `tests/interop/published_test.py`: `fp8`, `nvfp4` and
`mxfp4` of `compressed-tensors` and the layouts `fp8` and `gpt-oss` load in transformers, with the weights of
`halfbyte dequantize`, to the bit, for some of these architectures.

The layouts `gptq` and `awq` are not in the table: transformers reads them with further packages (optimum and gptqmodel),
and vLLM on GPUs; no test runs either. What is known of them is in [formats.md](formats.md#gptq).

| words | meaning |
|---|---|
| {equal} | The reader loads the model. No key is missing, unexpected or of another shape. All weights are those of `halfbyte dequantize`, to the bit; in f32 in MLX. The outputs are those of the dense model with these weights, but for the order of sums. All linear layers and experts are quantized, the head aside |
| {dense} | The same, but less of the linear layers and experts is quantized, and the report of the tool says why |
| {refused} | The tool writes nothing, and says why |
| {cannot} | The reader cannot load this model, even dense |
| {failure} | Something else |

"""
