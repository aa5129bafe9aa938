// config.json: everything that is read of it, and what is written into it, which must be read again.
#include <nlohmann/json.hpp>

#include "fuzz.h"
#include "io/architecture.h"
#include "io/config.h"
#include "io/mlx_model.h"

using namespace halfbyte;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(fuzz::text_of(data, size));
  const auto read = [](const std::string& config) {
    io::quant_method(config);
    io::mlx_grids_of_config(config);
    io::compressed_tensors_bits(config);
    io::word_config_of_config(config);
    io::dtype_of_config(config);
  };
  fuzz::attempt([&] { io::mlx_grids(text); });
  fuzz::attempt([&] { io::word_config(text, "text"); });
  fuzz::attempt([&] { read(text); });
  fuzz::attempt([&] {
    const nlohmann::json config = io::config_json(text);
    if (const auto architecture = io::Architecture::find(config)) {
      architecture->tied_modules();
      for (const char* name : {"model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj",
                               "transformer.h.0.attn.c_attn.weight", "lm_head.weight", "", "."})
        architecture->find_tensor(name);
    }
    if (const auto model = io::MlxModel::find(config)) model->refused();
  });
  const Layout layouts[] = {Layout::bitsandbytes, Layout::compressed_tensors,
                            Layout::mlx,          Layout::halfbyte,
                            Layout::gptq,         Layout::awq};
  io::ModelQuantization quantization{};
  quantization.layout = layouts[size % std::size(layouts)];
  quantization.spec.format = quantization.layout == Layout::mlx            ? Format::affine4
                             : quantization.layout == Layout::bitsandbytes ? Format::nf4
                                                                           : Format::int4;
  quantization.weight_dtype = DType::bf16;
  std::string with;
  if (!fuzz::attempt([&] { with = io::with_quantization(text, quantization); })) return 0;
  if (io::quant_method(with).empty()) fuzz::fail("a config does not say the quantization that it was given");
  const std::string without = io::without_quantization(with, DType::f16);
  read(without);
  return 0;
}
