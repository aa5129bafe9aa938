"""Whole models: which layers are quantized, and models from checkpoints."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _core
from .._progress import Bar
from ._layouts import Packed
from ._library import WORDS
from ._ops_weight import double_quantize, pack, quantize_packed, spec_of, without_double_quant
from .experts import QuantizedExperts
from .linear import QuantizedLinear, as_tensor, linear_class


class LayerReport(NamedTuple):
    """What became of a weight of two axes or more."""

    name: str
    shape: tuple[int, ...]
    spec: _core.QuantSpec | None  # None: it is dense
    reason: str  # why it is dense
    dense_bytes: int
    num_bytes: int


class ModelReport(NamedTuple):
    """What became of the weights of a model. As a text: a line for the quantized layers, one for each reason."""

    layers: list[LayerReport]

    @property
    def quantized(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.spec is not None]

    @property
    def dense(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.spec is None]

    def __str__(self) -> str:
        groups: dict[str, list[LayerReport]] = {}
        for layer in self.layers:
            groups.setdefault(f"{layer.spec}" if layer.spec is not None else f"dense, {layer.reason}", []).append(layer)
        lines = []
        for name, layers in groups.items():
            of, now = sum(layer.dense_bytes for layer in layers), sum(layer.num_bytes for layer in layers)
            names = layers[0].name if len(layers) == 1 else f"{layers[0].name} and {len(layers) - 1} more"
            lines.append(f"{name}: {names}, {of / 1e6:.1f} -> {now / 1e6:.1f} MB")
        return "\n".join(lines)

    __repr__ = __str__


# ---- Which layers


def _is_experts(module: nn.Module) -> bool:
    """Whether it is a module of transformers 5 whose forward is the same for all experts, and no more than that."""
    says_its_form = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
    return says_its_form and not getattr(module, "has_post_expert_norm", False)  # to version 5.17 there was none


def is_turned(module: nn.Module) -> bool:
    """Whether it is a module of transformers that has its weights turned, [in, out]."""
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return is_conv1d or (_is_experts(module) and module.is_transposed)


def _weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that can be quantized, by their names in it."""
    if _is_experts(module):
        up = "gate_up_proj" if module.has_gate else "up_proj"
        return {up: module.get_parameter(up), "down_proj": module.down_proj}
    is_linear = type(module) is nn.Linear or is_turned(module)
    return {"weight": module.weight} if is_linear else {}


def _turned(module: nn.Module, weight: Tensor) -> Tensor:
    """A weight of a module as [..., out, in]."""
    return weight.transpose(-1, -2) if is_turned(module) else weight


def _extents(module: nn.Module) -> tuple[int, int]:
    return tuple(_turned(module, module.weight).shape)


def _config_text(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return ""
    fields = config.to_dict()
    fields["architectures"] = fields.get("architectures") or [type(model).__name__]
    return json.dumps(fields, default=str)


def _names(expressions: Sequence[str] | str | None) -> list[str]:
    return [expressions] if isinstance(expressions, str) else list(expressions or ())


_NO_LAYER = "for which there is no quantized layer"
_NOT_READ = "which from_pretrained with HalfbyteConfig quantizes"


def dense_reasons(model: nn.Module, include: Sequence[str] | str | None = None,
                  exclude: Sequence[str] | str | None = None) -> dict[str, str]:
    """Why each weight of two axes or more would stay dense, by its name; empty: it would be quantized. The rule is that
    of `halfbyte quantize`: by the modules of the model where its config names an architecture that is known, else by
    names; heads, embeddings and routers stay dense. include, exclude: regular expressions that are searched in the
    names; include replaces the choice."""
    owners = {id(parameter): [] for parameter in model.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(name)
    weights = [(name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
               if parameter.dim() >= 2 and not name.endswith("bias")]  # experts have a row of bias each
    reasons = _core._dense_reasons(_config_text(model), [
        (name, list(of.shape), WORDS.get(of.dtype)) for name, of in weights], _names(include), _names(exclude))
    result = {}
    for (name, parameter), reason in zip(weights, reasons):
        module = model.get_submodule(name.rpartition(".")[0])
        others = [other for other in owners[id(parameter)] if other != name]
        if not reason and others:
            reason = f"shared with {others[0]}"
        elif not reason and name.rpartition(".")[2] not in _weights_of(module):
            reason = f"of {type(module).__name__}, {_NO_LAYER}"
        result[name] = reason
    for name in result:  # experts are quantized as a whole
        path, _, own = name.rpartition(".")
        others = _weights_of(model.get_submodule(path))
        if own in others:
            result[name] = next((result[f"{path}.{other}"] for other in others if result[f"{path}.{other}"]), "")
    return result


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _quantized_experts(module: nn.Module, spec: _core.QuantSpec | str, device: object, lora_rank: int = 0,
                       lora_alpha: float | None = None, **options) -> QuantizedExperts:
    weights = {name: _turned(module, weight) for name, weight in _weights_of(module).items()}
    up_name, up = next(iter(weights.items()))
    num_experts, hidden_size, intermediate_size = weights["down_proj"].shape
    # The activation is a method of the module, which keeps its other fields, not its weights.
    experts = QuantizedExperts(num_experts, hidden_size, intermediate_size,
                               module._apply_gate if module.has_gate else module.act_fn, up_features=up.shape[1],
                               up_name=up_name, bias=module.has_bias, spec=spec, device="meta", dtype=up.dtype, **options)
    for name, weight in weights.items():
        device = weight.device if device is None else device
        if not weight.is_meta:
            packed = experts.packed_of(name, weight.to(device))
            experts.register_parameter(name, nn.Parameter(packed, requires_grad=False))
            if module.has_bias:
                bias = module.get_parameter(name + "_bias")
                experts.register_parameter(name + "_bias", nn.Parameter(bias.detach().to(device), bias.requires_grad))
    module._parameters.clear()
    if lora_rank > 0:
        experts.add_adapter(lora_rank, lora_alpha)
    return experts.train(module.training)


def quantized_module(module: nn.Module, spec: _core.QuantSpec | str, device: object = None,
                     **options) -> QuantizedLinear | QuantizedExperts:
    """The quantized layer of a linear one, or of experts, whose dense weights are gone then; of a module on the meta
    device, one there. options: lora_rank, lora_alpha, storage_dtype."""
    if _is_experts(module):
        return _quantized_experts(module, spec, device, **options)
    if module.weight.is_meta:
        n, k = _extents(module)
        return linear_class(spec)(k, n, module.bias is not None, spec=spec, device="meta", dtype=module.weight.dtype,
                                  **options).train(module.training)
    if is_turned(module):
        turned = nn.Linear(1, 1, device="meta")
        turned.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
        turned.bias = module.bias
        module = turned.train(module.training)
    return QuantizedLinear.from_linear(module, spec, device=device, **options)


def replace_linear(model: nn.Module, spec: _core.QuantSpec | str = "nf4", *, include: Sequence[str] | str | None = None,
                   exclude: Sequence[str] | str | None = None, lora_rank: int = 0, lora_alpha: float | None = None,
                   storage_dtype: torch.dtype = torch.uint8, device: torch.device | str | None = None) -> ModelReport:
    """Replaces the linear layers of a model, and the experts of transformers 5 that hold their weights in tensors of
    three axes, in place, by quantized ones, one after the other: each dense weight is freed before the next is touched.
    The choice is that of `halfbyte quantize`; see dense_reasons. Warns of weights that it would take and that are in
    modules for which there is no quantized layer. device: of the new layers; None: that of each. On the meta device nothing
    is computed. Raises ValueError, before any layer is replaced, for a spec that cannot hold one of them.

        >>> import torch, halfbyte.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> halfbyte.torch.replace_linear(model, "int8", exclude="2")
        int8: 0.weight, 0.0 -> 0.0 MB
        dense, excluded: 2.weight, 0.0 -> 0.0 MB
    """
    spec = spec_of(str(_core.QuantSpec.parse(str(spec))))
    options = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "storage_dtype": storage_dtype}
    reasons = dense_reasons(model, include, exclude)
    layers, chosen = [], {}
    for name, reason in reasons.items():
        path, _, own = name.rpartition(".")
        weight = model.get_parameter(name)
        layers.append(LayerReport(name, tuple(weight.shape), None, reason, _bytes_of(weight), _bytes_of(weight)))
        if not reason:
            module = model.get_submodule(path)
            spec.packed_bytes(*_turned(module, weight).shape[-2:])
            chosen[path] = None
    _warn_of_dense(layers)
    for path in chosen:
        put_module(model, path, quantized_module(model.get_submodule(path), spec, device, **options))
    return ModelReport([layer if layer.reason else layer._replace(
        spec=spec, num_bytes=_bytes_of(model.get_parameter(layer.name))) for layer in layers])


def _warn_of_dense(layers: Sequence[LayerReport]) -> None:
    dense = [layer for layer in layers if layer.reason.endswith((_NO_LAYER, _NOT_READ))]
    if dense:
        warnings.warn(f"{len(dense)} weights stay dense that halfbyte quantize would quantize: "
                      + ", ".join(f"{layer.name} ({layer.reason})" for layer in dense), stacklevel=3)


# ---- From a checkpoint


def _snapshot(path: str) -> str:
    """A directory: itself, or the snapshot of a model in the cache of the hub."""
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ValueError(f"a model must be a directory with config.json, got the file {path}")
    from huggingface_hub import snapshot_download
    return snapshot_download(path, local_files_only=True)


def _empty_model(path: str, dtype: torch.dtype | None) -> nn.Module:
    """The model of transformers, on the meta device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    names = config.architectures or []
    if not names or not hasattr(transformers, names[0]):
        raise ValueError(f"{path}: config.json names no class of transformers in \"architectures\", but {names}")
    if hasattr(config, "quantization_config"):  # here the layers are those of halfbyte
        del config.quantization_config
    own = config.dtype or torch.get_default_dtype()
    dtype = dtype or (getattr(torch, own) if isinstance(own, str) else own)
    with torch.device("meta"):
        model = getattr(transformers, names[0])._from_config(config, dtype=dtype)
    return model.eval()


class _Loader:
    """Fills a model on the meta device from a checkpoint."""

    def __init__(self, model: nn.Module, path: str, spec: _core.QuantSpec | None, device: torch.device,
                 options: dict, reasons: dict[str, str]) -> None:
        self.model, self.path, self.spec, self.device, self.options = model, path, spec, device, options
        self.reasons = reasons
        self.checkpoint = _core.Checkpoint(path)
        self.weights = {weight.name: weight for weight in self.checkpoint.weights}
        self.stored = self.checkpoint.tensors
        self.files: dict = {}
        self.layers: list[LayerReport] = []

    def find(self, name: str):
        """The weight of a tensor of the model, which may lack the prefix of the base model, or have it."""
        prefix = getattr(self.model, "base_model_prefix", "") + "."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self.weights:
                return self.weights[candidate]
        return None

    def run(self, progress: Callable) -> ModelReport:
        jobs = list(self._jobs())
        done, total = 0, sum(weight.num_bytes for weight, _, _ in jobs)
        with contextlib.ExitStack() as self.open_files:
            for i, (weight, read, finish) in enumerate(jobs):
                if i + 1 < len(jobs):
                    self._announce(jobs[i + 1][0])
                finish(read())
                done += weight.num_bytes
                progress("load", done, total)
        self._fill_buffers()
        self.model.tie_weights()
        left = [name for name, of in [*self.model.named_parameters(), *self.model.named_buffers()] if of.is_meta]
        if left:
            raise ValueError(f"{self.path}: the checkpoint has no weight {left[0]}"
                             + (f", nor {len(left) - 1} more" if len(left) > 1 else "")
                             + f", which {type(self.model).__name__} has")
        _warn_of_dense(self.layers)
        return ModelReport(self.layers)

    def _announce(self, weight) -> None:
        """Lets the system read the parts of a weight from the disk while others are computed."""
        if not hasattr(os, "posix_fadvise"):
            return
        for part in weight.parts:
            stored = self.stored[part]
            if stored.file not in self.files:
                file = open(os.path.join(self.path, stored.file), "rb", buffering=0)
                self.files[stored.file] = self.open_files.enter_context(file)
            os.posix_fadvise(self.files[stored.file].fileno(), stored.offset, stored.num_bytes, os.POSIX_FADV_WILLNEED)

    def _jobs(self) -> Iterator[tuple[object, Callable, Callable]]:
        """For each tensor its weight in the file, a function that reads, and one that takes what was read."""
        for path, module in list(self.model.named_modules()):
            is_linear = type(module) is nn.Linear or is_turned(module)
            weight = self.find(path + ".weight") if is_linear else None
            name = path + ".weight"
            if weight is not None and weight.layout is not None and self._is_packable(weight):
                yield (weight, lambda weight=weight: self._load(weight),
                       lambda q, path=path, module=module: self._put_quantized(path, module, q))
            elif weight is not None and weight.layout is None and self.spec is not None and not self.reasons[name]:
                yield (weight, lambda weight=weight, module=module: self._quantize(weight, module),
                       lambda packed, path=path, module=module: self._put_packed(path, module, packed))
            else:
                yield from self._dense_jobs(path, module, module._parameters)
                continue
            yield from self._dense_jobs(path, module, {"bias": module.bias})
        for path, module in list(self.model.named_modules()):
            kept = {name: of for name, of in module._buffers.items() if name not in module._non_persistent_buffers_set}
            yield from self._dense_jobs(path, module, kept)

    def _dense_jobs(self, path: str, module: nn.Module,
                    tensors: dict) -> Iterator[tuple[object, Callable, Callable]]:
        for own, tensor in tensors.items():
            name = f"{path}.{own}" if path else own
            weight = self.find(name) if tensor is not None else None
            if weight is None:  # tied to another, or missing: said at the end
                continue
            yield (weight, lambda weight=weight, tensor=tensor: self._read(weight, tensor),
                   lambda read, path=path, own=own, name=name: self._put_dense(path, own, name, read))

    # Reading

    def _is_packable(self, weight) -> bool:
        try:
            weight.spec.packed_bytes(*weight.shape)
        except ValueError:
            return False
        return weight.note != "act-order"

    def _load(self, weight) -> object:
        return self.checkpoint.load_weight(weight.name, self.device, framework="torch")

    def _quantize(self, weight, module: nn.Module) -> Packed:
        n, k = _extents(module)
        if is_turned(module):
            dense = self._read(weight, module.weight)
            return Packed(quantize_packed(dense.t().contiguous(), str(self.spec)), self.spec, n, k)
        spec = without_double_quant(self.spec)
        q = _core._quantize_weight(self.checkpoint, weight.name, spec, _core.Encoding(), self.device, 0)
        if not self.spec.double_quant:
            return Packed(as_tensor(q.pack().data), self.spec, n, k)
        codes, zeros = as_tensor(q.codes), as_tensor(q.codes).new_empty(0)
        scales, nested = double_quantize(as_tensor(q.scales))
        biases = zeros.new_empty(0, dtype=torch.float32)
        return Packed(pack(codes, scales, zeros, biases, nested, str(self.spec), n, k), self.spec, n, k)

    def _read(self, weight, like: Tensor) -> Tensor:
        word = WORDS.get(like.dtype)
        if word is None:
            data = as_tensor(self.checkpoint.read(self.stored[weight.parts[0]])).view(like.dtype).reshape(like.shape)
            return data.to(self.device)
        read = as_tensor(self.checkpoint.load_dense(weight.name, word, device=self.device, framework="torch"))
        if list(read.shape) != list(like.shape):
            raise ValueError(f"weight {weight.name} must have the shape {list(like.shape)}, got {list(read.shape)}")
        return read

    # Placing

    def _put_quantized(self, path: str, module: nn.Module, q: object) -> None:
        n, k = q.shape
        if (n, k) != _extents(module):
            raise ValueError(f"weight {path}.weight must have the shape {list(_extents(module))}, got {[n, k]}")
        self._put_packed(path, module, Packed(as_tensor(q.pack().data), q.spec, n, k))

    def _put_packed(self, path: str, module: nn.Module, packed: Packed) -> None:
        layer = QuantizedLinear._of_packed(packed, None, module.weight.dtype, **self.options)
        if module.bias is not None:
            layer.bias = module.bias
        put_module(self.model, path, layer.train(module.training))
        self.layers.append(LayerReport(path + ".weight", tuple(module.weight.shape), packed.spec, "",
                                       _bytes_of(module.weight), _bytes_of(layer.weight)))

    def _put_dense(self, path: str, own: str, name: str, read: Tensor) -> None:
        module = self.model.get_submodule(path)
        if own in module._buffers:
            module._buffers[own] = read
            return
        like = module._parameters[own]
        module._parameters[own] = nn.Parameter(read, requires_grad=like.requires_grad)
        if read.dim() >= 2 and not own.endswith("bias"):
            reason = self.reasons.get(name) or (
                f"of {type(module).__name__}, {_NOT_READ}" if _is_experts(module) else "no packed form of it")
            self.layers.append(LayerReport(name, tuple(read.shape), None, reason, _bytes_of(read), _bytes_of(read)))

    def _fill_buffers(self) -> None:
        """Buffers that are computed and not stored, as the frequencies of rotary embeddings."""
        for module in self.model.modules():
            empty = [name for name, of in module._buffers.items() if of is not None and of.is_meta]
            if empty:
                for name in empty:
                    module._buffers[name] = torch.zeros_like(module._buffers[name], device=self.device)
                self.model._init_weights(module)


def quantize_model(model_or_dir: nn.Module | str | os.PathLike, spec: _core.QuantSpec | str | None = "nf4", *,
                   device: torch.device | str | None = None, include: Sequence[str] | str | None = None,
                   exclude: Sequence[str] | str | None = None, dtype: torch.dtype | None = None, lora_rank: int = 0,
                   lora_alpha: float | None = None, storage_dtype: torch.dtype = torch.uint8,
                   progress: bool | None = None) -> tuple[nn.Module, ModelReport]:
    """A model with quantized linear layers, and the report of replace_linear.

    Of a module: in place, layer by layer, each on `device` (None: its own), where the model is moved in the end. Of a
    directory with a model of transformers, or of a model in the cache of the hub ("org/name", which is not
    downloaded): weights go from the file into packed ones in blocks of rows, so that little more memory is needed than
    that of the result. Weights that the file has quantized, in any layout, are taken exactly as they are, whatever
    `spec`; None: no other weight is quantized. dtype: of what stays dense; None: that of config.json. device: None:
    the CPU. progress: of a directory: a bar where it takes long; None: where stderr is a terminal. Raises ValueError
    for weights that are missing or do not fit.
    """
    options = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "storage_dtype": storage_dtype}
    if isinstance(model_or_dir, nn.Module):
        report = replace_linear(model_or_dir, spec, include=include, exclude=exclude, device=device, **options)
        model_or_dir.to(device=device, dtype=dtype)
        return model_or_dir, report
    path = _snapshot(os.fspath(model_or_dir))
    model = _empty_model(path, dtype)
    of = None if spec is None else spec_of(str(_core.QuantSpec.parse(str(spec))))
    loader = _Loader(model, path, of, torch.device("cpu" if device is None else device), options,
                     dense_reasons(model, include, exclude))
    bar = Bar() if (sys.stderr.isatty() if progress is None else progress) else None
    try:
        return model, loader.run(bar or (lambda *_: None))
    finally:
        if bar is not None:
            bar.close()
