"""Linear layers over packed weights: where they come from, training, moving and storing them."""

import copy
import importlib
import io
import pickle

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.torch import Linear4bit, LinearAffine, LinearInt, QuantizedLinear, linear_class
from halfbyte.torch._layouts import book_of
from halfbyte.torch._ops_weight import quantize_packed

ops = torch.ops.halfbyte
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SPECS = ["nf4", "nf4,double_quant", "fp4,group_size=32", "affine4,scale_dtype=f16", "int8,asymmetric",
         "int4,granularity=channel,scale_dtype=bf16", "nvfp4", "mxfp4", "fp8,granularity=channel"]
for_devices = pytest.mark.parametrize("device", DEVICES)


def dense(k=128, n=64, bias=True, device="cpu", dtype=torch.float32):
    return nn.Linear(k, n, bias, device=device, dtype=dtype)


def assert_near(of, reference, tolerance):
    assert of.shape == reference.shape
    of, reference = of.detach(), reference.detach()
    error = float((of.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
    assert error < tolerance, error


@for_devices
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rank", [0, 3])
def test_forward_and_backward_are_those_of_the_decoded_weight(spec, rank, device):
    source = dense(device=device)
    layer = QuantizedLinear.from_linear(source, spec, lora_rank=rank, lora_alpha=6)
    assert type(layer) is linear_class(spec) and isinstance(layer, nn.Linear)
    assert layer.weight.dtype == torch.uint8 and layer.weight.dim() == 1 and not layer.weight.requires_grad
    weight = layer.dequantized()
    assert_near(weight, source.weight, 0.2)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    assert len(parameters) == (3 if rank else 1)
    if rank:
        layer.lora_b.data.normal_(std=0.1)
    x = torch.randn(3, 5, 128, device=device, requires_grad=True)
    g = torch.randn(3, 5, 64, device=device)
    expected = x @ weight.T + layer.bias
    if rank:
        expected = expected + 2.0 * (x @ layer.lora_a.T) @ layer.lora_b.T
    for of, want in zip(torch.autograd.grad(layer(x), [x, *parameters], g),
                        torch.autograd.grad(expected, [x, *parameters], g)):
        assert_near(of, want, 5e-6)
    assert_near(layer(x), expected, 5e-6)


def test_classes_hold_their_formats():
    assert [Linear4bit(64, 8).spec.format, LinearAffine(64, 8).spec.format, LinearInt(64, 8).spec.format] == [
        "nf4", "affine4", "int4"]
    with pytest.raises(ValueError, match="Linear4bit holds nf4"):
        Linear4bit(64, 8, spec="int4")
    assert LinearInt(128, 64, spec="int3").bits_per_weight == 3.5
    with pytest.raises(ValueError):
        LinearInt(48, 8, spec="int3,granularity=flat")  # has no packed form
    assert repr(Linear4bit(128, 64, False, spec="nf4,group_size=128")) == (
        "Linear4bit(in_features=128, out_features=64, bias=False, spec=nf4,group_size=128, 4.25 bits per weight)")


def test_from_linear_keeps_dtype_mode_and_names_bad_values():
    source = dense(dtype=torch.bfloat16).eval()
    layer = Linear4bit.from_linear(source, lora_rank=2)
    assert (layer.dtype, layer.bias.dtype, layer.lora_a.dtype, layer.training) == (
        torch.bfloat16, torch.bfloat16, torch.bfloat16, False)
    source.weight.data[1, 2] = float("inf")
    with pytest.raises(ValueError, match="first_nonfinite=130"):
        Linear4bit.from_linear(source)


@for_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_autocast(dtype, device):
    layer = Linear4bit.from_linear(dense(device=device), lora_rank=2)
    x = torch.randn(4, 128, device=device)
    assert layer(x.to(dtype)).dtype == dtype
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, layer(x.bfloat16()))
    y.float().sum().backward()
    assert layer.bias.grad.dtype == torch.float32
    assert layer.half().bias.dtype == torch.float16 and layer.weight.dtype == torch.uint8
    assert layer(x.half()).dtype == torch.float16


@for_devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, device):
    from torch.utils.checkpoint import checkpoint
    layer = LinearAffine.from_linear(dense(device=device), lora_rank=2)
    layer.lora_b.data.normal_()
    x = torch.randn(4, 128, device=device, requires_grad=True)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    plain = torch.autograd.grad(layer(x).square().sum(), inputs)
    for p in inputs:
        p.grad = None
    checkpoint(lambda x: layer(x), x, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(p.grad, want) for p, want in zip(inputs, plain))


@for_devices
def test_compiled_layers_give_the_same_bytes(device):
    layer = Linear4bit.from_linear(dense(device=device, dtype=torch.bfloat16), lora_rank=2)
    x = torch.randn(4, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert x.grad is not None
    with torch.autocast(device, dtype=torch.float16):
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_state_dict_round_trip(spec, storage, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = QuantizedLinear.from_linear(dense(), spec, lora_rank=2, storage_dtype=storage)
    x = torch.randn(2, 128)
    y = layer(x)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    state = safetensors.load_file(tmp_path / "layer.safetensors")
    options = {"spec": spec, "lora_rank": 2, "storage_dtype": storage}
    fresh = type(layer)(128, 64, **options)
    assert fresh.load_state_dict(state) == ([], []) and torch.equal(fresh(x), y)
    meta = type(layer)(128, 64, device="meta", **options)
    meta.load_state_dict(state, assign=True)
    assert torch.equal(meta(x), y) and not meta.weight.requires_grad
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    other_spec = "nf4" if layer.spec.format in ("nvfp4", "mxfp4") else layer.spec.replace(granularity="group", group_size=16)
    other = type(layer)(128, 64, spec=other_spec, lora_rank=2, storage_dtype=storage)
    with pytest.raises(RuntimeError, match="weight: the weight must have the spec"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"must have the shape \[32, 128\], got \[64, 128\]"):
        type(layer)(128, 32, **options).load_state_dict(state)
    old = dict(state, weight_spec=torch.tensor(list(
        bytes(state["weight_spec"].tolist()).replace(b'"packed_version": 2', b'"packed_version": 1')), dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="packed form must have version 2, got 1"):
        fresh.load_state_dict(old)


def test_a_model_stores_its_layers():
    model = nn.Sequential(Linear4bit(64, 64), nn.ReLU(), LinearInt(64, 32, spec="int8"))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again = nn.Sequential(Linear4bit(64, 64), nn.ReLU(), LinearInt(64, 32, spec="int8"))
    again.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(3, 64)
    assert torch.equal(again(x), model(x))
    missing = {name: value for name, value in model.state_dict().items() if name != "0.weight_spec"}
    with pytest.raises(RuntimeError, match="Missing key.*0.weight_spec"):
        again.load_state_dict(missing)


@pytest.mark.parametrize("spec", SPECS)
def test_a_dense_state_dict_is_quantized(spec):
    source = dense()
    layer = linear_class(spec)(128, 64, spec=spec)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.weight, QuantizedLinear.from_linear(source, spec).weight)
    assert torch.equal(layer.bias, source.bias)
    with pytest.raises(RuntimeError, match=r"must have the shape \[64, 128\], got \[64, 64\]"):
        layer.load_state_dict(dense(64).state_dict())


def test_casts_leave_bytes_alone_or_are_refused():
    layer = Linear4bit(128, 64, storage_dtype=torch.bfloat16, dtype=torch.bfloat16)
    data = layer.weight.detach().clone().view(torch.uint8)
    for cast in (layer.half, layer.float, layer.double, lambda: layer.to(torch.float16)):
        with pytest.raises(TypeError, match="would destroy the packed weight"):
            cast()
    assert torch.equal(layer.bfloat16().to("cpu").weight.view(torch.uint8), data)
    layer = Linear4bit(128, 64)
    data = layer.weight.detach().clone()
    assert torch.equal(layer.to(torch.float16).weight, data) and layer.bias.dtype == layer.dtype == torch.float16


def test_meta_and_to_empty():
    layer = Linear4bit(128, 64, lora_rank=2, device="meta")
    assert layer.weight.is_meta and layer(torch.empty(3, 128, device="meta")).shape == (3, 64)
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(layer(torch.randn(3, 128))).all() and not layer.lora_b.any()


@for_devices
def test_merging_an_adapter_says_what_it_loses(device):
    layer = Linear4bit.from_linear(dense(device=device), lora_rank=4, lora_alpha=8)
    layer.lora_b.data.normal_(std=0.05)
    exact = layer.dequantized() + 2 * layer.lora_b @ layer.lora_a
    report = layer.merge_adapter()
    assert report.into == "codes" and layer.lora_a is None and layer.lora_rank == 0
    exact = exact.detach()
    loss = float((layer.dequantized() - exact).norm() / exact.norm())
    assert report.relative_rmse == pytest.approx(loss, rel=1e-4) and 0.01 < loss < 0.2
    assert torch.equal(layer.weight, quantize_packed(exact, "nf4"))
    with pytest.raises(ValueError, match="no adapter"):
        layer.merge_adapter()


@for_devices
@pytest.mark.parametrize("spec,length", [("affine4,group_size=32", 32), ("affine8,granularity=channel", 128)])
def test_adapters_that_are_constant_in_groups_go_into_biases(spec, length, device):
    layer = LinearAffine.from_linear(dense(device=device), spec, lora_rank=2)
    layer.lora_a.data.copy_(torch.randn(2, 128 // length).repeat_interleave(length, 1))
    layer.lora_b.data.normal_()
    exact = layer.dequantized() + layer.lora_b @ layer.lora_a
    codes = ops.unpack(layer.weight, str(layer.spec), 64, 128)[0]
    report = layer.merge_adapter()
    assert report.into == "biases" and report.relative_rmse < 1e-6
    assert torch.equal(ops.unpack(layer.weight, str(layer.spec), 64, 128)[0], codes)
    assert_near(layer.dequantized(), exact, 1e-6)
    layer.add_adapter(2)
    layer.lora_b.data.normal_()
    assert layer.merge_adapter().into == "codes"  # one that is not


def test_it_trains():
    torch.manual_seed(4)
    layer = Linear4bit.from_linear(dense(bias=False), lora_rank=8)
    x = torch.randn(64, 128)
    target = x @ (layer.dequantized() + 0.05 * torch.randn(64, 4) @ torch.randn(4, 128)).T
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


# ---- Tensors of other tools

def codes_of(n, k, bits):
    return torch.randint(0, 1 << bits, [n, k], dtype=torch.uint8)


def words_of(codes, bits):
    """[..., columns] -> i32 words of a bit stream, the first column in the low bits."""
    stream = (codes.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(-2).unflatten(-1, (-1, 32))
    words = (stream.to(torch.int64) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def spread(of, length):
    return of.float().repeat_interleave(length, 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_tensors(bits, version, symmetric):
    n, k, length = 64, 128, 32
    codes = codes_of(n, k, bits)
    zeros = torch.full([n, k // length], 1 << (bits - 1), dtype=torch.uint8) if symmetric else codes_of(n, 4, bits)
    scales = torch.rand(n, k // length).half()
    stored = (zeros - int(version == 1)) & ((1 << bits) - 1)
    tensors = {"qweight": words_of(codes.T.contiguous().T, bits).T.contiguous(), "qzeros": words_of(stored.T, bits),
               "scales": scales.T.contiguous(), "g_idx": torch.arange(k, dtype=torch.int32) // length}
    layer = LinearInt.from_tensors("gptq", tensors, bits=bits, version=version)
    assert layer.spec.asymmetric != symmetric and layer.spec.group_size == length
    assert torch.equal(layer.dequantized(), (codes.float() - spread(zeros, length)) * spread(scales, length))
    with pytest.raises(ValueError, match="gptq: g_idx: groups of columns in another order"):
        LinearInt.from_tensors("gptq", {**tensors, "g_idx": tensors["g_idx"].flip(0)}, bits=bits)
    with pytest.raises(ValueError, match="gptq: tensor qzeros is missing"):
        LinearInt.from_tensors("gptq", {name: of for name, of in tensors.items() if name != "qzeros"})
    with pytest.raises(ValueError, match="gptq: codes of 4 and 8 bits are read, not of 3"):
        LinearInt.from_tensors("gptq", tensors, bits=3)


def test_awq_tensors():
    n, k, length = 64, 128, 64
    codes, zeros, scales = codes_of(n, k, 4), codes_of(n, k // length, 4), torch.rand(n, k // length).half()

    def awq(columns):  # [rows, n]: field i has column order[i]
        return words_of(columns.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    layer = LinearInt.from_tensors("awq", {"qweight": awq(codes.T), "qzeros": awq(zeros.T), "scales": scales.T.contiguous(),
                                           "bias": torch.arange(n).half()})
    assert torch.equal(layer.dequantized(torch.float32), (codes.float() - spread(zeros, length)) * spread(scales, length))
    assert torch.equal(layer.bias, torch.arange(n).half()) and layer.dtype == torch.float16


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_tensors(bits):
    n, k, length = 32, 128, 64
    codes = codes_of(n, k, bits)
    scales, biases = torch.randn(2, n, k // length).bfloat16()
    layer = LinearAffine.from_tensors("mlx", {"weight": words_of(codes, bits), "scales": scales, "biases": biases}, bits=bits)
    assert torch.equal(layer.dequantized(torch.float32), codes * spread(scales, length) + spread(biases, length))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_compressed_tensors(bits, groups):
    n, k = 64, 128
    codes = codes_of(n, k, bits)
    half, length = 1 << (bits - 1), k // groups
    scales = torch.rand(n, groups).bfloat16()
    tensors = {"weight_packed": words_of(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    layer = LinearInt.from_tensors("compressed-tensors", tensors, bits=bits)
    assert layer.spec.granularity == ("channel" if groups == 1 else "group")
    assert torch.equal(layer.dequantized(torch.float32), (codes.float() - half) * spread(scales, length))
    if groups > 1:
        zeros = codes_of(n, groups, bits)
        tensors["weight_zero_point"] = words_of(zeros.T.contiguous(), bits).T.contiguous()
        layer = LinearInt.from_tensors("compressed-tensors", tensors, bits=bits)
        assert torch.equal(layer.dequantized(torch.float32), (codes.float() - spread(zeros, length)) * spread(scales, length))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_both_ways(quant_type, nested):
    bnb = pytest.importorskip("bitsandbytes")
    source = dense(256, 96)
    theirs = bnb.nn.Linear4bit(256, 96, compress_statistics=nested, quant_type=quant_type)
    theirs.load_state_dict(source.state_dict())
    theirs = theirs.to("cuda" if torch.cuda.is_available() else "cpu")
    weight = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state).float()
    layer = Linear4bit.from_bitsandbytes(theirs)
    assert layer.spec.format == quant_type and layer.spec.double_quant == nested
    assert_near(layer.dequantized(torch.float32), weight, 1e-6)
    state = {name: of.cpu() for name, of in theirs.state_dict().items()}
    again = Linear4bit(256, 96, spec=layer.spec)
    assert again.load_state_dict(state) == ([], [])
    assert torch.equal(again.weight.cpu(), layer.weight.cpu())
    ours = layer.cpu().bitsandbytes_state_dict()
    assert ours.keys() == state.keys()
    for name, of in state.items():
        if "quant_state" not in name:
            assert torch.equal(ours[name], of.to(ours[name].dtype)), name
    back = bnb.nn.Params4bit.from_prequantized(
        ours["weight"], {name.removeprefix("weight."): of for name, of in ours.items() if name.startswith("weight.")},
        device=theirs.weight.device)
    assert_near(bnb.functional.dequantize_4bit(back.data, back.quant_state).float(), weight, 1e-6)
    with pytest.raises(RuntimeError, match="must have the spec"):
        Linear4bit(256, 96, spec=layer.spec.replace(group_size=32)).load_state_dict(state)
    with pytest.raises(ValueError, match="bitsandbytes: it holds nf4 and fp4"):
        LinearAffine(256, 96).bitsandbytes_state_dict()


def test_docstrings():
    import doctest
    for module in ("linear", "model"):
        result = doctest.testmod(importlib.import_module(f"halfbyte.torch.{module}"))
        assert result.attempted > 0 and result.failed == 0


def test_code_books():
    book = book_of(halfbyte.QuantSpec("nf4"), torch.device("cpu"))
    assert book[0] == -1 and book[7] == 0 and book[15] == 1 and (book.diff() > 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moving_between_devices():
    layer = Linear4bit.from_linear(dense(dtype=torch.bfloat16), lora_rank=2)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    y = layer(x)
    assert_near(layer.cuda()(x.cuda()).cpu(), y, 2e-2)
    assert layer.weight.is_cuda and torch.equal(layer.cpu()(x), y)
    assert Linear4bit.from_linear(dense(), device="cuda").weight.is_cuda


@for_devices
def test_error_shows_in_repr_until_the_weight_changes(device):
    source = dense(192, 96, device=device)
    layer = Linear4bit.from_linear(source, "nf4")
    assert "RMSE" not in repr(layer)
    error = layer.error(source.weight)
    exact = source.weight.detach().double()
    difference = layer.dequantized(torch.float32).double() - exact
    assert error.relative_rmse == pytest.approx(float(difference.norm() / exact.norm()), rel=1e-12)
    assert error.max_error == float(difference.abs().max())
    assert error.max_error == float(difference.flatten()[error.max_error_index].abs())
    assert f"relative RMSE {error.relative_rmse:.3g}" in repr(layer)
    layer.set_weight(source.weight)
    assert "RMSE" not in repr(layer)
    with pytest.raises(ValueError, match=r"the shape \[96, 192\], got \[192, 96\]"):
        layer.error(source.weight.t())


@for_devices
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("k,n", [(0, 8), (8, 0), (0, 0)])
def test_weights_without_elements(spec, k, n, device):
    with pytest.warns(UserWarning, match="zero-element"):
        source = dense(k, n, device=device)
    layer = QuantizedLinear.from_linear(source, spec)
    x = torch.ones(3, k, device=device, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, source(x))
    y.sum().backward()
    assert x.grad.shape == x.shape and not x.grad.any()
    assert layer.dequantized().shape == (n, k)
