"""Operators of PyTorch: torch.ops.halfbyte.*.

An operator is functional: it allocates its results, or declares what it changes (`Tensor(a!)`). Specs are texts
(`str(QuantSpec)`), so that graphs can be stored. One kernel serves CPU and CUDA: _core looks at the tensors.
"""

from collections.abc import Callable

import torch

# The words of floating dtypes, and the reverse.
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
WORDS = {dtype: word for word, dtype in FLOATS.items()}

_LIBRARY = torch.library.Library("halfbyte", "DEF")


def define(schema: str, kernel: Callable, fake: Callable, *, setup_context: Callable | None = None,
           backward: Callable | None = None) -> Callable:
    """Defines `schema`; `fake` makes results without data. Returns the operator."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"halfbyte::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"halfbyte::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.halfbyte, name).default
