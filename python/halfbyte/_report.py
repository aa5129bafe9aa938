"""report(): what is quantized in a model or a checkpoint, how, and what it cost. Imports pandas, matplotlib and tqdm
only where they are used and installed."""

import html
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from . import _core
from ._values import relative_error

_COLUMNS = ("name", "shape", "format", "group_size", "bits_per_weight", "bytes", "layer", "kind", "module",
            "relative_rmse", "snr_db", "max_error")


class Table:
    """Rows of named columns, as text and in notebooks: what stands for a DataFrame where pandas is not installed."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[object]]):
        self.columns, self.rows = list(columns), [tuple(row) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list:
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def _cells(self) -> list[list[str]]:
        return [self.columns, *([_text(value) for value in row] for row in self.rows)]

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells)]
        is_number = [all(isinstance(value, (int, float, type(None))) for value in self[name]) for name in self.columns]
        return "\n".join("  ".join(cell.rjust(width) if right else cell.ljust(width)
                                   for cell, width, right in zip(row, widths, is_number)).rstrip() for row in cells)

    def _repr_html_(self) -> str:
        head, *body = ("".join(f"<t{kind}>{html.escape(cell)}</t{kind}>" for cell in row)
                       for row, kind in zip(self._cells(), ["h"] + ["d"] * len(self.rows)))
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Report:
    """The result of `halfbyte.report`. Shows as a table, with the totals below."""

    def __init__(self, rows: list[dict], load_codes: Callable[[str], np.ndarray]):
        self.rows = rows
        self._load_codes = load_codes

    @property
    def table(self) -> object:
        """A row a weight: a DataFrame of pandas where that is installed, else a Table. Columns that have nothing to
        say are left out."""
        columns = [name for name in _COLUMNS if any(row[name] is not None for row in self.rows)]
        table = Table(columns, ([row[name] for name in columns] for row in self.rows))
        pandas = _optional("pandas")
        return table if pandas is None else pandas.DataFrame(dict(zip(columns, zip(*table.rows))), columns=columns)

    @property
    def num_bytes(self) -> int:
        """Of all weights, as they are stored."""
        return sum(row["bytes"] for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Of all weights, dense ones too."""
        size = sum(math.prod(row["shape"]) for row in self.rows)
        return 8 * self.num_bytes / size if size else 0.0

    @property
    def _quantized(self) -> list[dict]:
        return [row for row in self.rows if row["spec"] is not None]

    def _summary(self) -> str:
        return (f"{len(self._quantized)} of {len(self.rows)} weights quantized, {self.num_bytes:,} bytes, "
                f"{self.bits_per_weight:.4g} bits per weight")

    def __repr__(self) -> str:
        return f"{self.table}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>{html.escape(self._summary())}</p>"

    def histogram(self, name: str | None = None) -> dict[str, np.ndarray]:
        """How often each code occurs, i64 [2^bits]: by weight; of one, or of all that are quantized."""
        names = [row["name"] for row in self._quantized]
        if name is not None and name not in names:
            raise ValueError(f"name must be a quantized weight of the report, got {name!r}")
        chosen = names if name is None else [name]
        return {of: self._load_codes(of) for of in _progress(chosen, "codes", None)}

    def plot_error(self, ax: object = None) -> object:
        """The relative RMSE by layer, a line a kind of weight. Needs matplotlib, and a reference. Returns the
        axes."""
        rows = [row for row in self._quantized if row["relative_rmse"] is not None]
        if not rows:
            raise ValueError("no weight has an error: make the report with reference=")
        ax = _axes(ax)
        for kind in dict.fromkeys(row["kind"] for row in rows):
            points = sorted((row["layer"] if row["layer"] is not None else -1, row["relative_rmse"])
                            for row in rows if row["kind"] == kind)
            ax.plot(*zip(*points), marker="o", label=kind)
        ax.set(xlabel="layer", ylabel="relative RMSE", ylim=(0, None))
        ax.legend()
        return ax

    def plot_codes(self, name: str | None = None, ax: object = None) -> object:
        """The share of each code, of one weight or of all with as many bits as the first. Needs matplotlib. Returns
        the axes."""
        counts = list(self.histogram(name).values())
        if not counts:
            raise ValueError("no weight is quantized")
        total = sum(each for each in counts if len(each) == len(counts[0]))
        ax = _axes(ax)
        ax.bar(range(len(total)), total / max(1, total.sum()))
        ax.set(xlabel="code", ylabel="share", title=name or "")
        return ax

    def plot_sizes(self, ax: object = None) -> object:
        """The bytes by kind of weight, quantized and dense. Needs matplotlib. Returns the axes."""
        ax = _axes(ax)
        kinds = list(dict.fromkeys(row["kind"] for row in self.rows))
        left = np.zeros(len(kinds))
        for label, is_quantized in ("quantized", True), ("dense", False):
            sizes = np.array([sum(row["bytes"] for row in self.rows if row["kind"] == kind and
                                  (row["spec"] is not None) == is_quantized) for kind in kinds], np.float64)
            ax.barh(kinds, sizes, left=left, label=label)
            left += sizes
        ax.set(xlabel="bytes")
        ax.invert_yaxis()
        ax.legend()
        return ax


def report(source: object, reference: object = None, *, progress: bool | None = None) -> Report:
    """What a model or a checkpoint holds: a row a weight with its shape, format, size and, against a reference,
    error.

    source: a torch.nn.Module, a Checkpoint, or the path of a checkpoint. reference: the same model dense: a module or
    checkpoint for a module, a checkpoint for a checkpoint; None: no errors. progress: bars for what takes long; None:
    where stderr is a terminal and tqdm is installed. In the rows `layer` is the first number of the name, `kind` the
    last word of its module, `module` the class; group_size is None where scales are of something else than groups.
    relative_rmse, snr_db and max_error are those of `compare_checkpoints`, in f64. Raises what Checkpoint raises,
    TypeError for other sources.

    >>> report = halfbyte.report(model)
    >>> report.num_bytes, report.bits_per_weight
    (6558208, 16.0)
    """
    if isinstance(source, (str, os.PathLike, _core.Checkpoint)):
        return _of_checkpoint(source, reference, progress)
    if not hasattr(source, "named_modules"):
        raise TypeError(f"source must be a torch.nn.Module, a Checkpoint or a path, got {type(source).__name__}")
    return _of_module(source, reference, progress)


def _row(name: str, shape: tuple, spec: _core.QuantSpec | None, dtype: str | None, num_bytes: int,
         module: str | None = None) -> dict:
    layer = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    words = [word for word in name.split(".") if not word.isdigit()]
    kind = words[-2] if len(words) > 1 else words[0]
    size = math.prod(shape)
    return {"name": name, "shape": tuple(shape), "format": _format(spec) if spec is not None else dtype,
            "group_size": spec.group_size if spec is not None and spec.granularity in ("group", "flat") else None,
            "bits_per_weight": 8 * num_bytes / size if size else None, "bytes": num_bytes,
            "layer": int(layer[1]) if layer else None, "kind": kind, "module": module,
            "relative_rmse": None, "snr_db": None, "max_error": None, "spec": spec}


def _format(spec: _core.QuantSpec) -> str:
    return spec.format + (" asymmetric" if spec.asymmetric else "") + (" double_quant" if spec.double_quant else "")


def _count(codes: np.ndarray, bits: int, shape: tuple, is_flat: bool) -> np.ndarray:
    """The counts of codes in bit streams of the native layout, which are padded at the end of each."""
    cols = math.prod(shape) if is_flat else shape[-1] if shape else 1
    counts = np.zeros(1 << bits, np.int64)
    stream = codes.reshape(-1, codes.shape[-1]) if codes.size else np.zeros((0, 0), np.uint8)
    step = max(1, (1 << 22) // max(1, cols))
    weights = (1 << np.arange(bits)).astype(np.uint8)
    for begin in range(0, len(stream), step):
        rows = np.unpackbits(stream[begin : begin + step], axis=1, bitorder="little", count=cols * bits)
        counts += np.bincount((rows.reshape(-1, bits) * weights).sum(1, dtype=np.int64), minlength=1 << bits)
    return counts


def _of_tensor(weight: object) -> np.ndarray:
    host = weight.to("cpu").as_framework("numpy")
    return _count(np.asarray(host.codes), host.spec.bits, host.shape, host.spec.granularity == "flat")


# ---- Checkpoints


def _of_checkpoint(source: object, reference: object, progress: bool | None) -> Report:
    checkpoint = _opened(source)
    weights = checkpoint.weights
    rows = [_row(w.name, w.shape, w.spec, w.dtype or "", w.num_bytes) for w in weights]
    if reference is not None:
        dense = _opened(reference)
        for weight, row in _progress(list(zip(weights, rows)), "report", progress):
            of = dense.find(weight.name)
            if weight.spec is not None and of is not None and of.shape == weight.shape:
                row |= _error(_blocks(checkpoint, weight, dense, of))
    return Report(rows, lambda name: _of_tensor(checkpoint.load_weight(name)))


def _opened(of: object) -> _core.Checkpoint:
    if isinstance(of, (str, os.PathLike)):
        return _core.Checkpoint(of)
    if not isinstance(of, _core.Checkpoint):
        raise TypeError(f"reference must be a Checkpoint or a path, got {type(of).__name__}")
    return of


def _blocks(checkpoint: _core.Checkpoint, weight: object, dense: _core.Checkpoint, of: object) -> Iterator[tuple]:
    size, step = math.prod(weight.shape), 1 << 22
    for begin in range(0, size, step):
        count = min(step, size - begin)
        yield tuple(np.asarray(c.decode(w, "f32", begin=begin, count=count)).astype(np.float64)
                    for c, w in ((checkpoint, weight), (dense, of)))


def _error(blocks: Iterable[tuple]) -> dict:
    """Of pairs (y, x) of f64."""
    error = size = largest = 0.0
    for y, x in blocks:
        difference = y - x
        error += float((difference * difference).sum())
        size += float((x * x).sum())
        largest = max(largest, float(abs(difference).max()))
    relative, snr = relative_error(error, size)
    return {"relative_rmse": relative, "max_error": largest, "snr_db": snr}


# ---- Modules


def _weights(model: object) -> Iterator[tuple[str, object, object | None]]:
    """Name, module and dense parameter of each weight; None for a quantized one."""
    seen = set()
    for name, module in model.named_modules():
        is_quantized = hasattr(module, "dequantized")
        if is_quantized:
            yield f"{name}.weight" if name else "weight", module, None
        for word, parameter in module.named_parameters(recurse=False):
            if is_quantized and word in ("weight", "scales", "biases") or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield f"{name}.{word}" if name else word, module, parameter


def _packed_bytes(module: object) -> int:
    parts = [getattr(module, word, None) for word in ("codes", "scales", "zeros", "biases")]
    parts = parts if parts[0] is not None else [module.weight]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _of_module(model: object, reference: object, progress: bool | None) -> Report:
    weights = list(_weights(model))
    rows, modules = [], {}
    dense = _dense_of(reference)
    for name, module, parameter in _progress(weights, "report", progress if reference is not None else False):
        of = type(module).__name__
        if parameter is not None:
            word = str(parameter.dtype).removeprefix("torch.")
            rows.append(_row(name, parameter.shape, None, word, parameter.numel() * parameter.element_size(), of))
            continue
        modules[name] = module
        row = _row(name, (module.out_features, module.in_features), module.spec, None, _packed_bytes(module), of)
        exact = dense(name)
        if exact is not None:
            y = module.dequantized().detach().double()
            row |= _error([(y, exact.detach().to(y.device).double())])
        rows.append(row)
    return Report(rows, lambda name: _codes_of_module(modules[name]))


def _dense_of(reference: object) -> Callable[[str], object | None]:
    """A function from the name of a weight to the dense tensor of PyTorch."""
    if reference is None:
        return lambda name: None
    if not hasattr(reference, "named_parameters"):
        checkpoint = _opened(reference)
        return lambda name: None if checkpoint.find(name) is None else checkpoint.load_dense(name, "f32",
                                                                                             framework="torch")
    return dict(reference.named_parameters(remove_duplicate=False)).get


def _codes_of_module(module: object) -> np.ndarray:
    shape = (module.out_features, module.in_features)
    if hasattr(module, "codes"):
        return _count(module.codes.detach().cpu().numpy(), module.spec.bits, shape, False)
    data = module.weight.detach().cpu().view(sys.modules["torch"].uint8).numpy()
    return _of_tensor(_core.PackedTensor.copy_of(module.spec, *shape, data).unpack())


# ---- What may be installed


def _optional(name: str) -> object | None:
    try:
        return __import__(name)
    except ImportError:
        return None


def _axes(ax: object) -> object:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    return plt.subplots()[1]


def _shows(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def _progress(items: Iterable, text: str, progress: bool | None) -> Iterable:
    if not _shows(progress) or _optional("tqdm") is None:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=text, leave=False)
