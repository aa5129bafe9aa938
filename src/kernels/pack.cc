// Writes kernel packs.
#include <algorithm>
#include <set>

#include "core/checks.h"
#include "cuda/kernel_pack.h"
#include "halfbyte/output.hpp"
#include "io/file.h"
#include "kernels/kernels.h"

namespace halfbyte {
namespace {

template <class Range>
bool contains(const Range& range, const std::string& value) {
  return std::ranges::find(range, value) != range.end();
}

void check_known(const char* what, const std::vector<std::string>& words,
                 const std::set<std::string>& known) {
  for (const std::string& word : words)
    HALFBYTE_CHECK(known.contains(word), usage, "kernel pack: unknown {} '{}': must be one of {}", what, word,
                   fmt::join(known, ", "));
}

// The listed values of a key in all kernels.
std::set<std::string> values_of(const std::string& name) {
  std::set<std::string> values;
  for (const KernelInfo& kernel : all_kernels())
    for (const KernelKey& key : kernel.keys)
      if (key.name == name) values.insert(key.values.begin(), key.values.end());
  return values;
}

struct PackKernel {
  cuda::KernelSpec spec;
  std::string target;
};
// What the options ask for, of all shards.
std::vector<PackKernel> kernels_of(const KernelPackOptions& options) {
  std::set<std::string> ops;
  for (const KernelInfo& kernel : all_kernels()) ops.insert(kernel.op);
  check_known("op", options.ops, ops);
  check_known("format", options.formats, values_of("format"));
  check_known("dtype", options.dtypes, values_of("dtype"));
  // Kernels of qgemm are given the table.
  HALFBYTE_CHECK(!contains(options.formats, "lut4") || options.ops == std::vector<std::string>{"qgemm"},
                 usage,
                 "kernel pack: it cannot hold kernels of format lut4 but those of op qgemm: others hold the "
                 "user's table");
  const auto uses = [&](const std::string& key, const std::string& value) {
    const std::vector<std::string>* only = key == "format"  ? &options.formats
                                           : key == "dtype" ? &options.dtypes
                                                            : nullptr;
    return !only || only->empty() || contains(*only, value);
  };
  std::vector<PackKernel> kernels;
  for (const cuda::Kernel& kernel : kernel_table())
    if (!kernel.info.plain && (options.ops.empty() || contains(options.ops, kernel.info.op)))
      for (const KernelConfiguration& configuration : all_configurations(kernel, uses))
        for (const std::string& target : options.targets)
          if (kernel.is_for(target)) kernels.push_back({configuration.spec, target});
  HALFBYTE_CHECK(!kernels.empty() || options.targets.empty(), usage,
                 "kernel pack: no kernel of {} has these formats and dtypes", fmt::join(options.ops, ", "));
  return kernels;
}

int64_t count_of_shard(const KernelPackOptions& options, size_t num_kernels) {
  HALFBYTE_CHECK(options.num_shards > 0 && options.shard >= 0 && options.shard < options.num_shards, usage,
                 "kernel pack: shard must be one of num_shards, got {} of {}", options.shard,
                 options.num_shards);
  const auto all = static_cast<int64_t>(num_kernels);
  return (all - options.shard + options.num_shards - 1) / options.num_shards;
}

}  // namespace

int64_t count_pack_kernels(const KernelPackOptions& options) {
  return count_of_shard(options, kernels_of(options).size());
}

KernelPackReport write_kernel_pack(const std::string& path, const KernelPackOptions& options) {
  const std::vector<std::string>& known = kernel_targets();
  HALFBYTE_CHECK(!options.targets.empty(), usage, "kernel pack: at least one target is needed, of {}",
                 fmt::join(known, ", "));
  check_known("target", options.targets, {known.begin(), known.end()});
  const std::vector<PackKernel> kernels = kernels_of(options);
  const int64_t total = count_of_shard(options, kernels.size());

  remove_leftovers(path);
  // A pack that others may write to would be refused.
  io::OutputFile file(path, 0, options.force, 0644);
  cuda::KernelPackWriter writer(
      [&](uint64_t offset, std::string_view bytes) { file.write(offset, std::as_bytes(std::span(bytes))); });
  KernelPackReport report;
  for (int64_t i = 0; i < total; ++i) {
    const auto& [spec, target] = kernels[static_cast<size_t>(options.shard + i * options.num_shards)];
    std::optional<cuda::PackedKernel> packed = cuda::find_packed(spec, target);
    if (!packed) ++report.num_compiled;
    const std::vector<char> cubin = packed ? std::move(packed->cubin) : cuda::compile(spec, target).code;
    writer.add(spec, target, {cubin.data(), cubin.size()});
    ++report.num_kernels;
    HALFBYTE_CHECK(!options.progress || options.progress(i + 1, total), cancelled,
                   "writing the kernel pack was cancelled");
  }
  report.num_bytes = writer.finish();
  file.commit();
  return report;
}

}  // namespace halfbyte
