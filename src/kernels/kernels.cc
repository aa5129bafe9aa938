#include "kernels/kernels.h"

#include <algorithm>
#include <set>

#include "benchmark/benchmark_kernels.h"
#include "core/checks.h"
#include "cuda/clear.h"
#include "cuda/nvrtc.h"
#include "ops/affine_qdq/affine_qdq_cuda.h"
#include "ops/all_reduce/all_reduce_cuda.h"
#include "ops/compute_qparams/compute_qparams_cuda.h"
#include "ops/dequantize/dequantize_cuda.h"
#include "ops/fake_quantize/fake_quantize_cuda.h"
#include "ops/learned_scale/learned_scale_cuda.h"
#include "ops/observe/observe_cuda.h"
#include "ops/qgemm/qgemm_cuda.h"
#include "ops/quantize/quantize_cuda.h"
#include "ops/quantize_linear/quantize_linear_cuda.h"
#include "ops/reorder/reorder_cuda.h"
#include "ops/route/route_cuda.h"

namespace halfbyte {
namespace {

using cuda::Kernel;
using cuda::KernelSpec;
using cuda::KernelValues;

std::vector<Kernel> make_table() {
  std::vector<Kernel> table;
  for (const auto& rows : {
           quantize_kernels(),
           dequantize_kernels(),
           quantize_linear_kernels(),
           fake_quantize_kernels(),
           learned_scale_kernels(),
           observe_kernels(),
           compute_qparams_kernels(),
           affine_qdq_kernels(),
           qgemm_kernels(),
           reorder_kernels(),
           route_kernels(),
           all_reduce_kernels(),
           benchmark_kernels(),
       })
    table.insert(table.end(), rows.begin(), rows.end());
  table.push_back(
      {{"workspace", "clear_workspace", "Zeros for another kernel, which may begin meanwhile.", {}},
       [](const KernelValues&) { return cuda::clear_kernel(); }});
  return table;
}

std::string names_of(std::span<const KernelKey> keys) {
  std::string names;
  for (const KernelKey& key : keys) names += (names.empty() ? "" : ", ") + key.name;
  return names;
}

const KernelKey& find_key(const Kernel& kernel, std::string_view name) {
  const auto& keys = kernel.info.keys;
  const auto found = std::ranges::find(keys, name, &KernelKey::name);
  HALFBYTE_CHECK(found != keys.end(), usage, "kernel {} has no key '{}': must be one of {}", kernel.info.name,
                 name, names_of(keys));
  return *found;
}

KernelSpec specialise_values(const Kernel& kernel, const KernelValues& values) {
  KernelSpec spec = kernel.specialise(values);
  HALFBYTE_CHECK(spec.function == kernel.info.name, bug, "kernel {}: its row makes {}", kernel.info.name,
                 spec.function);
  return spec;
}

// The value of every key. Error(usage) naming the known ones.
KernelValues complete_values(const Kernel& kernel, const KernelConfig& config) {
  KernelValues values;
  for (const auto& [name, value] : config) {
    const KernelKey& key = find_key(kernel, name);
    HALFBYTE_CHECK(key.open || std::ranges::find(key.values, value) != key.values.end(), usage,
                   "kernel {}: {} must be one of {}, got '{}'", kernel.info.name, name,
                   fmt::join(key.values, ", "), value);
    HALFBYTE_CHECK(values.emplace(name, value).second, usage, "kernel {}: {} is given twice",
                   kernel.info.name, name);
  }
  for (const KernelKey& key : kernel.info.keys) values.emplace(key.name, key.default_value());
  return values;
}

// The code of a kernel for a target that NVRTC must know.
std::vector<char> emit(std::string_view name, const KernelConfig& config, std::string_view target, bool ptx) {
  const Kernel& kernel = find_kernel(name);
  const KernelSpec spec = specialise(kernel, config);
  const std::vector<std::string>& targets = kernel_targets();
  HALFBYTE_CHECK(std::ranges::find(targets, target) != targets.end(), usage,
                 "unknown target '{}': must be one of {}", target, fmt::join(targets, ", "));
  HALFBYTE_CHECK(kernel.is_for(target), usage, "kernel {}: target must be {}, got {}", name,
                 kernel.info.target, target);
  return cuda::compile(spec, std::string(target), {.ptx = ptx}).code;
}

}  // namespace

std::span<const Kernel> kernel_table() {
  static const auto& table = *new std::vector<Kernel>(make_table());
  return table;
}

const Kernel& find_kernel(std::string_view name) {
  std::string known;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.info.name == name) return kernel;
    known += (known.empty() ? "" : ", ") + kernel.info.name;
  }
  HALFBYTE_FAIL(usage, "unknown kernel '{}': must be one of {}", name, known);
}

KernelSpec specialise(const Kernel& kernel, const KernelConfig& config) {
  return specialise_values(kernel, complete_values(kernel, config));
}

std::vector<KernelConfiguration> all_configurations(
    const Kernel& kernel, const std::function<bool(const std::string& key, const std::string& value)>& uses) {
  std::vector<std::vector<std::string>> choices;  // of each key, the values that are used
  KernelConfig config;
  for (const KernelKey& key : kernel.info.keys) {
    std::vector<std::string>& own = choices.emplace_back();
    const std::vector<std::string> only_default = {key.default_value()};
    std::ranges::copy_if(key.values.empty() ? only_default : key.values, std::back_inserter(own),
                         [&](const std::string& value) { return !uses || uses(key.name, value); });
    if (own.empty()) return {};
    config.emplace_back(key.name, own[0]);
  }
  KernelValues values(config.begin(), config.end());
  std::vector<KernelConfiguration> configurations;
  std::set<std::string> found;
  // All combinations, of which most are refused: the value of the first key changes first.
  for (std::vector<size_t> at(choices.size());;) {
    try {
      KernelSpec spec = specialise_values(kernel, values);
      if (found.insert(spec.config).second) configurations.push_back({config, std::move(spec)});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::usage) throw;  // the values do not go together
    }
    size_t key = 0;
    for (bool carries = true; carries; ++key) {
      if (key == at.size()) return configurations;
      carries = ++at[key] == choices[key].size();
      if (carries) at[key] = 0;
      config[key].second = values[config[key].first] = choices[key][at[key]];
    }
  }
}

const std::vector<KernelInfo>& all_kernels() {
  static const auto& kernels = *[] {
    auto* made = new std::vector<KernelInfo>;
    for (const Kernel& kernel : kernel_table()) made->push_back(kernel.info);
    return made;
  }();
  return kernels;
}

const KernelInfo& choose_kernel(std::string_view op, const KernelConfig& config) {
  std::vector<const Kernel*> kernels, chosen;
  std::set<std::string> ops;
  for (const Kernel& kernel : kernel_table()) {
    ops.insert(kernel.info.op);
    if (kernel.info.op != op) continue;
    kernels.push_back(&kernel);
    if (kernel.chosen_by_config) chosen.push_back(&kernel);
  }
  HALFBYTE_CHECK(!kernels.empty(), usage, "unknown op '{}': must be one of {}", op, fmt::join(ops, ", "));
  if (kernels.size() == 1) chosen = kernels;
  HALFBYTE_CHECK(!chosen.empty(), bug, "{}: none of its kernels is chosen", op);
  for (const Kernel* kernel : chosen) {
    try {
      specialise(*kernel, config);
      return kernel->info;
    } catch (const Error& error) {
      // The last takes the most: what it refuses is wrong.
      if (error.code() != ErrorCode::usage || kernel == chosen.back()) throw;
    }
  }
  HALFBYTE_FAIL(bug, "{}: no kernel was tried", op);
}

KernelDescription describe_kernel(std::string_view name, const KernelConfig& config) {
  const Kernel& kernel = find_kernel(name);
  HALFBYTE_CHECK(kernel.describe != nullptr, usage,
                 "kernel {} takes a struct of this version of the library: only plain kernels are described",
                 name);
  const KernelValues values = complete_values(kernel, config);
  specialise_values(kernel, values);  // whether they go together
  KernelDescription description = kernel.describe(values);
  description.op = kernel.info.op;
  description.kernel = kernel.info.name;
  for (const KernelKey& key : kernel.info.keys)
    description.config.emplace_back(key.name, values.at(key.name));
  return description;
}

const std::vector<std::string>& kernel_targets() { return cuda::nvrtc().targets; }

std::string emit_ptx(std::string_view kernel, const KernelConfig& config, std::string_view target) {
  const std::vector<char> ptx = emit(kernel, config, target, true);
  return {ptx.begin(), ptx.end()};
}

std::vector<std::byte> emit_cubin(std::string_view kernel, const KernelConfig& config,
                                  std::string_view target) {
  const std::vector<char> cubin = emit(kernel, config, target, false);
  const auto bytes = std::as_bytes(std::span(cubin));
  return {bytes.begin(), bytes.end()};
}

}  // namespace halfbyte
