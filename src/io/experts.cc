#include "io/experts.h"

#include <array>
#include <charconv>
#include <cstring>

#include "core/checks.h"

namespace halfbyte::io {
namespace {

struct Projection {
  std::string_view own, fused;
  int64_t part, num_parts;
};
constexpr std::array<Projection, 3> kProjections = {{{"gate_proj", "gate_up_proj", 0, 2},
                                                     {"up_proj", "gate_up_proj", 1, 2},
                                                     {"down_proj", "down_proj", 0, 1}}};
constexpr std::string_view kExperts = ".experts.";

// The endings of the two names.
struct Kind {
  std::string_view own, fused;
};
constexpr std::array<Kind, 2> kKinds = {{{".weight", ""}, {".bias", "_bias"}}};

ExpertName name_of(std::string_view path, int64_t expert, const Projection& projection, const Kind& kind,
                   bool in_turns) {
  return {fmt::format("{}{}{}", path, projection.fused, kind.fused),
          fmt::format("{}{}.{}{}", path, expert, projection.own, kind.own),
          {expert, projection.part, projection.num_parts, in_turns}};
}

// Calls body(part of `to`, part of `from`) for the parts that have a row for each row.
template <class To, class From, class Body>
void for_each_part(To& to, From& from, const Body& body) {
  for (const auto part :
       {&QuantizedTensor::codes, &QuantizedTensor::scales, &QuantizedTensor::zeros, &QuantizedTensor::biases})
    if ((to.*part).num_bytes() > 0) body(to.*part, from.*part);
}

}  // namespace

std::vector<ExpertName> experts_of(const std::string& fused, int64_t num_experts, bool in_turns) {
  std::vector<ExpertName> names;
  const size_t at = fused.rfind(kExperts);
  if (at == std::string::npos) return names;
  const std::string_view path = std::string_view(fused).substr(0, at + kExperts.size());
  for (int64_t expert = 0; expert < num_experts; ++expert)
    for (const Projection& projection : kProjections)
      for (const Kind& kind : kKinds)
        if (ExpertName name = name_of(path, expert, projection, kind, in_turns); name.fused == fused)
          names.push_back(std::move(name));
  return names;
}

QuantSpec by_rows(const QuantSpec& spec, int64_t cols) {
  QuantSpec result = spec;
  if (spec.granularity == Granularity::flat && cols % spec.group_size == 0)
    result.granularity = Granularity::group;
  return result;
}

std::optional<ExpertName> expert_of(const std::string& own, bool in_turns) {
  const size_t at = own.rfind(kExperts);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + kExperts.size();
  int64_t expert = -1;
  const auto [end, error] = std::from_chars(own.data() + begin, own.data() + own.size(), expert);
  if (error != std::errc() || expert < 0) return std::nullopt;
  for (const Projection& projection : kProjections)
    for (const Kind& kind : kKinds)
      if (ExpertName name =
              name_of(std::string_view(own).substr(0, begin), expert, projection, kind, in_turns);
          name.own == own)
        return name;
  return std::nullopt;
}

QuantizedTensor load_expert(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, int64_t expert) {
  QuantizedWeight weight = stored.weight;
  weight.spec = by_rows(weight.spec, weight.cols());
  const int64_t rows = weight.shape[1], cols = weight.shape[2], first = expert * rows * cols;
  QuantizedTensor matrix(weight.spec, {rows, cols}, weight.dtype);
  matrix.encoding = weight.encoding;
  if (has_global_scale(weight.spec))
    std::memcpy(matrix.global_scale.data(), &weight.global_scale, sizeof weight.global_scale);
  Buffer buffer;
  for (int64_t begin = first; begin < first + rows * cols;) {
    const Block block = block_at(weight, begin, std::min(kBlockElements, first + rows * cols - begin));
    for (const Role role : block_roles(weight.spec)) {
      const StoredRange range = stored_range(weight, block, role);
      std::byte* const bytes = buffer.reserve(static_cast<int64_t>(range.num_bytes()));
      checkpoint.read(stored.part(role), range, {bytes, range.num_bytes()});
      const int64_t row_bytes = part_of(matrix, role).num_bytes() / rows;
      to_native(weight, block, role, bytes,
                part_of(matrix, role).data() + (block.first_row - expert * rows) * row_bytes);
    }
    begin += block.count;
  }
  return matrix;
}

QuantizedTensor take_rows(const QuantizedTensor& matrix, const ExpertRows& rows) {
  const int64_t count = rows.count(matrix.rows());
  QuantizedTensor taken(matrix.spec, {count, matrix.cols()}, matrix.dtype);
  taken.encoding = matrix.encoding;
  taken.global_scale = matrix.global_scale;
  for_each_part(taken, matrix, [&](const Tensor& to, const Tensor& from) {
    const int64_t row_bytes = to.num_bytes() / count;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(to.data() + row * row_bytes, from.data() + rows.row(row, matrix.rows()) * row_bytes,
                  static_cast<size_t>(row_bytes));
  });
  return taken;
}

void put_rows(const QuantizedTensor& matrix, const ExpertRows& rows, QuantizedTensor& all) {
  const int64_t all_rows = all.shape[1], before = rows.expert * all_rows;
  for_each_part(all, matrix, [&](const Tensor& to, const Tensor& from) {
    const int64_t row_bytes = from.num_bytes() / matrix.rows();
    for (int64_t row = 0; row < matrix.rows(); ++row)
      std::memcpy(to.data() + (before + rows.row(row, all_rows)) * row_bytes, from.data() + row * row_bytes,
                  static_cast<size_t>(row_bytes));
  });
}

}  // namespace halfbyte::io
