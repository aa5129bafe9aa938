"""Operators on the weights of experts: route, qgemm_grouped, qgemm_grouped_sum.

`weight` is u8 [num_experts, bytes], the packed weights [n, k] of all experts. A slot is one use of a token by an
expert: slot t * top_k + j is the j-th of token t. `slots` has them in the order of their experts, i32
[tokens * top_k], and `offsets` where those of each expert end, i32 [num_experts]: route makes both.
"""

import torch
from torch import Tensor

from .. import _core, _functions
from ._library import define
from ._ops_weight import quantize_packed, spec_of


def quantize_experts(x: Tensor, spec: str, out: Tensor) -> Tensor:
    """Fills `out`, u8 [num_experts, bytes], with the packed weights of dense ones [num_experts, n, k]."""
    for dense, packed in zip(x, out):
        packed.copy_(quantize_packed(dense, spec))
    return out


# ---- route


def _route(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return tuple(_functions.route(experts, num_experts))


def _route_fake(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return (experts.new_empty([num_experts], dtype=torch.int32),
            experts.new_empty([experts.shape[0] * experts.shape[1]], dtype=torch.int32))


route = define("route(Tensor experts, int num_experts) -> (Tensor offsets, Tensor slots)", _route, _route_fake)


# ---- qgemm_grouped: x has a row for each token, y for each slot


def _outer(n: int, k: int, transposed: bool) -> int:
    return k if transposed else n


def _packed(weight: Tensor, spec: str, n: int, k: int) -> _core.PackedExperts:
    return _core.PackedExperts.of(spec_of(spec), n, k, weight)


def _qgemm_grouped(x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor, spec: str, n: int, k: int, top_k: int,
                   transposed: bool = False) -> Tensor:
    return _functions.qgemm_grouped(x, _packed(weight, spec, n, k), offsets, slots, top_k=top_k, transposed=transposed)


def _qgemm_grouped_fake(x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor, spec: str, n: int, k: int,
                        top_k: int, transposed: bool = False) -> Tensor:
    return x.new_empty([x.shape[0] * top_k, _outer(n, k, transposed)])


def _qgemm_grouped_setup(ctx, inputs: tuple, output: Tensor) -> None:
    _, weight, offsets, slots, ctx.spec, ctx.n, ctx.k, ctx.top_k, ctx.transposed = inputs
    ctx.save_for_backward(weight, offsets, slots)


def _qgemm_grouped_backward(ctx, dy: Tensor) -> tuple:
    dx = None
    if ctx.needs_input_grad[0]:
        ones = dy.new_ones([dy.shape[0] // ctx.top_k, ctx.top_k], dtype=torch.float32)
        dx = qgemm_grouped_sum(dy.contiguous(), *ctx.saved_tensors, ones, ctx.spec, ctx.n, ctx.k, not ctx.transposed)
    return dx, None, None, None, None, None, None, None, None


qgemm_grouped = define(
    "qgemm_grouped(Tensor x, Tensor weight, Tensor offsets, Tensor slots, str spec, int n, int k, SymInt top_k, "
    "bool transposed=False) -> Tensor",
    _qgemm_grouped, _qgemm_grouped_fake, setup_context=_qgemm_grouped_setup, backward=_qgemm_grouped_backward)


# ---- qgemm_grouped_sum: x has a row for each slot; y for each token, the sum of its slots by their routing weights


def _qgemm_grouped_sum(x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor, routing_weights: Tensor, spec: str,
                       n: int, k: int, transposed: bool = False) -> Tensor:
    return _functions.qgemm_grouped(x, _packed(weight, spec, n, k), offsets, slots, routing_weights.contiguous(),
                                    sum_slots=True, transposed=transposed)


def _qgemm_grouped_sum_fake(x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor, routing_weights: Tensor,
                            spec: str, n: int, k: int, transposed: bool = False) -> Tensor:
    return x.new_empty([routing_weights.shape[0], _outer(n, k, transposed)])


def _qgemm_grouped_sum_setup(ctx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.spec, ctx.n, ctx.k, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _qgemm_grouped_sum_backward(ctx, dy: Tensor) -> tuple:
    if ctx.transposed:
        raise NotImplementedError("experts are differentiated once, not twice")
    dx, of_weights = qgemm_grouped_sum_backward(dy.contiguous(), *ctx.saved_tensors, ctx.spec, ctx.n, ctx.k)
    return dx, None, None, None, of_weights, None, None, None, None


qgemm_grouped_sum = define(
    "qgemm_grouped_sum(Tensor x, Tensor weight, Tensor offsets, Tensor slots, Tensor routing_weights, str spec, int n, "
    "int k, bool transposed=False) -> Tensor",
    _qgemm_grouped_sum, _qgemm_grouped_sum_fake, setup_context=_qgemm_grouped_sum_setup,
    backward=_qgemm_grouped_sum_backward)


def _qgemm_grouped_sum_gradients(dy: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor,
                                 routing_weights: Tensor, spec: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    dx, of_weights = torch.empty_like(x), torch.empty_like(routing_weights)
    tokens, top_k = routing_weights.shape
    d = _core.QgemmGroupedDescriptor(spec=spec_of(spec), num_experts=weight.shape[0], m=tokens, n=n, k=k,
                                     transposed=True, dtype=dy.dtype, rows="indices", top_k=top_k,
                                     routing_weights=True, routing_gradient=True)
    _functions._run(_core.QgemmGroupedPlan, d, dy, None, 0, x=dy, weight=weight, offsets=offsets, slots=slots,
                    routing_weights=routing_weights, forward_x=x, routing_grad=of_weights, y=dx)
    return dx, of_weights


def _qgemm_grouped_sum_gradients_fake(dy: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, slots: Tensor,
                                      routing_weights: Tensor, spec: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(routing_weights)


qgemm_grouped_sum_backward = define(
    "qgemm_grouped_sum_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, Tensor slots, "
    "Tensor routing_weights, str spec, int n, int k) -> (Tensor dx, Tensor routing_grad)",
    _qgemm_grouped_sum_gradients, _qgemm_grouped_sum_gradients_fake)
