// config.json of a model directory: what it says about quantization. The only place that edits it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halfbyte/checkpoint.hpp"

namespace halfbyte::io {

inline constexpr const char* kConfigFile = "config.json";

// "bfloat16": the dtype in PyTorch's words; f32, f16 and bf16 only.
const char* torch_name(DType dtype);
std::optional<DType> dtype_from_torch(std::string_view name);

// Texts are whole config.json documents; what cannot be understood is Error(bad_input).

// Constants that JSON does not have (io/json.h) are strings in it.
nlohmann::json config_json(const std::string& config);
// Error(bad_input) where it is none.
void check_config(const std::string& config);

// "quant_method" of a config that has a quantization ("mlx" where it names none); empty if it has none.
std::string quant_method(const std::string& config);

// What configs call a layout, and what those of compressed-tensors call the form of a format.
const char* quant_method(Layout layout);
std::string compressed_tensors_format(Format format);

// How many bits and which groups an MLX model has: its tensors alone do not tell.
struct MlxGrid {
  int bits = 0;
  int64_t group_size = 0;
  std::string mode = {};  // as it is read; empty: none is named
};
struct MlxGrids {
  std::optional<MlxGrid> all;
  std::map<std::string, MlxGrid> modules;  // that differ from `all`
};
// From the "quantization" of a config, or from that object alone (as in a file's metadata).
MlxGrids mlx_grids_of_config(const std::string& config);
MlxGrids mlx_grids(const std::string& quantization);
// That object for `spec`.
std::string mlx_quantization(const QuantSpec& spec);

// The "num_bits" of integer weights in the "config_groups" of compressed-tensors, within [1, 8], each once,
// ascending.
std::vector<int> compressed_tensors_bits(const std::string& config);

// What tells the format and the shapes of experts that bitsandbytes has as Experts4bit.
struct Experts4bitConfig {
  std::optional<Format> format;        // "bnb_4bit_quant_type" of the quantization
  std::optional<int64_t> hidden_size;  // of the model or its text_config; above 0
};
Experts4bitConfig experts4bit_config(const std::string& config);

// What says how the words of gptq and awq are meant.
struct WordConfig {
  std::string method;                 // "gptq", "awq", "auto-round"; empty: it does not say
  std::string format;                 // "gptq", "gptq_v2", "gemm", in lower case; empty: it does not say
  std::optional<int64_t> group_size;  // -1: a row
  std::optional<bool> symmetric;
  std::optional<DType> dtype;  // of the weights before; only where a file stands alone
};
// Of the text of such an object, or of a config that has one; nothing where it says nothing of this kind.
std::optional<WordConfig> word_config(const std::string& text, const std::string& what);
std::optional<WordConfig> word_config_of_config(const std::string& config);
// The key in the metadata of a file that stands alone, and the other file of a directory that has it.
inline constexpr const char* kWordMetadata = "quantization_config";
inline constexpr const char* kWordFile = "quantize_config.json";
inline constexpr const char* kModeloptFile = "hf_quant_config.json";

// Rows and columns of the blocks of fp8: "weight_block_size", or the first "block_structure" of
// compressed-tensors. Nothing where it says none, or what is no two extents within [1, kMaxFp8Block].
inline constexpr int64_t kMaxFp8Block = 1024;
std::optional<std::array<int64_t, 2>> fp8_block_of_config(const std::string& config);

// Of the weights that are not quantized, as the config says.
std::optional<DType> dtype_of_config(const std::string& config);

struct ModelQuantization {
  Layout layout;
  QuantSpec spec;
  DType weight_dtype;                               // of the weights before
  std::vector<std::string> dense_modules;           // what is not quantized, as the reader spells it
  std::vector<std::string> quantized_modules = {};  // of gptq, where others beside them are dense
  std::string blocks = {};                 // of gptq: the list of layers that has them, "model.layers"
  bool head = false;                       // of gptq, awq: it is quantized
  std::map<std::string, MlxGrid> modules;  // of MLX, that differ from `spec`
  bool decompressed = false;               // of compressed-tensors: when the model is loaded
};
std::string with_quantization(const std::string& config, const ModelQuantization& quantization);
// The "quantization_config" of that alone, of weights whose tensors do not tell their dtype: what other files
// say, and, with the dtype of the weights, the metadata of a file that stands alone.
std::string word_quantization(const ModelQuantization& quantization, bool with_dtype);
// Other files of a model directory that say so: of gptq, for old readers. Their names and texts.
std::map<std::string, std::string> files_beside_config(const ModelQuantization& quantization);
// Without what with_quantization has added; `dtype` replaces the one the config names.
std::string without_quantization(const std::string& config, std::optional<DType> dtype);

}  // namespace halfbyte::io
