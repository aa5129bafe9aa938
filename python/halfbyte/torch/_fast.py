"""The fast door to products: in plain eager mode the kernel is called without the dispatcher of PyTorch.

Everything else goes through the operators: compilation, export, fake and meta tensors, subclasses, modes, transforms
of functorch, forward-mode differentiation, tracing. Both doors give the same bytes.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops_weight import Shape, qgemm, qgemm_lora, sum_rows

_PLAIN = (Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_num_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def is_open(x: Tensor, weight: Tensor) -> bool:
    """Whether a call with these goes through the fast door."""
    return (not _is_compiling() and type(x) in _PLAIN and type(weight) in _PLAIN and (x.is_cpu or x.is_cuda)
            and _num_modes() == 0 and _num_function_modes() == 0 and _transform() is None
            and forward_ad._current_level < 0 and _tracing() is None)


class _Qgemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, transposed: bool) -> Tensor:
        ctx.shape, ctx.transposed = shape, transposed
        ctx.save_for_backward(weight)
        return shape.multiply(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        (weight,) = ctx.saved_tensors
        of_x, _, of_bias, _, _ = ctx.needs_input_grad
        dx = None
        if of_x and (_is_grad_enabled() or type(dy) is not Tensor or _num_modes() != 0):
            dx = linear(dy, weight, None, ctx.shape, not ctx.transposed)
        elif of_x:  # nothing else has changed since forward
            dx = ctx.shape.multiply(dy, weight, None, not ctx.transposed)
        return dx, None, sum_rows(dy) if of_bias else None, None, None


# Of what Function.apply does before it calls this, is_open has answered all.
_apply_qgemm = super(torch.autograd.Function, _Qgemm).apply


class _QgemmLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float,
                shape: Shape, transposed: bool) -> Tensor:
        ctx.scaling, ctx.shape, ctx.transposed = scaling, shape, transposed
        y, h = shape.multiply_lora(x, weight, bias, a, b, scaling, transposed)
        ctx.save_for_backward(x, weight, a, b, h)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        x, weight, a, b, h = ctx.saved_tensors
        x, rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = of_a = of_b = None
        g = torch.mm(rows, b) * ctx.scaling
        if _is_grad_enabled():  # all that is used here is differentiated again
            h = torch.mm(x, a.t()) * ctx.scaling
        if ctx.needs_input_grad[0] and _is_grad_enabled():
            dx = linear_lora(dy, weight, None, b.t(), a.t(), ctx.scaling, ctx.shape, not ctx.transposed)
        elif ctx.needs_input_grad[0]:
            dx = torch.mm(g, a).view(*dy.shape[:-1], a.shape[1])
            dx = ctx.shape.multiply(dy, weight, None, not ctx.transposed, dx)
        if ctx.needs_input_grad[3]:
            of_a = torch.mm(g.t(), x)
        if ctx.needs_input_grad[4]:
            of_b = torch.mm(rows.t(), h)
        return dx, None, sum_rows(dy) if ctx.needs_input_grad[2] else None, of_a, of_b, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, transposed: bool = False) -> Tensor:
    """x . W^T (+ bias); transposed: x . W."""
    if not is_open(x, weight):
        refuse_sharded(weight)
        return qgemm(x, weight, bias, shape.spec, shape.n, shape.k, transposed)
    if _is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _apply_qgemm(x, weight, bias, shape, transposed)
    return shape.multiply(x, weight, bias, transposed)


def linear_lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float,
                shape: Shape, transposed: bool = False) -> Tensor:
    """x . W^T (+ bias) + scaling * (x A^T) B^T."""
    if not is_open(x, weight):
        refuse_sharded(weight)
        return qgemm_lora(x, weight, bias, a, b, scaling, shape.spec, shape.n, shape.k, transposed)
    if _is_grad_enabled():
        return _QgemmLora.apply(x, weight, bias, a, b, scaling, shape, transposed)
    return shape.multiply_lora(x, weight, bias, a, b, scaling, transposed)[0]


def refuse_sharded(weight: Tensor) -> None:
    if hasattr(weight, "placements"):
        raise RuntimeError("the weight is sharded (a DTensor): call the module that fully_shard was applied to, which "
                           "gathers it")
