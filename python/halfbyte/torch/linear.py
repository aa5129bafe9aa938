"""Linear layers over packed weights."""

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _core
from .._values import QuantizationError, relative_error
from . import _fast, _layouts
from ._fast import linear
from ._library import FLOATS
from ._ops_weight import (_sum_groups, aligned, dequantize_packed, group_length, nested_of, quantize_packed, scale_dtype_of, shape_of,
                          spec_of, unpack)


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # one question for all kinds of devices


class MergeReport(NamedTuple):
    """What merge_adapter or add_to_weight did.

    into: "biases" (the codes stay) or "codes" (the weight was quantized again).
    relative_rmse: of the new weight against the old one with the adapter added: what the merge lost.
    """

    into: str
    relative_rmse: float


def autocast(x: Tensor) -> Tensor:
    kind = "cuda" if x.is_cuda else "cpu"
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


def relative_rmse(of: Tensor, reference: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(reference))
    return float(torch.linalg.vector_norm(of - reference)) / norm if norm > 0 else 0.0


def refuse_cast(weight: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Raises TypeError if fn, which nn.Module._apply applies, casts what a packed weight is stored as."""
    storage = weight.dtype
    if storage != torch.uint8 and fn(torch.empty(0, dtype=storage, device=weight.device)).dtype != storage:
        raise TypeError(f"a cast to another dtype would destroy the packed weight, which is stored as {storage}: "
                        "cast x instead, or make the layer with storage_dtype=torch.uint8")


class QuantizedLinear(nn.Linear):
    """y = x W^T + bias (+ an adapter), with W [out_features, in_features] quantized: the base of Linear4bit,
    LinearAffine and LinearInt.

    weight: the packed bytes of W, a parameter without gradient, u8 (or `storage_dtype`, whose bytes they are).
    bias: [out_features] or None; a gradient flows to it, as to x. The gradient of x is the product with the same
    packed weight: W is never dense. x: f32, f16 or bf16, of any leading axes; bias and adapter are cast to its dtype.
    lora_a [lora_rank, in_features], lora_b [out_features, lora_rank]: parameters of an adapter, which adds
    lora_alpha / lora_rank * (x lora_a^T) lora_b^T within the product.

        >>> import torch, halfbyte.torch
        >>> dense = torch.nn.Linear(128, 64)
        >>> layer = halfbyte.torch.Linear4bit.from_linear(dense, "nf4")
        >>> layer
        Linear4bit(in_features=128, out_features=64, bias=True, spec=nf4, 4.50 bits per weight)
        >>> layer(torch.ones(2, 128)).shape
        torch.Size([2, 64])
    """

    _kinds: tuple[str, ...] = ("nf4", "fp4", "lut4", "nvfp4", "mxfp4", "int", "affine", "fp8")  # what the names of its formats begin with
    _default_spec = "nf4"
    packed_names = ("weight",)  # the parameters that hold packed weights
    part: object | None = None  # of a larger layer, which this one is: parallel.Part

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *,
                 spec: _core.QuantSpec | str | None = None, lora_rank: int = 0, lora_alpha: float | None = None,
                 storage_dtype: torch.dtype = torch.uint8, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None) -> None:
        """spec: of W. dtype: of bias and adapter, and of dequantized(). storage_dtype: a floating dtype lets FSDP2 of
        torch < 2.13 shard the weight. Raises ValueError where the class does not hold the format, and
        where there is no packed form."""
        nn.Module.__init__(self)
        spec = spec_of(str(_core.QuantSpec.parse(str(self._default_spec if spec is None else spec))))
        if not spec.format.startswith(self._kinds):
            raise ValueError(f"{type(self).__name__} holds {', '.join(kind + '*' for kind in self._kinds)}, not "
                             f"{spec.format}")
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self._shape = shape_of(str(spec), out_features, in_features)
        self._error: QuantizationError | None = None
        num_bytes = spec.packed_bytes(out_features, in_features)
        self.weight = nn.Parameter(
            torch.empty(num_bytes // storage_dtype.itemsize, dtype=storage_dtype, device=device), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=self.dtype, device=device))
        else:
            self.register_parameter("bias", None)
        self.lora_rank, self.lora_alpha = 0, 0.0
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        if lora_rank > 0:
            self.add_adapter(lora_rank, lora_alpha)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    # ---- Weights

    @property
    def weight_spec(self) -> Tensor:
        """What the bytes of the weight are, as a JSON text in a u8 tensor: a key of state_dict()."""
        shape = [self.out_features, self.in_features] if self.part is None else self.part.shape
        text = json.dumps({"spec": str(self.spec), "shape": shape, "packed_version": _core._packed_version})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    @property
    def bits_per_weight(self) -> float:
        size = self.in_features * self.out_features
        return 8 * self.spec.packed_bytes(self.out_features, self.in_features) / size if size else 0.0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial values of nn.Linear; the weight is quantized."""
        dense = torch.empty(self.out_features, self.in_features, device=self.weight.device)
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        self.set_weight(dense.uniform_(-bound, bound))
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)
        if self.lora_a is not None:
            self._reset_adapter()

    @torch.no_grad()
    def set_weight(self, dense: Tensor, *, scale_rule: str | None = None, code_scale: str = "stored") -> None:
        """Quantizes a dense weight [out_features, in_features] into this layer."""
        if list(dense.shape) != [self.out_features, self.in_features]:
            raise ValueError(f"the weight must have the shape [{self.out_features}, {self.in_features}], got "
                             f"{list(dense.shape)}")
        dense = dense.detach().to(self.weight.device)
        self._set_packed(quantize_packed(dense, str(self.spec), scale_rule, code_scale))

    def packed_of(self, name: str, dense: Tensor) -> Tensor:
        """What the parameter `name`, "weight", holds of a dense weight [out_features, in_features]."""
        self._check_shape(list(dense.shape))
        return quantize_packed(dense.detach(), str(self.spec)).view(self.weight.dtype)

    @torch.no_grad()
    def cut(self, part: object) -> None:
        """Becomes a part of itself (parallel.py)."""
        of_part = part.cut_weight(self.quantized())
        self.part, self.spec = part, spec_of(str(of_part.spec))
        self.out_features, self.in_features = of_part.shape
        self._shape = shape_of(str(self.spec), self.out_features, self.in_features)
        self._set_packed(as_tensor(of_part.pack().data))
        if self.bias is not None:
            self.bias = nn.Parameter(part.cut_bias(self.bias.detach()), requires_grad=self.bias.requires_grad)

    def _set_packed(self, data: Tensor) -> None:
        """Takes the bytes without a copy, where they are on the device of the layer or that is meta."""
        storage = self.weight.dtype
        data = data.reshape(-1).view(torch.uint8).view(storage)
        if self.weight.device.type != "meta":
            data = data.to(self.weight.device)
        self.weight = nn.Parameter(data, requires_grad=False)
        self._error = None

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """W, dense: [out_features, in_features] of `dtype`; None: that of the layer. Without the adapter."""
        return dequantize_packed(self.weight.detach(), str(self.spec), self.out_features, self.in_features,
                                 self.dtype if dtype is None else dtype)

    def quantized(self) -> _core.QuantizedTensor:
        """The weight as a halfbyte.QuantizedTensor, a copy on its device."""
        data = self.weight.detach().view(torch.uint8)
        return _core.PackedTensor.of(self.spec, self.out_features, self.in_features, data).unpack()

    @torch.no_grad()
    def error(self, dense: Tensor) -> QuantizationError:
        """The error of W against a dense weight [out_features, in_features], in f64; repr shows it from then on."""
        self._check_shape(list(dense.shape))
        dense = dense.detach().double()
        difference = (self.dequantized(torch.float32).to(dense.device).double() - dense).flatten()
        largest = int(difference.abs().argmax()) if difference.numel() else 0
        error, size = float(difference.square().sum()), float(dense.square().sum())
        self._error = QuantizationError(float(difference[largest].abs()) if difference.numel() else 0.0, largest,
                                        *relative_error(error, size))
        return self._error

    # ---- Adapter

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.lora_rank if self.lora_rank else 0.0

    def add_adapter(self, rank: int, alpha: float | None = None) -> None:
        """A new adapter, which adds nothing yet: lora_b is 0. alpha: None: as rank."""
        if rank <= 0:
            raise ValueError(f"the rank of an adapter must be positive, got {rank}")
        if self.part is not None:
            raise ValueError("a layer that is cut over devices has no adapter of its own")
        where = {"dtype": self.dtype, "device": self.weight.device}
        self.lora_rank, self.lora_alpha = rank, float(rank if alpha is None else alpha)
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features, **where))
        self.lora_b = nn.Parameter(torch.empty(self.out_features, rank, **where))
        if self.weight.device.type != "meta":
            self._reset_adapter()

    @torch.no_grad()
    def _reset_adapter(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.lora_b.zero_()

    def merge_adapter(self) -> MergeReport:
        """Adds the adapter to the weight, as add_to_weight does, and removes it."""
        if self.lora_a is None:
            raise ValueError("the layer has no adapter")
        report = self.add_to_weight(self.scaling * (self.lora_b.detach().float() @ self.lora_a.detach().float()))
        self.lora_a = self.lora_b = None
        self.lora_rank, self.lora_alpha = 0, 0.0
        return report

    @torch.no_grad()
    def add_to_weight(self, change: Tensor) -> MergeReport:
        """W += change, f32 [out_features, in_features]. Of an affine format, a change that is constant within groups
        goes into the biases, and the codes stay; by any other the weight is quantized again."""
        self._check_shape(list(change.shape))
        exact = self.dequantized(torch.float32) + change
        merged = self._merged_biases(change)
        into = "codes" if merged is None else "biases"
        self._set_packed(quantize_packed(exact, str(self.spec)) if merged is None else merged)
        return MergeReport(into, relative_rmse(self.dequantized(torch.float32), exact))

    def _merged_biases(self, change: Tensor) -> Tensor | None:
        """The packed weight with `change` in its biases; None if it is not constant within groups."""
        if not self.spec.has_biases:
            return None
        n, k = change.shape
        codes, scales, zeros, biases, *nested = unpack(self.weight, str(self.spec), n, k)
        lengths = _sum_groups(torch.ones_like(change), self.spec, biases.shape)
        means = _sum_groups(change.double(), self.spec, biases.shape) / lengths
        width = n * k if self.spec.granularity in ("flat", "tensor") else k
        length = group_length(self.spec, n, k)
        spread = means.float().reshape(-1, -(-width // length)).repeat_interleave(length, 1)[:, :width].reshape(n, k)
        if not torch.allclose(spread, change, rtol=1e-6, atol=1e-6 * float(change.abs().max())):
            return None
        biases = (biases.double() + means).to(scale_dtype_of(self.spec))
        return torch.ops.halfbyte.pack(codes, scales, zeros, biases, nested_of(self.spec, *nested),
                                       str(self.spec), n, k)

    # ---- Forward

    def forward(self, x: Tensor) -> Tensor:
        if self.part is not None:
            return self.part.forward(self, x)
        parameters = self._parameters
        bias, a = parameters["bias"], parameters["lora_a"]
        if _is_any_autocast_enabled():
            x = autocast(x)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if a is None:
            return linear(x, parameters["weight"], bias, self._shape)
        return _fast.linear_lora(x, parameters["weight"], bias, a.to(x.dtype), parameters["lora_b"].to(x.dtype),
                                 self.scaling, self._shape)

    def extra_repr(self) -> str:
        adapter = f", lora_rank={self.lora_rank}" if self.lora_rank else ""
        error = f", relative RMSE {self._error.relative_rmse:.3g}" if self._error else ""
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"spec={self.spec}, {self.bits_per_weight:.2f} bits per weight{adapter}{error}")

    # ---- Moving, storing

    def _apply(self, fn, recurse: bool = True):
        refuse_cast(self.weight, fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.part is not None:
            self.part.put_whole(self, destination, prefix)
        destination[prefix + "weight_spec"] = self.weight_spec

    def bitsandbytes_state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors under which bitsandbytes stores this layer, without the adapter. Raises ValueError for formats
        that it does not have."""
        tensors = _layouts.to_bitsandbytes_keys(self.weight.detach(), self.spec, self.out_features, self.in_features,
                                                self.dtype)
        if self.bias is not None:
            tensors["bias"] = self.bias.detach()
        return {prefix + name: tensor for name, tensor in tensors.items()}

    def _load_from_state_dict(self, state_dict, prefix: str, local_metadata, strict: bool, missing_keys,
                              unexpected_keys, error_msgs) -> None:
        # Packed bytes, the keys of bitsandbytes, or a dense weight, which is quantized.
        key = prefix + "weight"
        self._error = None
        if self.part is not None:
            try:
                self.part.take_whole(self, state_dict, prefix)
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                return
        given, described = state_dict.get(key), state_dict.pop(prefix + "weight_spec", None)
        try:
            if described is not None:
                self.check_description(bytes(described.cpu().tolist()))
            elif key + ".absmax" in state_dict:
                names = [name for name in state_dict if name.startswith(key + ".")]
                tensors = {name.removeprefix(prefix): state_dict.pop(name) for name in names}
                state_dict[key] = self._stored(_layouts.from_bitsandbytes_keys({**tensors, "weight": given}))
            elif given is not None and given.dim() == 2 and given.is_floating_point():
                if given.device.type != "meta":
                    on_device = given if self.weight.device.type == "meta" else given.to(self.weight.device)
                    state_dict[key] = self.packed_of("weight", on_device)
            elif given is not None:
                missing_keys.append(prefix + "weight_spec")
            if key in state_dict:
                state_dict[key] = aligned(state_dict[key])
        except ValueError as error:
            error_msgs.append(f"{key}: {error}")
            state_dict[key] = self.weight.detach()  # reported once
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)

    def _check_shape(self, shape: list[int]) -> None:
        if shape != [self.out_features, self.in_features]:
            raise ValueError(f"the weight must have the shape [{self.out_features}, {self.in_features}], got {shape}")

    def check_description(self, text: bytes) -> None:
        """Raises ValueError if a weight_spec is not that of this layer."""
        described = json.loads(text)
        self._check_shape(described["shape"])
        if _core.QuantSpec.parse(described["spec"]) != self.spec:
            raise ValueError(f"the weight must have the spec {self.spec}, got {described['spec']}")
        if described["packed_version"] != _core._packed_version:
            raise ValueError(f"the packed form must have version {_core._packed_version}, got "
                             f"{described['packed_version']}")

    def _stored(self, packed: _layouts.Packed) -> Tensor:
        """The bytes of a weight that must be of the spec of this layer."""
        self._check_shape([packed.n, packed.k])
        if packed.spec != self.spec:
            raise ValueError(f"the weight must have the spec {self.spec}, got {packed.spec}")
        return packed.data.view(self.weight.dtype)

    # ---- From weights of any kind

    @classmethod
    def _class_of(cls, spec: _core.QuantSpec) -> type["QuantizedLinear"]:
        return linear_class(spec) if cls is QuantizedLinear else cls

    @classmethod
    def _of_packed(cls, packed: _layouts.Packed, bias: Tensor | None = None, dtype: torch.dtype | None = None,
                   **options) -> "QuantizedLinear":
        of = cls._class_of(packed.spec)
        layer = of(packed.k, packed.n, bias is not None, spec=packed.spec, device="meta",
                   dtype=bias.dtype if dtype is None and bias is not None else dtype, **options)
        layer._set_packed(packed.data)
        device = packed.data.device
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(device, layer.dtype), requires_grad=bias.requires_grad)
        if layer.lora_a is not None:
            layer.add_adapter(layer.lora_rank, layer.lora_alpha)
        return layer

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, spec: _core.QuantSpec | str | None = None, *,
                    scale_rule: str | None = None, code_scale: str = "stored",
                    device: torch.device | str | None = None, **options) -> "QuantizedLinear":
        """A dense layer, quantized on `device` (None: its own). The bias becomes that of the new layer. options:
        lora_rank, lora_alpha, storage_dtype. Raises ValueError for values that are not finite."""
        spec = spec_of(str(_core.QuantSpec.parse(str(cls._default_spec if spec is None else spec))))
        weight = linear.weight.detach()
        on_device = weight.to(weight.device if device is None else device)
        data = quantize_packed(on_device, str(spec), scale_rule, code_scale)
        layer = cls._of_packed(_layouts.Packed(data, spec, *weight.shape), linear.bias, weight.dtype, **options)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(cls, weight: object, bias: Tensor | None = None, *, device: torch.device | str | None = None,
                       dtype: torch.dtype | None = None, **options) -> "QuantizedLinear":
        """Of a halfbyte.QuantizedTensor of two axes. device: None: that of the weight."""
        n, k = weight.shape
        data = as_tensor(weight.pack().data)
        data = data.to(data.device if device is None else device)
        return cls._of_packed(_layouts.Packed(data, weight.spec, n, k), bias, dtype, **options)

    @classmethod
    def from_tensors(cls, layout: str, tensors: Mapping[str, Tensor], *, bits: int = 4, group_size: int | None = None,
                     version: int = 1, dtype: torch.dtype | None = None, **options) -> "QuantizedLinear":
        """Of the tensors of a layer of another tool, exactly, under the names that they have in its files:

        bitsandbytes        weight, absmax, quant_map, quant_state.bitsandbytes__*, nested_absmax, nested_quant_map
        compressed-tensors  weight_packed, weight_scale, weight_shape, weight_zero_point
        mlx                 weight, scales, biases
        gptq                qweight, qzeros, scales, g_idx; `version` 1 or 2
        awq                 qweight, qzeros, scales

        and bias. bits, group_size: what the tensors do not say; None: groups of one size. dtype: of the layer; None:
        that of the bias, or the default. Raises ValueError naming what does not fit."""
        packed = _layouts.from_tensors(layout, tensors, _layouts.Grid(bits, group_size, version))
        return cls._of_packed(packed, tensors.get("bias"), dtype, **options)

    @classmethod
    def from_bitsandbytes(cls, source: nn.Module | Tensor, *, dtype: torch.dtype | None = None,
                          **options) -> "QuantizedLinear":
        """Of a Linear4bit or a Params4bit of bitsandbytes that is quantized, exactly."""
        weight, bias = (source.weight, source.bias) if isinstance(source, nn.Module) else (source, None)
        state = getattr(weight, "quant_state", None)
        if state is None:
            raise ValueError("bitsandbytes: the weight is not quantized yet: move it to a device first")
        packed = _layouts.from_bitsandbytes_state(state, weight.detach())
        return cls._of_packed(packed, bias, state.dtype if dtype is None else dtype, **options)

    @classmethod
    def from_checkpoint(cls, checkpoint: object, name: str, *, device: torch.device | str = "cpu",
                        dtype: torch.dtype | None = None, **options) -> "QuantizedLinear":
        """A quantized weight of a checkpoint in any layout, exactly, with the bias beside it. checkpoint: a
        halfbyte.Checkpoint or a path. name: of the weight or of its module. dtype: of the layer; None: that which
        the weight had before."""
        from .. import Checkpoint

        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        module = name.removesuffix(".weight")
        weight = checkpoint.load_weight(module + ".weight", device=device)
        bias = None
        if any(stored.name == module + ".bias" for stored in checkpoint.weights):
            bias = as_tensor(checkpoint.decode(module + ".bias"))
        if dtype is None and weight.dtype is not None:
            dtype = FLOATS[weight.dtype]
        return cls.from_quantized(weight, bias, device=device, dtype=dtype, **options)


class Linear4bit(QuantizedLinear):
    """A QuantizedLinear of a table format: nf4, fp4, fp4_e2m1, lut4, nvfp4, mxfp4."""

    _kinds = ("nf4", "fp4", "lut4", "nvfp4", "mxfp4")


class LinearAffine(QuantizedLinear):
    """A QuantizedLinear of an affine format: affine4, affine8. W = code * scale + bias of the group."""

    _kinds = ("affine",)
    _default_spec = "affine4"


class LinearInt(QuantizedLinear):
    """A QuantizedLinear of an integer format: int4, int8, with or without zero points."""

    _kinds = ("int",)
    _default_spec = "int4"


class LinearFp8(QuantizedLinear):
    """A QuantizedLinear of fp8: a code is a number of E4M3. Its scales are of rows, or of groups."""

    _kinds = ("fp8",)
    _default_spec = "fp8,granularity=channel"


def linear_class(spec: _core.QuantSpec | str) -> type[QuantizedLinear]:
    """The class of layers of a spec."""
    name = _core.QuantSpec.parse(str(spec)).format
    return next(of for of in (Linear4bit, LinearAffine, LinearInt, LinearFp8) if name.startswith(of._kinds))


def as_tensor(array: object) -> Tensor:
    """An array of halfbyte as a tensor of the same memory."""
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array) if type(array).__module__ == "numpy" else torch.from_dlpack(array)
