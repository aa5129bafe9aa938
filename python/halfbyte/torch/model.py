"""Whole models: which layers are quantized, and models from checkpoints."""

import contextlib
import json
import os
import re
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
from ._ops_weight import double_quantize, expand_scales, pack, quantize_packed, spec_of, without_double_quant
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
_NOT_PACKED = "which have no packed form together"


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
    if chosen:
        _say_quantized(model)
    return ModelReport([layer if layer.reason else layer._replace(
        spec=spec, num_bytes=_bytes_of(model.get_parameter(layer.name))) for layer in layers])


def _say_quantized(model: nn.Module) -> None:
    """Some models of transformers, such as Jamba, multiply by the weight of a layer unless their config says this."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "to_dict"):
            module.config._is_quantized = True


def _warn_of_dense(layers: Sequence[LayerReport]) -> None:
    dense = [layer for layer in layers if layer.reason.endswith((_NO_LAYER, _NOT_PACKED))]
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


class _Source(NamedTuple):
    """What a tensor of a model is made of in a checkpoint."""

    weights: list[list]  # the whole, as [[weight]]; or of each projection those of the experts, one after the other
    operations: tuple = ()  # by which transformers makes one tensor of several

    @property
    def all(self) -> list:
        return [weight for of_projection in self.weights for weight in of_projection]

    @property
    def is_stacked(self) -> bool:
        """Whether each weight is of all experts."""
        return all(len(weight.shape) == 3 for weight in self.all)

    @property
    def is_joined_by_rows(self) -> bool:
        """Whether experts are stacked, and then the rows of projections follow each other."""
        return all((type(operation).__name__, getattr(operation, "dim", None)) in (("MergeModulelist", 0), ("Concatenate", 1))
                   for operation in self.operations)


def _natural(name: str) -> list:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _renames(model: nn.Module) -> Callable[[str], tuple[str, object, str | None]]:
    """Of the name of a weight in a checkpoint: that of the tensor of the model, and what transformers makes it by of
    several (None: it is the tensor), with the pattern of that weight."""
    names, prefix = model.state_dict(), model.base_model_prefix

    def by_prefix(name: str) -> tuple[str, object, str | None]:
        found = (other for other in (name, name.removeprefix(prefix + "."), f"{prefix}.{name}") if other in names)
        return next(found, name), None, None

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4 names its modules as files do
        return by_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [of for of in mapping if isinstance(of, WeightRenaming)]
    converters = [of for of in mapping if isinstance(of, WeightConverter)]
    by_pattern = {pattern: of for of in converters for pattern in of.source_patterns}

    def by_transformers(name: str) -> tuple[str, object, str | None]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if renamed not in names:
            return by_prefix(name)
        return renamed, by_pattern.get(pattern), pattern

    return by_transformers


def _parts_of(q: object, num: int) -> list[tuple[Tensor, ...]]:
    """What pack takes of each of the `num` weights of which q has the rows: codes, scales (not quantized ones), zero
    points, biases, global scale."""
    codes, scales = as_tensor(q.codes), as_tensor(q.scales)
    if q.spec.double_quant:
        scales = expand_scales(scales, *(as_tensor(of) for of in (q.scales_absmax, q.scales_map, q.scales_offset)))
    rest = [scales.new_empty(0) if of is None else as_tensor(of) for of in (q.zeros, q.biases, q.global_scale)]
    split = [[part] * num if part.numel() <= 1 else part.chunk(num) for part in (codes, scales, *rest)]
    return list(zip(*split))


class _Loader:
    """Fills a model on the meta device from a checkpoint."""

    def __init__(self, model: nn.Module, path: str, spec: _core.QuantSpec | None, device: torch.device,
                 options: dict, reasons: dict[str, str]) -> None:
        self.model, self.path, self.spec, self.device, self.options = model, path, spec, device, options
        self.reasons = reasons
        self.checkpoint = _core.Checkpoint(path)
        self.stored = self.checkpoint.tensors
        self.sources = self._find_sources()
        self.files: dict = {}
        self.layers: list[LayerReport] = []

    def _find_sources(self) -> dict[str, _Source]:
        renamed, found = _renames(self.model), {}
        for weight in sorted(self.checkpoint.weights, key=lambda weight: _natural(weight.name)):
            # As mlx-lm names those of all experts in one tensor.
            name, converter, pattern = renamed(weight.name.replace(".switch_mlp.", ".experts.0."))
            if converter is None:
                found[name] = _Source([[weight]])
                continue
            patterns = converter.source_patterns
            source = found.setdefault(name, _Source([[] for _ in patterns], tuple(converter.operations)))
            source.weights[patterns.index(pattern)].append(weight)
        return found

    def run(self, progress: Callable) -> ModelReport:
        jobs = list(self._jobs())
        done, total = 0, sum(weight.num_bytes for weights, _, _ in jobs for weight in weights)
        with contextlib.ExitStack() as self.open_files:
            for i, (weights, read, finish) in enumerate(jobs):
                if i + 1 < len(jobs):
                    self._announce(jobs[i + 1][0])
                finish(read())
                done += sum(weight.num_bytes for weight in weights)
                progress("load", done, total)
        self._fill_buffers()
        self.model.tie_weights()
        left = [name for name, of in [*self.model.named_parameters(), *self.model.named_buffers()] if of.is_meta]
        if left:
            raise ValueError(f"{self.path}: the checkpoint has no weight {left[0]}"
                             + (f", nor {len(left) - 1} more" if len(left) > 1 else "")
                             + f", which {type(self.model).__name__} has")
        _warn_of_dense(self.layers)
        if any(layer.spec is not None for layer in self.layers):
            _say_quantized(self.model)
        return ModelReport(self.layers)

    def _announce(self, weights: list) -> None:
        """Lets the system read the parts of weights from the disk while others are computed."""
        if not hasattr(os, "posix_fadvise"):
            return
        for part in (part for weight in weights for part in weight.parts):
            stored = self.stored[part]
            if stored.file not in self.files:
                file = open(os.path.join(self.path, stored.file), "rb", buffering=0)
                self.files[stored.file] = self.open_files.enter_context(file)
            os.posix_fadvise(self.files[stored.file].fileno(), stored.offset, stored.num_bytes, os.POSIX_FADV_WILLNEED)

    def _jobs(self) -> Iterator[tuple[list, Callable, Callable]]:
        """Of tensors of the model: their weights in the files, a function that reads, and one that takes what was read."""
        for path, module in list(self.model.named_modules()):
            if _is_experts(module):
                yield from self._jobs_of_experts(path, module)
                continue
            name = path + ".weight"
            is_linear = type(module) is nn.Linear or is_turned(module)
            source = self.sources.get(name) if is_linear else None
            weight = source.weights[0][0] if source is not None and not source.operations else None
            if weight is not None and weight.layout is not None and self._is_packable(weight, weight.shape):
                yield ([weight], lambda weight=weight: self._load(weight),
                       lambda q, path=path, module=module: self._put_quantized(path, module, q))
            elif weight is not None and weight.layout is None and self.spec is not None and not self.reasons[name]:
                yield ([weight], lambda weight=weight, module=module: self._quantize(weight, module),
                       lambda packed, path=path, module=module: self._put_packed(path, module, packed))
            else:
                yield from self._dense_jobs(path, module, module._parameters)
                continue
            yield from self._dense_jobs(path, module, {"bias": module.bias})
        for path, module in list(self.model.named_modules()):
            kept = {name: of for name, of in module._buffers.items() if name not in module._non_persistent_buffers_set}
            yield from self._dense_jobs(path, module, kept)

    def _dense_jobs(self, path: str, module: nn.Module, tensors: dict,
                    reason: str = "") -> Iterator[tuple[list, Callable, Callable]]:
        for own, tensor in tensors.items():
            name = f"{path}.{own}" if path else own
            source = self.sources.get(name) if tensor is not None else None
            if source is None or not source.is_joined_by_rows:  # tied to another, or missing: said at the end
                continue
            yield (source.all, lambda source=source, tensor=tensor: self._read_dense(source, tensor),
                   lambda read, path=path, own=own, name=name: self._put_dense(path, own, name, read, reason))

    # Experts: those of a layer have one spec, and are quantized together or not at all

    def _jobs_of_experts(self, path: str, module: nn.Module) -> Iterator[tuple[list, Callable, Callable]]:
        sources = {name: self.sources.get(f"{path}.{name}") for name in _weights_of(module)}
        reason = self.reasons[f"{path}.down_proj"]
        of = [] if None in sources.values() else [weight for source in sources.values() for weight in source.all]
        if of and all(weight.layout is None for weight in of):
            spec, read = None if reason else self.spec, self._quantize_experts
        else:
            spec, read = self._spec_of_experts(module, of), self._load_experts
            reason = "" if spec is not None or not of else f"of {type(module).__name__}, {_NOT_PACKED}"
        joined = all(source is not None and source.is_joined_by_rows for source in sources.values())
        if spec is None or not joined:
            yield from self._dense_jobs(path, module, module._parameters, reason)
            return
        dense = {name: module.get_parameter(name) for name in sources}
        experts = quantized_module(module, spec, storage_dtype=self.options["storage_dtype"])
        put_module(self.model, path, experts)
        for name, source in sources.items():
            yield (source.all, lambda read=read, source=source, name=name: read(experts, module, source, name),
                   lambda packed, name=name: self._put_experts(path, experts, name, dense[name], packed))
        biases = {name + "_bias": experts.get_parameter(name + "_bias") for name in sources if module.has_bias}
        yield from self._dense_jobs(path, experts, biases)

    def _spec_of_experts(self, module: nn.Module, weights: list) -> _core.QuantSpec | None:
        """The spec that quantized weights have as packed ones; None: they have none in common."""
        turned = is_turned(module)
        specs = {str(without_double_quant(weight.spec)) for weight in weights if weight.layout is not None}
        fits = len(specs) == 1 and all(
            weight.layout is not None and turned == (weight.layout == "gpt-oss") and
            self._is_packable(weight, weight.shape[-2:] if not turned else weight.shape[:-3:-1]) for weight in weights)
        return spec_of(specs.pop()) if fits else None

    def _load_experts(self, experts: QuantizedExperts, _: nn.Module, source: _Source, name: str) -> Tensor:
        """What the file has quantized: codes and scales as they are, the rows of projections one below the other."""
        n, k = experts.extents[name]
        spec, num = experts.spec, experts.num_experts
        rows, of_projections = 0, []
        for weights in source.weights:
            loaded = [self._load(weight) for weight in weights]
            of_each = num // len(loaded)
            all_rows = sum(q.rows for q in loaded)
            if {q.shape[-1] for q in loaded} != {k} or all_rows % num != 0 or of_each * len(loaded) != num:
                raise ValueError(f"weight {weights[0].name}: {len(loaded)} of {list(loaded[0].shape)} do not make those of "
                                 f"{num} experts {[n, k]}")
            own_rows = all_rows // num
            if spec.granularity == "flat" and own_rows * k % spec.group_size != 0:
                raise ValueError(f"weight {weights[0].name}: groups of {spec.group_size} cross rows of the next projection")
            rows += own_rows
            of_projections.append([parts for q in loaded for parts in _parts_of(q, of_each)])
        if rows != n:
            raise ValueError(f"weight {source.all[0].name}: {rows} rows in all do not make those of {[n, k]}")
        packed = [self._pack_joined(parts, spec, n, k, source) for parts in zip(*of_projections)]
        return torch.stack(packed)

    @staticmethod
    def _pack_joined(parts: Sequence[tuple[Tensor, ...]], spec: _core.QuantSpec, n: int, k: int,
                     source: _Source) -> Tensor:
        def common(values: Sequence[Tensor], what: str) -> Tensor:
            if any(not torch.equal(value, values[0]) for value in values):
                raise ValueError(f"{' and '.join(of[0].name for of in source.weights)} must have one {what}, which they "
                                 "share as rows of one weight; halfbyte repair makes those of nvfp4 equal")
            return values[0]

        codes, *of_groups, global_scales = zip(*parts)
        if spec.granularity == "tensor":
            joined = [common(of, "scale and zero point") for of in of_groups]
        else:
            joined = [torch.cat(of) for of in of_groups]
        nested = [common(global_scales, "global scale").reshape(1)] if spec.has_global_scale else []
        return pack(torch.cat(codes), *joined, nested, str(spec), n, k)

    def _quantize_experts(self, experts: QuantizedExperts, module: nn.Module, source: _Source, name: str) -> Tensor:
        if source.is_stacked:
            return experts.packed_of(name, _turned(module, self._read_stacked(source, experts.dtype)))
        return torch.stack([quantize_packed(torch.cat([self._read(weight, experts.dtype) for weight in of_expert]),
                                            str(self.spec)) for of_expert in zip(*source.weights)])

    def _put_experts(self, path: str, experts: QuantizedExperts, name: str, dense: Tensor, packed: Tensor) -> None:
        packed = packed.view(self.options["storage_dtype"])
        if packed.shape != experts.get_parameter(name).shape:
            raise ValueError(f"weight {path}.{name} must be of {experts.num_experts} experts, got {len(packed)}")
        experts.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        if self.options["lora_rank"] > 0 and not any(experts.get_parameter(of).is_meta for of in experts.packed_names):
            experts.add_adapter(self.options["lora_rank"], self.options["lora_alpha"])
        self.layers.append(LayerReport(f"{path}.{name}", tuple(dense.shape), experts.spec, "", _bytes_of(dense),
                                       _bytes_of(packed)))

    # Reading

    def _is_packable(self, weight, shape: Sequence[int]) -> bool:
        try:
            weight.spec.packed_bytes(*shape)
        except ValueError:
            return False
        return weight.note != "act-order"

    def _load(self, weight) -> object:
        return self.checkpoint.load_weight(weight.name, self.device, framework="torch")

    def _quantize(self, weight, module: nn.Module) -> Packed:
        n, k = _extents(module)
        if is_turned(module):
            dense = self._read_dense(_Source([[weight]]), module.weight)
            return Packed(quantize_packed(dense.t().contiguous(), str(self.spec)), self.spec, n, k)
        spec = without_double_quant(self.spec)
        q = _core._quantize_weight(self.checkpoint, weight.name, spec, _core.Encoding(), self.device, 0)
        if not self.spec.double_quant:
            return Packed(as_tensor(q.pack().data), self.spec, n, k)
        codes, zeros = as_tensor(q.codes), as_tensor(q.codes).new_empty(0)
        scales, nested = double_quantize(as_tensor(q.scales))
        biases = zeros.new_empty(0, dtype=torch.float32)
        return Packed(pack(codes, scales, zeros, biases, nested, str(self.spec), n, k), self.spec, n, k)

    def _read(self, weight, dtype: torch.dtype) -> Tensor:
        word = WORDS.get(dtype)
        if word is None:
            data = as_tensor(self.checkpoint.read(self.stored[weight.parts[0]])).view(dtype)
            return data.reshape(weight.shape).to(self.device)
        return as_tensor(self.checkpoint.load_dense(weight.name, word, device=self.device, framework="torch"))

    def _read_stacked(self, source: _Source, dtype: torch.dtype) -> Tensor:
        return torch.cat([self._read(weight, dtype) for weight in source.all], dim=-2)

    def _read_dense(self, source: _Source, like: Tensor) -> Tensor:
        if not source.operations:
            read = self._read(source.all[0], like.dtype)
        elif source.is_stacked:
            read = self._read_stacked(source, like.dtype)
        else:
            read = torch.stack([torch.cat([self._read(weight, like.dtype) for weight in of_expert])
                                for of_expert in zip(*source.weights)])
        if list(read.shape) != list(like.shape):
            raise ValueError(f"weight {source.all[0].name} must have the shape {list(like.shape)}, got {list(read.shape)}")
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

    def _put_dense(self, path: str, own: str, name: str, read: Tensor, reason: str) -> None:
        module = self.model.get_submodule(path)
        if own in module._buffers:
            module._buffers[own] = read
            return
        like = module._parameters[own]
        module._parameters[own] = nn.Parameter(read, requires_grad=like.requires_grad)
        if read.dim() >= 2 and not own.endswith("bias"):
            reason = reason or self.reasons.get(name) or (
                "dense in the checkpoint" if self.spec is None else "no packed form of it")
            self.layers.append(LayerReport(name, tuple(read.shape), None, reason, _bytes_of(read), _bytes_of(read)))

    def _fill_buffers(self) -> None:
        """Buffers that are computed and not stored, as the frequencies of rotary embeddings."""
        for module in self.model.modules():
            empty = [name for name, of in module._buffers.items() if of is not None and of.is_meta]
            if not empty:
                continue
            for name in empty:
                module._buffers[name] = torch.zeros_like(module._buffers[name], device=self.device)
            # What was read must be out of its reach: it would give an embedding new random weights.
            parameters = {name: of for name, of in module._parameters.items() if of is not None}
            buffers = {name: of for name, of in module._buffers.items() if of is not None and name not in empty}
            for name, of in parameters.items():
                module._parameters[name] = nn.Parameter(torch.empty_like(of, device="meta"), requires_grad=False)
            for name, of in buffers.items():
                module._buffers[name] = torch.empty_like(of, device="meta")
            try:
                self.model._init_weights(module)
            finally:
                module._parameters.update(parameters)
                module._buffers.update(buffers)


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
    `spec`, experts among them; None: no other weight is quantized. dtype: of what stays dense; None: that of
    config.json. device: None: the CPU. progress: of a directory: a bar where it takes long; None: where stderr is a
    terminal. Raises ValueError for weights that are missing or do not fit.
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
