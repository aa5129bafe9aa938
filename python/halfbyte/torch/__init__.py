"""halfbyte for PyTorch (2.6 and later): operators, layers and training."""

from .linear import Linear4bit, LinearAffine, LinearInt, MergeReport, QuantizedLinear, linear_class
