// Output weights made of whole, parted, stacked, interleaved and turned input weights, against a gather of
// single elements; and what may not be one.
#include "io/output_weight.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "io/safetensors.h"
#include "io/test_directory.h"

namespace halfbyte::io {
namespace {

struct InputWeight {
  std::string name, dtype;
  std::vector<int64_t> shape;
};

// Every byte tells weight and place.
void write_input(const std::string& path, const std::vector<InputWeight>& inputs) {
  std::vector<StoredTensor> tensors;
  for (const InputWeight& input : inputs) tensors.push_back({input.name, input.dtype, input.shape, "", 0, 0});
  const SafetensorsLayout layout = lay_out_safetensors(tensors, {});
  std::string text = layout.prefix;
  text.resize(layout.file_bytes);
  std::mt19937 rng(7);
  for (size_t i = layout.prefix.size(); i < text.size(); ++i) text[i] = static_cast<char>(rng());
  write_file(path, text);
}

class OutputWeightTest : public ::testing::Test {
 protected:
  const Checkpoint::Impl& open(const std::vector<InputWeight>& inputs) {
    write_input(directory_ / "in.safetensors", inputs);
    checkpoint_.emplace(Checkpoint::open(directory_ / "in.safetensors"));
    return checkpoint_->impl();
  }
  size_t index_of(const std::string& name) const {
    return static_cast<size_t>(checkpoint_->find(name) - checkpoint_->weights().data());
  }

  // All of it, element by element.
  std::vector<std::byte> gather(const OutputWeight& weight) const {
    const auto size =
        static_cast<size_t>(safetensors_dtype_bits(stored_dtype(checkpoint_->impl(), weight)) / 8);
    std::vector<std::byte> all;
    for (const SourceRows& rows : weight.sources) {
      const StoredTensor& tensor =
          checkpoint_->tensors()[static_cast<size_t>(checkpoint_->weights()[rows.weight].parts.front())];
      std::vector<std::byte> source(tensor.num_bytes);
      checkpoint_->read(tensor, 0, source);
      for (int64_t row = 0; row < rows.num_rows; ++row)
        for (int64_t column = 0; column < weight.cols(); ++column) {
          const int64_t element = rows.first + row * rows.row_stride + column * rows.col_stride;
          const auto* bytes = source.data() + static_cast<size_t>(element) * size;
          all.insert(all.end(), bytes, bytes + size);
        }
    }
    return all;
  }

  // Random ranges, the whole and the ends.
  void expect_gathered(const OutputWeight& weight) {
    SCOPED_TRACE(weight.name);
    const Checkpoint::Impl& input = checkpoint_->impl();
    check_output_weight(input, weight);
    const std::vector<std::byte> all = gather(weight);
    ASSERT_EQ(num_bytes(input, weight), all.size());
    const auto size = static_cast<uint64_t>(safetensors_dtype_bits(stored_dtype(input, weight)) / 8);
    const uint64_t n = all.size() / size;
    Buffer scratch;
    for (int trial = 0; trial < 60; ++trial) {
      uint64_t begin = rng_() % (n + 1), end = rng_() % (n + 1);
      if (begin > end) std::swap(begin, end);
      if (trial == 0) begin = 0, end = n;
      std::vector<std::byte> bytes((end - begin) * size, std::byte{0x5a});
      read_output(input, weight, begin * size, bytes, scratch);
      ASSERT_TRUE(std::ranges::equal(bytes, std::span(all).subspan(begin * size, bytes.size())))
          << "elements [" << begin << ", " << end << ") of " << n;
    }
  }

  TestDirectory directory_;
  std::optional<Checkpoint> checkpoint_;
  std::mt19937 rng_{3};
};

TEST_F(OutputWeightTest, AllFormsOfRandomShapes) {
  const std::vector<std::string> dtypes = {"F8_E4M3", "BF16", "F32", "I64"};
  for (int trial = 0; trial < 40; ++trial) {
    const auto extent = [&](int most) { return static_cast<int64_t>(1 + rng_() % most); };
    const int64_t experts = extent(4), half = extent(trial % 2 == 0 ? 6 : 70), cols = extent(90);
    const std::string dtype = dtypes[rng_() % dtypes.size()];
    open({{"fused", dtype, {experts, 2 * half, cols}},
          {"turned", dtype, {experts, cols, 2 * half}},
          {"conv1d", dtype, {cols, half}},
          {"a", dtype, {half, cols}},
          {"b", dtype, {half, cols}}});
    expect_gathered(whole_weight(*checkpoint_->find("fused"), index_of("fused")));
    expect_gathered(transposed_weight(checkpoint_->impl(), index_of("conv1d")));
    expect_gathered(transposed_weight(checkpoint_->impl(), index_of("turned")));
    const size_t fused = index_of("fused"), turned = index_of("turned");
    const int64_t last = (experts - 1) * 2 * half * cols;  // the last expert
    const std::vector<int64_t> shape = {half, cols};
    expect_gathered({"gate", shape, {{fused, last, half, cols, 1}}});
    expect_gathered({"up", shape, {{fused, last + half * cols, half, cols, 1}}});
    expect_gathered({"interleaved up", shape, {{fused, last + cols, half, 2 * cols, 1}}});
    expect_gathered(
        {"sparse rows", {1 + (half - 1) / 2, cols}, {{fused, last, 1 + (half - 1) / 2, 4 * cols, 1}}});
    expect_gathered({"turned up", shape, {{turned, last + half, half, 1, 2 * half}}});
    expect_gathered({"turned interleaved up", shape, {{turned, last + 1, half, 2, 2 * half}}});
    const OutputWeight apart = with_rows({"rows", shape, {{fused, last, half, cols, 1}}},
                                         std::vector<RowRange>{{0, (half + 1) / 2}, {(half + 1) / 2, half}});
    EXPECT_EQ(apart.shape, shape);
    expect_gathered(apart);
    const OutputWeight matrix = with_rows(transposed_weight(checkpoint_->impl(), turned),
                                          std::vector<RowRange>{{last / cols, last / cols + 2 * half}});
    EXPECT_EQ(matrix.shape, (std::vector<int64_t>{1, 2 * half, cols}));
    EXPECT_EQ(matrix.sources.size(), 1);
    EXPECT_EQ(matrix.sources[0].first, last);
    expect_gathered(matrix);
    const OutputWeight row = with_rows(whole_weight(*checkpoint_->find("a"), index_of("a")),
                                       std::vector<RowRange>{{half - 1, half}});
    EXPECT_EQ(row.sources[0].first, (half - 1) * cols);
    expect_gathered(row);
    expect_gathered({"stacked",
                     {4, half, cols},
                     {{index_of("b"), 0, half, cols, 1},
                      {fused, last + cols, half, 2 * cols, 1},
                      {turned, last, half, 1, 2 * half},
                      {index_of("a"), 0, half, cols, 1}}});
  }
}

TEST_F(OutputWeightTest, WhatIsOne) {
  const Checkpoint::Impl& input = open({{"f4", "F4", {3, 6}},
                                        {"f4.b", "F4", {3, 6}},
                                        {"empty", "BF16", {4, 0}},
                                        {"m", "BF16", {3, 6}},
                                        {"n", "F16", {3, 6}},
                                        {"scalar", "F32", {}}});
  Buffer scratch;
  const auto whole = [&](const std::string& name) {
    return whole_weight(*checkpoint_->find(name), index_of(name));
  };
  for (const char* name : {"f4", "empty", "m", "scalar"}) {
    const OutputWeight weight = whole(name);
    check_output_weight(input, weight);
    EXPECT_TRUE(is_whole(input, weight)) << name;
    EXPECT_EQ(num_bytes(input, weight), checkpoint_->find(name)->num_bytes) << name;
    std::vector<std::byte> bytes(num_bytes(input, weight)), expected(bytes.size());
    read_output(input, weight, 0, bytes, scratch);
    checkpoint_->read(*input.find(name), 0, expected);
    EXPECT_EQ(bytes, expected) << name;
  }
  check_output_weight(input, transposed_weight(checkpoint_->impl(), index_of("empty")));
  EXPECT_EQ(scratch.data(), nullptr);
  OutputWeight reshaped = whole("m");
  reshaped.name = "other", reshaped.shape = {18};
  reshaped.sources.front().num_rows = 1, reshaped.sources.front().row_stride = 18;
  EXPECT_TRUE(is_whole(input, reshaped));
  EXPECT_FALSE(is_transposed(reshaped));
  const OutputWeight turned = transposed_weight(checkpoint_->impl(), index_of("m"));
  EXPECT_EQ(turned.shape, (std::vector<int64_t>{6, 3}));
  EXPECT_FALSE(is_whole(input, turned));
  EXPECT_TRUE(is_transposed(turned));

  const auto refused = [&](ErrorCode code, const std::string& text, const OutputWeight& weight) {
    SCOPED_TRACE(text);
    expect_error(code, text, [&] { check_output_weight(input, weight); });
  };
  const size_t m = index_of("m");
  refused(ErrorCode::bad_input, "\"m\", which is BF16, and of \"n\", which is F16",
          {"w", {2, 3, 6}, {{m, 0, 3, 6, 1}, {index_of("n"), 0, 3, 6, 1}}});
  refused(ErrorCode::bad_input, "elements of F4 are not whole bytes",
          {"w", {2, 3, 6}, {{index_of("f4"), 0, 3, 6, 1}, {index_of("f4.b"), 0, 3, 6, 1}}});
  refused(ErrorCode::bug, "no sources", {"w", {3, 6}, {}});
  refused(ErrorCode::bug, "not within", {"w", {3, 6}, {{m, 1, 3, 6, 1}}});
  refused(ErrorCode::bug, "do not make up", {"w", {4, 6}, {{m, 0, 3, 6, 1}}});
  refused(ErrorCode::bug, "no strides", {"w", {3, 6}, {{m, 0, 3, 0, 1}}});
}

}  // namespace
}  // namespace halfbyte::io
