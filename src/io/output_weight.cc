#include "io/output_weight.h"

#include <algorithm>
#include <cstring>

#include "core/checks.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

// Columns of a transposed weight that are read before they are put into place: a line of the cache then gets
// all of its elements at once.
constexpr int64_t kLanes = 32;

const StoredTensor& tensor_of(const Checkpoint::Impl& input, const SourceRows& rows) {
  return input.tensors[static_cast<size_t>(input.weights[rows.weight].parts.front())];
}

bool is_decoded(const Checkpoint::Impl& input, const SourceRows& rows) {
  return input.weights[rows.weight].layout.has_value();
}

std::string dtype_of(const Checkpoint::Impl& input, const SourceRows& rows) {
  return is_decoded(input, rows) ? dtype_to_safetensors(*input.weights[rows.weight].dtype)
                                 : tensor_of(input, rows).dtype;
}

bool is_contiguous(const SourceRows& rows, int64_t cols) {
  return rows.col_stride == 1 && (rows.row_stride == cols || rows.num_rows <= 1);
}

// Bytes of an element. Whole weights are never asked for it.
int64_t element_size(const Checkpoint::Impl& input, const OutputWeight& weight) {
  return safetensors_dtype_bits(stored_dtype(input, weight)) / 8;
}

template <class Body>
void with_element(int64_t size, const Body& body) {
  switch (size) {
    case 1:
      return body(uint8_t{});
    case 2:
      return body(uint16_t{});
    case 4:
      return body(uint32_t{});
    case 8:
      return body(uint64_t{});
    default:
      HALFBYTE_FAIL(bug, "elements of {} bytes", size);
  }
}

void add(DType dtype, float value, std::span<std::byte> bytes) {
  constexpr int64_t kMany = 1024;
  float sums[kMany];
  const int64_t size = size_of(dtype), n = static_cast<int64_t>(bytes.size()) / size;
  for (int64_t i = 0; i < n; i += kMany) {
    const int64_t count = std::min(kMany, n - i);
    convert_elements(bytes.data() + i * size, dtype, count, reinterpret_cast<std::byte*>(sums), DType::f32);
    for (float& sum : std::span(sums, static_cast<size_t>(count))) sum += value;
    convert_elements(reinterpret_cast<const std::byte*>(sums), DType::f32, count, bytes.data() + i * size,
                     dtype);
  }
}

// Reads elements [begin, begin + count) of the matrix that one source makes.
class SourceReader {
 public:
  SourceReader(const Checkpoint::Impl& input, const SourceRows& rows, int64_t cols, int64_t size,
               Buffer& scratch)
      : input_(input),
        rows_(rows),
        tensor_(tensor_of(input, rows)),
        cols_(cols),
        size_(size),
        scratch_(scratch),
        decoder_(input) {}

  void read(int64_t begin, int64_t count, std::byte* out) {
    if (is_contiguous(rows_, cols_)) {
      read_run(rows_.first + begin, count, out);
    } else if (rows_.col_stride == 1) {
      read_rows(begin, begin + count, out);
    } else {
      read_columns(begin, begin + count, out);
    }
  }

 private:
  void read_run(int64_t first, int64_t count, std::byte* out) {
    const Weight& weight = input_.weights[rows_.weight];
    if (rows_.as_stored)
      return decoder_.decode_stored(*input_.quantized_weight(weight), first, count, *weight.dtype, out);
    if (weight.layout) return decoder_.decode(weight, first, count, *weight.dtype, out);
    input_.read(tensor_, static_cast<uint64_t>(first * size_), {out, static_cast<size_t>(count * size_)});
  }

  void read_rows(int64_t begin, int64_t end, std::byte* out) {
    const auto at = [&](int64_t element) {
      return rows_.first + element / cols_ * rows_.row_stride + element % cols_;
    };
    const int64_t first = at(begin), span = at(end - 1) + 1 - first;
    const std::byte* read = nullptr;  // all rows and what is between them, if that is not much
    if (rows_.row_stride > cols_ && span <= 2 * (end - begin)) {
      std::byte* data = scratch_.reserve(span * size_);
      read_run(first, span, data);
      read = data;
    }
    for (int64_t element = begin, next; element < end; element = next) {
      next = std::min(end, (element / cols_ + 1) * cols_);
      std::byte* const row = out + (element - begin) * size_;
      if (read) {
        std::memcpy(row, read + (at(element) - first) * size_, static_cast<size_t>((next - element) * size_));
      } else {
        read_run(at(element), next - element, row);
      }
    }
  }

  void read_columns(int64_t begin, int64_t end, std::byte* out) {
    const int64_t stride = rows_.row_stride, most = ceil_div(end - begin, cols_);
    const int64_t span = (most - 1) * stride + 1;
    std::byte* const lanes = scratch_.reserve(std::min(kLanes, cols_) * span * size_);
    for (int64_t column = 0; column < cols_; column += kLanes) {
      const int64_t num_lanes = std::min(kLanes, cols_ - column);
      int64_t low[kLanes], high[kLanes];
      for (int64_t lane = 0; lane < num_lanes; ++lane) {
        const RowRange rows = rows_of_column(begin, end, column + lane, cols_);
        low[lane] = rows.begin, high[lane] = rows.end;
        if (low[lane] < high[lane])
          read_run(rows_.first + low[lane] * stride + (column + lane) * rows_.col_stride,
                   (high[lane] - low[lane] - 1) * stride + 1, lanes + lane * span * size_);
      }
      with_element(size_, [&](auto type) {
        using Element = decltype(type);
        const auto move = [&](int64_t row, int64_t lane) {
          std::memcpy(out + (row * cols_ + column + lane - begin) * size_,
                      lanes + (lane * span + (row - low[lane]) * stride) * size_, sizeof(Element));
        };
        // The first and the last row need not have all lanes.
        const auto [least, first] = std::minmax_element(low, low + num_lanes);
        const auto [last, largest] = std::minmax_element(high, high + num_lanes);
        for (int64_t row = *least; row < *largest; ++row) {
          if (row >= *first && row < *last) {
            for (int64_t lane = 0; lane < num_lanes; ++lane) move(row, lane);
          } else {
            for (int64_t lane = 0; lane < num_lanes; ++lane)
              if (row >= low[lane] && row < high[lane]) move(row, lane);
          }
        }
      });
    }
  }

  const Checkpoint::Impl& input_;
  const SourceRows& rows_;
  const StoredTensor& tensor_;
  const int64_t cols_, size_;
  Buffer& scratch_;
  Decoder decoder_;  // of a quantized weight
};

}  // namespace

OutputWeight whole_weight(const Weight& weight, size_t index) {
  OutputWeight output{weight.name, weight.shape, {}};
  const int64_t n = num_elements(weight), cols = output.cols();
  output.sources.push_back({index, 0, n == 0 ? 0 : n / cols, cols, 1});
  return output;
}

OutputWeight transposed_weight(const Checkpoint::Impl& input, size_t index) {
  const Weight& weight = input.weights[index];
  OutputWeight output{weight.name, weight.shape, {}};
  const size_t rank = weight.shape.size();
  HALFBYTE_CHECK(rank >= 2, bug, "weight \"{}\" has no two axes to exchange", printable(weight.name));
  std::swap(output.shape[rank - 2], output.shape[rank - 1]);
  const int64_t n = num_elements(weight), rows = output.shape[rank - 2], cols = output.shape[rank - 1];
  if (const StoredWeight* quantized = input.quantized_weight(weight); quantized && quantized->transposed) {
    output.sources.push_back({index, 0, n / cols, cols, 1, true});
    return output;
  }
  for (int64_t first = 0; first < n; first += rows * cols)
    output.sources.push_back({index, first, rows, 1, rows});
  if (n == 0) output.sources.push_back({index, 0, 0, 1, rows});
  return output;
}

OutputWeight with_rows(const OutputWeight& weight, std::span<const RowRange> ranges) {
  OutputWeight output{weight.name, weight.shape, {}, weight.plus};
  int64_t num_rows = 0;
  for (const RowRange& range : ranges) {
    num_rows += range.end - range.begin;
    int64_t first = 0;  // row of the source
    for (const SourceRows& rows : weight.sources) {
      const int64_t begin = std::max(range.begin, first), end = std::min(range.end, first + rows.num_rows);
      if (begin < end) {
        SourceRows part = rows;
        part.first += (begin - first) * rows.row_stride;
        part.num_rows = end - begin;
        output.sources.push_back(part);
      }
      first += rows.num_rows;
    }
  }
  const size_t rank = output.shape.size();
  for (size_t axis = 0; axis + 2 < rank; ++axis) output.shape[axis] = 1;
  if (rank == 2) output.shape[0] = num_rows;
  if (rank > 2) output.shape[rank - 3] = num_rows / output.shape[rank - 2];
  return output;
}

void check_output_weight(const Checkpoint::Impl& input, const OutputWeight& weight) {
  const auto fail = [&](const char* what) {
    HALFBYTE_FAIL(bug, "output weight \"{}\" [{}]: {}", printable(weight.name), fmt::join(weight.shape, ", "),
                  what);
  };
  if (weight.sources.empty()) fail("it has no sources");
  const StoredTensor& first = tensor_of(input, weight.sources.front());
  const std::string dtype = stored_dtype(input, weight);
  const int64_t n = num_elements(weight.shape), cols = weight.cols();
  int64_t total = 0;
  for (const SourceRows& rows : weight.sources) {
    const Weight& source = input.weights[rows.weight];
    const StoredTensor& tensor = tensor_of(input, rows);
    HALFBYTE_CHECK(dtype_of(input, rows) == dtype, bad_input,
                   "weight \"{}\" would be made of \"{}\", which is {}, and of \"{}\", which is {}",
                   printable(weight.name), printable(first.name), dtype, printable(tensor.name),
                   dtype_of(input, rows));
    if (n == 0) continue;
    if (rows.num_rows <= 0 || rows.row_stride <= 0 || rows.col_stride <= 0) fail("no rows, or no strides");
    const int64_t last = rows.first + (rows.num_rows - 1) * rows.row_stride + (cols - 1) * rows.col_stride;
    if (rows.first < 0 || last >= num_elements(source)) fail("a source is not within its weight");
    total += rows.num_rows * cols;
  }
  if (total != n) fail("the sources do not make up the shape");
  HALFBYTE_CHECK(weight.plus == 0 || dtype == "F32" || dtype == "F16" || dtype == "BF16", bad_input,
                 "weight \"{}\" would be that of the input plus {}, but it is {}", printable(weight.name),
                 weight.plus, dtype);
  HALFBYTE_CHECK(
      safetensors_dtype_bits(dtype) % 8 == 0 || is_whole(input, weight), bad_input,
      "weight \"{}\" would be a part of \"{}\" or several weights, but elements of {} are not whole "
      "bytes",
      printable(weight.name), printable(first.name), dtype);
}

std::string stored_dtype(const Checkpoint::Impl& input, const OutputWeight& weight) {
  return dtype_of(input, weight.sources.front());
}

uint64_t num_bytes(const Checkpoint::Impl& input, const OutputWeight& weight) {
  if (is_whole(input, weight)) return tensor_of(input, weight.sources.front()).num_bytes;
  return static_cast<uint64_t>(num_elements(weight.shape) * element_size(input, weight));
}

bool is_whole(const Checkpoint::Impl& input, const OutputWeight& weight) {
  const SourceRows& rows = weight.sources.front();
  return weight.plus == 0 && weight.sources.size() == 1 && rows.first == 0 && !is_decoded(input, rows) &&
         is_contiguous(rows, weight.cols()) &&
         num_elements(weight.shape) == num_elements(input.weights[rows.weight]);
}

bool is_transposed(const OutputWeight& weight) {
  return std::ranges::any_of(weight.sources, [](const auto& rows) { return rows.col_stride != 1; });
}

int64_t scratch_bytes(int64_t num_bytes) {
  constexpr int64_t kMaxElementSize = 8;
  return 2 * (num_bytes + kLanes * kMaxElementSize);
}

void read_output(const Checkpoint::Impl& input, const OutputWeight& weight, uint64_t offset,
                 std::span<std::byte> bytes, Buffer& scratch) {
  if (is_whole(input, weight)) return input.read(tensor_of(input, weight.sources.front()), offset, bytes);
  const int64_t size = element_size(input, weight), cols = weight.cols();
  const int64_t begin = static_cast<int64_t>(offset) / size;
  const int64_t end = begin + static_cast<int64_t>(bytes.size()) / size;
  int64_t first = 0;  // element of the source
  for (const SourceRows& rows : weight.sources) {
    const int64_t last = first + rows.num_rows * cols;
    const int64_t low = std::max(begin, first), high = std::min(end, last);
    if (low < high)
      SourceReader(input, rows, cols, size, scratch)
          .read(low - first, high - low, bytes.data() + (low - begin) * size);
    first = last;
  }
  if (weight.plus != 0) add(*dtype_from_safetensors(stored_dtype(input, weight)), weight.plus, bytes);
}

}  // namespace halfbyte::io
