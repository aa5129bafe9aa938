// Which weights of a checkpoint are quantized, and in what form the reader of the output wants each: by the
// modules that they belong to, where the table of architectures has the model, otherwise by their names.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "io/architecture.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/layout.h"
#include "io/output_weight.h"

namespace halfbyte::io {

struct SelectedWeight {
  OutputWeight weight;
  bool quantize = false;
  std::string reason = {};              // why it stays dense
  std::vector<std::string> skips = {};  // what tells readers that it is dense, where they would expect codes
  std::optional<MlxGrid> grid = {};     // other bits and groups than those of the options
  std::optional<ModuleInfo> module = {};
};

struct Selection {
  Reader reader = Reader::none;
  std::string architecture;  // that of the table, as LlamaForCausalLM; empty: it has none
  std::vector<SelectedWeight> weights;
  std::vector<std::string> skips;  // as above, of modules that have no weight of their own
  std::vector<size_t> left_out;    // weights of the input that the reader does not load
  std::string why_not;             // why the reader does not load the model at all
};

// The reader of the options, or that of the layout. Error(usage) if it does not read the layout, or what the
// options ask for in it.
Reader reader_of(const LayoutInfo& layout, const QuantizeOptions& options);

// Error(usage) where options.include selects what cannot be quantized, or what the reader cannot load
// quantized (without options.force_layout). With `chosen`, names of weights, include is not looked at: these
// are quantized, and nothing else.
Selection select_weights(const Checkpoint::Impl& checkpoint, const LayoutInfo& layout,
                         const QuantizeOptions& options, const std::set<std::string>* chosen = nullptr);

// What readers are told: the skips of `selection`, and of its weights that `is_dense`, but for those that
// would cover a module that is quantized; each once, in order.
std::vector<std::string> skips_of(const Selection& selection, const LayoutInfo& layout,
                                  const std::vector<bool>& is_dense);

// Error(usage) where the reader loads the experts of a layer only if all of them are quantized, and some stay
// dense.
void check_experts(const Selection& selection, const LayoutInfo& layout, const std::vector<bool>& is_dense);

// Whether transformers can load what compressed-tensors has of this only if it makes it dense at once: the
// layers that it would hold compressed cannot have zero points, and not all models can hold such layers.
bool must_be_decompressed(const Selection& selection, bool asymmetric, const std::vector<bool>& is_dense);

// Of gptq, what its readers are told of the layers that are quantized.
struct QuantizedModules {
  std::vector<std::string> names;  // empty: there are no linear layers but these in the blocks
  std::string blocks;  // the list of layers that has them all, "model.layers"; empty: there is none
  bool head = false;   // is one of them
};
QuantizedModules quantized_modules(const Selection& selection, const std::vector<bool>& is_dense);

// What the config of the output says. `targets`: for each weight of the selection what it becomes; null:
// dense. At least one is quantized. Error(usage) where the layout has one spec for the model, and they
// differ.
ModelQuantization model_quantization(const Selection& selection, const LayoutInfo& layout, bool force_layout,
                                     std::span<const QuantizedWeight* const> targets);

// Which readers load the output, and which do not and why, as far as the rules go that are known of them.
std::vector<ReaderVerdict> reader_verdicts(const Selection& selection, const LayoutInfo& layout,
                                           const QuantizeOptions& options, const std::vector<bool>& is_dense);

// "a", "b", "c" and 4 more
std::string name_list(const std::vector<std::string>& names);

}  // namespace halfbyte::io
