#include <gtest/gtest.h>

#include <random>

#include "core/arithmetic.h"
#include "ops/qgemm/weight/common_cuda.h"
#include "ops/qgemm/weight/experts_cuda.h"

namespace halfbyte {
namespace {

QgemmProblem problem_of(QuantSpec spec, DType dtype = DType::bf16) {
  QgemmDescriptor d;
  d.spec = spec;
  d.dtype = dtype;
  d.m = 1;
  d.n = d.k = 1024;
  return make_qgemm_problem({DeviceKind::cuda, 0}, d, 0);
}

// What layouts store by default, of bf16 and of f16 models.
TEST(QgemmWeights, OfLayoutsAreCommon) {
  const auto is_common = [](const QuantSpec& spec, DType dtype = DType::bf16) {
    return is_common_weight(problem_of(spec, dtype));
  };
  using enum Format;
  for (const Format format : {nf4, fp4}) {  // bitsandbytes
    for (const int64_t size : {32, 64, 96, 128, 256, 512})
      EXPECT_TRUE(is_common({.format = format, .group_size = size}));
    EXPECT_TRUE(is_common({.format = format, .group_size = 64, .double_quant = true}));
  }
  for (const int64_t size : {32, 64, 128})
    for (const auto& [format, asymmetric] : {std::pair(nf4, false),
                                             {fp4_e2m1, false},
                                             {int4, false},
                                             {int4, true},
                                             {int8, false},
                                             {affine4, false},
                                             {affine8, false}}) {
      QuantSpec spec{.format = format, .asymmetric = asymmetric, .group_size = size};
      spec.scale_dtype = DType::f16;
      EXPECT_TRUE(is_common(spec) && is_common(spec, DType::f16)) << info(format).name << size;
      spec.scale_dtype = DType::bf16;  // of bf16 models
      EXPECT_TRUE(is_common(spec)) << info(format).name << size;
      EXPECT_FALSE(is_common(spec, DType::f16)) << info(format).name << size;
    }
  for (const DType scale : {DType::f16, DType::bf16})
    EXPECT_TRUE(is_common({.format = int8, .asymmetric = true, .group_size = 128, .scale_dtype = scale}));
  for (const Format format : {nf4, int4, int8})
    for (const DType scale : {DType::f32, DType::f16, DType::bf16})
      EXPECT_TRUE(is_common({.format = format, .granularity = Granularity::channel, .scale_dtype = scale}));
}

TEST(QgemmWeights, OthersAreRefusedWithWhatTheyAre) {
  EXPECT_EQ(refuse_rare_weight(problem_of({.group_size = 64})), "");
  EXPECT_EQ(
      refuse_rare_weight(problem_of({.group_size = 40})),
      "x and the weight must go together as in a layout (docs/kernels.md), got bf16 x, a table of 4 bits, "
      "f32 scales for 40 columns");
  EXPECT_EQ(
      refuse_rare_weight(problem_of({.group_size = 32, .double_quant = true}, DType::f16)),
      "x and the weight must go together as in a layout (docs/kernels.md), got f16 x, a table of 4 bits, "
      "f32 scales, double quantized, for 32 columns");
  EXPECT_NE(refuse_rare_weight(problem_of({.format = Format::int8, .asymmetric = true})), "");
  EXPECT_EQ(refuse_rare_weight(problem_of({.format = Format::affine3})),
            "codes must have 4 or 8 bits, got 3");
}

TEST(QgemmWeights, SpillingTilesAreRefused) {
  const QgemmProblem problem = problem_of({});
  EXPECT_EQ(refuse_spilling(problem, {"qgemm_sm90_wgmma", 32, 2, false}), "");
  EXPECT_EQ(refuse_spilling(problem, {"qgemm_sm90_wgmma", 32, 2, true}),
            "blocks must not share a tile of 32 rows of x and 64 of the weight");
  QgemmProblem experts = problem;
  experts.experts.num = 8;
  EXPECT_EQ(refuse_spilling(experts, {"qgemm_sm90_wgmma", 16, 8, false}), "");
  EXPECT_EQ(refuse_spilling(experts, {"qgemm_sm90_wgmma", 32, 8, false}),
            "of experts, a tile of 32 rows of x must have at most 128 rows of the weight");
  EXPECT_EQ(refuse_spilling(problem, {"qgemm_sm90_transposed"}), "");
}

// As many as when each row chooses an expert by chance.
TEST(QgemmWeights, LikelyExpertTiles) {
  std::mt19937_64 random(1);
  for (const int64_t num : {1, 8, 100})
    for (const int64_t rows : {30, 800, 5000, 60000})
      for (const int64_t tile : {8, 32, 256}) {
        constexpr int kRounds = 100;
        double tiles = 0;
        for (int round = 0; round < kRounds; ++round) {
          std::vector<int64_t> rows_of(static_cast<size_t>(num));
          for (int64_t row = 0; row < rows; ++row) ++rows_of[random() % static_cast<uint64_t>(num)];
          for (const int64_t count : rows_of) tiles += static_cast<double>(ceil_div(count, tile)) / kRounds;
        }
        QgemmProblem problem = problem_of({});
        problem.m = rows;
        problem.experts.num = num;
        const double likely = likely_expert_tiles(problem, tile);
        // Few experts have less chance than it is given.
        EXPECT_NEAR(likely / tiles, 1, num == 1 ? 0.4 : 0.05) << num << " " << rows << " " << tile;
      }
  QgemmProblem masked = problem_of({});
  masked.experts = {.num = 3, .rows = ExpertRows::masked, .rows_per_expert = 20};
  EXPECT_EQ(likely_expert_tiles(masked, 8), 9);
  EXPECT_EQ(likely_expert_tiles(problem_of({}), 8), 1);
}

}  // namespace
}  // namespace halfbyte
