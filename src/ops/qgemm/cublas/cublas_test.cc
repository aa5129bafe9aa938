#include <gtest/gtest.h>

#include "ops/qgemm/cublas/cublas_cuda.h"

namespace halfbyte {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

QgemmProblem problem_of(QgemmDescriptor d) { return make_qgemm_problem({DeviceKind::cuda, 0}, d, 0); }
QgemmDescriptor descriptor(int64_t m, int64_t n, int64_t k, bool transposed) {
  QgemmDescriptor d;
  d.m = m;
  d.n = n;
  d.k = k;
  d.transposed = transposed;
  return d;
}

// They cover the features, in whole tiles, within the workspace.
TEST(QgemmCublas, SlicesCoverTheFeatures) {
  for (const bool transposed : {false, true})
    for (const int64_t n : {8, 64, 4096, 4104, 14336, 28672, 131072})
      for (const int64_t k : {8, 128, 4096, 8192, 28680, 131072})
        for (const int64_t m : {65, 512, 8192, 100000}) {
          const QgemmProblem problem = problem_of(descriptor(m, n, k, transposed));
          const QgemmSlices slices = qgemm_cublas_slices(problem);
          SCOPED_TRACE(fmt::format("m {} n {} k {} transposed {}", m, n, k, transposed));
          EXPECT_EQ(slices.features % 64, 0);
          EXPECT_LT((slices.count - 1) * slices.features, problem.out_cols());
          EXPECT_GE(slices.count * slices.features, problem.out_cols());
          EXPECT_LE(slices.features * problem.in_cols() * 2, kWorkspaceBytes);
        }
}
TEST(QgemmCublas, SlicesAreFewAndAlike) {
  const auto of = [](int64_t n, int64_t k, bool transposed) {
    const QgemmSlices slices = qgemm_cublas_slices(problem_of(descriptor(8192, n, k, transposed)));
    return std::array{slices.features, slices.count};
  };
  EXPECT_EQ(of(8192, 8192, false), (std::array<int64_t, 2>{2048, 4}));
  EXPECT_EQ(of(4096, 4096, true), (std::array<int64_t, 2>{4096, 1}));
  EXPECT_EQ(of(14336, 4096, false), (std::array<int64_t, 2>{3584, 4}));
  EXPECT_EQ(of(28672, 8192, true), (std::array<int64_t, 2>{576, 15}));
  EXPECT_EQ(of(200, 512, false), (std::array<int64_t, 2>{256, 1}));
}

// What CUDA devices of every kind are not asked for.
TEST(QgemmCublas, Refuses) {
  const auto refused = [](auto change) {
    QgemmDescriptor d = descriptor(128, 256, 512, false);
    change(d);
    return refuse_qgemm_cublas(problem_of(d));
  };
  using D = QgemmDescriptor;
  EXPECT_EQ(refused([](D&) {}), "");
  EXPECT_EQ(refused([](D& d) { d.packed = false; }), "the weight must be packed");
  EXPECT_EQ(refused([](D& d) { d.tile = {64, 64}; }), "tile is for qgemm_simt");
  EXPECT_EQ(refused([](D& d) { d.dtype = DType::f32; }), "dtype must be bf16 or f16, got f32");
  EXPECT_EQ(refused([](D& d) { d.m = 64; }), "m must be at least 65, got 64");
  EXPECT_EQ(refused([](D& d) { d.spec.group_size = 100; }),
            "the group size must be a multiple of 8, got 100");
  EXPECT_EQ(refused([](D& d) { d.spec.group_size = 1000; }), "");  // one a row
  EXPECT_EQ(refused([](D& d) { d.n = 260; }),
            "n and k must be multiples of 8 and the alignment at least 16, got 260, 512 and 16");
  EXPECT_EQ(refused([](D& d) { d.alignment = 8; }),
            "n and k must be multiples of 8 and the alignment at least 16, got 256, 512 and 8");
  EXPECT_EQ(refused([](D& d) { d.k = 262152; }), "k must be at most 262144, got 262152");
  EXPECT_EQ(refused([](D& d) { d.accumulate = true; }),
            "y must not be added to: cuBLASLt rounds the product before it adds");
  EXPECT_EQ(refused([](D& d) {
              d.transposed = true;
              d.n = 262152;
            }),
            "n must be at most 262144, got 262152");
}

}  // namespace
}  // namespace halfbyte
