#include <gtest/gtest.h>

#include "ops/qgemm/qgemm_cuda.h"

namespace halfbyte {
namespace {

constexpr int kMultiprocessors = 132;
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
          const QgemmSlices slices = qgemm_cublas_slices(problem, kMultiprocessors);
          SCOPED_TRACE(fmt::format("m {} n {} k {} transposed {}", m, n, k, transposed));
          EXPECT_EQ(slices.features % 128, 0);
          EXPECT_LT((slices.count - 1) * slices.features, problem.out_cols());
          EXPECT_GE(slices.count * slices.features, problem.out_cols());
          EXPECT_EQ(slices.buffer_bytes, slices.features * problem.in_cols() * 2);
          EXPECT_LE(slices.buffers * slices.buffer_bytes, kWorkspaceBytes);
          EXPECT_TRUE(slices.buffers == 2 || slices.buffers == 1);
          EXPECT_TRUE(slices.buffers == 1 || slices.count > 1);
        }
}
// Slices fill waves of tiles: 8 x 32 of 128 x 256 are two on 132 multiprocessors, 7 x 32 would be, too.
TEST(QgemmCublas, SlicesFillWaves) {
  const auto of = [](int64_t m, int64_t n, int64_t k, bool transposed) {
    const QgemmSlices slices =
        qgemm_cublas_slices(problem_of(descriptor(m, n, k, transposed)), kMultiprocessors);
    return std::array{slices.features, slices.count, int64_t{slices.buffers}};
  };
  EXPECT_EQ(of(8192, 8192, 8192, false), (std::array<int64_t, 3>{1024, 8, 2}));
  EXPECT_EQ(of(8192, 8192, 8192, true), (std::array<int64_t, 3>{1024, 8, 2}));
  EXPECT_EQ(of(2048, 4096, 4096, false), (std::array<int64_t, 3>{2048, 2, 2}));
  EXPECT_EQ(of(512, 2048, 4096, false), (std::array<int64_t, 3>{2048, 1, 1}));
  EXPECT_EQ(of(8192, 8192, 28672, false), (std::array<int64_t, 3>{512, 16, 1}));
}

// What CUDA devices of every kind are not asked for.
TEST(QgemmCublas, Refuses) {
  const auto refused = [](auto change) {
    QgemmDescriptor d = descriptor(128, 256, 512, false);
    change(d);
    try {
      qgemm_cublas_decode_kernel(problem_of(d));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return std::string(error.what());
    }
    return std::string();
  };
  using D = QgemmDescriptor;
  EXPECT_EQ(refused([](D&) {}), "");
  EXPECT_EQ(refused([](D& d) { d.packed = false; }), "qgemm_cublas: the weight must be packed");
  EXPECT_EQ(refused([](D& d) { d.tile = {64, 64}; }), "qgemm_cublas: tile is for qgemm_simt");
  EXPECT_EQ(refused([](D& d) { d.dtype = DType::f32; }), "qgemm_cublas: dtype must be bf16 or f16, got f32");
  EXPECT_EQ(refused([](D& d) { d.m = 64; }), "qgemm_cublas: m must be at least 65, got 64");
  EXPECT_EQ(refused([](D& d) { d.spec.group_size = 100; }),
            "qgemm_cublas: the group size must be a multiple of 8, got 100");
  EXPECT_EQ(refused([](D& d) { d.spec.group_size = 1000; }), "");  // one a row
  EXPECT_EQ(
      refused([](D& d) { d.n = 260; }),
      "qgemm_cublas: n and k must be multiples of 8 and the alignment at least 16, got 260, 512 and 16");
  EXPECT_EQ(refused([](D& d) { d.alignment = 8; }),
            "qgemm_cublas: n and k must be multiples of 8 and the alignment at least 16, got 256, 512 and 8");
  EXPECT_EQ(refused([](D& d) { d.k = 131080; }), "qgemm_cublas: k must be at most 131072, got 131080");
  EXPECT_EQ(refused([](D& d) {
              d.transposed = true;
              d.n = 131080;
            }),
            "qgemm_cublas: n must be at most 131072, got 131080");
}

}  // namespace
}  // namespace halfbyte
