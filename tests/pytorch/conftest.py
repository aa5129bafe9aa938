import pytest
import torch
from tiny_models import TINY


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A directory with a model of each kind of tiny_models, dense, in bf16."""
    transformers = pytest.importorskip("transformers", "5")
    path = tmp_path_factory.mktemp("models")
    for name, make in TINY.items():
        torch.manual_seed(1)
        model = make(transformers)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.02)
        model.bfloat16().save_pretrained(path / name)
    return path
