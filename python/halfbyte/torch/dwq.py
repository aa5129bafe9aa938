"""DWQ: the scales and biases of affine codes, trained so that a model answers as it did before it was quantized.

Codes stay as rounding chose them. Distilled weight quantization is from mlx-lm.

    student = prepare_dwq(copy.deepcopy(teacher), "affine3")
    report = dwq(student, teacher, batches)
    save_dwq(student, "model-dir", "out-dir")       # the layout of MLX
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core import CheckpointReport, CheckpointWriter, QuantizedTensor, QuantSpec
from ._library import FLOATS, WORDS
from ._ops_training import affine_init, affine_qdq
from .linear import as_tensor
from .qat import replace_linears


class DwqLinear(nn.Module):
    """x @ w.T + bias, where w = codes * scales + biases, group by group. Only scales and biases are trained.

    codes: a u8 buffer, packed. scales, biases: f32 parameters [out_features, groups], which are stored in the
    scale_dtype of `spec`. The bias of the layer is a buffer, and stays. x: f32, f16 or bf16; w is decoded in its
    dtype. """

    def __init__(self, in_features: int, out_features: int, spec: QuantSpec | str = "affine4", bias: bool = True,
                 device: torch.device | str | None = None):
        super().__init__()
        self.spec = _affine_spec(spec)
        self.in_features, self.out_features = in_features, out_features
        self.scale_dtype = FLOATS[self.spec.scale_dtype]
        codes, groups = self.spec.part_shapes(out_features, in_features)
        self.register_buffer("codes", torch.empty(codes, dtype=torch.uint8, device=device))
        self.scales = nn.Parameter(torch.empty(groups, dtype=torch.float32, device=device))
        self.biases = nn.Parameter(torch.empty(groups, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.empty(out_features, device=device) if bias else None)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, spec: QuantSpec | str = "affine4", *, refit: bool = False) -> "DwqLinear":
        """The codes, scales and biases of the rule mlx-edge, with scales in the dtype of the weight: those that
        `halfbyte quantize` stores in the layout of MLX. refit: instead scales and biases that fit the codes best."""
        weight = linear.weight
        dtype = WORDS.get(weight.dtype)
        if dtype in (None, "f64"):
            raise TypeError(f"the weight must be f32, f16 or bf16, got {weight.dtype}")
        layer = cls(linear.in_features, linear.out_features, _affine_spec(spec).replace(scale_dtype=dtype),
                    linear.bias is not None, weight.device)
        codes, scales, biases = affine_init(weight, bits=layer.spec.bits, group_size=layer.spec.group_size,
                                            scale_dtype=layer.scale_dtype, scale_rule="mlx-edge", refit=refit)
        return layer._set(codes, scales, biases, linear.bias)

    @classmethod
    @torch.no_grad()
    def from_quantized(cls, weight: QuantizedTensor, bias: Tensor | None = None) -> "DwqLinear":
        """Of a weight of two axes that is quantized already, by a checkpoint say."""
        rows, cols = weight.shape
        codes, scales, biases = (as_tensor(part) for part in (weight.codes, weight.scales, weight.biases))
        return cls(cols, rows, weight.spec, bias is not None, codes.device)._set(codes, scales, biases, bias)

    def _set(self, codes: Tensor, scales: Tensor, biases: Tensor, bias: Tensor | None) -> "DwqLinear":
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        self.biases.copy_(biases)
        self.bias = None if bias is None else bias.detach().clone()
        return self

    def quantized(self) -> QuantizedTensor:
        """The weight as it is stored: scales and biases rounded to the scale_dtype."""
        scales, biases = (values.detach().to(self.scale_dtype) for values in (self.scales, self.biases))
        return QuantizedTensor(self.spec, (self.out_features, self.in_features), self.spec.scale_dtype,
                               codes=self.codes, scales=scales, biases=biases)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, [out_features, in_features]."""
        return affine_qdq(self.codes, self.scales, self.biases, cols=self.in_features, bits=self.spec.bits,
                          group_size=self.spec.group_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.dequantized(x.dtype), bias)

    def round_(self) -> None:
        """Rounds scales and biases to what is stored."""
        with torch.no_grad():
            for values in self.scales, self.biases:
                values.copy_(values.to(self.scale_dtype))

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """Scales and biases keep f32."""
        kept = [values.data for values in (self.scales, self.biases)]
        super()._apply(fn, recurse)
        for values, data in zip((self.scales, self.biases), kept):
            if values.dtype != torch.float32:
                values.data = data.to(values.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, spec={str(self.spec)!r}, bias={self.bias is not None}"


def _affine_spec(spec: QuantSpec | str) -> QuantSpec:
    spec = QuantSpec.parse(spec) if isinstance(spec, str) else spec
    if not spec.has_biases or spec.granularity != "group":
        raise ValueError(f"spec must be affine in groups, got {spec}")
    return spec


def prepare_dwq(model: nn.Module, spec: QuantSpec | str = "affine4", *, include: str | Sequence[str] | None = None,
                exclude: str | Sequence[str] | None = None, refit: bool = False) -> nn.Module:
    """Replaces the nn.Linear of `model`, in place, by DwqLinear.from_linear. Returns the model.

    spec: affine2 to affine8 in groups. include, exclude: as `prepare_qat` takes them.

    >>> prepare_dwq(nn.Sequential(nn.Linear(64, 32)), "affine3,group_size=32")
    Sequential(
      (0): DwqLinear(64, 32, spec='affine3,group_size=32', bias=True)
    )
    """
    spec = _affine_spec(spec)
    return replace_linears(model, lambda linear: DwqLinear.from_linear(linear, spec, refit=refit), include, exclude)


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """KL(teacher || student) in nats of logits [..., vocabulary], both divided by the temperature: the mean over all
    but the last axis, in f32.

    >>> round(kl_divergence(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]])).item(), 6)
    0.110944
    """
    log_q = F.log_softmax(student.float() / temperature, -1).flatten(0, -2)
    log_p = F.log_softmax(teacher.float() / temperature, -1).flatten(0, -2)
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


@dataclasses.dataclass
class DwqReport:
    """What `dwq` did. Losses are the divergence of the validation batches, of scales and biases as they are
    stored."""

    start_loss: float
    best_loss: float
    best_step: int  # 0: nothing was better than the start, which the student then is
    validated: list[tuple[int, float]]  # (step, loss)
    trained: list[float]  # the divergence of the batch of each step


def _logits(model: nn.Module, batch: object) -> Tensor:
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    return result if isinstance(result, Tensor) else result.logits


def _progress(steps: Iterable, show: bool | None) -> Iterable:
    if show is False:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc="dwq", disable=None if show is None else False)


def dwq(student: nn.Module, teacher: nn.Module, batches: Sequence, *, validation: Sequence | None = None,
        steps: int | None = None, learning_rate: float = 0.05, temperature: float = 2.0,
        validate_every: int | None = None, betas: tuple[float, float] = (0.9, 0.99),
        loss: Callable[[Tensor, Tensor], Tensor] | None = None, progress: bool | None = None) -> DwqReport:
    """Trains the scales and biases of the student's DwqLinear layers by Adam. Everything else stays.

    batches: what the models take, one after the other and again from the first: tensors, or dicts of keyword
    arguments. A model returns logits, or something that has `.logits`. validation: batches that are not trained on
    and choose the best step; None: an eighth of `batches`, its first, is kept for that. steps: None: once through the
    batches. learning_rate: how far a step moves a bias, or what the largest code adds to it, as a part of the mean
    scale of the layer; it rises for the first 5 % of the steps and then falls as a cosine. loss: of (student logits,
    teacher logits); None: `kl_divergence` at `temperature`. progress: a bar of tqdm; None: where it is installed and
    there is a terminal.

    The student ends with the scales and biases of the best validation, rounded to their scale_dtype; never worse than
    it began, by that measure. Raises ValueError where there is nothing to train or to validate. """
    layers = [m for m in student.modules() if isinstance(m, DwqLinear)]
    if not layers:
        raise ValueError("student has no DwqLinear: call prepare_dwq first")
    batches = list(batches)
    if validation is None:
        held = max(1, len(batches) // 8)
        validation, batches = batches[:held], batches[held:]
    if not batches or not validation:
        raise ValueError(f"{len(batches)} batches to train on and {len(validation)} to validate with: there must be "
                         "one of each")
    steps = len(batches) if steps is None else steps
    validate_every = max(1, steps // 8) if validate_every is None else validate_every
    measure = loss or (lambda a, b: kl_divergence(a, b, temperature))

    groups = []
    for layer in layers:
        rate = learning_rate * (layer.scales.detach().abs().mean().item() or 1.0)
        for values, largest in (layer.scales, (1 << layer.spec.bits) - 1), (layer.biases, 1):
            groups.append({"params": [values], "lr": rate / largest, "eps": 1e-12})
    optimizer = torch.optim.Adam(groups, betas=betas)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, 1) * 0.5 * (
        1 + math.cos(math.pi * step / steps)))
    parameters = [values for layer in layers for values in (layer.scales, layer.biases)]
    mode = student.training, teacher.training
    student.eval()  # no dropout
    teacher.eval()

    def validate() -> tuple[float, list[Tensor]]:
        """The loss of what would be stored, and its values."""
        masters = [p.detach().clone() for p in parameters]
        for layer in layers:
            layer.round_()
        rounded = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            total = sum(measure(_logits(student, b), target).item() for b, target in zip(validation, targets))
            for p, master in zip(parameters, masters):
                p.copy_(master)
        return total / len(validation), rounded

    frozen = [(p, p.requires_grad) for p in student.parameters()]
    try:
        for p, _ in frozen:
            p.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        with torch.no_grad():
            targets = [_logits(teacher, batch) for batch in validation]
        start, best_values = validate()
        report = DwqReport(start, start, 0, [(0, start)], [])
        for step in _progress(range(1, steps + 1), progress):
            batch = batches[(step - 1) % len(batches)]
            with torch.no_grad():
                target = _logits(teacher, batch)
            value = measure(_logits(student, batch), target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            report.trained.append(value.item())
            if step % validate_every == 0 or step == steps:
                now, values = validate()
                report.validated.append((step, now))
                if now < report.best_loss:
                    report.best_loss, report.best_step, best_values = now, step, values
    finally:
        for p, required in frozen:
            p.requires_grad_(required)
        student.train(mode[0])
        teacher.train(mode[1])
    with torch.no_grad():
        for p, best in zip(parameters, best_values):
            p.copy_(best)
            p.grad = None
    return report


def save_dwq(student: nn.Module, source: str | os.PathLike, output: str | os.PathLike, *,
             force: bool = False) -> CheckpointReport:
    """Writes the checkpoint `source` again, in the layout of MLX, with the weights of the student's DwqLinear layers;
    the names of these modules are those of the checkpoint. Everything else is copied. force: replaces an output that
    exists. Raises what CheckpointWriter does."""
    with CheckpointWriter(output, "mlx", base=source, force=force) as writer:
        for name, layer in student.named_modules():
            if isinstance(layer, DwqLinear):
                writer.set(f"{name}.weight", layer.quantized())
    return writer.report
