// What modules the tensors of a checkpoint belong to, by the table that tools/architectures.py makes of the
// readers themselves: src/io/architectures.json, which docs/architectures.md explains.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace halfbyte::io {

enum class ModuleKind : uint8_t {
  linear,           // nn.Linear: weight [out, in]
  linear_subclass,  // a class derived from it: bitsandbytes does not replace it, compressed-tensors does
  conv1d,           // a linear layer stored transposed: weight [in, out]
  embedding,
  attention,    // nn.MultiheadAttention: in_proj_weight, and out_proj, which is of a class derived from
                // nn.Linear
  convolution,  // of any number of dimensions
  experts,      // one tensor [E, out, in], or [E, in, out] if transposed
  parameter,    // a tensor of two dimensions or more that belongs to none of these
};

enum class ModuleRole : uint8_t { plain, head, router, expert, projector, adapter, vision, audio };

struct ModuleInfo {
  ModuleKind kind;
  ModuleRole role;
  bool transposed;     // experts: [E, in, out]
  bool interleaved;    // experts: gate and up take turns; otherwise gate comes first
  bool apart;          // experts: readers of quantized weights have a linear layer for each
  bool uncompressed;   // transformers 5 cannot hold it compressed, only make it dense
  bool kept_f32;       // f32 in a model of another dtype: readers do not quantize it
  std::string module;  // its name in transformers 5; of experts and parameters that of the tensor
  std::string
      operations;  // what makes the module's tensor of those of the checkpoint, "stack 0, concat 1"; or empty
  std::string tied_to;  // the module that it shares its weight with if the embeddings are tied; or empty
};

// The text of the table, in the library.
std::string_view architectures_json();
// It, read.
const nlohmann::json& architectures();

// A row of the table with the rows of the models within it. Copies share it.
class Architecture {
 public:
  // That of a config.json: the class in its "architectures", or one of its "model_type", with a head if there
  // is such a class; models within it by their configurations. Nothing if the table has neither.
  static std::optional<Architecture> find(const nlohmann::json& config);

  // The class, as LlamaForCausalLM.
  const std::string& name() const;
  // Whether the head and the embeddings are one tensor: as config.json says, or as the class has it by
  // default.
  bool tied() const;
  // Where the tensor of a checkpoint belongs, under the names of published checkpoints or those of
  // transformers 5, with or without that of the base model. Nothing if it is unknown, or has one dimension,
  // as norms have.
  std::optional<ModuleInfo> find_tensor(std::string_view tensor) const;
  // The modules that share a weight with others if the embeddings are tied, a `*` for each number.
  std::vector<std::string> tied_modules() const;

 private:
  struct Model;
  explicit Architecture(std::shared_ptr<const Model> model);
  std::shared_ptr<const Model> model_;
};

}  // namespace halfbyte::io
