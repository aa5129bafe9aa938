// Experts of a layer in the forms that models have: all in one tensor [experts, out, in], in which rows of
// gate and up take turns (gpt-oss) or gate comes first, and a matrix for each expert and projection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"

namespace halfbyte::io {

// Which rows of an expert's matrix in the tensor of all are those of one projection: of gate and up the one
// or the other part.
struct ExpertRows {
  int64_t expert = 0, part = 0, num_parts = 1;
  bool in_turns = true;

  // Of a matrix of so many rows.
  int64_t count(int64_t all_rows) const { return all_rows / num_parts; }
  int64_t row(int64_t index, int64_t all_rows) const {
    return in_turns ? index * num_parts + part : part * count(all_rows) + index;
  }
};
// One matrix, by both names.
struct ExpertName {
  std::string fused;  // "X.experts.gate_up_proj", "X.experts.gate_up_proj_bias"
  std::string own;    // "X.experts.3.up_proj.weight", "X.experts.3.up_proj.bias"
  ExpertRows rows;
};

// Of a tensor of all experts; empty: the name is none of one.
std::vector<ExpertName> experts_of(const std::string& fused, int64_t num_experts, bool in_turns);
// Of a matrix, or a bias; nothing where the name is none of one.
std::optional<ExpertName> expert_of(const std::string& own, bool in_turns);

// The spec of a weight of so many columns with flat groups that are whole within rows: as groups of a row,
// which have the same bytes. Others as they are.
QuantSpec by_rows(const QuantSpec& spec, int64_t cols);

// A matrix of a quantized tensor [experts, out, in] in which each row has scales of its own (by_rows),
// without double quantization.
QuantizedTensor load_expert(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, int64_t expert);
// Those rows of it as a matrix; and back, into a tensor of all experts.
QuantizedTensor take_rows(const QuantizedTensor& matrix, const ExpertRows& rows);
void put_rows(const QuantizedTensor& matrix, const ExpertRows& rows, QuantizedTensor& all);

}  // namespace halfbyte::io
