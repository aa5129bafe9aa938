"""halfbyte for PyTorch (2.6 and later): operators, layers and training."""
