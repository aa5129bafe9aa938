// The CUDA kernels: which there are, their code, packs of them.
#include "halfbyte/kernels.hpp"

#include "capi/support.h"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

const KernelKey& key_of(int64_t kernel_index, int64_t key_index) {
  return element(element(all_kernels(), kernel_index, "kernels").keys, key_index, "keys");
}

KernelConfig config_of(const halfbyte_kernel_setting* settings, int64_t count) {
  if (count < 0) refuse("num_settings must not be negative, got {}", count);
  if (count > 0) required(settings, "settings");
  KernelConfig config;
  for (int64_t i = 0; i < count; ++i)
    config.emplace_back(&required(settings[i].key, "settings: key"),
                        &required(settings[i].value, "settings: value"));
  return config;
}

halfbyte_kernel_pack_options default_pack_options() {
  halfbyte_kernel_pack_options options{};
  options.num_shards = KernelPackOptions{}.num_shards;
  return options;
}

KernelPackOptions options_of(const halfbyte_kernel_pack_options* given) {
  required(given, "options");
  const halfbyte_kernel_pack_options c = read_struct(given, default_pack_options(), "options");
  KernelPackOptions options;
  options.targets = words_of(c.targets, c.num_targets, "options.targets");
  options.ops = words_of(c.ops, c.num_ops, "options.ops");
  options.formats = words_of(c.formats, c.num_formats, "options.formats");
  options.dtypes = words_of(c.dtypes, c.num_dtypes, "options.dtypes");
  options.force = flag_of(c.force, "options.force");
  options.shard = c.shard;
  options.num_shards = c.num_shards;
  if (c.progress != nullptr)
    options.progress = [function = c.progress, user_data = c.user_data](int64_t done, int64_t total) {
      return function(done, total, user_data) == 0;
    };
  return options;
}

}  // namespace

halfbyte_status halfbyte_kernel_count(int64_t* num_kernels) {
  return guard([&] { required(num_kernels, "num_kernels") = static_cast<int64_t>(all_kernels().size()); });
}
halfbyte_status halfbyte_kernel_get(int64_t index, halfbyte_kernel* kernel) {
  return guard([&] {
    const KernelInfo& of = element(all_kernels(), index, "kernels");
    write_struct(kernel,
                 {0, of.op.c_str(), of.name.c_str(), of.description.c_str(),
                  static_cast<int64_t>(of.keys.size()), of.target.c_str(), of.plain},
                 "kernel");
  });
}
halfbyte_status halfbyte_kernel_get_key(int64_t kernel_index, int64_t key_index, halfbyte_kernel_key* key) {
  return guard([&] {
    const KernelKey& of = key_of(kernel_index, key_index);
    write_struct(
        key, {0, of.name.c_str(), of.description.c_str(), static_cast<int64_t>(of.values.size()), of.open},
        "key");
  });
}
const char* halfbyte_kernel_key_value(int64_t kernel_index, int64_t key_index, int64_t value_index) {
  const char* value = nullptr;
  guard([&] { value = element(key_of(kernel_index, key_index).values, value_index, "values").c_str(); });
  return value;
}

halfbyte_status halfbyte_kernel_choose(const char* op, const halfbyte_kernel_setting* settings,
                                       int64_t num_settings, int64_t* index) {
  return guard([&] {
    const KernelInfo& kernel = choose_kernel(&required(op, "op"), config_of(settings, num_settings));
    const auto found = std::ranges::find(all_kernels(), kernel.name, &KernelInfo::name);
    required(index, "index") = found - all_kernels().begin();
  });
}

halfbyte_status halfbyte_kernel_describe(const char* kernel, const halfbyte_kernel_setting* settings,
                                         int64_t num_settings, halfbyte_blob** json) {
  return guard([&] {
    required(json, "json");
    *json = new halfbyte_blob{
        to_json(describe_kernel(&required(kernel, "kernel"), config_of(settings, num_settings)))};
  });
}

halfbyte_status halfbyte_kernel_target_count(int64_t* num_targets) {
  return guard([&] { required(num_targets, "num_targets") = static_cast<int64_t>(kernel_targets().size()); });
}
halfbyte_status halfbyte_kernel_target_get(int64_t index, const char** target) {
  return guard([&] { required(target, "target") = element(kernel_targets(), index, "targets").c_str(); });
}

halfbyte_status halfbyte_kernel_emit_ptx(const char* kernel, const halfbyte_kernel_setting* settings,
                                         int64_t num_settings, const char* target, halfbyte_blob** ptx) {
  return guard([&] {
    required(ptx, "ptx");
    *ptx = new halfbyte_blob{emit_ptx(&required(kernel, "kernel"), config_of(settings, num_settings),
                                      &required(target, "target"))};
  });
}
halfbyte_status halfbyte_kernel_emit_cubin(const char* kernel, const halfbyte_kernel_setting* settings,
                                           int64_t num_settings, const char* target, halfbyte_blob** cubin) {
  return guard([&] {
    required(cubin, "cubin");
    const std::vector<std::byte> bytes = emit_cubin(
        &required(kernel, "kernel"), config_of(settings, num_settings), &required(target, "target"));
    *cubin = new halfbyte_blob{{reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
  });
}

halfbyte_status halfbyte_kernel_pack_options_init(halfbyte_kernel_pack_options* options, size_t struct_size) {
  return init_struct(options, default_pack_options(), struct_size, "options");
}
halfbyte_status halfbyte_kernel_pack_count(const halfbyte_kernel_pack_options* options,
                                           int64_t* num_kernels) {
  return guard([&] { required(num_kernels, "num_kernels") = count_pack_kernels(options_of(options)); });
}
halfbyte_status halfbyte_kernel_pack_write(const char* path, const halfbyte_kernel_pack_options* options,
                                           halfbyte_kernel_pack_info* info) {
  return guard([&] {
    if (info != nullptr) check_struct_size<halfbyte_kernel_pack_info>(info->struct_size, "info");
    const KernelPackReport report = write_kernel_pack(&required(path, "path"), options_of(options));
    if (info != nullptr)
      write_struct(info, {0, report.num_kernels, report.num_compiled, report.num_kernels, report.num_bytes},
                   "info");
  });
}
halfbyte_status halfbyte_kernel_pack_load(const char* path, halfbyte_kernel_pack_info* info) {
  return guard([&] {
    if (info != nullptr) check_struct_size<halfbyte_kernel_pack_info>(info->struct_size, "info");
    const KernelPackInfo pack = load_kernel_pack(&required(path, "path"));
    if (info != nullptr) write_struct(info, {0, pack.num_kernels, 0, pack.num_matching, 0}, "info");
  });
}
