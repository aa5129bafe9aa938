// What a checkpoint may have. One table for what reads and for what writes: writing is planned within these
// limits, so what is written can be read. Real checkpoints are far below; hostile ones cost no more than
// this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace halfbyte::io {

// A file of tensors.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;    // the limit of the reference
inline constexpr size_t kMaxFileTensors = size_t{1} << 18;  // the largest models have 200,000, in many files
inline constexpr size_t kMaxRank = 32;
inline constexpr size_t kMaxMetadataEntries = size_t{1} << 20;
inline constexpr size_t kMaxEntryKeys = 16;  // of the entry of a tensor
inline constexpr int kMaxHeaderDepth = 4;

// A model of several files.
inline constexpr size_t kMaxModelTensors = size_t{1} << 20;
inline constexpr uint64_t kMaxIndexBytes = 100'000'000;

// A quantized weight.
inline constexpr int64_t kMaxElements = int64_t{1} << 56;
inline constexpr uint64_t kMaxDescriptionBytes = 64 * 1024;  // of the tensor that describes it in JSON

// Other texts in JSON: config.json, what tools write beside it, metadata.
inline constexpr uint64_t kMaxConfigBytes = uint64_t{16} << 20;
inline constexpr size_t kMaxJsonValues = size_t{1} << 19;
inline constexpr int kMaxJsonDepth = 64;

// Control characters between two strings of any text in JSON: an error would spell out each of them.
inline constexpr size_t kMaxBlankControls = size_t{1} << 20;

}  // namespace halfbyte::io
