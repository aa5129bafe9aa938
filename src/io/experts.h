// Experts of a layer in the two forms that models have: all in one tensor [experts, out, in], in which rows
// of gate and up take turns (gpt-oss), and a matrix for each expert and projection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"

namespace halfbyte::io {

// Rows of a matrix of one expert: of the tensor of all those first, first + step, ... of that expert.
struct ExpertRows {
  int64_t expert = 0, first = 0, step = 1;
};
// One matrix, by both names.
struct ExpertName {
  std::string fused;  // "X.experts.gate_up_proj", "X.experts.gate_up_proj_bias"
  std::string own;    // "X.experts.3.up_proj.weight", "X.experts.3.up_proj.bias"
  ExpertRows rows;
};

// Of a tensor of all experts; empty: the name is none of one.
std::vector<ExpertName> experts_of(const std::string& fused, int64_t num_experts);
// Of a matrix, or a bias; nothing where the name is none of one.
std::optional<ExpertName> expert_of(const std::string& own);

// A matrix of a quantized tensor [experts, out, in] in which each row has scales of its own, without double
// quantization.
QuantizedTensor load_expert(const Checkpoint::Impl& checkpoint, const StoredWeight& stored, int64_t expert);
// Of those rows of it `count`, as a matrix; and back, into a tensor of all experts.
QuantizedTensor take_rows(const QuantizedTensor& matrix, const ExpertRows& rows, int64_t count);
void put_rows(const QuantizedTensor& matrix, const ExpertRows& rows, QuantizedTensor& all);

}  // namespace halfbyte::io
