#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "ops/qgemm/sm90_large/sm90_large_args.h"

namespace halfbyte {
namespace {

// Each turn of each tile has a block; who has the first stores the tile, and the others with pieces of it are
// the blocks before it, with one piece to give each.
TEST(QgemmPieces, AreAllOfAllTiles) {
  std::mt19937 random(1);
  const auto number = [&](int first, int last) { return std::uniform_int_distribution(first, last)(random); };
  int num_divided = 0;
  for (int i = 0; i < 2000; ++i) {
    const int blocks = number(0, 2) == 0 ? number(1, 16) : number(50, 150), tiles = number(0, 3 * blocks);
    const int stages = 2 * number(1, 120), dividing_stages = number(0, 20);
    SCOPED_TRACE(::testing::Message() << blocks << " blocks, " << tiles << " tiles of " << stages
                                      << " stages, to divide takes " << dividing_stages);
    const QgemmPieces pieces(blocks, tiles, stages, dividing_stages);
    std::map<int, QgemmPiece> stored;           // by the tile
    std::map<int, int> stored_by, given_by;     // the block, by the tile; the tile, by the block
    std::set<std::pair<int, int>> has_a_block;  // tile and turn
    for (int block = 0; block < blocks; ++block) {
      QgemmPiece piece;
      for (int number = 0; pieces.find(piece, block, number); ++number) {
        ASSERT_LT(piece.first_stage, piece.last_stage);
        for (int stage = piece.first_stage; stage < piece.last_stage; stage += 2)
          ASSERT_TRUE(has_a_block.insert({piece.tile, stage}).second);
        if (piece.givers == QgemmPiece::kGives) {
          ASSERT_EQ(number, 0);
          given_by[block] = piece.tile;
        } else {
          ASSERT_EQ(piece.first_stage, 0);
          stored[piece.tile] = piece;
          stored_by[piece.tile] = block;
        }
      }
    }
    ASSERT_EQ(has_a_block.size(), static_cast<size_t>(tiles * stages / 2));
    ASSERT_EQ(stored.size(), static_cast<size_t>(tiles));
    size_t num_givers = 0;
    for (const auto& [tile, piece] : stored) {
      ASSERT_LE(piece.givers, 31);  // a lane for each
      for (int giver = 1; giver <= piece.givers; ++giver, ++num_givers) {
        const auto given = given_by.find(stored_by[tile] - giver);
        ASSERT_TRUE(given != given_by.end() && given->second == tile);
      }
    }
    ASSERT_EQ(num_givers, given_by.size());
    num_divided += pieces.sharers > 0 ? 1 : 0;
  }
  EXPECT_GT(num_divided, 500);
}

// One tile more than blocks takes an eighth more: eight blocks share it. What is short is not divided.
TEST(QgemmPieces, OneMoreTile) {
  const QgemmPieces pieces(132, 133, 64, 7);
  EXPECT_EQ(pieces.whole, 132);
  EXPECT_EQ(pieces.sharers, 8);
  QgemmPiece piece;
  ASSERT_TRUE(pieces.find(piece, 131, 0));
  EXPECT_EQ(piece.tile, 132);
  EXPECT_EQ(piece.last_stage, 8);
  EXPECT_EQ(piece.givers, 7);
  ASSERT_TRUE(pieces.find(piece, 131, 1));
  EXPECT_EQ(piece.tile, 131);
  EXPECT_FALSE(pieces.find(piece, 131, 2));
  ASSERT_TRUE(pieces.find(piece, 130, 0));
  EXPECT_EQ(piece.tile, 132);
  EXPECT_EQ(piece.givers, QgemmPiece::kGives);
  EXPECT_EQ(QgemmPieces(132, 133, 6, 7).sharers, 0);
  EXPECT_EQ(QgemmPieces(132, 264, 64, 7).sharers, 0);
}

}  // namespace
}  // namespace halfbyte
