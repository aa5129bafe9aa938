#include "io/importance.h"

#include <algorithm>
#include <cmath>

#include "core/checks.h"
#include "io/journal.h"
#include "io/selection.h"

namespace halfbyte::io {
namespace {

const StoredTensor* find(const Checkpoint& file, const std::string& name) {
  const auto& by_name = file.impl().by_name;
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : &file.impl().tensors[static_cast<size_t>(found->second)];
}

}  // namespace

ImportanceFile::ImportanceFile(const std::string& path) : file_(Checkpoint::open(path)) {}

std::span<const float> ImportanceFile::values(const QuantizedWeight& weight, Buffer& buffer) const {
  const StoredTensor& tensor = *find(file_, weight.name);
  std::byte* const data = buffer.reserve(static_cast<int64_t>(tensor.num_bytes));
  file_.read(tensor, 0, {data, static_cast<size_t>(tensor.num_bytes)});
  return {reinterpret_cast<const float*>(data), static_cast<size_t>(weight.cols())};
}

nlohmann::json ImportanceFile::identity() const { return source_identity(file_.impl(), {}); }

void ImportanceFile::check(std::span<const QuantizedWeight* const> weights) const {
  const std::string path = printable(file_.impl().path);
  std::vector<std::string> missing;
  for (const QuantizedWeight* const weight : weights)
    if (find(file_, weight->name) == nullptr) missing.push_back(weight->name);
  HALFBYTE_CHECK(missing.empty(), bad_input, "importance \"{}\" has nothing for {} of {} weights: {}", path,
                 missing.size(), weights.size(), name_list(missing));
  Buffer buffer;
  for (const QuantizedWeight* const weight : weights) {
    const StoredTensor& tensor = *find(file_, weight->name);
    HALFBYTE_CHECK(tensor.dtype == "F32" && tensor.shape == std::vector<int64_t>{weight->cols()}, bad_input,
                   "importance \"{}\" of weight \"{}\" must be F32 [{}], got {} [{}]", path,
                   printable(weight->name), weight->cols(), printable(tensor.dtype),
                   fmt::join(tensor.shape, ", "));
    const std::span<const float> of = values(*weight, buffer);
    const auto bad =
        std::ranges::find_if(of, [](float value) { return !(value >= 0 && std::isfinite(value)); });
    HALFBYTE_CHECK(bad == of.end(), bad_input,
                   "importance \"{}\" of weight \"{}\" must be finite and not negative, got {} at index {}",
                   path, printable(weight->name), *bad, bad - of.begin());
  }
}

Importance ImportanceFile::read(const QuantizedWeight& weight, const Block& block,
                                BlockWorker& worker) const {
  values(weight, worker.importance);
  worker.transfer([&] { worker.importance.upload(worker.stream); });
  return {reinterpret_cast<const float*>(worker.importance.mirror()), weight.cols(),
          block.begin % weight.cols()};
}

}  // namespace halfbyte::io
