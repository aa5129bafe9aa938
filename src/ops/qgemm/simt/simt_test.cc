#include <gtest/gtest.h>

#include "ops/qgemm/simt/simt_cuda.h"

namespace halfbyte {
namespace {

QgemmProblem problem_of(QgemmDescriptor d) {
  d.n = d.k = 256;
  return make_qgemm_problem({DeviceKind::cuda, 0}, d, 0);
}

TEST(QgemmSimt, RefusesTilesNamingThosePossible) {
  QgemmDescriptor d;
  d.m = 4;
  d.dtype = DType::f32;
  EXPECT_EQ(kQgemmSimt.refuse(problem_of(d)), "");
  d.tile = {32, 64};
  EXPECT_EQ(kQgemmSimt.refuse(problem_of(d)), "tile must be one of 16 x 64, 64 x 64, 128 x 128, got 32 x 64");
  d.tile = {128, 0};
  EXPECT_EQ(kQgemmSimt.refuse(problem_of(d)), "");
  d.math = QgemmMath::f64;
  EXPECT_EQ(kQgemmSimt.refuse(problem_of(d)), "tile must be one of 16 x 64, 64 x 64, got 128 x 0");
  d.tile = {};
  d.math = QgemmMath::tf32;
  EXPECT_EQ(kQgemmSimt.refuse(problem_of(d)), "");  // rounding to tf32 is allowed, not demanded
}

// Few rows of x have a kernel of their own, where its loads are aligned and chunks have one group.
TEST(QgemmSimt, RowsOrTiles) {
  QgemmDescriptor d;
  d.m = 8;
  EXPECT_TRUE(has_simt_rows(problem_of(d)));
  const auto without = [&](auto change) {
    QgemmDescriptor other = d;
    change(other);
    return !has_simt_rows(problem_of(other));
  };
  EXPECT_TRUE(without([](QgemmDescriptor& other) { other.m = 9; }));
  EXPECT_TRUE(without([](QgemmDescriptor& other) { other.transposed = true; }));
  EXPECT_TRUE(without([](QgemmDescriptor& other) { other.alignment = 8; }));
  EXPECT_TRUE(without([](QgemmDescriptor& other) { other.tile = {64, 64}; }));
  EXPECT_TRUE(without([](QgemmDescriptor& other) { other.spec.group_size = 100; }));
  EXPECT_TRUE(without([](QgemmDescriptor& other) {
    other.dtype = DType::f32;
    other.math = QgemmMath::f64;
  }));
  // Bit streams: rows of views begin at words.
  const auto has_rows = [&](bool packed, int64_t k) {
    QgemmDescriptor other = d;
    other.spec.format = Format::int3;
    other.packed = packed;
    other.n = 256;
    other.k = k;
    return has_simt_rows(make_qgemm_problem({DeviceKind::cuda, 0}, other, 0));
  };
  EXPECT_TRUE(has_rows(true, 256) && has_rows(true, 264) && has_rows(false, 256));
  EXPECT_FALSE(has_rows(false, 264));
}

}  // namespace
}  // namespace halfbyte
