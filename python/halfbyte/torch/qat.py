"""Quantization-aware training: layers that compute with the values that their quantized weights will have.

    prepare_qat(model, "int4,group_size=32", activations="int8,granularity=tensor")
    ...                     # train
    convert(model)          # the stored weights decode to exactly those of the last forward

A weight learns by straight-through gradients, or with `learn_scale` also its scales (LSQ, arXiv:1902.08153) and zero
points (LSQ+, arXiv:2004.09576).
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core import FakeQuantizeDescriptor, ObserverConfig, QuantizedTensor, QuantSpec
from ._layouts import book_of
from ._library import WORDS
from ._ops_training import BLOCK_FLOATS, compute_qparams, fake_quantize, observe, quantize_linear
from ._ops_weight import dequantize, quantize, scale_dtype_of, spec_of
from .linear import QuantizedLinear, as_tensor
from .model import dense_reasons

_TABLES = ("nf4", "fp4", "fp4_e2m1", "lut4", *BLOCK_FLOATS)


def _in_backward() -> bool:
    """Whether activation checkpointing runs a forward again: it must see what the first one saw."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class FakeQuantize(nn.Module):
    """Rounds a tensor to the values that a quantized tensor of `spec` could hold; gradients pass straight through.

    spec: an integer or table format, with granularity "tensor", "channel" or "group", and scale_dtype. axis: of
    channels and groups; None: 0 of channels, -1 of groups, as weights have them. shape: of what is rounded; needed to
    keep scales of channels or groups. Where scales come from:

    - by default from each tensor itself;
    - observer="min-max", "moving-average", "percentile", "mse" or an ObserverConfig: from what was seen in training
      mode while `observer_enabled`, which is kept in the buffers min, max and num_batches (integers only);
    - learn_scale: a parameter `scale`, with learn_zero_point also `zero_point` (asymmetric specs), which the first
      tensor initializes, by the observer or else the least error. gradient_scale: None: 1 / sqrt(n * q_max) as in LSQ,
      where n elements share a scale. A learned scale below `eps` is used as `eps`.

    Of "nvfp4" and "mxfp4" scales are always those of each tensor, the global scale of nvfp4 too, and gradients pass
    everywhere.

    `fake_quant_enabled = False` returns what it is given. f32, f64, f16 and bf16.

    >>> rounded = FakeQuantize("int4,granularity=tensor")
    >>> rounded(torch.tensor([-7.0, 0.4, 0.6]))
    tensor([-7.,  0.,  1.])
    """

    def __init__(self, spec: QuantSpec | str = "int8,granularity=tensor", *, shape: Sequence[int] | None = None,
                 axis: int | None = None, observer: ObserverConfig | str | None = None, learn_scale: bool = False,
                 learn_zero_point: bool = False, gradient_scale: float | None = None, eps: float = 2.0**-23,
                 device: torch.device | str | None = None):
        super().__init__()
        self.spec = spec = QuantSpec.parse(spec) if isinstance(spec, str) else spec
        if spec.has_biases or spec.double_quant or spec.granularity == "flat":
            raise ValueError("spec must be an integer or table format without double quantization, whose scales are of "
                             f"a tensor, channel or group, got {spec}")
        self.is_table = spec.format in _TABLES
        if not (self.is_table or spec.format.startswith("int")):
            raise ValueError(f"spec must be an integer or table format, got {spec}")
        if self.is_table and observer is not None and not learn_scale:
            raise ValueError(f"observer must be None for a table format, got {spec}")
        self.is_block_float = spec.format in BLOCK_FLOATS
        if self.is_block_float and learn_scale:
            raise ValueError(f"learn_scale must be False for {spec.format}, whose scales are those of each tensor")
        if learn_zero_point and not (learn_scale and spec.asymmetric):
            raise ValueError(f"learn_zero_point needs learn_scale and an asymmetric spec, got {spec}")
        self.observer = ObserverConfig(observer) if isinstance(observer, str) else observer
        self.learn_scale, self.learn_zero_point = learn_scale, learn_zero_point
        self.gradient_scale, self.eps = gradient_scale, eps
        self.observer_enabled = self.fake_quant_enabled = True

        self.q_min, self.q_max = -(1 << spec.bits - 1), (1 << spec.bits - 1) - 1
        self.scale_dtype = scale_dtype_of(spec)
        self.scale_rule = "minmax" if spec.asymmetric else "absmax"
        self.groups = {"granularity": spec.granularity}
        if spec.granularity != "tensor":
            self.groups["axis"] = axis if axis is not None else 0 if spec.granularity == "channel" else -1
        if spec.granularity == "group":
            self.groups["group_size"] = spec.group_size
        self.codes = {"q_min": self.q_min, "q_max": self.q_max}
        self.form = {"format": spec.format} if self.is_table else self.codes
        if spec.format == "lut4":
            self.form["table"] = list(spec.table)

        keeps = self.observer is not None or learn_scale
        if keeps and shape is None and spec.granularity != "tensor":
            raise ValueError(f"shape must be given to keep scales of a {spec.granularity}")
        self.is_ready = not keeps  # has seen, or was given, what scales come from
        if not keeps:
            return
        groups = FakeQuantizeDescriptor(shape=tuple(shape or ()), **self.groups, **self.form).scale_shape
        full = lambda value: torch.full(groups, value, dtype=torch.float32, device=device)  # noqa: E731
        if learn_scale:
            self.scale = nn.Parameter(full(math.nan))
            if learn_zero_point:
                self.zero_point = nn.Parameter(full(0.0))
            elif spec.asymmetric:
                self.register_buffer("zero_point", torch.zeros(groups, dtype=torch.int32, device=device))
        else:
            for name, tensor in self._new_state(groups, torch.float32, device).items():
                self.register_buffer(name, tensor)

    def _new_state(self, groups: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> dict:
        count = groups if self._observer().kind in ("percentile", "mse") else []
        return {"min": torch.full(groups, math.inf, dtype=dtype, device=device),
                "max": torch.full(groups, -math.inf, dtype=dtype, device=device),
                "num_batches": torch.zeros(count, dtype=torch.int64, device=device)}

    def _observer(self) -> ObserverConfig:
        return self.observer or ObserverConfig("mse")

    @torch.no_grad()
    def _observe(self, x: Tensor, state: dict) -> None:
        of = self._observer()
        observe(x, *state.values(), kind=of.kind, momentum=of.momentum, percentile=of.percentile,
                asymmetric=self.spec.asymmetric, scale_rule=self.scale_rule, **self.codes, **self.groups)

    def _of_range(self, min: Tensor, max: Tensor) -> tuple[Tensor, Tensor | None]:
        scale, zero_point = compute_qparams(min, max, asymmetric=self.spec.asymmetric, scale_rule=self.scale_rule,
                                            scale_dtype=self.scale_dtype, **self.codes)
        return scale.to(min.dtype), zero_point

    @torch.no_grad()
    def _of_tensor(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points of x alone."""
        if self.is_table:
            state = torch.ops.halfbyte.fake_quantize_computed(x, **self.form, **self.groups)[1]
            return state.to(self.scale_dtype).to(state.dtype), None
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        groups = FakeQuantizeDescriptor(shape=x.shape, **self.groups, **self.codes).scale_shape
        state = self._new_state(groups, dtype, x.device)
        if self.learn_scale:
            self._observe(x, state)
        else:
            count = state["num_batches"].new_zeros([])
            observe(x, state["min"], state["max"], count, **self.groups)
        return self._of_range(state["min"], state["max"])

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        """Sets learned scales and zero points from x, as the first forward does."""
        scale, zero_point = self._of_tensor(x)
        self.scale.copy_(scale)
        if zero_point is not None:
            self.zero_point.copy_(zero_point)
        self.is_ready = True

    def qparams(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point with which x would be rounded now; not of nvfp4 and mxfp4."""
        if self.is_block_float:
            raise ValueError(f"qparams: the scales of {self.spec.format} are those that quantize gives")
        if not self.learn_scale and self.observer is None:
            return self._of_tensor(x)
        if not self.is_ready:
            raise RuntimeError("FakeQuantize has seen no data: run a batch in training mode, or load a state")
        if not self.learn_scale:
            return self._of_range(self.min, self.max)
        # What is used is a positive scale as it can be stored; its gradient passes to the parameter.
        state = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale = self.scale.to(state)
        used = scale.detach().clamp_min(self.eps).to(self.scale_dtype).to(state)
        zero_point = getattr(self, "zero_point", None)
        if self.learn_zero_point:
            zero_point = zero_point.to(state)
        return used + (scale - scale.detach()), zero_point

    def forward(self, x: Tensor) -> Tensor:
        if self.learn_scale and not self.is_ready:
            self.initialize(x)
        elif hasattr(self, "min") and self.training and self.observer_enabled and not _in_backward():
            self._observe(x, {"min": self.min, "max": self.max, "num_batches": self.num_batches})
            self.is_ready = True
        if not self.fake_quant_enabled:
            return x
        if self.is_block_float:
            return fake_quantize(x, axis=self.groups["axis"], **self.form)
        scale, zero_point = self.qparams(x)
        factor = self.gradient_scale
        if factor is None:
            factor = 1 / math.sqrt(max(1, x.numel()) / max(1, scale.numel()) * self.q_max) if self.learn_scale else 1.0
        return fake_quantize(x, scale, zero_point, gradient_scale=factor, **self.form, **self.groups)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.learn_scale:
            self.is_ready = not self.scale.isnan().any().item()
        elif self.observer is not None:
            self.is_ready = bool(self.num_batches.any())

    def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
        """Ranges keep f32 where a model becomes f16 or bf16."""
        kept = {name: value for name, value in self._buffers.items() if name in ("min", "max")}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            if self._buffers[name].dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = value.to(self._buffers[name].device)
        return self

    def extra_repr(self) -> str:
        of = "learned" if self.learn_scale else self.observer.kind if self.observer is not None else "of each tensor"
        return f"{str(self.spec)!r}, scales={of}"


class QatLinear(nn.Linear):
    """A linear layer whose weight, and input if `activation_quantizer` is there, are rounded in every forward."""

    weight_quantizer: FakeQuantize
    activation_quantizer: FakeQuantize | None

    @classmethod
    def from_linear(cls, linear: nn.Linear, weight_quantizer: FakeQuantize,
                    activation_quantizer: FakeQuantize | None = None) -> "QatLinear":
        """With the parameters of `linear` themselves."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.weight_quantizer, layer.activation_quantizer = weight_quantizer, activation_quantizer
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation_quantizer is not None:
            x = self.activation_quantizer(x)
        return F.linear(x, self.weight_quantizer(self.weight), self.bias)

    def quantized_weight(self) -> QuantizedTensor:
        """The codes and scales of the weight: decoded to its dtype, they are what the next forward multiplies by, bit
        by bit."""
        return _quantized(self.weight.detach(), self.weight_quantizer)


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module], include: str | Sequence[str] | None,
                    exclude: str | Sequence[str] | None) -> nn.Module:
    """Puts make(linear) in the places of the nn.Linear that `halfbyte quantize` would quantize; see dense_reasons."""
    for name, reason in dense_reasons(model, include, exclude).items():
        path = name.rpartition(".")[0]
        linear = model.get_submodule(path)
        if not reason and type(linear) is nn.Linear:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, make(linear))
    return model


def prepare_qat(model: nn.Module, spec: QuantSpec | str = "int4", *, activations: QuantSpec | str | None = None,
                observer: ObserverConfig | str | None = None,
                activation_observer: ObserverConfig | str = "moving-average", learn_scale: bool = False,
                learn_zero_point: bool = False, include: str | Sequence[str] | None = None,
                exclude: str | Sequence[str] | None = None) -> nn.Module:
    """Replaces the nn.Linear of `model`, in place, by QatLinear layers that share their parameters. Returns the
    model.

    spec: of the weights. activations: of the inputs of these layers, "int8,granularity=tensor" say. observer,
    learn_scale, learn_zero_point: as FakeQuantize takes them, of weights; learn_scale is of activations too.
    activation_observer: of activations; "nvfp4" and "mxfp4" take none, as their scales are those of each input.
    include, exclude: regular expressions that are searched in the names of weights; `include` replaces the choice,
    which is that of `halfbyte quantize`: heads, embeddings, routers and shared weights stay dense.

    >>> model = prepare_qat(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), "int4,group_size=32")
    >>> model(torch.ones(1, 64)).shape
    torch.Size([1, 8])
    >>> convert(model)[0]
    LinearInt(in_features=64, out_features=32, bias=True, spec=int4,group_size=32, 5.00 bits per weight)
    """

    def qat(linear: nn.Linear) -> QatLinear:
        learned = {"learn_scale": learn_scale, "device": linear.weight.device}
        weight = FakeQuantize(spec, shape=linear.weight.shape, observer=observer, learn_zero_point=learn_zero_point,
                              **learned)
        if learn_scale and linear.weight.device.type != "meta":
            weight.initialize(linear.weight)
        if activations is None:
            return QatLinear.from_linear(linear, weight)
        of_input = None if spec_of(str(activations)).format in BLOCK_FLOATS else activation_observer
        return QatLinear.from_linear(linear, weight, FakeQuantize(activations, observer=of_input, **learned))

    return replace_linears(model, qat, include, exclude)


def enable_observer(model: nn.Module, on: bool = True) -> None:
    """Lets the observers of all FakeQuantize in `model` see batches, or not."""
    for module in model.modules():
        if isinstance(module, FakeQuantize):
            module.observer_enabled = on


def enable_fake_quantize(model: nn.Module, on: bool = True) -> None:
    """Lets all FakeQuantize in `model` round, or return what they are given."""
    for module in model.modules():
        if isinstance(module, FakeQuantize):
            module.fake_quant_enabled = on


# ---- What is stored


def _pack(codes: Tensor, bits: int, zero: int) -> Tensor:
    """Codes [rows, cols], one in each byte, as the bit streams of the native layout; `zero` is that of 0."""
    rows, cols = codes.shape
    words = F.pad(codes, (0, -cols % 8), value=zero).view(rows, -1, 8).long()
    words = (words << torch.arange(8, device=codes.device) * bits).sum(-1, keepdim=True)
    of_byte = (words >> torch.arange(bits, device=codes.device) * 8) & 255
    return of_byte.to(torch.uint8).view(rows, -1)[:, : (cols * bits + 7) // 8].contiguous()


def _table_codes(w: Tensor, scale: Tensor, quantizer: FakeQuantize) -> tuple[Tensor, int]:
    """The codes whose values times the scale are what w is rounded to, and the code of 0."""
    rounded = fake_quantize(w, scale, **quantizer.form, **quantizer.groups)
    book = book_of(quantizer.spec, w.device).to(w.dtype)
    zero = int(book.abs().argmin())
    if quantizer.spec.granularity == "group":
        scale = scale.repeat_interleave(quantizer.spec.group_size, 1)[:, : w.shape[1]]
    elif quantizer.spec.granularity == "channel":
        scale = scale[:, None]
    codes = torch.full(w.shape, zero, dtype=torch.uint8, device=w.device)
    for code in range(16):
        codes.masked_fill_((book[code] * scale == rounded) & (rounded != 0), code)
    return codes, zero


@torch.no_grad()
def _quantized(weight: Tensor, quantizer: FakeQuantize) -> QuantizedTensor:
    spec = quantizer.spec
    if quantizer.is_block_float:
        codes, scales, _, _, global_scale = quantize(weight, str(spec))
        return QuantizedTensor(spec, weight.shape, WORDS[weight.dtype], codes=codes, scales=scales,
                               global_scale=global_scale if spec.has_global_scale else None)
    w = weight if weight.dtype == torch.float64 else weight.float()
    scale, zero_point = quantizer.qparams(weight)
    zeros = None
    if quantizer.is_table:
        codes, zero = _table_codes(w, scale, quantizer)
    else:
        zero = -quantizer.q_min
        if zero_point is not None:
            zero_point = zero_point.nan_to_num(quantizer.q_min).round().clamp(quantizer.q_min, quantizer.q_max).int()
            zeros = (zero_point + zero).to(torch.uint8)
        codes = quantize_linear(w, scale, zero_point, **quantizer.codes, **quantizer.groups)
        codes = (codes.int() + zero).to(torch.uint8)
    shape = spec.part_shapes(*w.shape)[1]
    dtype = WORDS[weight.dtype]
    return QuantizedTensor(spec, weight.shape, dtype, codes=_pack(codes, spec.bits, zero),
                           scales=scale.to(quantizer.scale_dtype).view(shape),
                           zeros=None if zeros is None else zeros.view(shape))


class DecodedLinear(nn.Module):
    """A linear layer whose weight is stored quantized and decoded in each forward: for scales of f64, which have no
    packed form.

    codes, scales, zeros: buffers, the parts of a QuantizedTensor of two axes. bias: a parameter or None."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None = None):
        super().__init__()
        self.spec = weight.spec
        self.out_features, self.in_features = weight.shape
        for name in "codes", "scales", "zeros":
            part = getattr(weight, name)
            self.register_buffer(name, torch.empty(0, dtype=torch.uint8) if part is None else as_tensor(part))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, [out_features, in_features]."""
        return dequantize(self.codes, self.scales, self.zeros, self.scales.new_empty(0), str(self.spec),
                          [self.out_features, self.in_features], dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """Scales keep their dtype."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, spec={self.spec}, bias={self.bias is not None}"


def _round_input(layer: nn.Module, inputs: tuple) -> tuple:
    return (layer.activation_quantizer(inputs[0]), *inputs[1:])


def _stored(layer: QatLinear) -> nn.Module:
    weight = layer.quantized_weight()
    try:
        weight.spec.packed_bytes(*weight.shape)
    except ValueError:
        stored = DecodedLinear(weight, layer.bias)
    else:
        stored = QuantizedLinear.from_quantized(weight, layer.bias, dtype=layer.weight.dtype)
    if layer.activation_quantizer is not None:
        stored.activation_quantizer = layer.activation_quantizer
        stored.activation_quantizer.observer_enabled = False
        stored.register_forward_pre_hook(_round_input)
    return stored.train(layer.training)


def convert(model: nn.Module) -> nn.Module:
    """Replaces the QatLinear layers of `model`, in place, by layers of quantized weights: Linear4bit or LinearInt, or
    DecodedLinear where a weight has no packed form. What they decode to is, bit by bit, what the QatLinear would
    round its weight to now: that of the last forward, unless an optimizer stepped since. Inputs are rounded as
    before, with observers that no longer change. Returns the model."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, QatLinear):
            continue
        if not name:
            return _stored(layer)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _stored(layer))
    return model
