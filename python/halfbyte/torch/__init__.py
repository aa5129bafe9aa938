"""halfbyte for PyTorch (2.6 and later): operators, layers and training."""

from ._ops_training import (affine_adam_step, affine_init, affine_qdq, compute_qparams, dequantize_linear, fake_quantize,
                            observe, quantize_linear)
from .dwq import DwqLinear, DwqReport, dwq, kl_divergence, prepare_dwq, save_dwq
from .experts import QuantizedExperts
from .linear import Linear4bit, LinearAffine, LinearFp8, LinearInt, MergeReport, QuantizedLinear, linear_class
from .model import LayerReport, ModelReport, dense_reasons, quantize_model, replace_linear
from .qat import DecodedLinear, FakeQuantize, QatLinear, convert, enable_fake_quantize, enable_observer, prepare_qat
