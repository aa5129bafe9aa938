// Copies a checkpoint, with other global scales and scales.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "core/checks.h"
#include "formats/convert.h"
#include "halfbyte/output.hpp"
#include "halfbyte/verify.hpp"
#include "io/checkpoint_writer.h"
#include "io/fused.h"
#include "io/shard_index.h"

namespace halfbyte {
namespace io {
namespace {

// Bytes of a file that are not copied as they are.
struct Patch {
  uint64_t begin = 0, end = 0;  // in the file
  float ratio = 0;              // of scales in e4m3: what they are multiplied by; 0: `value` instead
  float value = 0;
};

std::byte rescaled(std::byte scale, float ratio) {
  const float before = formats::e4m3_to_f32(std::to_integer<formats::u8>(scale));
  const formats::u8 after = formats::to_e4m3(before * ratio);
  return std::byte{after == 0 && before != 0 ? formats::u8{1} : after};
}

// `bytes` are those from `offset` on.
void apply(const Patch& patch, uint64_t offset, std::span<std::byte> bytes) {
  const uint64_t begin = std::max(offset, patch.begin), end = std::min(offset + bytes.size(), patch.end);
  std::byte value[sizeof(float)];
  std::memcpy(value, &patch.value, sizeof value);
  for (uint64_t i = begin; i < end; ++i) {
    std::byte& byte = bytes[i - offset];
    byte = patch.ratio == 0 ? value[i - patch.begin] : rescaled(byte, patch.ratio);
  }
}

class Repairer {
 public:
  Repairer(const Checkpoint::Impl& input, const ProgressFunction& progress)
      : input_(input), reporter_(progress) {}

  RepairReport run(const std::string& output, bool force) {
    find_patches();
    HALFBYTE_CHECK(!report_.weights.empty(), usage,
                   "repair: \"{}\" has no weights of one product with several global scales",
                   printable(input_.path));
    check_output_path(input_.path, output);
    remove_leftovers(output);
    uint64_t total = 0;
    for (const Checkpoint::Impl::File& file : input_.files) total += file.input.size();
    if (!input_.is_directory) {
      ProgressPhase phase(reporter_, "copy", total);
      OutputFile file(output, total, force);
      copy(input_.files.front().input, patches_[0], file, phase);
      reporter_.ask();
      file.commit();
      return std::move(report_);
    }
    std::vector<std::string> others = find_side_files(input_).copied;
    for (const std::string& name : list_directory(input_.path))
      if (name == "config.json" || name == kIndexFile) others.push_back(name);
    for (const std::string& name : others) total += open_beside(name).size();
    ProgressPhase phase(reporter_, "copy", total);
    OutputDirectory directory(output, force, others);
    directory.check_space(total, input_.files.size() + others.size());
    const auto copy_to = [&](const std::string& name, const InputFile& from, std::vector<Patch>& patches) {
      OutputFile file(directory, name, from.size());
      copy(from, patches, file, phase);
      file.commit();
    };
    for (size_t i = 0; i < input_.files.size(); ++i)
      copy_to(input_.files[i].name, input_.files[i].input, patches_[i]);
    std::vector<Patch> none;
    for (const std::string& name : others) copy_to(name, open_beside(name), none);
    directory.sync();
    reporter_.ask();
    directory.commit();
    return std::move(report_);
  }

 private:
  // As it is stored: of some layouts the reciprocal.
  struct Global {
    const StoredTensor* tensor;
    float value;
    bool reciprocal;
    // Of the one that the others take.
    bool operator<(const Global& other) const {
      return reciprocal ? value > other.value : value < other.value;
    }
  };
  static bool has_global(const QuantizedWeight& weight) {
    return has_global_scale(weight.spec) && weight.layout != Layout::mlx;  // which stores none
  }
  Global global_of(const QuantizedWeight& weight) const {
    for (const Part& part : parts_of(weight))
      if (part.role == Role::constant && part.dtype == "F32")
        return {input_.find(part.name), read_f32(input_, part.name, "repair"),
                layout_info(weight.layout).global_is_reciprocal};
    HALFBYTE_FAIL(bug, "weight \"{}\" stores no global scale", printable(weight.name));
  }

  void find_patches() {
    std::map<std::string, Global> least;
    for (const StoredWeight& stored : input_.quantized) {
      const QuantizedWeight& weight = stored.weight;
      if (!has_global(weight)) continue;
      const Global own = global_of(weight);
      HALFBYTE_CHECK(own.value > 0 && formats::is_finite(own.value), bad_input, "repair: tensor \"{}\" is {}",
                     printable(own.tensor->name), own.value);
      const auto [entry, added] = least.emplace(fused_name(weight.name), own);
      if (!added) entry->second = std::min(entry->second, own);
    }
    for (const StoredWeight& stored : input_.quantized) {
      const QuantizedWeight& weight = stored.weight;
      if (!has_global(weight)) continue;
      const Global own = global_of(weight), shared = least.at(fused_name(weight.name));
      if (own.value == shared.value) continue;
      const StoredTensor& scales = stored.part(Role::scales);
      add(scales, {.ratio = own.reciprocal ? own.value / shared.value : shared.value / own.value});
      add(*own.tensor, {.value = shared.value});
      const float divisor = shared.reciprocal ? 1 / shared.value : shared.value;
      report_.weights.push_back(
          {weight.name, weight.global_scale, divisor, static_cast<int64_t>(scales.num_bytes)});
    }
  }

  void add(const StoredTensor& tensor, Patch patch) {
    patch.begin = tensor.offset;
    patch.end = tensor.offset + tensor.num_bytes;
    const auto index = static_cast<size_t>(input_.by_name.at(tensor.name));
    patches_[input_.file_of[index]].push_back(patch);
  }

  InputFile open_beside(const std::string& name) const {
    const size_t slash = name.rfind('/');
    const std::string parent = slash == std::string::npos ? "" : "/" + name.substr(0, slash);
    return InputFile::open_beneath(input_.path + parent, name.substr(slash + 1));
  }

  void copy(const InputFile& from, std::vector<Patch>& patches, OutputFile& to, ProgressPhase& phase) {
    constexpr uint64_t kPart = uint64_t{1} << 20;
    std::ranges::sort(patches, {}, &Patch::begin);
    std::vector<std::byte> buffer(std::min(kPart, from.size()));
    size_t next = 0;  // the first patch that ends behind `offset`
    for (uint64_t offset = 0; offset < from.size();) {
      const std::span<std::byte> bytes(buffer.data(), std::min<uint64_t>(kPart, from.size() - offset));
      from.read(offset, bytes);
      while (next < patches.size() && patches[next].end <= offset) ++next;
      for (size_t i = next; i < patches.size() && patches[i].begin < offset + bytes.size(); ++i)
        apply(patches[i], offset, bytes);
      to.write(offset, bytes);
      offset += bytes.size();
      phase.add(bytes.size());
    }
    from.check_unchanged();
    to.sync([&] { reporter_.poll(); });
  }

  const Checkpoint::Impl& input_;
  ProgressReporter reporter_;
  std::map<size_t, std::vector<Patch>> patches_;  // by file
  RepairReport report_;
};

}  // namespace
}  // namespace io

RepairReport repair_checkpoint(const std::string& input, const std::string& output, bool force,
                               const ProgressFunction& progress) {
  const Checkpoint from = Checkpoint::open(input, progress);
  return io::Repairer(from.impl(), progress).run(output, force);
}

}  // namespace halfbyte
