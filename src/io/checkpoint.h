// Inside of Checkpoint: its files, tensors and how the quantized weights are read.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "io/block_worker.h"
#include "io/file.h"
#include "io/json.h"
#include "io/layout.h"
#include "io/whole_tensors.h"

namespace halfbyte {
namespace io {

using Metadata = std::vector<std::pair<std::string, std::string>>;

// A quantized weight and where its parts are.
struct StoredWeight {
  QuantizedWeight weight;                         // as stored
  std::array<const StoredTensor*, 5> parts = {};  // by role, without the constants
  // The model has the transpose of what is stored, [in, out] or [E, in, out]: a Conv1D that bitsandbytes made
  // a linear layer, experts of gpt-oss.
  bool transposed = false;

  const StoredTensor& part(Role role) const { return *parts[static_cast<size_t>(role)]; }
  std::vector<int64_t> model_shape() const;
};

}  // namespace io

struct Checkpoint::Impl {
  struct File {
    std::string name;
    io::InputFile input;
    io::Metadata metadata;
  };

  std::string path;
  bool is_directory = false;
  std::vector<File> files;
  std::vector<io::InputFile> text_files;  // of the texts below
  std::vector<StoredTensor> tensors;
  std::vector<size_t> file_of;                        // for each tensor
  std::unordered_map<std::string_view, int> by_name;  // of the tensors
  // Texts of config.json, and of the index of shards without what it says of tensors; empty: there is none.
  std::string config, index;
  std::map<std::string, std::string> quantization_configs;  // names of other files -> their texts
  bool has_adapter_config = false;                          // of PEFT, and no model beside it
  // Of weights whose tensors do not tell it: that of the config, or of the metadata of a file that stands
  // alone; bf16 where neither says it.
  DType model_dtype = DType::bf16;
  std::optional<std::array<int64_t, 2>> fp8_block;  // rows and columns of the blocks that the config names
  std::vector<Weight> weights;
  std::vector<int> quantized_of;  // for each weight: its place in `quantized`, -1 if dense
  std::vector<io::StoredWeight> quantized;
  std::map<std::string, std::string> not_read;  // as in FoundWeights
  std::shared_ptr<io::WholeTensors> whole_tensors = std::make_shared<io::WholeTensors>();
  std::vector<ForeignQuantization> foreign;

  // Error(bad_input) if a file has changed since it was opened: any; one with a text or with `weight`.
  void check_unchanged() const;
  void check_unchanged(const Weight& weight) const;
  // Of config.json or one of `quantization_configs`; empty: there is none.
  const std::string& config_text(const std::string& file) const;
  const StoredTensor* find(const std::string& name) const;
  void read(const StoredTensor& tensor, uint64_t offset, std::span<std::byte> bytes) const;
  // One run behind the other. Of short ones the tensor is read as a whole, once for all who ask for some.
  void read(const StoredTensor& tensor, const io::StoredRange& range, std::span<std::byte> bytes) const;
  // Bytes of whole tensors that are kept at most while weights are read.
  uint64_t whole_bytes() const;
  // All bytes of a small tensor; Error(bad_input) naming it if it has more than 64 KiB.
  std::string read_text(const StoredTensor& tensor) const;
  // The file with the first part of a weight.
  size_t file_index(const Weight& weight) const { return file_of[static_cast<size_t>(weight.parts.front())]; }
  // Null for a dense weight. `weight` must be one of `weights`.
  const io::StoredWeight* quantized_weight(const Weight& weight) const;
};

namespace io {

// `stop` is asked while long headers are read.
std::unique_ptr<Checkpoint::Impl> open_checkpoint(const std::string& path, const Stop& stop = {});
// Its files and tensors, without what they mean: no weights.
std::unique_ptr<Checkpoint::Impl> open_tensors(const std::string& path, const Stop& stop = {});

int64_t num_elements(std::span<const int64_t> shape);
// A tensor of one F32 beside others; Error(bad_input), for the reader of `what`, where there is none.
float read_f32(const Checkpoint::Impl& checkpoint, const std::string& name, const std::string& what);
inline int64_t num_elements(const Weight& weight) { return num_elements(weight.shape); }
// One rounding, half to even, between f32, f16, bf16 and f64.
void convert_elements(const std::byte* from, DType from_dtype, int64_t count, std::byte* to, DType to_dtype);

// Reads a block of a quantized weight and decodes it into y [block.rows, block.cols], memory of the worker's
// device: enqueued on its stream. Uses its buffers but `dense`, whose mirror y must be on a CUDA device. On
// the host, restore_columns() is left to do.
void decode_block(const Checkpoint::Impl& checkpoint, const StoredWeight& quantized, const Block& block,
                  BlockWorker& worker, const TensorView& y);

// Decodes ranges of weights on the CPU. Keeps its buffers, so one thread at a time.
class Decoder {
 public:
  explicit Decoder(const Checkpoint::Impl& checkpoint) : checkpoint_(checkpoint) {}
  // As Checkpoint::decode; `weight` must be one of the checkpoint's own, the range within it.
  void decode(const Weight& weight, int64_t begin, int64_t count, DType dtype, std::byte* out);
  // Elements in the order of what is stored, which is another where the model has the transpose.
  void decode_stored(const StoredWeight& quantized, int64_t begin, int64_t count, DType dtype,
                     std::byte* out);

 private:
  void decode_dense(const Weight& weight, int64_t begin, int64_t count, DType dtype, std::byte* out);
  void decode_transposed(const StoredWeight& quantized, int64_t begin, int64_t count, DType dtype,
                         std::byte* out);

  const Checkpoint::Impl& checkpoint_;
  BlockWorker worker_;
  Buffer column_;
};

}  // namespace io
}  // namespace halfbyte
